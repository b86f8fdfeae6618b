"""What happens to idle slots, and who ends when the pool overflows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.upkeep import (
    BASE_IDLE_SECONDS,
    CANCEL_SECONDS,
    IDLE_SECONDS,
    MARGIN_TOKENS,
    SAVE_AT_LEAST,
    WORTH,
    Growth,
    IdleSlot,
    exit_order,
    is_worth,
    next_base,
    next_save,
    relieve,
)

DUE = IdleSlot(0, tokens=1000, stake=1000, idle_seconds=IDLE_SECONDS)
SLOTS = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.sampled_from([0.0, 9.9, 10.0, 59.9, 60.0, 1e6])).flatmap(
        lambda f: st.booleans().map(lambda base: (max(f[:2]), min(f[:2]), f[2], base))
    ),
    max_size=6,
).map(lambda found: tuple(IdleSlot(i, *facts) for i, facts in enumerate(found)))
RUNNERS = st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 200)), max_size=4).flatmap(
    lambda found: st.permutations(range(len(found))).map(
        lambda orders: tuple(Growth(slot, n, *facts) for slot, (n, facts) in enumerate(zip(orders, found, strict=True)))
    )
)
IDLE = st.lists(st.integers(1, 500), max_size=4).map(lambda sizes: tuple((10 + i, n) for i, n in enumerate(sizes)))


# --- a pool that fills ---


def wanted(runners: tuple[Growth, ...]) -> int:
    """Cells to be kept free while a runner is being ended."""
    return MARGIN_TOKENS + int(CANCEL_SECONDS * sum(r.rate for r in runners))


@given(st.integers(0, 4000), st.integers(1, 4000), IDLE, RUNNERS)
def test_idle_slots_go_first_and_no_more_than_needed(
    used: int, capacity: int, idle: tuple[tuple[int, int], ...], runners: tuple[Growth, ...]
) -> None:
    evicted, ended = relieve(used, capacity, idle, runners)
    assert evicted == [slot for slot, _ in idle[: len(evicted)]]
    free, sizes = capacity - used, dict(idle)
    freed = sum(sizes[slot] for slot in evicted)
    if evicted:
        assert free + freed - sizes[evicted[-1]] < wanted(runners)
    if len(evicted) < len(idle):
        assert free + freed >= wanted(runners)
    if ended is not None:
        assert capacity - sum(r.cells for r in runners) - sum(sizes.values()) + freed < wanted(runners)


@given(st.integers(0, 4000), st.integers(1, 4000), IDLE, RUNNERS)
def test_the_older_runner_never_ends(
    used: int, capacity: int, idle: tuple[tuple[int, int], ...], runners: tuple[Growth, ...]
) -> None:
    """Only the youngest of at least two ends, and only when what is really taken leaves no room to grow."""
    evicted, ended = relieve(used, capacity, idle, runners)
    kept = sum(n for slot, n in idle if slot not in evicted)
    short = capacity - kept - sum(r.cells for r in runners) < wanted(runners)
    youngest = max(runners, key=lambda r: r.order).slot if runners else None
    assert ended == (youngest if short and len(runners) > 1 else None)


def test_a_pool_with_room_for_the_margin_is_left_alone() -> None:
    """Two runners of 30 tokens a second: 64 cells and what both add while one is being ended."""
    runners = (Growth(0, 1, 438, 30.0), Growth(1, 2, 388, 30.0))
    assert relieve(1000 - 124, 1000, ((2, 50),), runners) == ([], None)
    assert relieve(1000 - 123, 1000, ((2, 50),), runners) == ([2], None)
    assert relieve(1000 - 124, 1000, ((2, 51),), runners) == ([], 1)
    assert relieve(1000, 1000, (), (replace(runners[0], cells=489), runners[1])) == ([], 1)


def test_promises_alone_end_nobody() -> None:
    """A pool that reserves fill to the brim evicts idle slots; runners end by what they really hold."""
    runners = (Growth(0, 1, 100, 10.0), Growth(1, 2, 100, 10.0))
    assert relieve(1000, 1000, ((2, 300),), runners) == ([2], None)
    assert relieve(1000, 1000, (), runners) == ([], None)


# --- idle saves ---


def test_a_save_has_to_be_worth_ten_times_its_cost() -> None:
    """1,000 tokens at a tenth of their save's cost each: 100 times 10 is just worth it."""
    assert is_worth(1000, 1000, save_cost=0.1)
    assert not is_worth(999, 1000, save_cost=0.1)
    assert not is_worth(SAVE_AT_LEAST - 1, SAVE_AT_LEAST - 1, save_cost=0.0)
    assert is_worth(SAVE_AT_LEAST, SAVE_AT_LEAST, save_cost=0.0)


