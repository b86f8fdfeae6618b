"""A history that comes back against the ledger of what was sent: appended, repaired, or the client's own edit.

The ledger holds the messages of a line's newest prompt as the engine got them. Where the incoming history says the same
in other words, the ledger's spelling goes on being sent and the slot's tokens stay valid; where it says something else,
the client has edited it, and its text is what counts from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.append_only_data import LONGEST, PRUNED, SHAPES
from policies.message_parts import Message, only_reminders, role_of, texts_of
from policies.normal_form import Defaults, defaults_of, diff_kinds, differs_in, normal
from policies.types import digest

__all__ = [
    "Appended",
    "Defaults",
    "Diverged",
    "Message",
    "Repaired",
    "aligned",
    "defaults_of",
    "diff_kinds",
    "is_placeholder",
    "normal",
    "normal_digest",
    "reconcile",
    "says_nothing",
]

MOST_ALIKE = 120
"""Characters: a shorter text that replaces several results alike is a placeholder (issue 4, "Reconcile")."""
GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True)
class Appended:
    """The first `n_shared` incoming messages are the ledger, spelled alike."""

    n_shared: int


@dataclass(frozen=True, slots=True)
class Repaired:
    """The first `n_shared` incoming messages say what the whole ledger says: the prompt is the ledger and then the
    rest of incoming. `n_shared` is not the ledger's length where messages that say nothing came or went: those of
    reminders only, and empty answers.

    `how`: the kinds of differences (`diff_kinds`), "prune", "empty_turn", "gave_up" (a rule was skipped because the
    history contradicts itself). `deferred`: positions in the ledger of results that the client has pruned.
    """

    n_shared: int
    how: tuple[str, ...]
    deferred: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Diverged:
    """The first `at` messages of the ledger are the first `n_shared` incoming ones; then the client's text counts.

    `why`: "role", "content", "calls", "call_ids" or "keys" of the first message that differs; "shorter": the history
    ends there; "cancelled": the ledger's last turn was given up, or its answer, for another prompt;
    "pruned": the first of the prunes that were to be applied. `how` and `deferred`: as in `Repaired`, for the messages
    before.
    """

    at: int
    why: str
    n_shared: int = 0
    how: tuple[str, ...] = ()
    deferred: tuple[int, ...] = ()


Reconciled = Appended | Repaired | Diverged


def reconcile(
    ledger: Sequence[Message],
    incoming: Sequence[Message],
    defaults: Defaults,
    *,
    apply_prunes: bool = False,
    digests: Sequence[bytes] = (),
) -> Reconciled:
    """How the incoming history relates to the ledger, message by message.

    `ledger`: the messages of the line's newest prompt without the reply to it. `apply_prunes`: what would be deferred
    is the divergence instead. `digests`: `normal_digest` of the ledger's messages as the client first sent them, for
    messages that were sent on with notes in them; none: as they stand. Messages of any JSON shape are taken; nothing
    is raised or changed.
    """
    walk = _walk(ledger, incoming, defaults, digests)
    pruned = _prunes(walk, ledger, incoming)
    edits = [pair for pair in walk.suspects if pair not in pruned]
    if apply_prunes and pruned and not (edits and edits[0] < min(pruned)):
        return _diverged(walk, min(pruned), "pruned", ())
    deferred = tuple(at for at, _ in sorted(pruned))
    if edits:
        return _diverged(walk, edits[0], "content", deferred)
    if walk.at < len(ledger) or (ledger and not walk.n_shared):
        return _diverged(walk, walk.matched, _why(walk, ledger, incoming, defaults), deferred)
    if deferred:
        walk.how["prune"] = None
    return Repaired(walk.n_shared, tuple(walk.how), deferred) if walk.how else Appended(walk.n_shared)


def normal_digest(message: Message, defaults: Defaults) -> bytes:
    """16-byte digest of the normal form."""
    return digest(normal(message, defaults))


def aligned(
    ledger: Sequence[Message], incoming: Sequence[Message], defaults: Defaults, digests: Sequence[bytes] = ()
) -> tuple[list[int | None], int] | None:
    """Which incoming message stands for each of the ledger's first ones, None for one that says nothing and is gone;
    and how many incoming ones lie before the next. None: no message came or went, so that positions agree.

    `digests`: as for `reconcile`."""
    walk = _walk(ledger, incoming, defaults, digests)
    at, n_shared = (walk.at, walk.n_shared) if walk.at == len(ledger) else walk.matched
    stands = dict(walk.pairs)
    places = [stands.get(i) for i in range(at)]
    return None if places == list(range(n_shared)) else (places, n_shared)


def is_placeholder(text: str) -> bool:
    """Whether a tool result is a known placeholder for one that was pruned (policies/append_only_data)."""
    text = text.strip() if len(text) <= LONGEST else ""
    return bool(text) and (text in PRUNED or any(shape.fullmatch(text) for shape in SHAPES))


# --- walking --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Walk:
    """Where the comparison stands, in the ledger and in incoming, and what it has met.

    `matched`: the same behind the last two messages that matched; `skipped`: why some were passed over since.
    `suspects`: positions of tool results that differ and might be prunes.
    """

    at: int = 0
    n_shared: int = 0
    matched: tuple[int, int] = (0, 0)
    how: dict[str, None] = field(default_factory=dict)
    skipped: dict[str, None] = field(default_factory=dict)
    suspects: list[tuple[int, int]] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)

    def take_skipped(self) -> None:
        """What was passed over lies between messages that are shared."""
        self.how |= self.skipped
        self.skipped.clear()


def _walk(
    ledger: Sequence[Message], incoming: Sequence[Message], defaults: Defaults, digests: Sequence[bytes]
) -> _Walk:
    walk = _Walk()
    while walk.at < len(ledger) and walk.n_shared < len(incoming):
        one, other = ledger[walk.at], incoming[walk.n_shared]
        if _is_identical(one, other):
            pass
        elif normal(one, defaults) == normal(other, defaults):
            walk.how |= dict.fromkeys(diff_kinds(one, other))
        elif walk.at < len(digests) and normal_digest(other, defaults) == digests[walk.at]:
            walk.how |= dict.fromkeys(diff_kinds(*({**message, "content": None} for message in (one, other))))
        elif _may_be_pruned(one, other, defaults):
            walk.suspects.append((walk.at, walk.n_shared))
        elif why := says_nothing(one) or says_nothing(other):
            walk.skipped[why] = None
            is_gone = says_nothing(one) is not None
            walk.at, walk.n_shared = walk.at + is_gone, walk.n_shared + (not is_gone)
            continue
        else:
            return walk
        walk.pairs.append((walk.at, walk.n_shared))
        walk.at, walk.n_shared = walk.matched = walk.at + 1, walk.n_shared + 1
        walk.take_skipped()
    if walk.at == len(ledger):
        walk.take_skipped()
    return walk


def _is_identical(one: Message, other: Message) -> bool:
    """Whether two messages are the same texts; others may be equal to Python and not in JSON (1 and true)."""
    if one is other:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or len(one) != len(other):
        return False
    return all(isinstance(value, str) and value == other.get(key) for key, value in one.items())


def says_nothing(message: Message) -> str | None:
    """Why a message may come and go: its reminders are told elsewhere, or it is an answer that never began."""
    if only_reminders(message):
        return "reminder"
    is_empty = role_of(message) == "assistant" and normal(message, {}) == normal({"role": "assistant"}, {})
    return "empty_turn" if is_empty else None


def _diverged(walk: _Walk, place: tuple[int, int], why: str, deferred: tuple[int, ...]) -> Diverged:
    before = tuple(at for at in deferred if at < place[0])
    return Diverged(place[0], why, place[1], (*walk.how, "prune") if before else tuple(walk.how), before)


def _why(walk: _Walk, ledger: Sequence[Message], incoming: Sequence[Message], defaults: Defaults) -> str:
    """Why the walk ended early. It shares what is before the last match: what was skipped after it may be no more."""
    at, n = walk.matched
    if walk.n_shared >= len(incoming):
        return "shorter"
    if _is_given_up(ledger, at, incoming[n:]):
        return "cancelled"
    return differs_in(ledger[at], incoming[n], defaults) or "content"


def _is_given_up(ledger: Sequence[Message], at: int, instead: Sequence[Message]) -> bool:
    """Whether the ledger ends in the turn of `at` and an unanswered prompt stands instead of what is left of it.

    A client that was interrupted forgets the turn (Continue) or its answer (pi), or puts both prompts into one (Qwen
    Code). A first prompt that is another one is another conversation, unless it begins with the first.
    """
    left = ledger[at:]
    is_turn = all(role_of(message) != "user" for message in left[1:])
    if not is_turn or role_of(instead[0]) != "user" or not all(role_of(m) in _TOLD for m in instead[1:]):
        return False
    was, now = texts_of(left[0])[-1:], texts_of(instead[0])[-1:]
    goes_on = bool(was and now) and now[0].startswith(was[0])
    return goes_on or any(role_of(message) not in _SYSTEM for message in ledger[:at])


_SYSTEM = frozenset({"system", "developer"})
_TOLD = _SYSTEM | {"user"}


# --- prunes ---------------------------------------------------------------------------------------------------------


def _may_be_pruned(one: Message, other: Message, defaults: Defaults) -> bool:
    """Whether a tool result came back shorter; everything else is as it was."""
    if role_of(one) != "tool" or role_of(other) != "tool" or differs_in(one, other, defaults) != "content":
        return False
    if (text := _text(other)) is None:
        return False
    before = _text(one)
    is_shorter = before is None or len(text) < len(before)
    return is_shorter and (len(text) < MOST_ALIKE or is_placeholder(text))


def _prunes(walk: _Walk, ledger: Sequence[Message], incoming: Sequence[Message]) -> set[tuple[int, int]]:
    """The suspects that are prunes. Where a call id names several results none is: that rule gives up."""
    if not walk.suspects:
        return set()
    alike = Counter(_text(incoming[n]) for _, n in walk.suspects)
    ids = [Counter(_call_id(m) for m in messages if role_of(m) == "tool") for messages in (ledger, incoming)]
    pruned = set()
    for at, n in walk.suspects:
        text = _text(incoming[n]) or ""
        if alike[text] < 2 and not is_placeholder(text):
            continue
        if any(count[_call_id(incoming[n])] > 1 for count in ids):
            walk.how[GAVE_UP] = None
        else:
            pruned.add((at, n))
    return pruned


def _call_id(message: Message) -> str:
    name = message.get("tool_call_id")
    return name if isinstance(name, str) else ""


def _text(message: Message) -> str | None:
    """The text of a tool result, None if it holds anything else, such as an image."""
    content = message.get("content")
    if isinstance(content, list) and len(texts_of(message)) < sum(not _is_empty(part) for part in content):
        return None
    return "".join(texts_of(message)).strip()


def _is_empty(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and part.get("text") == ""
