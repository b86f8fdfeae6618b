"""Which slot, and from where: the issue's cases, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.checkpoints import Memory
from policies.placement import GUEST_AT_MOST, MOST_SNAPSHOTS, WAIT_WORTH, most_useful, place
from policies.types import Abilities, Action, Eviction, Place, Question, SlotFacts, SnapshotFacts, Wait

NO_FILES = Abilities(save=False, restore=False)
HYBRID = Abilities(rewind=False)
EMPTY = tuple(SlotFacts(i, 0) for i in (1, 2, 3))
A = SlotFacts(0, tokens=800, common=500, last_used=1.0)
"""Conversation A; the prompt to be placed shares 500 of its 800 tokens."""


def go(q: Question) -> Place:
    """A placement that has to be possible."""
    decision = place(q)
    assert isinstance(decision, Place), decision
    return decision


# --- llama-server.md: "A (800 tokens), then B sharing 500 of them: B takes A's slot ... although three were empty" ---


def test_only_a_prompt_that_continues_is_at_hand() -> None:
    """Whatever has to ask the engine for something first is not."""
    p = Place(Action.CONTINUE, 0, 500, "it continues its line")
    assert p.is_at_hand and replace(p, action=Action.COLD).is_at_hand
    more: list[dict[str, object]] = [{"save_first": True}, {"erase_first": True}, {"evictions": (Eviction(1, False),)}]
    more += [{"action": Action.FORK, "source": 1}, {"action": Action.RESTORE, "snapshot": "s"}]
    assert not any(replace(p, **values).is_at_hand for values in more)  # type: ignore[arg-type]


def test_b_leaves_a_alone_and_copies_what_they_share() -> None:
    p = go(Question(n_prompt=900, reserve=100, slots=(A, *EMPTY)))
    assert (p.action, p.slot, p.source, p.predicted_cache_n) == (Action.FORK, 1, 0, 500)
    assert p.evictions == ()


def test_b_leaves_a_alone_also_without_files() -> None:
    p = go(Question(n_prompt=900, reserve=100, slots=(A, *EMPTY), abilities=NO_FILES))
    assert (p.action, p.slot, p.predicted_cache_n) == (Action.COLD, 1, 0)


def test_b_loads_a_snapshot_of_what_they_share() -> None:
    """A base snapshot is cheaper to load than A is to copy."""
    q = Question(900, 100, (A, *EMPTY), snapshots=(SnapshotFacts("base", 500, 500), SnapshotFacts("far", 900, 90)))
    p = go(q)
    assert (p.action, p.slot, p.snapshot, p.predicted_cache_n) == (Action.RESTORE, 1, "base", 500)


@pytest.mark.parametrize("memory", [Memory(recurrent=True), Memory(window=128)])
def test_a_base_is_weighed_however_many_conversations_go_on_from_it(memory: Memory) -> None:
    """Their files share more with the prompt, and nothing of them can be used where memory cannot be rewound."""
    a = Abilities(rewind=False, rewind_files=False, memory=memory, file_checkpoints=True)
    others = [SnapshotFacts(f"c{i}", 2000 + i, 1480, (1996 + i,)) for i in range(MOST_SNAPSHOTS)]
    base = SnapshotFacts("base", 1470, 1470, (1466,))
    found = most_useful(a, 1680, [*others, base])
    assert len(found) == MOST_SNAPSHOTS and found[0] == base
    p = go(Question(1680, 100, EMPTY, snapshots=found, abilities=a))
    assert (p.action, p.snapshot) == (Action.RESTORE, "base")


def test_of_files_that_serve_alike_the_shorter_are_weighed() -> None:
    """They cost less to load, also where they share a little less."""
    long = [SnapshotFacts(f"c{i}", 30_000, 1480) for i in range(MOST_SNAPSHOTS)]
    assert most_useful(Abilities(), 1680, [*long, SnapshotFacts("base", 1470, 1470)])[0].id == "base"


def test_room_is_made_of_what_nobody_comes_back_for() -> None:
    """It is the newest, and its cells are as good as those of a conversation."""
    theirs = replace(A, foreign=True, ownerless=True, common=0, saved=800, last_used=9.0)
    table = (replace(A, id=1, common=0), theirs, SlotFacts(2, 0))
    p = go(Question(900, 100, table, capacity=1900, abilities=NO_FILES))
    assert (p.slot, p.evictions) == (2, (Eviction(0, False),))


def test_a_copy_that_costs_more_than_the_prefill_is_not_made() -> None:
    dear = Abilities(save_cost=0.6, restore_cost=0.1)
    assert go(Question(900, 100, (A, *EMPTY), abilities=dear)).action is Action.COLD


def test_b_takes_the_slot_when_it_is_the_only_one_and_saves_a_first() -> None:
    p = go(Question(900, 100, (A,)))
    assert (p.action, p.slot, p.predicted_cache_n, p.save_first) == (Action.GUEST, 0, 500, True)


def test_the_slot_whose_loss_costs_least_is_given_up() -> None:
    """Without files: the short one; of two alike the one used longest ago; a saved one before an unsaved one."""
    long, short = SlotFacts(0, 3000, last_used=1.0), SlotFacts(1, 200, last_used=2.0)
    assert go(Question(900, 100, (long, short), abilities=NO_FILES)).slot == 1
    old, new = SlotFacts(0, 900, last_used=2.0), SlotFacts(1, 900, last_used=1.0)
    assert go(Question(900, 100, (old, new), abilities=NO_FILES)).slot == 1
    unsaved, saved = SlotFacts(0, 900, last_used=1.0), SlotFacts(1, 900, saved=900, last_used=2.0)
    assert go(Question(900, 100, (unsaved, saved))).slot == 1


def test_without_an_empty_slot_only_the_price_counts() -> None:
    """An abandoned branch of 9,000 tokens is worth more than a stranger's 100."""
    branch, stranger = SlotFacts(0, 9000, family=True, last_used=1.0), SlotFacts(1, 100, last_used=2.0)
    assert go(Question(900, 100, (branch, stranger), abilities=NO_FILES)).slot == 1


