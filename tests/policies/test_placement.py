"""Which slot, and from where: what must hold for every question."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from policies.checkpoints import REWINDS, reused
from policies.placement import (
    GUEST_AT_MOST,
    MOST_SNAPSHOTS,
    SAVE_AT_LEAST,
    SMALL_TAIL,
    WAIT_WORTH,
    _choices,
    is_worth_saving,
    most_useful,
    place,
)
from policies.types import Abilities, Action, Place, Question, SlotFacts, SnapshotFacts
from tests.policies.placement_cases import ABILITIES, IN_PLACE, SIZES, placed, questions, slot_of, used

# --- whose tokens ---


@given(questions())
def test_only_idle_slots_are_touched_each_for_one_thing(q: Question) -> None:
    p, _ = placed(q)
    touched = [p.slot, *([] if p.source is None else [p.source]), *(e.slot for e in p.evictions)]
    assert all(slot_of(q, number).idle for number in touched)
    assert len(touched) == len(set(touched))
    assert all(not slot_of(q, e.slot).is_empty for e in p.evictions)


@given(questions())
def test_no_token_of_another_tenant_is_reused(q: Question) -> None:
    """A foreign target is erased first, and what runs there comes from a file of ours or from nowhere."""
    p, target = placed(q)
    assert p.source is None or not slot_of(q, p.source).foreign
    if target.foreign:
        assert p.erase_first
        assert p.action not in IN_PLACE
        assert p.action is not Action.COLD or p.predicted_cache_n == 0


@given(questions())
def test_a_file_is_loaded_only_into_an_empty_slot(q: Question) -> None:
    q = replace(q, slots=tuple(s for s in q.slots if not s.is_empty) or q.slots)
    p, target = placed(q)
    if p.action in (Action.FORK, Action.RESTORE):
        assert p.erase_first == (not target.is_empty)
    if p.action in IN_PLACE:
        assert not p.erase_first


@given(questions())
def test_each_action_names_its_source(q: Question) -> None:
    p, target = placed(q)
    assert (p.source is not None) == (p.action is Action.FORK)
    assert (p.snapshot is not None) == (p.action is Action.RESTORE)
    assert p.action not in IN_PLACE or not target.is_empty or target.mine


# --- what is reused ---


@given(questions())
def test_something_is_always_processed(q: Question) -> None:
    """The engine evaluates at least the last prompt token, for its logits."""
    p, _ = placed(q)
    assert 0 <= p.predicted_cache_n < q.n_prompt


@given(questions())
def test_no_more_is_promised_than_the_source_shares(q: Question) -> None:
    p, target = placed(q)
    shared = 0
    if p.action in IN_PLACE:
        shared = target.common
    elif p.source is not None:
        shared = slot_of(q, p.source).common
    elif p.snapshot is not None:
        shared = next(s.common for s in q.snapshots if s.id == p.snapshot)
    most = min(shared, q.n_prompt - 1)
    assert p.predicted_cache_n == most or (not q.abilities.memory.rewinds and p.predicted_cache_n < most)


@given(questions())
def test_where_memory_cannot_be_rewound_only_whole_contents_are_reused(q: Question) -> None:
    """But for the line's own slot, of which the engine keeps checkpoints. And nobody can be a guest there."""
    q = replace(q, abilities=replace(q.abilities, rewind=False, memory=REWINDS))
    p, target = placed(q)
    assert p.action is not Action.GUEST
    if p.action is Action.CONTINUE:
        assert target.mine or target.common == target.tokens
    assert_files_are_whole(q, p)


def assert_files_are_whole(q: Question, p: Place) -> None:
    """Whatever is loaded from a file is a prefix of the prompt to its last token; a copy may be cut to be one."""
    if p.source is not None and not p.cut:
        assert slot_of(q, p.source).common == slot_of(q, p.source).tokens
    if p.snapshot is not None:
        assert all(s.common == s.tokens for s in q.snapshots if s.id == p.snapshot)


@given(questions())
def test_where_files_cannot_be_rewound_they_are_reused_whole(q: Question) -> None:
    """Nor is a slot cut back into what a file brought."""
    q = replace(q, abilities=replace(q.abilities, rewind_files=False, memory=REWINDS))
    p, target = placed(q)
    if p.cut:
        source = slot_of(q, p.source if p.source is not None else -1)
        assert q.abilities.rewind and source.rigid <= p.cut == p.predicted_cache_n <= source.common
    if p.action in IN_PLACE and not target.mine:
        assert target.common >= target.rigid
    assert_files_are_whole(q, p)


@given(questions())
def test_nothing_is_reused_for_a_fresh_prompt(q: Question) -> None:
    p, target = placed(replace(q, fresh=True))
    assert (p.action, p.predicted_cache_n, p.source, p.snapshot) == (Action.COLD, 0, None, None)
    assert p.erase_first == (not target.is_empty)


