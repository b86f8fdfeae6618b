"""Leases and the waiting line, case by case. `test_slots_machine` tries random series of the same steps."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from policies.queue import MAX_BYPASSED
from policies.slot_state import IllegalStep, SlotEvent, SlotState
from policies.types import Abilities, Action, Match, Prompt, SnapshotFacts, digest
from proxy.errors import Busy, EngineStarting, WaitedTooLong
from proxy.lines import Identity, Line
from proxy.slots import MOST_TENANTS, Grant, NeedsTokens, Slot, SlotTable, Want

LONG = 1000.0
"""Seconds that no test waits."""


def packed(*tokens: int) -> bytes:
    """Packed little-endian int32."""
    return b"".join(t.to_bytes(4, "little") for t in tokens)


def line_of(name: str, tenant: str = "local") -> Line:
    """A line of that id."""
    return Line(name, Identity(tenant), Prompt(b"", b"", b"", (), ()), b"")


def want(name: str = "a", n: int = 100, reserve: int = 10, tenant: str = "local", **fields: object) -> Want:
    """A new conversation that shares nothing with any other."""
    tokens = packed(*(int.from_bytes(digest(name.encode())[:2], "little") * 1000 + i for i in range(n)))
    made = Want(line_of(name, tenant), Match.NEW, n, reserve, lambda: None, tokens=tokens)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def table(n_slots: int = 2, capacity: int | None = None, **fields: object) -> SlotTable:
    """Of an engine without slot files, unless said otherwise."""
    made = SlotTable(n_slots, capacity, Abilities(save=False, restore=False), clock=lambda: 0.0)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def answered(t: SlotTable, grant: Grant, w: Want, n_more: int = 0) -> None:
    """The request was answered with `n_more` tokens: its slot holds it, and is given back."""
    slot = grant.target
    slot.line, slot.tenant, slot.tokens = w.line.id, w.tenant, w.tokens or slot.tokens
    slot.n_tokens = w.n_prompt + n_more
    t.release(slot)


async def turn(n: int = 5) -> None:
    """Lets every task run on as far as it can."""
    for _ in range(n):
        await asyncio.sleep(0)


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


async def test_a_grant_knows_whether_its_slot_is_still_its_own() -> None:
    """After the release the slot may be anybody's; its state then speaks of somebody else."""
    t = table(1)
    first = want("a")
    mine = await t.acquire(first, LONG)
    assert mine.is_held
    waiting = asyncio.create_task(t.acquire(want("b"), LONG))
    await turn()
    answered(t, mine, first)
    theirs = await waiting
    theirs.target.apply(SlotEvent.SEND)
    assert theirs.target is mine.target
    assert not mine.is_held
    assert theirs.is_held


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


async def test_a_full_waiting_line_refuses() -> None:
    t = table(1, max_waiting=2)
    await t.acquire(want("a"), LONG)
    waiting = [asyncio.create_task(t.acquire(want(name), LONG)) for name in "bc"]
    await turn()
    with pytest.raises(Busy, match="2 requests wait already"):
        await t.acquire(want("d"), LONG)
    assert t.n_waiting == 2
    for task in waiting:
        task.cancel()
    await turn()
    assert t.n_waiting == 0


async def test_waited_too_long() -> None:
    t = table(1)
    await t.acquire(want("a"), LONG)
    with pytest.raises(WaitedTooLong, match="No slot became free within 0 s"):
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
    with pytest.raises(EngineStarting):
        await waiting
    assert t.n_waiting == 0
    t.release(grant.target)
    assert grant.target.state is SlotState.EMPTY


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


# --- what placement is told ---


async def put(t: SlotTable, slot: int, w: Want, n_more: int = 0) -> Slot:
    """A line lies in that slot, idle."""
    for other in t.slots[:slot]:
        t.lease(other)
    grant = await t.acquire(w, LONG)
    assert grant.target.id == slot
    answered(t, grant, w, n_more)
    for other in t.slots[:slot]:
        t.release(other)
    return grant.target


async def test_tokens_are_compared_within_a_tenant_only() -> None:
    t = table(2)
    await put(t, 0, want("a"))
    same = replace(want("b"), tokens=want("a").tokens)
    assert (t.question(same).slots[0].common, t.question(same).slots[0].foreign) == (100, False)
    theirs = replace(same, line=line_of("b", "other"))
    assert (t.question(theirs).slots[0].common, t.question(theirs).slots[0].foreign) == (0, True)


async def test_content_that_we_did_not_put_there_is_nobodys() -> None:
    """The engine says that a slot holds something else: its line lost it, and it is erased before it is used."""
    t = table(1)
    slot = await put(t, 0, want("a"))
    assert t.correct(slot, 70) == ["a"]
    assert (slot.line, slot.tokens, slot.n_tokens, slot.state) == (None, b"", 70, SlotState.IDLE)
    grant = await t.acquire(want("a"), LONG)
    assert (grant.place.action, grant.place.erase_first) == (Action.COLD, True)


async def test_a_slot_that_is_in_use_is_not_corrected() -> None:
    t = table(1)
    grant = await t.acquire(want("a"), LONG)
    with pytest.raises(IllegalStep):
        t.correct(grant.target, 0)
    assert grant.target.state is SlotState.LEASED


async def test_an_unloaded_model_takes_idle_slots_only() -> None:
    t = table(3)
    await put(t, 0, want("a"))
    grant = await t.acquire(want("b"), LONG)
    grant.target.n_tokens = 5
    assert t.lose_idle() == ["a"]
    assert [s.n_tokens for s in t.slots] == [0, 5, 0]


async def test_a_snapshot_counts_only_while_it_exists() -> None:
    t = table(1)
    slot = await put(t, 0, want("a"))
    slot.saved, slot.snapshot = 60, "s"
    assert t.saved_of(slot) == 60
    t.is_kept = lambda _: False
    assert t.saved_of(slot) == 0
    slot.line = None
    assert t.saved_of(slot) == slot.n_tokens


async def test_an_unrendered_prompt_continues_or_asks_for_its_tokens() -> None:
    t = table(2)
    w = want("a")
    slot = await put(t, 0, w, n_more=7)
    hot = Want(w.line, Match.EXTENDS, 130, 10, w.stop, is_hot=True)
    grant = await t.acquire(hot, LONG)
    assert (grant.place.action, grant.target, grant.place.predicted_cache_n) == (Action.CONTINUE, slot, 107)
    answered(t, grant, hot)
    t.correct(slot, 0)
    with pytest.raises(NeedsTokens):
        await t.acquire(hot, LONG)
    assert (t.n_waiting, t.runners()) == (0, [])


async def test_a_line_is_held_by_the_slot_with_most_of_it() -> None:
    t = table(2)
    await put(t, 0, want("a"))
    more = await put(t, 1, want("a"), n_more=5)
    assert t.holding("a") is more
    assert t.holding("b") is None


async def test_a_runner_that_outgrows_its_reserve_is_watched() -> None:
    seen: list[int] = []
    t = table(1, watch=lambda: seen.append(1))
    grant = await t.acquire(want(reserve=2), LONG)
    runner = grant.runner
    for n in range(1, 5):
        runner.n_decoded = n
        runner.grew()
    assert len(seen) == 2
    assert grant.target.claims == 104
