"""Which reminders the model has yet to be told, when the ledger's spelling of a history goes on being sent.

Agents change, drop and move their `<system-reminder>` blocks in messages that were sent long ago. What was told stays
told; what the client says now has to be what the model was told last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from itertools import islice, takewhile

from policies.message_parts import Message, inner_of, reminders

MOST_MOVED = 64
"""Different reminders that move at once; of more, which no agent has, all are told again."""
MOST_COMPARED = 256
"""Different reminders of one history that are compared, newest first; agents have a few dozen."""
SHORT = 12
"""Characters of a reminder that says too little to be told from another of its tag by its beginning ("Plan mode.")."""
BEGINNING = 24
"""Characters that two versions of a reminder begin with alike ("The current mode is plan", "Today's date is ...")."""


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
    """Blocks that left the first `n_shared` incoming messages and stand in the rest again: the ledger still tells them
    where they were first, and the prompt need not tell them twice. One that other reminders came after is none of them:
    they may have said the contrary ("plan mode", "build mode", "plan mode")."""
    told, kept, again = (
        [block for message in messages for block in reminders(message)]
        for messages in (ledger, incoming[:n_shared], incoming[n_shared:])
    )
    moved = (Counter(told) - Counter(kept)) & Counter(again)
    if len(moved) > MOST_MOVED:
        return ()
    while contradicted := _contradicted(told, again, moved):
        moved = Counter({block: count for block, count in moved.items() if block not in contradicted})
    return tuple(moved.elements())


def _contradicted(told: Sequence[str], again: Sequence[str], moved: Counter[str]) -> set[str]:
    """Blocks between whose places another reminder stands that does not move with them."""
    behind: set[str] = set(again[: next((i for i, block in enumerate(again) if block not in moved), len(again))])
    last = next((i for i in range(len(told) - 1, -1, -1) if told[i] not in moved), -1)
    behind &= set(told[last + 1 :])
    return set(moved) - behind


def overtaken(told: Iterable[str], said: Iterable[str], returned: Set[str] = frozenset()) -> tuple[str, ...]:
    """Blocks of `said` that have to be told again, in order, because another version of them was told last.

    `told`: all blocks in the order in which the model reads them; `said`: those of the client's history. A block is
    another version of one if the two begin alike (`_is_version`). `returned`: blocks that stand again where the client
    had others in between: whatever was told since and is no longer said has taken their place.
    """
    order = _newest(said)
    if len(order) > MOST_COMPARED:
        order = dict(islice(order.items(), len(order) - MOST_COMPARED, None))
    read = _newest(told)
    again = []
    for block, at in order.items():
        if block not in read:
            continue  # not told at all: `new_reminders`
        later = islice(takewhile(block.__ne__, reversed(read)), MOST_COMPARED)
        if any(
            order.get(other, -1) < at and ((block in returned and other not in order) or _is_version(block, other))
            for other in later
        ):
            again.append(block)
            read[block] = read.pop(block)  # told last
    return tuple(again)


def _newest(blocks: Iterable[str]) -> dict[str, int]:
    """Different blocks by where each stands last, in that order."""
    places: dict[str, int] = {}
    for at, block in enumerate(blocks):
        places.pop(block, None)
        places[block] = at
    return places


def _is_version(one: str, other: str) -> bool:
    """Whether two blocks say the same thing of different states, as far as their beginnings show it."""
    (tag, mine), (their_tag, theirs) = inner_of(one), inner_of(other)
    if tag != their_tag:
        return False
    shorter = min(len(mine), len(theirs))
    n = min(BEGINNING, shorter // 2)
    return shorter <= SHORT or mine[:n] == theirs[:n]