@given(questions())
def test_files_are_moved_only_by_engines_that_can(q: Question) -> None:
    p, _ = placed(q)
    a = q.abilities
    assert p.action is not Action.RESTORE or a.restore
    assert p.action is not Action.FORK or (a.restore and a.save)
    assert a.save or not (p.save_first or any(e.save for e in p.evictions))
    if p.action in (Action.FORK, Action.RESTORE):
        assert p.predicted_cache_n >= SAVE_AT_LEAST


# --- who loses what ---


@given(questions(own_idle=True))
def test_a_line_continues_in_its_idle_slot(q: Question) -> None:
    own = next(s for s in q.slots if s.mine)
    assume(own.common >= own.rigid or not q.abilities.rewind)
    decision = place(q)
    if isinstance(decision, Place):
        assert (decision.slot, decision.action) == (own.id, Action.CONTINUE)
        assert not decision.save_first
    else:
        assert q.capacity is not None
        assert q.reserved + max(q.n_prompt + q.reserve, own.tokens) > q.capacity


@given(questions(new=True))
@settings(max_examples=300)
def test_a_new_line_takes_no_tail_while_an_empty_slot_exists(q: Question) -> None:
    """The issue's promise. A guest begins behind the owner's prompt; what makes room for it is saved or was before."""
    p, target = placed(q)
    if not target.is_empty and not target.family:
        assert q.abilities.rewind
        assert target.common >= target.owner_end or target.tokens <= SMALL_TAIL
        assert not target.foreign
        assert q.n_prompt + q.reserve - target.common <= GUEST_AT_MOST
    for eviction in p.evictions:
        victim = slot_of(q, eviction.slot)
        assert eviction.save or victim.family or victim.at_stake < SAVE_AT_LEAST


@given(questions())
def test_what_is_worth_a_file_is_saved_before_it_is_lost(q: Question) -> None:
    p, target = placed(q)
    assert all(e.save == is_worth_saving(q, slot_of(q, e.slot)) for e in p.evictions)
    own_end = p.action is Action.CONTINUE and target.mine
    kept = 0
    if p.action in IN_PLACE and q.abilities.rewind:
        kept = target.common if target.common >= target.rigid else 0
    elif p.action in IN_PLACE and not q.abilities.memory.rewinds:
        kept = p.predicted_cache_n
    if not own_end and target.tokens - kept > SMALL_TAIL:
        assert p.save_first == is_worth_saving(q, target)


@given(st.builds(SlotFacts, id=st.just(0), tokens=SIZES, saved=SIZES), ABILITIES)
def test_a_save_has_to_cost_less_than_what_it_keeps(slot: SlotFacts, abilities: Abilities) -> None:
    worth = is_worth_saving(Question(1, 0, (slot,), abilities=abilities), slot)
    stake = max(0, slot.tokens - slot.saved)
    assert worth == (abilities.save and stake >= SAVE_AT_LEAST and abilities.save_cost * slot.tokens < stake)


@given(questions(), SIZES.map(lambda n: n + 1), st.integers(0, 3), st.booleans())
def test_what_nobody_comes_back_for_goes_first(q: Question, tokens: int, last_used: int, foreign: bool) -> None:
    """However new it is and however much: nothing that somebody owns is overwritten while it is there."""
    one = SlotFacts(
        len(q.slots), tokens, foreign=foreign, ownerless=True, saved=tokens, last_used=float(last_used), prompt=tokens
    )
    q = replace(q, slots=(*q.slots, one), capacity=None)
    q = replace(q, abilities=replace(q.abilities, restore_cost=q.abilities.restore_cost or 0.02))
    p, target = placed(q)
    assert p.action in IN_PLACE or target.ownerless or target.tokens <= SMALL_TAIL
    assert not (target.ownerless and p.save_first)


# --- the pool ---


@given(questions())
def test_everything_fits_the_pool(q: Question) -> None:
    """Both reserves fit, or the prompt runs alone (design.md, rule 8)."""
    p, _ = placed(q)
    assume(q.capacity is not None)
    assert q.capacity is not None
    assert used(q, p, {e.slot for e in p.evictions}) <= q.capacity


@given(questions())
@settings(max_examples=300)
def test_no_eviction_is_superfluous(q: Question) -> None:
    p, _ = placed(q)
    evicted = {e.slot for e in p.evictions}
    assert q.capacity is not None or not evicted
    for spared in evicted:
        assert q.capacity is not None
        assert used(q, p, evicted - {spared}) > q.capacity


