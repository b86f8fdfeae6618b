"""A history that comes back against the ledger of what was sent: appended, repaired, or the client's own edit.

The ledger holds the messages of a line's newest prompt as the engine got them. Where the incoming history says the same
in other words, the ledger's spelling goes on being sent and the slot's tokens stay valid; where it says something else,
the client has edited it, and its text is what counts from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from policies.append_only_data import LONGEST, PRUNED, SHAPES
from policies.normal_form import (
    Defaults,
    Message,
    defaults_of,
    diff_kinds,
    differs_in,
    normal,
    only_reminders,
    reminders,
    role_of,
    texts_of,
)

__all__ = [
    "Appended",
    "Defaults",
    "Diverged",
    "Message",
    "Repaired",
    "defaults_of",
    "diff_kinds",
    "is_placeholder",
    "moved_reminders",
    "new_reminders",
    "normal",
    "only_reminders",
    "reconcile",
    "reminders",
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
    rest of incoming. `n_shared` is not the ledger's length where messages that are reminders only came or went.

    `how`: the kinds of differences (`diff_kinds`), "prune", "gave_up" (a rule was skipped because the history
    contradicts itself). `deferred`: positions in the ledger of results that the client has pruned.
    """

    n_shared: int
    how: tuple[str, ...]
    deferred: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Diverged:
    """The first `at` messages of the ledger are the first `n_shared` incoming ones; then the client's text counts.

    `why`: "role", "content", "calls", "call_ids" or "keys" of the first message that differs; "shorter": the history
    ends there; "cancelled": the ledger's last turn was given up for another prompt, no answer in between;
    "pruned": the first of the prunes that were to be applied. `how`: as in `Repaired`, for the messages before.
    """

    at: int
    why: str
    n_shared: int = 0
    how: tuple[str, ...] = ()


Reconciled = Appended | Repaired | Diverged


def reconcile(
    ledger: Sequence[Message], incoming: Sequence[Message], defaults: Defaults, *, apply_prunes: bool = False
) -> Reconciled:
    """How the incoming history relates to the ledger, message by message.

    `ledger`: the messages of the line's newest prompt without the reply to it. `apply_prunes`: what would be deferred
    is the divergence instead. Messages of any JSON shape are taken; nothing is raised or changed.
    """
    walk = _walk(ledger, incoming, defaults)
    pruned, refused = _prunes(walk.suspects, ledger, incoming)
    if refused:
        walk.how[GAVE_UP] = None
    real = [pair for pair in walk.suspects if pair not in pruned]
    first_prune = min(pruned) if pruned and apply_prunes else None
    if real and (first_prune is None or real[0] < first_prune):
        at, n = real[0]
        return Diverged(at, "content", n, tuple(walk.how))
    if first_prune is not None:
        return Diverged(first_prune[0], "pruned", first_prune[1], tuple(walk.how))
    if walk.at < len(ledger) or (ledger and not walk.n_shared):
        return _ended(walk, ledger, incoming, defaults)
    if pruned:
        walk.how["prune"] = None
    if walk.how:
        return Repaired(walk.n_shared, tuple(walk.how), tuple(at for at, _ in pruned))
    return Appended(walk.n_shared)


def new_reminders(ledger: Iterable[Message], incoming: Iterable[Message]) -> tuple[str, ...]:
    """Reminder blocks of `incoming` that the ledger does not hold, in order: what the ledger's spelling would lose.

    `incoming`: only the messages that the ledger stands for (`n_shared`). A block that the ledger holds once and
    incoming twice is new once.
    """
    held = Counter(block for message in ledger for block in reminders(message))
    new = []
    for message in incoming:
        for block in reminders(message):
            if held[block] > 0:
                held[block] -= 1
            else:
                new.append(block)
    return tuple(new)


def moved_reminders(ledger: Iterable[Message], incoming: Sequence[Message], n_shared: int) -> tuple[str, ...]:
    """Blocks that left the first `n_shared` incoming messages and stand in the rest again. The ledger still tells them
    where they were first, so that the prompt would tell them twice."""
    gone = Counter(block for message in ledger for block in reminders(message))
    gone -= Counter(block for message in incoming[:n_shared] for block in reminders(message))
    there = Counter(block for message in incoming[n_shared:] for block in reminders(message))
    return tuple((gone & there).elements())