@pytest.mark.parametrize(
    ("slot", "cost", "bytes_left"),
    [
        (replace(DUE, idle_seconds=IDLE_SECONDS - 0.1), 0.01, 1e9),
        (replace(DUE, stake=99), 0.01, 1e9),
        (DUE, 0.11, 1e9),
        (DUE, 0.01, 1000 * 10.0 - 1),
    ],
    ids=["not idle long enough", "mostly saved", "save too dear", "day's bytes used up"],
)
def test_what_is_not_saved_when_idle(slot: IdleSlot, cost: float, bytes_left: float) -> None:
    assert next_save((slot,), cost, bytes_left, 10.0) is None
    assert next_save((DUE,), 0.01, 1e9, 10.0) == 0


@given(SLOTS, st.sampled_from([0.0, 0.01, 0.1, 0.5]), st.integers(0, 30_000), st.sampled_from([1.0, 10.0]))
def test_the_most_at_stake_is_saved_first(
    slots: tuple[IdleSlot, ...], cost: float, bytes_left: int, per_token: float
) -> None:
    def is_due(s: IdleSlot) -> bool:
        worth = s.stake >= max(SAVE_AT_LEAST, WORTH * cost * s.tokens)
        return worth and s.idle_seconds >= IDLE_SECONDS and s.tokens * per_token <= bytes_left

    found = next_save(slots, cost, bytes_left, per_token)
    due = [s for s in slots if is_due(s)]
    assert (found is None) == (not due)
    if found is not None:
        assert slots[found] in due
        assert slots[found].stake == max(s.stake for s in due)


@given(SLOTS)
def test_the_base_idle_longest_is_kept_first(slots: tuple[IdleSlot, ...]) -> None:
    due = [s for s in slots if s.base_wanted and s.idle_seconds >= BASE_IDLE_SECONDS]
    found = next_base(slots)
    assert (found is None) == (not due)
    if found is not None:
        assert slots[found] in due
        assert slots[found].idle_seconds == max(s.idle_seconds for s in due)


@given(SLOTS)
def test_at_exit_the_most_at_stake_goes_first_and_trifles_stay(slots: tuple[IdleSlot, ...]) -> None:
    saved = exit_order(slots)
    assert set(saved) == {s.id for s in slots if s.stake >= SAVE_AT_LEAST}
    assert len(saved) == len(set(saved))
    stakes = [slots[number].stake for number in saved]
    assert stakes == sorted(stakes, reverse=True)


# --- an engine that sleeps ---


def test_before_an_engine_sleeps_what_it_would_lose_is_saved() -> None:
    """Half of its idle time on, and for less than ten saves' worth: that is a loss."""
    slot = replace(DUE, idle_seconds=15.0, stake=500)
    dear = 0.4
    assert next_save((slot,), dear, 1e9, 1.0, sleep_seconds=30.0) == slot.id
    assert next_save((slot,), dear, 1e9, 1.0, sleep_seconds=31.0) is None, "not yet"
    assert next_save((slot,), 0.5, 1e9, 1.0, sleep_seconds=30.0) is None, "its prefill costs no more"
    assert next_save((replace(slot, idle_seconds=IDLE_SECONDS),), dear, 1e9, 1.0) is None, "it does not sleep"
    assert next_save((DUE,), 0.01, 1e9, 1.0, sleep_seconds=3600.0) == DUE.id, "it sleeps late"
    base = replace(DUE, idle_seconds=2.0, base_wanted=True)
    assert (next_base((base,), sleep_seconds=4.0), next_base((base,))) == (base.id, None)
