"""Why was a prompt not the continuation of its line? Kept for the newest requests, found out behind the answer.

Positions and hashes go into the request's record, which HTTP shows and state.db keeps; texts and tokens stay in memory
and are told on the control socket only (design.md, rule 10), or with --show-prompts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from llamacpp.errors import EngineError
from policies.advice import advice, advice_for_cause, agent_of
from policies.causes import Cause
from policies.divergence import Divergence, first_divergence
from policies.flatten import flatten
from policies.prefix import TOKEN_BYTES, common_prefix, n_tokens
from policies.types import Match, digest
from proxy.lines import Found, Line
from proxy.rendering import render_chat
from proxy.settle import Record
from proxy.slots import Want
from proxy.tasks import Tasks

if TYPE_CHECKING:
    from proxy.engine import Engine

log = structlog.get_logger(__name__)

MOST_EXPLAINED = 200
"""Divergences whose texts and tokens are kept; about 2 KB each."""
MOST_BODY_BYTES = 64 * 2**20
"""Bytes of the newest bodies of lines that are kept to be compared with; an agent's is 50 KB to a few MB. A slot keeps
the same object, so lines in slots cost nothing more."""
WINDOW = 12
"""Tokens shown on both sides of a divergence (issue 4)."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_BY_TEXT = (Cause.BASE_CHANGED, Cause.TOOLS_CHANGED, Cause.HISTORY_EDITED, "reasoning_dropped", "compaction")
"""Causes that the client's own change explains; others have an advice of their own."""


@dataclass(frozen=True, slots=True)
class Explained:
    """One divergence with its texts. `token`: index of the first token that differs, if known; `shared` are up to 12
    packed tokens before it, `old` and `new` up to 12 from it on, of the engine of that name."""

    divergence: Divergence
    agent: str
    engine: str
    repaired: bool
    token: int | None = None
    shared: bytes = b""
    old: bytes = b""
    new: bytes = b""


@dataclass(frozen=True, slots=True)
class _Side:
    """One of two prompts: its line, its chat body, its tokens as far as they are known."""

    line: Line
    body: bytes
    tokens: bytes | None
    base: bytes


