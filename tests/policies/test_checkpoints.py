"""llama-server's rule: the table of facts, and what must hold for every sequence. The engines are asked in
tests/live/test_tables.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.checkpoints import REWINDS, Checkpoints, Memory, after_prompt, reused

HYBRID, WINDOW = Memory(recurrent=True), Memory(window=128)
MEMORIES = st.sampled_from([REWINDS, HYBRID, WINDOW, Memory(window=16, recurrent=True, most=3, min_step=100)])
LENGTHS = st.integers(1, 4000)


def test_a_prompt_that_extends_a_slot_finds_all_of_it() -> None:
    for memory in (REWINDS, HYBRID, WINDOW):
        assert reused(memory, 1000, 1000, 1200, ()) == 1000


def test_after_a_restore_the_window_starts_at_the_threshold() -> None:
    """Nothing is reused without checkpoints in the file (engine A), all but five tokens with them (engine B)."""
    assert reused(WINDOW, 1000, 1000, 1200, (), from_file=True) == 0
    assert reused(WINDOW, 1000, 1000, 1200, (996,), from_file=True) == 995
    assert reused(HYBRID, 1000, 1000, 1200, (), from_file=True) == 1000
    assert reused(WINDOW, 100, 100, 1200, (), from_file=True) == 0, "also where it is shorter than the window"
    assert reused(WINDOW, 100, 100, 1200, (96,)) == 95


def test_a_prompt_that_departs_goes_back_to_a_checkpoint() -> None:
    for memory, found in ((REWINDS, 350), (HYBRID, 300), (WINDOW, 299)):
        assert reused(memory, 1841, 350, 500, (300, 1325, 1837)) == found
        assert reused(memory, 1841, 350, 500, (1325, 1837)) == (350 if memory is REWINDS else 0)


def test_the_same_prompt_again_goes_back_by_one_token_at_least() -> None:
    assert reused(REWINDS, 1000, 1000, 1000, ()) == 999
    assert reused(HYBRID, 1000, 1000, 1000, (996,)) == 996
    assert reused(HYBRID, 1000, 1000, 1000, (1000,)) == 0, "nothing would be left to process"


def test_checkpoints_lie_before_the_end_and_at_user_messages() -> None:
    assert after_prompt(HYBRID, (), 0, 2000) == (1484, 1996)
    assert after_prompt(HYBRID, (), 0, 300) == (296,)
    assert after_prompt(HYBRID, (), 0, 3) == ()
    assert after_prompt(HYBRID, (1484, 1996), 1996, 2100) == (1484, 1996, 2096)
    assert after_prompt(HYBRID, (), 0, 2000, (100, 900)) == (100, 900, 1484, 1996)
    assert after_prompt(REWINDS, (), 0, 2000) == ()


def test_the_oldest_goes_when_the_list_is_full() -> None:
    """So the base's is the first that is lost (llama-server.md)."""
    few = Memory(recurrent=True, most=3, min_step=0)
    found: Checkpoints = ()
    for n in (1000, 2000, 3000):
        found = after_prompt(few, found, n - 1000, n)
    assert len(found) == 3 and min(found) > 996


@given(MEMORIES, st.lists(LENGTHS, min_size=1, max_size=6), st.data())
def test_what_is_reused_is_shared_and_leaves_a_token(memory: Memory, prompts: list[int], data: st.DataObject) -> None:
    """And a checkpoint never lies beyond its slot's end, nor are there more of them than allowed."""
    held, checkpoints = 0, Checkpoints()
    for n_prompt in prompts:
        common = data.draw(st.integers(0, min(held, n_prompt)))
        found = reused(memory, held, common, n_prompt, checkpoints)
        assert 0 <= found <= max(0, min(common, n_prompt - 1))
        assert not memory.rewinds or found == max(0, min(common, n_prompt - 1))
        assert found >= reused(memory, held, common, n_prompt, checkpoints, from_file=True)
        checkpoints = after_prompt(memory, checkpoints, found, n_prompt)
        held = n_prompt
        assert len(set(checkpoints)) == len(checkpoints) and all(0 < c <= held for c in checkpoints)
        assert len(checkpoints) <= memory.most


@given(MEMORIES, LENGTHS, LENGTHS, st.sets(LENGTHS, max_size=4))
def test_one_more_checkpoint_never_costs(memory: Memory, held: int, n_prompt: int, at: set[int]) -> None:
    for common in (min(held, n_prompt), min(held, n_prompt) // 2):
        some = tuple(sorted(c for c in at if c < held))
        without = reused(memory, held, common, n_prompt, some[1:])
        assert reused(memory, held, common, n_prompt, some) >= without
