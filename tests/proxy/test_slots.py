"""Leases and the waiting line, case by case. `test_slots_machine` tries random series of the same steps."""

from __future__ import annotations

import asyncio

import pytest

from policies.queue import MAX_BYPASSED
from policies.slot_state import IllegalStep, SlotEvent, SlotState
from policies.types import Action, Match, SnapshotFacts
from proxy.errors import Busy, EngineStarting, WaitedTooLong
from proxy.runner import Runner
from proxy.slots import MOST_TENANTS, NeedsTokens
from tests.fakes.wants import LONG, answered, put, table, turn, want

# --- leases ---


async def test_a_free_slot_is_granted_at_once() -> None:
    t = table()
    grant = await t.acquire(want(), LONG)
    assert grant.target.state is SlotState.LEASED
    assert grant.target.claims == 110
    assert t.runners() == [grant.target]
    assert (t.n_waiting, t.waits) == (0, 0)


async def test_a_lease_is_given_back_once() -> None:
    """The second time it is nobody's to give; nothing changes then."""
    t = table()
    w = want()
    grant = await t.acquire(w, LONG)
    answered(t, grant, w)
    assert grant.target.state is SlotState.IDLE
    with pytest.raises(IllegalStep):
        t.release(grant.target)
    assert (grant.target.state, grant.target.n_tokens, grant.target.line) == (SlotState.IDLE, 100, "a")


async def test_a_slot_at_work_cannot_be_given_back() -> None:
    """A refused release changes nothing: the runner keeps its claim."""
    t = table()
    grant = await t.acquire(want(), LONG)
    grant.target.apply(SlotEvent.SEND)
    with pytest.raises(IllegalStep):
        t.release(grant.target)
    assert (grant.target.state, grant.target.claims) == (SlotState.BUSY, 110)


async def test_an_empty_slot_remembers_nothing() -> None:
    t = table()
    grant = await t.acquire(want(), LONG)
    grant.target.line, grant.target.tenant = "a", "local"
    t.release(grant.target)
    assert grant.target.state is SlotState.EMPTY
    assert (grant.target.line, grant.target.tenant, t.used()) == (None, None, 0)


# --- waiting ---


async def test_who_waits_is_served_when_a_slot_comes_back() -> None:
    t = table(1)
    first = want("a")
    grant = await t.acquire(first, LONG)
    waiting = asyncio.create_task(t.acquire(want("b"), LONG))
    await turn()
    assert (t.n_waiting, t.waits, waiting.done()) == (1, 1, False)
    answered(t, grant, first)
    assert (await waiting).target is grant.target
    assert t.n_waiting == 0


async def test_two_runners_whose_reserves_exceed_the_pool_run_one_after_the_other() -> None:
    t = table(2, capacity=1000)
    first = want("a", 400, 200)
    grant = await t.acquire(first, LONG)
    second = asyncio.create_task(t.acquire(want("b", 401, 0), LONG))
    third = asyncio.create_task(t.acquire(want("c", 399, 1), LONG))
    await turn()
    assert (second.done(), third.done()) == (False, True)
    answered(t, grant, first, 10)
    answered(t, third.result(), want("c", 399, 1))
    placed = await second
    assert [v.id for v in placed.victims] == []
    assert t.slots[placed.place.slot].claims <= 1000


async def test_an_estimate_is_counted_where_it_may_overflow_the_pool() -> None:
    """Alone it goes on unrendered; beside another only if it fits even at a token a byte. It keeps its place."""
    t = table(2, capacity=1000)
    first = want("a", 100)
    slot = await put(t, 0, first)
    hot = {"match": Match.EXTENDS, "is_hot": True, "line": first.line, "tokens": None}
    for n_most, fits in ((900, True), (600, False), (400, True)):
        if n_most == 600:
            await t.acquire(want("b", 400, reserve=50), LONG)
        estimated = want("a", 200, reserve=50, n_most=n_most, **hot)
        if not fits:
            with pytest.raises(NeedsTokens) as needs:
                await t.acquire(estimated, LONG)
            assert (needs.value.place_in_line > 0, slot.state) == (True, SlotState.IDLE)
            continue
        grant = await t.acquire(estimated, LONG)
        assert (grant.target, grant.place.action) == (slot, Action.CONTINUE)
        t.release(grant.target)


async def test_a_prompt_longer_than_estimated_is_told_once() -> None:
    """By the engine's own count; the pool is looked after then."""
    told: list[int] = []
    runner = Runner(1, 100, 10, lambda: None, watch=lambda: told.append(1))
    for n_prompt in (90, 100, 150, 150):
        runner.told(n_prompt)
    assert (runner.need, told) == (160, [1])


async def test_a_full_waiting_line_refuses() -> None:
    t = table(1, max_waiting=2)
    await t.acquire(want("a"), LONG)
    waiting = [asyncio.create_task(t.acquire(want(name), LONG)) for name in "bc"]
    await turn()
    with pytest.raises(Busy, match="waiting line is full .2.;"):
        await t.acquire(want("d"), LONG)
    assert t.n_waiting == 2
    for task in waiting:
        task.cancel()
    await turn()
    assert t.n_waiting == 0