# --- the own line ---

OWN = SlotFacts(2, tokens=5000, common=5000, mine=True, family=True)


def test_a_line_goes_on_where_it_is() -> None:
    q = Question(5100, 100, (A, SlotFacts(1, 0), OWN), snapshots=(SnapshotFacts("s", 5100, 5100),), extends=True)
    p = go(q)
    assert (p.action, p.slot, p.predicted_cache_n, p.save_first, p.evictions) == (Action.CONTINUE, 2, 5000, False, ())


def test_an_edited_conversation_branches_in_its_own_slot() -> None:
    """The old branch is saved first when that is worth it; it is cut off at the edit."""
    old = replace(OWN, mine=False, common=3000)
    p = go(Question(3100, 100, (A, SlotFacts(1, 0), old)))
    assert (p.action, p.slot, p.predicted_cache_n, p.save_first) == (Action.CONTINUE, 2, 3000, True)
    assert not go(Question(3100, 100, (A, SlotFacts(1, 0), replace(old, saved=5000)))).save_first


def test_an_edited_conversation_on_hybrid_memory_starts_again_elsewhere() -> None:
    old = replace(OWN, mine=False, common=3000)
    p = go(Question(3100, 100, (A, SlotFacts(1, 0), old), abilities=HYBRID))
    assert (p.action, p.slot, p.predicted_cache_n) == (Action.COLD, 1, 0)


def test_a_line_whose_slot_is_busy_waits_when_much_is_at_stake() -> None:
    busy = replace(OWN, idle=False)
    assert place(Question(5100, 100, (SlotFacts(1, 0), busy), extends=True)) == Wait(
        "the slot of its line is busy", by_choice=True
    )
    just = replace(busy, tokens=WAIT_WORTH, common=WAIT_WORTH)
    assert isinstance(place(Question(5100, 100, (SlotFacts(1, 0), just), extends=True)), Wait)
    little = replace(busy, tokens=WAIT_WORTH - 1, common=WAIT_WORTH - 1)
    assert go(Question(5100, 100, (SlotFacts(1, 0), little), extends=True)).action is Action.COLD
    snapshot = SnapshotFacts("s", 4900, 4900)
    assert go(Question(5100, 100, (SlotFacts(1, 0), busy), (snapshot,), extends=True)).action is Action.RESTORE