def is_placeholder(text: str) -> bool:
    """Whether a tool result is a known placeholder for one that was pruned (policies/append_only_data)."""
    text = text.strip() if len(text) <= LONGEST else ""
    return bool(text) and (text in PRUNED or any(shape.fullmatch(text) for shape in SHAPES))


# --- walking --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Walk:
    """Where the comparison stands, in the ledger and in incoming, and what it has met.

    `matched`: the same behind the last two messages that matched. `suspects`: positions of tool results that differ
    and might be prunes.
    """

    at: int = 0
    n_shared: int = 0
    matched: tuple[int, int] = (0, 0)
    how: dict[str, None] = field(default_factory=dict)
    suspects: list[tuple[int, int]] = field(default_factory=list)


def _walk(ledger: Sequence[Message], incoming: Sequence[Message], defaults: Defaults) -> _Walk:
    walk = _Walk()
    while walk.at < len(ledger) and walk.n_shared < len(incoming):
        one, other = ledger[walk.at], incoming[walk.n_shared]
        if _is_identical(one, other):
            pass
        elif normal(one, defaults) == normal(other, defaults):
            walk.how |= dict.fromkeys(diff_kinds(one, other))
        elif _may_be_pruned(one, other, defaults):
            walk.suspects.append((walk.at, walk.n_shared))
        elif only_reminders(one) or only_reminders(other):
            walk.how["reminder"] = None
            is_gone = only_reminders(one)
            walk.at, walk.n_shared = walk.at + is_gone, walk.n_shared + (not is_gone)
            continue
        else:
            return walk
        walk.at, walk.n_shared = walk.matched = walk.at + 1, walk.n_shared + 1
    return walk


def _is_identical(one: Message, other: Message) -> bool:
    """Whether two messages are the same texts; others may be equal to Python and not in JSON (1 and true)."""
    if one is other:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or len(one) != len(other):
        return False
    return all(isinstance(value, str) and value == other.get(key) for key, value in one.items())


def _ended(walk: _Walk, ledger: Sequence[Message], incoming: Sequence[Message], defaults: Defaults) -> Diverged:
    """The divergence at the walk's end. It begins behind the last match: what was skipped after it is not shared."""
    at, n = walk.matched
    if walk.n_shared >= len(incoming):
        why = "shorter"
    elif _is_given_up(ledger[at:], incoming[n:]):
        why = "cancelled"
    else:
        one, other = ledger[min(walk.at, len(ledger) - 1)], incoming[walk.n_shared]
        why = differs_in(one, other, defaults) or "content"
    return Diverged(at, why, n, tuple(walk.how))


def _is_given_up(left: Sequence[Message], instead: Sequence[Message]) -> bool:
    """Whether what is left of the ledger is its last turn, and instead of it stands one other prompt, unanswered.

    A client that was interrupted forgets the turn (Continue) or puts both prompts into one (Qwen Code).
    """
    is_turn = role_of(left[0]) == "user" and all(role_of(message) != "user" for message in left[1:])
    return is_turn and role_of(instead[0]) == "user" and all(role_of(m) in _TOLD for m in instead[1:])


_TOLD = frozenset({"user", "system", "developer"})


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


def _prunes(
    suspects: list[tuple[int, int]], ledger: Sequence[Message], incoming: Sequence[Message]
) -> tuple[list[tuple[int, int]], bool]:
    """Those that are prunes, and whether others were refused because their call id names several results."""
    alike = Counter(_text(incoming[n]) for _, n in suspects)
    ids = [Counter(_call_id(m) for m in messages if role_of(m) == "tool") for messages in (ledger, incoming)]
    pruned, refused = [], False
    for at, n in suspects:
        text = _text(incoming[n]) or ""
        if alike[text] < 2 and not is_placeholder(text):
            continue
        if any(count[_call_id(incoming[n])] > 1 for count in ids):
            refused = True
        else:
            pruned.append((at, n))
    return pruned, refused


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