async def test_waited_too_long() -> None:
    t = table(1)
    await t.acquire(want("a"), LONG)
    with pytest.raises(WaitedTooLong, match="No slot became free in 0 s"):
        await t.acquire(want("b"), 0.0)
    assert t.n_waiting == 0


async def test_a_grant_in_the_moment_of_the_time_out_is_given_back() -> None:
    t = table(1)
    first = want("a")
    grant = await t.acquire(first, LONG)
    late = asyncio.create_task(t.acquire(want("b"), 0.0))
    await asyncio.sleep(0)  # `late` waits; its time-out is due in the loop's next turn
    asyncio.get_running_loop().call_soon(answered, t, grant, first)
    with pytest.raises(WaitedTooLong):
        await late
    assert grant.target.is_idle
    assert t.runners() == []


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_client_that_leaves_in_the_moment_of_the_grant(cancel_first: bool) -> None:
    """Whichever comes first within one turn of the loop, the slot is free afterwards (design.md, rule 4)."""
    t = table(1)
    first = want("a")
    grant = await t.acquire(first, LONG)
    leaves = asyncio.create_task(t.acquire(want("b"), LONG))
    stays = asyncio.create_task(t.acquire(want("c"), LONG))
    await turn()
    if cancel_first:
        leaves.cancel()
        answered(t, grant, first)
    else:
        answered(t, grant, first)
        leaves.cancel()
    await turn()
    assert leaves.cancelled()
    assert (await stays).target is grant.target
    assert t.runners() == [grant.target]
    assert t.n_waiting == 0


async def test_a_placement_that_fails_leaves_nobody_in_the_line() -> None:
    def broken() -> tuple[SnapshotFacts, ...]:
        raise RuntimeError("no index")

    t = table(1)
    with pytest.raises(RuntimeError, match="no index"):
        await t.acquire(want(snapshots=broken), LONG)
    assert t.n_waiting == 0
    assert (await t.acquire(want("b"), LONG)).target.id == 0


async def test_who_waits_is_told_when_the_engine_is_gone() -> None:
    t = table(1)
    grant = await t.acquire(want("a"), LONG)
    waiting = asyncio.create_task(t.acquire(want("b"), LONG))
    await turn()
    t.lose_all()
    t.refuse_waiting(EngineStarting("The engine stopped."))
    assert t.n_waiting == 0
    with pytest.raises(EngineStarting):
        await waiting
    assert t.n_waiting == 0
    t.release(grant.target)
    assert grant.target.state is SlotState.EMPTY


async def test_a_dead_engine_leaves_leases_with_their_holders() -> None:
    """Whatever they were doing: what ran is over, what is in doubt stays so until it is given back."""
    t = table(3)
    leased, busy, left = [await t.acquire(want(name), LONG) for name in "abc"]
    busy.target.apply(SlotEvent.SEND)
    left.target.apply(SlotEvent.CANCELLED)
    t.lose_all()
    states = [g.target.state for g in (leased, busy, left)]
    assert states == [SlotState.LEASED, SlotState.LEASED, SlotState.UNKNOWN]
    for grant in (leased, busy, left):
        t.release(grant.target)
    assert {s.state for s in t.slots} == {SlotState.EMPTY}


# --- order ---


async def test_tenants_take_turns() -> None:
    t = table(1)
    held = want("a0", tenant="a")
    grant = await t.acquire(held, LONG)
    wants = [want("a1", tenant="a"), want("a2", tenant="a"), want("b1", tenant="b"), want("b2", tenant="b")]
    tasks = {asyncio.create_task(t.acquire(w, LONG)): w for w in wants}
    await turn()
    served = []
    for _ in wants:
        answered(t, grant, held)
        await turn()
        (done,) = [task for task in tasks if task.done()]
        held, grant = tasks.pop(done), done.result()
        served.append(held.line.id)
    assert served == ["b1", "a1", "b2", "a2"]


async def test_small_requests_pass_a_large_one_a_few_times_only() -> None:
    """Also when many fit at the same moment: no more than MAX_BYPASSED go before it; then all wait for it."""
    t = table(16, capacity=1000)
    holder, keeper = want("h", 800, 0), want("k", 100, 100)
    first, second = await t.acquire(holder, LONG), await t.acquire(keeper, LONG)
    large = asyncio.create_task(t.acquire(want("large", 950, 0), LONG))
    await turn()
    small = [asyncio.create_task(t.acquire(want(f"s{i}", 20, 0), LONG)) for i in range(12)]
    await turn()
    assert not any(task.done() for task in [large, *small])
    first.target.n_tokens = 0
    t.release(first.target)
    await turn()
    assert [task.done() for task in small] == [True] * MAX_BYPASSED + [False] * (12 - MAX_BYPASSED)
    for task in small[:MAX_BYPASSED]:
        t.release(task.result().target)
    await turn()
    assert not any(task.done() for task in [large, *small[MAX_BYPASSED:]])
    t.release(second.target)
    assert (await large).target.runner is not None
    for task in small[MAX_BYPASSED:]:
        task.cancel()


async def test_the_memory_of_turns_is_bounded() -> None:
    t = table(1)
    for i in range(MOST_TENANTS + 3):
        grant = await t.acquire(want(tenant=f"t{i}", n=1), LONG)
        t.release(grant.target)
    assert len(t._served) == MOST_TENANTS
    assert "t2" not in t._served
    assert "t3" in t._served