def test_a_repeated_request_waits_for_the_slot_that_its_forerunner_left() -> None:
    settling = SlotFacts(2, 50, common=50, idle=False, mine=True, family=True, settling=True)
    q = Question(60, 100, (SlotFacts(1, 0), settling), extends=True)
    assert isinstance(place(q), Wait)
    assert go(replace(q, fresh=True)).slot == 1


# --- guests ---

SIDE = SlotFacts(0, tokens=800, common=800, prompt=700)
"""A's slot as a title request sees it, which extends all of it by a sentence."""


def test_a_short_side_line_is_a_guest_behind_the_owners_end() -> None:
    p = go(Question(n_prompt=850, reserve=50, slots=(SIDE, *EMPTY)))
    assert (p.action, p.slot, p.predicted_cache_n, p.save_first) == (Action.GUEST, 0, 800, False)


def test_a_guest_may_begin_behind_the_owners_prompt() -> None:
    """The reply of the owner's last turn comes back re-tokenised anyway; what the owner sent stays."""
    reply_cut = replace(SIDE, common=700)
    assert go(Question(850, 50, (reply_cut, *EMPTY), abilities=NO_FILES)).action is Action.GUEST
    assert go(Question(850, 50, (replace(SIDE, common=699), *EMPTY), abilities=NO_FILES)).action is Action.COLD


@pytest.mark.parametrize(("extra", "action"), [(0, Action.GUEST), (1, Action.FORK)])
def test_a_guest_is_short(extra: int, action: Action) -> None:
    """A longer one is a conversation of its own and gets a copy."""
    assert go(Question(850, GUEST_AT_MOST - 50 + extra, (SIDE, *EMPTY))).action is action


def test_nobody_is_a_guest_where_memory_cannot_be_rewound() -> None:
    p = go(Question(850, 50, (SIDE, *EMPTY), abilities=HYBRID))
    assert (p.action, p.slot, p.predicted_cache_n) == (Action.FORK, 1, 800)


def test_who_extends_the_only_slot_of_hybrid_memory_takes_it_over() -> None:
    """Its end cannot be had back, so it is saved first and the slot is no longer its owner's."""
    p = go(Question(850, 50, (SIDE,), abilities=HYBRID))
    assert (p.action, p.slot, p.predicted_cache_n, p.save_first) == (Action.CONTINUE, 0, 800, True)


def test_a_window_that_came_from_a_file_is_not_cut_back() -> None:
    """--swa-full: a slot's own tokens can be cut off at will, those that a file brought only as a whole."""
    window = Abilities(rewind_files=False)
    q = Question(850, 50, (replace(SIDE, common=700, rigid=700), *EMPTY), abilities=window)
    assert go(q).action is Action.GUEST
    q = replace(q, slots=(replace(SIDE, common=700, rigid=701), *EMPTY))
    assert (go(q).action, go(q).slot) == (Action.COLD, 1)
    assert go(replace(q, snapshots=(SnapshotFacts("s", 800, 700),))).action is Action.COLD
    assert go(replace(q, snapshots=(SnapshotFacts("s", 700, 700),))).action is Action.RESTORE


# --- tenants ---


def test_another_tenants_slot_is_saved_and_erased_before_it_is_used() -> None:
    foreign = SlotFacts(0, 800, foreign=True)
    p = go(Question(900, 100, (foreign,)))
    assert (p.action, p.predicted_cache_n, p.save_first, p.erase_first) == (Action.COLD, 0, True, True)
    assert go(Question(900, 100, (foreign, *EMPTY))).slot == 1


def test_what_another_tenants_slot_shares_does_not_count() -> None:
    """Not in place, not as a copy, not as a place for a guest, however much it is and however little it holds."""
    foreign = SlotFacts(0, 800, common=800, foreign=True)
    p = go(Question(850, 50, (foreign,)))
    assert (p.action, p.predicted_cache_n, p.erase_first) == (Action.COLD, 0, True)
    p = go(Question(850, 50, (foreign, *EMPTY)))
    assert (p.action, p.slot, p.source) == (Action.COLD, 1, None)
    assert go(Question(850, 50, (SlotFacts(0, 10, common=10, foreign=True), *EMPTY))).slot == 1


# --- the pool ---


