"""What was really sent for a line, message by message, and what the model answered.

The client sends its whole history again on every turn, spelled as it likes; what lies in the slot is what was sent
before. So a line remembers both: how the client spelled each message last (a digest), and what went to the engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import xxhash

from llamacpp.errors import EngineBroken
from llamacpp.sse import EventSplitter, data_of
from llamacpp.wire import Asked, Decoder
from policies.compaction import Replacement, applied
from policies.layout import Value, to_tell
from policies.layout_text import placeholder
from policies.message_parts import size_of
from policies.types import DIGEST_BYTES

Json = dict[str, Any]

MOST_TEXT_BYTES = 64 * 1024**2
"""Text of ledgers in memory; older lines' text is read from state.db when it is needed."""
MOST_REPLY_BYTES = 4 * 1024**2
"""Events of one answer that are kept to give it back; a longer one comes back as the client spells it."""


class Reply:
    """An answer as the engine streamed it; parsed when somebody asks, off the path of the answer itself."""

    def __init__(self, chunks: Sequence[bytes] = (), message: Json | None = None) -> None:
        self._chunks, self._message = tuple(chunks), message

    @property
    def message(self) -> Json | None:
        """The assistant message that the model produced, as far as it came; None when there is none."""
        if self._chunks:
            found = assembled(b"".join(self._chunks)).get("message")
            self._message, self._chunks = found if isinstance(found, dict) else None, ()
        return self._message


def assembled(stream: bytes) -> Json:
    """The choice that a chat's events make, as far as they came; empty when they make none."""
    decoder = Decoder("chat")
    try:
        for event in EventSplitter().feed(stream):
            data = data_of(event)
            if data is not None and data != b"[DONE]" and isinstance(found := orjson.loads(data), dict):
                decoder.feed(found)
        choice = decoder.whole(Asked.of({}, "chat"))["choices"][0]
    except (EngineBroken, orjson.JSONDecodeError, LookupError, TypeError):
        return {}
    return choice if isinstance(choice, dict) else {}


