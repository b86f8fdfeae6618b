"""Why tokens were processed again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.causes import MERGED_TOKENS, Cause, Turn, Verdict, explain
from policies.types import Match

MISS = Turn(Match.EXTENDS, held=1000, cache_n=100, predicted_cache_n=100)
COUNTS = st.integers(0, 3000)
TURNS = st.builds(
    Turn,
    match=st.sampled_from(Match),
    held=COUNTS,
    cache_n=COUNTS,
    predicted_cache_n=COUNTS,
    same_tools=st.booleans(),
    lost=st.sampled_from([None, Cause.EVICTED, Cause.ENGINE_RESTART, Cause.CANCELLED]),
    restored=st.booleans(),
    can_rewind=st.booleans(),
    has_media=st.booleans(),
    fresh=st.booleans(),
)


def miss(**changes: object) -> Cause | None:
    """The cause of a turn that missed 900 of 1,000 tokens."""
    fields = {name: getattr(MISS, name) for name in Turn.__dataclass_fields__}
    verdict = explain(Turn(**{**fields, **changes}))  # type: ignore[arg-type]
    assert verdict.reprocessed == 900
    return verdict.cause


@given(TURNS)
def test_counts_never_exceed_what_was_held(turn: Turn) -> None:
    """Only tokens that an earlier prompt held and that the cache did not give count."""
    verdict = explain(turn)
    assert 0 <= verdict.reprocessed <= turn.held
    assert verdict.cause is None or verdict.reprocessed == turn.held - turn.cache_n


@given(TURNS)
def test_a_cause_and_a_count_come_together(turn: Turn) -> None:
    verdict = explain(turn)
    assert (verdict.cause is None) == (verdict.reprocessed == 0)
    assert (verdict.cause is None) == (turn.held - turn.cache_n <= MERGED_TOKENS)


@pytest.mark.parametrize(("short", "cause"), [(0, None), (MERGED_TOKENS, None), (MERGED_TOKENS + 1, Cause.UNKNOWN)])
def test_a_few_merged_tokens_are_no_miss(short: int, cause: Cause | None) -> None:
    """Sampled text that is tokenised again may come back a few tokens shorter."""
    turn = Turn(Match.EXTENDS, held=1000, cache_n=1000 - short, predicted_cache_n=1000)
    assert explain(turn) == Verdict(cause, short if cause else 0)


def test_more_in_the_cache_than_was_held_is_no_miss() -> None:
    assert explain(Turn(Match.NEW, held=0, cache_n=500, predicted_cache_n=0)) == Verdict(None, 0)


@pytest.mark.parametrize("match", Match)
def test_a_request_that_wanted_no_cache_is_isolation(match: Match) -> None:
    assert miss(match=match, fresh=True, lost=Cause.EVICTED) is Cause.ISOLATION


@pytest.mark.parametrize("match", Match)
def test_a_restore_that_did_not_help_is_named(match: Match) -> None:
    """Restore is a claim; the next `cache_n` proves it (design.md, rule 6)."""
    assert miss(match=match, restored=True, predicted_cache_n=1000) is Cause.RESTORE_INEFFECTIVE


def test_a_restore_that_gave_what_it_promised_is_not_blamed() -> None:
    assert miss(restored=True, lost=Cause.EVICTED) is Cause.EVICTED
    assert miss(restored=True, lost=Cause.EVICTED, predicted_cache_n=100 + MERGED_TOKENS) is Cause.EVICTED


def test_another_base() -> None:
    assert miss(match=Match.BASE) is Cause.BASE_CHANGED
    assert miss(match=Match.BASE, same_tools=False) is Cause.TOOLS_CHANGED


def test_an_edited_history() -> None:
    assert miss(match=Match.EDITED) is Cause.HISTORY_EDITED
    assert miss(match=Match.EDITED, can_rewind=False) is Cause.HISTORY_EDITED
    assert miss(match=Match.EDITED, predicted_cache_n=1000) is Cause.HISTORY_EDITED
    assert miss(match=Match.EDITED, predicted_cache_n=1000, can_rewind=False) is Cause.CHECKPOINT_MISSING
    assert miss(match=Match.EDITED, shared=1000, can_rewind=False) is Cause.CHECKPOINT_MISSING
    assert miss(match=Match.EDITED, shared=120, can_rewind=False) is Cause.HISTORY_EDITED


def test_a_new_line() -> None:
    assert miss(match=Match.NEW) is Cause.NEW_LINE


@pytest.mark.parametrize("lost", [Cause.EVICTED, Cause.ENGINE_RESTART, Cause.CANCELLED])
def test_what_became_of_the_slot_is_the_cause_of_a_line_that_only_grew(lost: Cause) -> None:
    assert miss(lost=lost, has_media=True, can_rewind=False) is lost


def test_a_line_that_only_grew_and_lost_nothing_we_know_of() -> None:
    assert miss(has_media=True) is Cause.IMAGE
    assert miss(can_rewind=False) is Cause.CHECKPOINT_MISSING
    assert miss() is Cause.UNKNOWN
