"""What the slot table tells placement, and what it does with the answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from policies.slot_state import IllegalStep, SlotEvent, SlotState
from policies.types import Abilities, Action, Match
from proxy.slots import NeedsTokens, Want
from tests.fakes.wants import LONG, answered, line_of, put, table, turn, want


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


@pytest.mark.parametrize("abilities", [Abilities(), Abilities(save=False, restore=False)])
async def test_a_slot_of_which_nobody_owns_the_content_is_given_up_first(abilities: Abilities) -> None:
    """Another client of the engine used it, last of all: nobody loses anything."""
    t = table(3, abilities=abilities)
    for number, name in enumerate("abc"):
        slot = await put(t, number, want(name))
        slot.last_used = float(number)
    assert t.correct(t.slots[2], 400) == ["c"]
    grant = await t.acquire(want("c"), LONG)
    assert (grant.target.id, grant.place.action) == (2, Action.COLD)


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


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_copy_holds_its_source(leaves: bool) -> None:
    """It is leased with the target, and comes back when the client has left in the moment of the grant."""
    t = table(3, capacity=10_000, abilities=Abilities())
    source = await put(t, 0, want("a", 400))
    runner = await t.acquire(want("r", 9000), LONG)
    task = asyncio.create_task(t.acquire(want("a", 500, 3000, line=line_of("b")), LONG))
    await turn()
    t.release(runner.target)
    assert source.state is SlotState.LEASED
    if leaves:
        task.cancel()
        await turn()
        assert [s.state for s in t.slots] == [SlotState.IDLE, SlotState.EMPTY, SlotState.EMPTY]
    else:
        grant = await task
        assert (grant.place.action, grant.source) == (Action.FORK, source)


@pytest.mark.parametrize("leaves", [False, True])
async def test_making_room_holds_those_who_go(leaves: bool) -> None:
    t = table(3, capacity=1500)
    victim = await put(t, 1, want("v", 500))
    runner = await t.acquire(want("r", 900), LONG)
    task = asyncio.create_task(t.acquire(want("b", 1200), LONG))
    await turn()
    t.release(runner.target)
    assert victim.state is SlotState.LEASED
    if leaves:
        task.cancel()
        await turn()
        assert [s.state for s in t.slots] == [SlotState.EMPTY, SlotState.IDLE, SlotState.EMPTY]
    else:
        assert (await task).victims == [victim]


async def test_a_line_in_its_slot_has_its_reply_too() -> None:
    """Its tokens are known to the prompt's end; the 7 of the reply behind it count for who continues."""
    t = table(2)
    slot = await put(t, 0, want("a"), n_more=7)
    longer = want("a", 130, match=Match.EXTENDS)
    facts = t.question(longer).slots[0]
    assert (facts.common, facts.mine, facts.family, t.question(longer).extends) == (107, True, True, True)
    stranger = replace(longer, line=line_of("b"), match=Match.NEW)
    facts = t.question(stranger).slots[0]
    assert (facts.common, facts.mine, facts.family, t.question(stranger).extends) == (100, False, False, False)
    edited = replace(stranger, match=Match.EDITED, stem="a")
    slot.n_prompt = 90
    facts = t.question(edited).slots[0]
    assert (facts.family, facts.mine, facts.prompt) == (True, False, 90)


async def test_a_fresh_prompt_and_a_slot_in_doubt_are_said_to_be_so() -> None:
    t = table(2)
    grant = await t.acquire(want("a"), LONG)
    grant.target.apply(SlotEvent.CANCELLED)
    q = t.question(want("b", fresh=True))
    assert (q.fresh, q.slots[0].settling, q.slots[0].idle, q.slots[1].settling) == (True, True, False, False)


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
    runner = grant.target.runner
    assert runner is not None
    for n in range(1, 9):
        runner.n_decoded = n
        runner.grew()
    assert len(seen) == 2
    assert grant.target.claims == 108