@dataclass(slots=True)
class Ledger:
    """One line's messages, the leading ones included. Positions are those of the client's list.

    `raw`, `normal`: digests of each message's spelling and normal form, as the client last sent it. `sent`: the JSON
    that the engine was given; None when it lies in state.db only. `altered`: positions where `sent` is not the client's
    own spelling; `deferred`: those of them where the client pruned what is still sent. `told`: volatile values as told
    at a position. `n_learned`: learned spans that its base was laid out by.
    """

    raw: list[bytes] = field(default_factory=list)
    normal: list[bytes] = field(default_factory=list)
    sent: list[bytes] | None = field(default_factory=list)
    altered: set[int] = field(default_factory=set)
    deferred: set[int] = field(default_factory=set)
    told: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    n_learned: int = 0
    reply: Reply = field(default_factory=Reply)
    seal: str = ""
    """Checksum of `sent` (`seal_of`): texts in state.db that are another turn's, or damaged, are none of it."""
    replaced: list[Replacement] = field(default_factory=list)
    """Spans of it that a summary stands for, each longer than the one before; the last is what is sent. `sent` holds
    the messages of the spans as well: should the client's history part from it there, they are sent again."""

    @property
    def n_bytes(self) -> int:
        """Bytes of text in memory."""
        return sum(map(len, self.sent or ()))

    @property
    def values(self) -> dict[str, str]:
        """What each placeholder stands for, as told last: `[[env:name]]` -> text."""
        return self.values_before(len(self.raw))

    def values_before(self, position: int) -> dict[str, str]:
        """The same as the messages before a position told it."""
        told = self.told_before(position)
        return {placeholder(name): text for name, text in told.items() if not name.startswith("=")}

    def told_before(self, position: int) -> dict[str, str]:
        """Volatile values that the messages before a position have told."""
        values: dict[str, str] = {}
        for at, told in self.told:
            if at < position:
                values |= told
        return values

    def changed(
        self, position: int, values: Sequence[Value], lines: Sequence[tuple[str, str]]
    ) -> tuple[tuple[Value, ...], list[tuple[str, str]], list[tuple[str, str]]]:
        """What was told otherwise before a position: values; lines (of the base, now); lines (told last, of the base)
        that are again as at first, to be told before them: another may now read as one of these did. `lines`: all that
        differ.
        """
        told = self.told_before(position)
        other = [(b, n) for b, n in lines if told.get(f"={b}", b) != n]
        now = {b for b, _ in lines}
        back = [(n, k[1:]) for k, n in told.items() if k[:1] == "=" and k[1:] not in now and n != k[1:]]
        return to_tell(told, values), other, back

    def composed(self, messages: Sequence[Json]) -> list[Json]:
        """The messages with the summary in the place of its span."""
        return [m for _, m in applied(messages, self.replaced[-1])] if self.replaced else list(messages)

    def sizes(self) -> tuple[int, ...]:
        """Bytes that are sent for each position (policies/types.Prompt); the summary counts where its span begins."""
        sizes = list(map(size_of, self.sent or ()))
        if self.replaced:
            r = self.replaced[-1]
            for i in range(r.start, r.end):
                sizes[i] = sizes[i] if i in r.pinned else 0
            sizes[r.start] += len(r.text.encode())
        return tuple(sizes)

    def to_extra(self) -> Json:
        """Everything but the text, for the ledger's record."""
        reply = self.reply.message
        return {
            "raw": b"".join(self.raw).hex(),
            "normal": b"".join(self.normal).hex(),
            "altered": sorted(self.altered),
            "deferred": sorted(self.deferred),
            "seal": self.seal,
            "told": self.told,
            "n_learned": self.n_learned,
            "reply": reply,
            "replaced": [(r.start, r.end, r.pinned, r.text) for r in self.replaced],
        }

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> Ledger:
        """A ledger whose text is still in state.db. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            raw=_digests(extra["raw"]),
            normal=_digests(extra["normal"]),
            sent=None,
            altered=set(map(int, extra["altered"])),
            deferred=set(map(int, extra["deferred"])),
            seal=str(extra.get("seal", "")),
            told=[(int(at), {str(k): str(v) for k, v in told.items()}) for at, told in extra["told"]],
            n_learned=int(extra["n_learned"]),
            reply=Reply(message=extra["reply"] if isinstance(extra["reply"], dict) else None),
            replaced=[
                Replacement(int(start), int(end), tuple(map(int, pinned)), str(text))
                for start, end, pinned, text in extra.get("replaced", ())
            ],
        )

    def branch(self, position: int) -> Ledger:
        """The ledger of a history that agrees with this one before `position`."""
        return replace(
            self,
            raw=self.raw[:position],
            normal=self.normal[:position],
            sent=self.sent[:position] if self.sent is not None else None,
            altered={i for i in self.altered if i < position},
            deferred={i for i in self.deferred if i < position},
            told=[(at, told) for at, told in self.told if at < position],
            replaced=[r for r in self.replaced if r.end <= position],
        )


def seal_of(sent: Sequence[bytes]) -> str:
    """Checksum of messages as they were sent, 16 hex digits."""
    seal = xxhash.xxh3_64()
    for blob in sent:
        seal.update(blob)
    return seal.hexdigest()


def _digests(packed: str) -> list[bytes]:
    found = bytes.fromhex(packed)
    return [found[i : i + DIGEST_BYTES] for i in range(0, len(found), DIGEST_BYTES)]


class TextBudget:
    """Keeps the text of the newest ledgers in memory, up to MOST_TEXT_BYTES."""

    def __init__(self, most: int = MOST_TEXT_BYTES) -> None:
        self._most, self._held = most, 0
        self._ledgers: OrderedDict[str, tuple[Ledger, int]] = OrderedDict()

    def hold(self, line: str, ledger: Ledger) -> None:
        """The newest; the oldest beyond the budget give their text up."""
        self.drop(line)
        n_bytes = ledger.n_bytes
        self._ledgers[line], self._held = (ledger, n_bytes), self._held + n_bytes
        while self._held > self._most and len(self._ledgers) > 1:
            _, (old, size) = self._ledgers.popitem(last=False)
            old.sent, self._held = None, self._held - size

    def drop(self, line: str) -> None:
        """That line's text is held elsewhere, or nowhere."""
        _, size = self._ledgers.pop(line, (None, 0))
        self._held -= size