def test_two_runners_whose_reserves_exceed_the_pool_wait() -> None:
    """Prompt and reserve of 5,096 beside 3,097 that are promised already: one cell too many for 8,192."""
    busy = SlotFacts(0, 2000, idle=False)
    q = Question(1000, 4096, (busy, *EMPTY), reserved=3097, capacity=8192)
    assert place(q) == Wait("the pool has no room beside the running requests")
    p = go(replace(q, reserved=3096))
    assert (p.action, p.slot, p.evictions) == (Action.COLD, 1, ())


def test_idle_slots_make_room_the_least_valuable_first() -> None:
    """The engine itself would purge the lowest id, unsaved."""
    keep, go_first = SlotFacts(0, 3000, last_used=2.0), SlotFacts(1, 3000, saved=3000, last_used=1.0)
    p = go(Question(1000, 1000, (keep, go_first, SlotFacts(2, 0)), capacity=6000))
    assert (p.slot, p.evictions) == (2, (Eviction(1, save=False),))


def test_a_large_victim_spares_the_small_ones() -> None:
    """100 saved tokens are cheap to lose, but when the large slot has to go anyway they may stay."""
    small, large = SlotFacts(0, 100, saved=100, last_used=1.0), SlotFacts(1, 5000, last_used=2.0)
    p = go(Question(3000, 1000, (small, large, SlotFacts(2, 0)), capacity=6000))
    assert (p.slot, p.evictions) == (2, (Eviction(1, save=True),))


def test_a_prompt_larger_than_the_pool_runs_alone() -> None:
    """The engine refuses it with its own figures."""
    q = Question(9000, 100, (A, *EMPTY), capacity=8192)
    assert go(q).evictions or go(q).slot == 0
    assert isinstance(place(replace(q, reserved=1, slots=(replace(A, idle=False), *EMPTY))), Wait)


def test_a_snapshot_longer_than_the_prompt_needs_room_for_all_of_it() -> None:
    """6,000 tokens are loaded before they are cut to 1,000; A would have to go for that, so it is not done."""
    snapshot, neighbour = SnapshotFacts("s", 6000, 1000), SlotFacts(0, 3000, saved=2900)
    q = Question(1100, 100, (neighbour, SlotFacts(1, 0)), (snapshot,), capacity=10_000)
    assert go(q).action is Action.RESTORE
    assert go(replace(q, capacity=8999)).action is Action.COLD


def test_the_source_of_a_copy_is_not_evicted_for_it() -> None:
    """Three times 3,000 do not fit: who lies beside goes, the source stays until it was copied."""
    source, beside = SlotFacts(0, 3000, common=3000, prompt=3000), SlotFacts(1, 3000, saved=3000)
    q = Question(3100, 3000, (source, beside, SlotFacts(2, 0)), capacity=9200)
    p = go(q)
    assert (p.action, p.source, p.slot, p.evictions) == (Action.FORK, 0, 2, (Eviction(1, save=False),))


def test_a_loaded_file_replaces_what_the_slot_held() -> None:
    """Another line's 900 saved tokens are erased first, or they would be taken for the prompt's."""
    p = go(Question(900, 10, (SlotFacts(0, 900, saved=900),), (SnapshotFacts("s", 800, 800),)))
    assert (p.action, p.slot, p.erase_first, p.save_first) == (Action.RESTORE, 0, True, False)


def test_no_copy_without_saving() -> None:
    assert go(Question(900, 100, (A, *EMPTY), abilities=Abilities(save=False))).action is Action.COLD


def test_what_has_to_go_for_a_file_is_part_of_its_price() -> None:
    """Loading spares 400 tokens, but a neighbour would have to be saved (300) and loaded again (120) for it."""
    q = Question(500, 100, (SlotFacts(0, 6000, last_used=1.0), SlotFacts(1, 0)), (SnapshotFacts("s", 3000, 400),))
    assert go(replace(q, capacity=9000)).action is Action.RESTORE
    assert go(replace(q, capacity=8999)).action is Action.COLD


def test_of_two_alike_the_lower_slot_goes_first() -> None:
    """In whatever order they are told."""
    two = (SlotFacts(1, 500, last_used=1.0), SlotFacts(2, 500, last_used=1.0))
    for told in (two, two[::-1]):
        q = Question(900, 0, (SlotFacts(0, 0), *told), capacity=1500, abilities=NO_FILES)
        assert go(q).evictions == (Eviction(1, save=False),)