class Explainer:
    """Compares prompts that do not simply extend their line with what the line held."""

    def __init__(self, tasks: Tasks, line: Callable[[str], Line | None], changed: Callable[[Record], None]) -> None:
        """`line`: the line of an id while it is remembered. `changed` is called when a record has got its divergence,
        perhaps after its request ended."""
        self._tasks, self._line, self._changed = tasks, line, changed
        self._found: OrderedDict[str, Explained] = OrderedDict()
        self._bodies: OrderedDict[str, bytes] = OrderedDict()
        self._n_bytes = 0

    def get(self, request: str) -> Explained | None:
        """What is known of a request's divergence, texts included."""
        return self._found.get(request)

    def body_of(self, line: Line | None) -> bytes | None:
        """The newest chat body of a line, if it is still kept."""
        return self._bodies.get(line.id) if line is not None else None

    def settled(
        self, engine: Engine, want: Want, found: Found, record: Record, body: bytes | None, *, repaired: bool
    ) -> None:
        """A prompt was processed, under mode repair or not. Call before the slot is told what it holds now, and before
        the ledger advances.

        Costs a look-up; the comparison runs in a task of its own.
        """
        stem = found.line if found.match in (Match.EDITED, Match.BASE) else None
        before = self._bodies.get(stem.id) if stem is not None else None
        if body is None or want.fresh:
            return
        self._keep(want.line.id, body)
        if stem is None or before is None or record.cause is None:
            return
        old = _Side(stem, before, _tokens_of(engine, stem), stem.prompt.base)
        new = _Side(want.line, body, want.tokens, want.line.prompt.base)
        self._tasks.spawn(self._explain(engine, record, old, new, repaired=repaired), "explain")

    def diverged(self, line: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Where a chat body, not yet sent, departs from the newest prompt of a line, without text; None when nowhere,
        or when that prompt is not known any more. For a refusal: parses and compares at once."""
        before = self._bodies.get(line)
        try:
            found, agent = _compared(before, orjson.dumps(body)) if before is not None else (None, "")
        except (ValueError, TypeError, RecursionError):
            return None
        return _where(found, agent, repaired=True) if found is not None else None

    def _keep(self, line: str, body: bytes) -> None:
        """The newest body of a line. Lines and bodies age in the same order: those of forgotten lines are first."""
        self._drop(line)
        self._bodies[line], self._n_bytes = body, self._n_bytes + len(body)
        while (oldest := next(iter(self._bodies))) != line and (
            self._n_bytes > MOST_BODY_BYTES or self._line(oldest) is None
        ):
            self._drop(oldest)

    def _drop(self, line: str) -> None:
        self._n_bytes -= len(self._bodies.pop(line, b""))

    async def _explain(self, engine: Engine, record: Record, old: _Side, new: _Side, *, repaired: bool) -> None:
        try:
            divergence, agent = await asyncio.to_thread(_compared, old.body, new.body)
        except (ValueError, RecursionError) as error:
            log.info("not_explained", request=record.id, error=type(error).__name__)
            return
        if divergence is None:
            return
        explained = await _with_tokens(engine, Explained(divergence, agent, engine.name, repaired), old, new)
        self._found[record.id] = explained
        while len(self._found) > MOST_EXPLAINED:
            self._found.popitem(last=False)
        record.divergence = {**record.divergence, **positions(explained, record)}
        self._changed(record)


def _tokens_of(engine: Engine, line: Line) -> bytes | None:
    slot = engine.table.holding(line.id)
    return slot.tokens if slot is not None and slot.is_rendered and slot.tokens else None


def _compared(old: bytes, new: bytes) -> tuple[Divergence | None, str]:
    """In a thread: a body of a megabyte takes tens of milliseconds."""
    now = orjson.loads(new)
    system = next((piece.text for piece in flatten(now) if piece.text), "")
    return first_divergence(orjson.loads(old), now), agent_of(system)


async def _with_tokens(engine: Engine, explained: Explained, old: _Side, new: _Side) -> Explained:
    """With the first differing token and its neighbours, by the engine's own tokens."""
    was, now = old.tokens, new.tokens if new.tokens is not None else await _rendered(engine, new)
    if now is None:
        return explained
    if was is None or common_prefix(was, now) >= n_tokens(was):  # a slot may know its content's beginning only
        was = await _rendered(engine, old)
    if was is None:
        return explained
    at = common_prefix(was, now)
    start, middle, end = max(0, at - WINDOW) * TOKEN_BYTES, at * TOKEN_BYTES, (at + WINDOW) * TOKEN_BYTES
    return Explained(
        explained.divergence,
        explained.agent,
        explained.engine,
        explained.repaired,
        token=at,
        shared=now[start:middle],
        old=was[middle:end],
        new=now[middle:end],
    )


async def _rendered(engine: Engine, side: _Side) -> bytes | None:
    try:
        found = await render_chat(engine, side.line.who.tenant, side.base, side.body)
    except EngineError as error:
        log.info("render_failed", engine=engine.name, line=side.line.id, error=type(error).__name__)
        return None
    return None if found.n_media else found.tokens


def positions(explained: Explained, record: Record) -> dict[str, Any]:
    """Where it diverged and what that cost, without text: names of a closed set, counts, hashes."""
    where = _where(explained.divergence, explained.agent, repaired=explained.repaired)
    return {**where, "token": explained.token, "reusable": record.reprocessed}


def _where(d: Divergence, agent: str, *, repaired: bool) -> dict[str, Any]:
    return {
        "section": d.section,
        "message": d.message,
        "role": d.role if d.role is None or d.role in _ROLES else "other",
        "path": d.path,
        "character": d.at,
        "flat_character": d.flat,
        "kind": d.kind.value,
        "old_hash": digest(d.old.encode("utf-8", "surrogatepass")).hex()[:16],
        "new_hash": digest(d.new.encode("utf-8", "surrogatepass")).hex()[:16],
        "advice": advice(d.kind, agent, repaired=repaired),
    }


def texts_of(explained: Explained) -> dict[str, str]:
    """The text before the divergence, and the old and the new one behind it."""
    d = explained.divergence
    return {"shared": d.shared, "old": d.old, "new": d.new}


def advices(record: Record) -> list[str]:
    """What avoids it: for the cause, and for the change in the client's text."""
    if record.cause is None:
        return []
    own = None if record.cause in _BY_TEXT else advice_for_cause(record.cause)
    return [text for text in (own, record.divergence.get("advice")) if text]


class ExplainDesk:
    """What `slotkeeper explain` asks for, as dictionaries for JSON; with text."""

    def __init__(self, explainer: Explainer, engines: Callable[[str], Engine | None]) -> None:
        self._explainer, self._engine = explainer, engines

    async def told(self, record: Record) -> dict[str, Any]:
        """One request: what it cost, why, where it diverged, what avoids it, texts and a window of tokens."""
        shown = record.to_json() | {"advice": advices(record), "texts": None, "tokens": None}
        explained = self._explainer.get(record.id)
        if explained is not None:
            shown |= {"texts": texts_of(explained), "tokens": await self._window(explained)}
        return shown

    async def _window(self, explained: Explained) -> dict[str, str] | None:
        """Twelve tokens on both sides, as text by the engine that has them; None when it cannot be asked."""
        engine = self._engine(explained.engine)
        if engine is None or explained.token is None:
            return None
        try:
            parts = [await engine.client.detokenize(p) for p in (explained.shared, explained.old, explained.new)]
        except EngineError:
            return None
        return dict(zip(("shared", "old", "new"), parts, strict=True))
