"""What to do with idle slots while nobody is served: which to save, which base to keep."""

from dataclasses import dataclass

from policies.placement import SAVE_AT_LEAST

IDLE_SECONDS = 60.0
"""A line idle for so long may be saved (design.md, rule 8)."""
BASE_IDLE_SECONDS = 10.0
"""A line idle for so long may have its base cut (design.md, rule 8)."""
WORTH = 10.0
"""Prefill at stake has to take so many times longer than the save (design.md, rule 8)."""
DAILY_BYTES = 50 * 1024**3
"""Bytes that idle saves may write in a day (design.md, rule 8)."""


@dataclass(frozen=True, slots=True)
class IdleSlot:
    """A slot that nobody uses. `stake`: tokens that no snapshot holds; `idle_seconds` since its last answer."""

    id: int
    tokens: int
    stake: int
    idle_seconds: float
    base_wanted: bool = False


def is_worth(stake: int, tokens: int, save_cost: float) -> bool:
    """Prefill at stake against the save of all tokens, both in prefill tokens."""
    return stake >= SAVE_AT_LEAST and stake >= WORTH * save_cost * tokens


def next_save(
    slots: tuple[IdleSlot, ...],
    save_cost: float,
    bytes_left: float,
    bytes_per_token: float,
    sleep_seconds: float = 0.0,
) -> int | None:
    """The slot to save now: the one with most at stake among those idle long enough, or None.

    `sleep_seconds`: after so long an idle engine unloads its model (0: never). That is a loss like any other, so what
    is at stake need not be worth ten saves then.
    """
    wait = idle_seconds(IDLE_SECONDS, sleep_seconds)
    due = [
        s
        for s in slots
        if s.idle_seconds >= wait
        and (is_worth(s.stake, s.tokens, save_cost) or (sleep_seconds and _is_loss(s, save_cost)))
        and s.tokens * bytes_per_token <= bytes_left
    ]
    return max(due, key=lambda s: (s.stake, -s.id)).id if due else None


def _is_loss(slot: IdleSlot, save_cost: float) -> bool:
    return slot.stake >= SAVE_AT_LEAST and save_cost * slot.tokens < slot.stake


def idle_seconds(usual: float, sleep_seconds: float) -> float:
    """How long to wait before idle work, so that it is done well before the engine sleeps (0: never)."""
    return min(usual, sleep_seconds / 2) if sleep_seconds else usual


def next_base(slots: tuple[IdleSlot, ...], sleep_seconds: float = 0.0) -> int | None:
    """The slot whose base is to be kept now: the one idle longest, or None."""
    wait = idle_seconds(BASE_IDLE_SECONDS, sleep_seconds)
    due = [s for s in slots if s.base_wanted and s.idle_seconds >= wait]
    return max(due, key=lambda s: (s.idle_seconds, -s.id)).id if due else None


def exit_order(slots: tuple[IdleSlot, ...]) -> list[int]:
    """The order of saves at exit: most at stake first; what is not worth a file is left out."""
    return [s.id for s in sorted(slots, key=lambda s: (-s.stake, s.id)) if s.stake >= SAVE_AT_LEAST]


@dataclass(frozen=True, slots=True)
class Growth:
    """A running request: admission order, cells it really holds, tokens per second it adds."""

    slot: int
    order: int
    cells: int
    rate: float


CANCEL_SECONDS = 1.0
"""Ending a runner takes the engine up to 0.7 s (llama-server.md, "Closing the connection"); all grow meanwhile."""
MARGIN_TOKENS = 64
"""Cells kept free besides: one batch may come before we look again."""


def relieve(
    promised: int, capacity: int, idle: tuple[tuple[int, int], ...], runners: tuple[Growth, ...]
) -> tuple[list[int], int | None]:
    """Which idle slots to evict, and which runner to end, so that running answers do not overflow the pool.

    `promised`: cells that are taken or may still be claimed by reserves. `idle`: (slot, tokens), first to go first:
    they make room for what was promised. The youngest runner ends only when what is really taken leaves no room to
    grow, nothing is left to evict, and at least two run: never both.
    """
    margin = MARGIN_TOKENS + int(CANCEL_SECONDS * sum(r.rate for r in runners))
    free = capacity - promised
    evict: list[int] = []
    for slot, tokens in idle:
        if free >= margin:
            break
        evict.append(slot)
        free += tokens
    kept = sum(tokens for slot, tokens in idle if slot not in evict)
    if capacity - kept - sum(r.cells for r in runners) >= margin or len(runners) < 2:
        return evict, None
    return evict, max(runners, key=lambda r: r.order).slot