def test_all_slots_busy() -> None:
    assert place(Question(10, 10, (SlotFacts(0, 5, idle=False),))) == Wait("every slot is busy")


def test_a_prompt_that_ends_with_a_file() -> None:
    """The engine has to go back by one token: where it cannot, a shorter file that it extends serves."""
    whole, base = SnapshotFacts("whole", 800, 800), SnapshotFacts("base", 300, 300)
    q = Question(800, 100, EMPTY, snapshots=(whole, base), abilities=Abilities(rewind=False, rewind_files=False))
    assert go(q).snapshot == "whole"
    cannot = replace(q, abilities=replace(q.abilities, step_back_files=False))
    assert (go(cannot).snapshot, go(cannot).predicted_cache_n) == ("base", 300)
    assert go(replace(cannot, n_prompt=801)).snapshot == "whole"


# --- where the engine goes back to checkpoints ---

CHECKPOINTED = Abilities(rewind=False, rewind_files=False, memory=Memory(recurrent=True))


def test_an_edited_conversation_goes_back_to_its_checkpoint() -> None:
    """Its own slot gives what lies before the last checkpoint ahead of the edit."""
    old = SlotFacts(2, 5000, common=3000, family=True, checkpoints=(1500, 2900, 4996))
    q = Question(3100, 100, (SlotFacts(1, 0), old), abilities=CHECKPOINTED)
    p = go(q)
    assert (p.action, p.slot, p.predicted_cache_n, p.save_first) == (Action.CONTINUE, 2, 2900, True)
    assert go(replace(q, slots=(SlotFacts(1, 0), replace(old, checkpoints=(3001,))))).action is Action.COLD


def test_a_line_that_departs_behind_its_last_checkpoint_loads_the_best_snapshot() -> None:
    old = SlotFacts(2, 5000, common=3000, family=True, checkpoints=(1500, 4996))
    snapshots = (
        SnapshotFacts("near", 2800, 2800),
        SnapshotFacts("far", 1000, 1000),
        SnapshotFacts("other", 4000, 3000),
    )
    q = Question(3100, 100, (SlotFacts(1, 0), old), snapshots=snapshots, abilities=CHECKPOINTED)
    assert (go(q).snapshot, go(q).predicted_cache_n) == ("near", 2800)
    with_some = replace(snapshots[2], checkpoints=(2990, 3500))
    q = replace(q, snapshots=(*snapshots[:2], with_some))
    assert go(q).snapshot == "near", "its files hold no checkpoints"
    newer = replace(q, abilities=replace(q.abilities, file_checkpoints=True))
    assert (go(newer).snapshot, go(newer).predicted_cache_n) == ("other", 2990)


def test_a_window_kept_whole_is_copied_up_to_where_a_prompt_departs() -> None:
    """--swa-full: the slot is cut back, its file could not be."""
    window = Abilities(rewind_files=False)
    q = Question(8000, 100, (SlotFacts(0, 10_000, common=6600), SlotFacts(1, 0)), abilities=window)
    p = go(q)
    assert (p.action, p.slot, p.source, p.cut, p.predicted_cache_n) == (Action.FORK, 1, 0, 6600, 6600)
    whole = go(replace(q, slots=(SlotFacts(0, 6600, common=6600, prompt=6700), SlotFacts(1, 0))))
    assert whole.cut == 0, "it is copied as it is"
    dear = replace(q, abilities=replace(window, save_cost=0.6))
    assert go(dear).action is Action.COLD, "two files cost more than the prefill"


def test_a_line_that_departs_from_its_file_does_not_go_on_there() -> None:
    """--swa-full: the engine would, without what its local layers need there."""
    own = SlotFacts(0, 5000, common=4900, mine=True, family=True, rigid=5000)
    q = Question(5100, 100, (own, SlotFacts(1, 0)), extends=True, abilities=Abilities(rewind_files=False))
    assert go(q).predicted_cache_n == 0
    assert go(replace(q, slots=(replace(own, rigid=4900), SlotFacts(1, 0)))).predicted_cache_n == 4900
