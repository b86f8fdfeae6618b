"""The table of slot states: whole, closed, and strict."""

import pytest

from policies.slot_state import TABLE, IllegalStep, SlotEvent, SlotState, is_free_to_lease, step

S, E = SlotState, SlotEvent
ALL = [(state, event) for state in SlotState for event in SlotEvent]


def test_every_state_has_a_row_and_every_event_a_use() -> None:
    assert set(TABLE) == set(SlotState)
    assert {event for row in TABLE.values() for event in row} == set(SlotEvent)


@pytest.mark.parametrize(("state", "event"), ALL, ids=str)
def test_a_step_is_the_tables_or_refused(state: SlotState, event: SlotEvent) -> None:
    """Legal steps lead where the table says; any other raises, names both, and leaves the table as it was."""
    before = {s: dict(row) for s, row in TABLE.items()}
    if event in TABLE[state]:
        assert step(state, event) is TABLE[state][event]
    else:
        with pytest.raises(IllegalStep, match=f"{state} cannot {event}"):
            step(state, event)
    assert before == TABLE


def reachable(start: SlotState) -> set[SlotState]:
    """States that some series of events leads to."""
    seen, todo = {start}, [start]
    while todo:
        for after in TABLE[todo.pop()].values():
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


@pytest.mark.parametrize("state", SlotState)
def test_each_state_is_reachable_and_none_is_a_trap(state: SlotState) -> None:
    assert state in reachable(S.EMPTY)
    assert {S.EMPTY, S.IDLE} <= reachable(state)


@pytest.mark.parametrize("state", SlotState)
def test_only_empty_and_idle_slots_may_be_leased(state: SlotState) -> None:
    """What somebody holds, or what is in doubt, is nobody else's (design.md, rule 4)."""
    assert is_free_to_lease(state) == (state in (S.EMPTY, S.IDLE))


@pytest.mark.parametrize("state", SlotState)
def test_a_lost_engine_is_legal_at_any_time_and_leaves_no_content(state: SlotState) -> None:
    """Slots of a dead engine are empty; a lease stays with its holder, who must give it back."""
    after = step(state, E.LOST)
    assert after is not S.IDLE
    assert is_free_to_lease(after) == is_free_to_lease(state)


def test_a_lease_ends_only_by_a_release() -> None:
    """Between LEASE and RELEASE_* no event makes a slot free."""
    held = set(SlotState) - {S.EMPTY, S.IDLE}
    for state in held:
        freed = {event for event, after in TABLE[state].items() if after not in held}
        assert freed <= {E.RELEASE_FULL, E.RELEASE_EMPTY}


def test_a_slot_at_work_cannot_be_given_back() -> None:
    for state in (S.BUSY, S.SAVING, S.RESTORING):
        for event in (E.RELEASE_FULL, E.RELEASE_EMPTY):
            with pytest.raises(IllegalStep):
                step(state, event)