@given(questions())
def test_a_prompt_waits_only_for_somebody_who_runs(q: Question) -> None:
    """For a slot, for its own line's slot, or for room that a runner holds; an idle engine takes any prompt."""
    decision = place(q)
    if isinstance(decision, Place):
        return
    event(decision.reason)
    busy_own = any(s.mine and not s.idle for s in q.slots) and not q.fresh
    idle = [s for s in q.slots if s.idle]
    no_room = q.capacity is not None and q.reserved > 0 and q.reserved + q.n_prompt + q.reserve > q.capacity
    own = next((s for s in q.slots if s.mine), None)
    no_room_for_own = own is not None and q.capacity is not None and q.reserved + own.tokens > q.capacity
    assert not idle or busy_own or no_room or no_room_for_own
    assert not all(s.idle for s in q.slots) or no_room or no_room_for_own


# --- cost ---


@given(questions(), st.integers(1, 9000), st.data())
def test_one_more_snapshot_never_makes_things_worse(q: Question, size: int, data: st.DataObject) -> None:
    shared = data.draw(st.integers(0, min(size, q.n_prompt)))
    more = replace(q, snapshots=(*q.snapshots, SnapshotFacts("more", size, shared)))
    idle = [s for s in q.slots if s.idle]
    before = min(((c.destroys, c.cost) for c in _choices(q, idle)), default=None)
    after = min(((c.destroys, c.cost) for c in _choices(more, idle)), default=None)
    assert (before is None) == (after is None)
    assert before is None or after is None or after <= before


@given(questions(), st.lists(SIZES.map(lambda n: n + 1), min_size=MOST_SNAPSHOTS, max_size=12), st.data())
def test_what_the_cut_leaves_out_serves_no_better(q: Question, sizes: list[int], data: st.DataObject) -> None:
    """A base, and files of conversations that go on behind what they share with the prompt."""
    assume(not q.fresh and q.n_prompt > SAVE_AT_LEAST)
    base = data.draw(st.integers(SAVE_AT_LEAST, q.n_prompt))
    shared = st.integers(base, q.n_prompt)
    many = [SnapshotFacts(f"m{i}", n + more, n) for i, more in enumerate(sizes) for n in [data.draw(shared)]]
    q = replace(q, snapshots=(*many, SnapshotFacts("base", base, base)), capacity=None)
    q = replace(q, abilities=replace(q.abilities, restore=True))
    fewer = replace(q, snapshots=most_useful(q.abilities, q.n_prompt, q.snapshots))
    assert len(fewer.snapshots) == MOST_SNAPSHOTS
    idle = [s for s in q.slots if s.idle]
    assume(idle)
    before, after = (min((c.destroys, c.cost) for c in _choices(some, idle)) for some in (q, fewer))
    assert after[0] == before[0] and after[1] < before[1] + SAVE_AT_LEAST


@given(questions())
def test_a_snapshot_of_the_whole_prompt_that_costs_nothing_is_used(q: Question) -> None:
    """Whatever else there is, no more than its last token is processed."""
    assume(not q.fresh and not q.extends and q.n_prompt > SAVE_AT_LEAST)
    free = replace(q.abilities, restore=True, restore_cost=0.0, memory=REWINDS)
    q = replace(q, abilities=free, snapshots=(SnapshotFacts("whole", q.n_prompt, q.n_prompt),))
    q = replace(q, slots=(*q.slots, SlotFacts(len(q.slots), 0)), capacity=None)
    p, _ = placed(q)
    assert p.predicted_cache_n == q.n_prompt - 1


@given(questions(), st.randoms(use_true_random=False))
def test_the_order_of_facts_does_not_matter(q: Question, random: st.DrawFn) -> None:
    """A decision depends on what is, not on the order in which it is told."""
    slots_, snapshots = list(q.slots), list(q.snapshots)
    random.shuffle(slots_)  # type: ignore[attr-defined]
    random.shuffle(snapshots)  # type: ignore[attr-defined]
    assert place(replace(q, slots=tuple(slots_), snapshots=tuple(snapshots))) == place(q)


@given(questions(own_idle=False))
def test_waiting_for_the_lines_own_slot_has_to_pay(q: Question) -> None:
    """While the own slot is busy the line runs elsewhere, unless that costs WAIT_WORTH tokens more."""
    own = next(s for s in q.slots if s.mine)
    decision = place(q)
    reusable = min(own.common, q.n_prompt - 1) if own.common == own.tokens else 0
    if q.abilities.rewind:
        reusable = min(own.common, q.n_prompt - 1) if own.common >= own.rigid else 0
    elif not q.abilities.memory.rewinds:
        from_file = own.tokens == own.rigid
        kept = own.checkpoints
        reusable = reused(q.abilities.memory, own.tokens, own.common, q.n_prompt, kept, from_file=from_file)
    if isinstance(decision, Place):
        assert not own.settling
        assert reusable - decision.predicted_cache_n < WAIT_WORTH
    elif decision.reason == "the slot of its line is busy":
        assert own.settling or reusable >= WAIT_WORTH
