"""Why were prompt tokens processed that an earlier prompt had already contained?"""

from dataclasses import dataclass
from enum import StrEnum

from policies.types import Match

MERGED_TOKENS = 8
"""A prompt may differ from what was sampled by a few tokens where text is tokenised again (llama-server.md: "Sampled
tokens do not always come back"); that is not a miss."""


ESTIMATE = 0.8
"""Share of an estimate of tokens from bytes that is certain enough to say that something was missing."""


class Cause(StrEnum):
    """Label values of `slotkeeper_prompt_tokens_reprocessed_total` that this version can tell apart (contract.md)."""

    NEW_LINE = "new_line"
    BASE_CHANGED = "base_changed"
    TOOLS_CHANGED = "tools_changed"
    HISTORY_EDITED = "history_edited"
    REASONING_DROPPED = "reasoning_dropped"
    TEMPLATE_REWRITE = "template_rewrite"
    TEMPLATE_CLOCK = "template_clock"
    COMPACTION = "compaction"
    EVICTED = "evicted"
    ENGINE_RESTART = "engine_restart"
    CANCELLED = "cancelled"
    CHECKPOINT_MISSING = "checkpoint_missing"
    RESTORE_INEFFECTIVE = "restore_ineffective"
    ISOLATION = "isolation"
    IMAGE = "image"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Turn:
    """What is known of a prompt once the engine has said how much of it came from the cache.

    `held`: tokens of the best earlier prompt that this one contains again; `shared`: those of them before the first
    change, estimated from bytes. `lost`: what became of the slot that held the
    line, when it no longer does. `restored`: a snapshot was loaded for it. `can_rewind`: dense memory.
    """

    match: Match
    held: int
    cache_n: int
    predicted_cache_n: int
    shared: int = 0
    same_tools: bool = True
    lost: Cause | None = None
    restored: bool = False
    can_rewind: bool = True
    has_media: bool = False
    dropped_reasoning: bool = False
    """The client's history differs in nothing but reasoning that it no longer sends."""
    rewrites_reasoning: bool = False
    """The template leaves out reasoning of earlier turns that the client does send."""
    clock_ticked: bool = False
    """The template prints the date, and it is another than at the line's last prompt."""
    fresh: bool = False
    is_compacted: bool = False
    """A summary has just taken the place of old messages."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens processed again, and why; `cause` is None when nothing was."""

    cause: Cause | None
    reprocessed: int


def explain(turn: Turn) -> Verdict:
    """The cause of a turn's miss; the tokens it cost."""
    again = turn.held - turn.cache_n
    if again <= MERGED_TOKENS:
        return Verdict(None, 0)
    return Verdict(_cause(turn), again)


def _cause(turn: Turn) -> Cause:
    if turn.fresh:
        return Cause.ISOLATION
    fell_short = turn.cache_n + MERGED_TOKENS < turn.predicted_cache_n
    if turn.is_compacted:
        return Cause.COMPACTION
    if turn.restored and fell_short:
        return Cause.RESTORE_INEFFECTIVE
    if turn.match is Match.BASE:
        return Cause.BASE_CHANGED if turn.same_tools else Cause.TOOLS_CHANGED
    if turn.match is Match.EDITED and turn.lost is not None and turn.cache_n < ESTIMATE * turn.shared:
        return turn.lost
    if turn.match is Match.EDITED and turn.dropped_reasoning:
        return Cause.REASONING_DROPPED
    if turn.match is Match.EDITED:
        is_short = fell_short or turn.cache_n + MERGED_TOKENS < ESTIMATE * turn.shared
        return Cause.CHECKPOINT_MISSING if is_short and not turn.can_rewind else Cause.HISTORY_EDITED
    if turn.match is Match.NEW:
        return Cause.NEW_LINE
    if turn.lost is not None:
        return turn.lost
    if turn.clock_ticked:
        return Cause.TEMPLATE_CLOCK
    if turn.rewrites_reasoning:
        return Cause.TEMPLATE_REWRITE
    if turn.has_media:
        return Cause.IMAGE
    return Cause.UNKNOWN if turn.can_rewind else Cause.CHECKPOINT_MISSING
