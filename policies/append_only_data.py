"""What agents put in the place of old tool results that they prune from their history.

Data, not rules: a text that is none of these still counts as a placeholder when it is short and stands for several
results alike (`append_only.reconcile`). Sources: the agents' public repositories and documentation, as named.
"""

from __future__ import annotations

import re

PRUNED: frozenset[str] = frozenset(
    (
        "[Old tool result content cleared]",  # Claude Code, opencode, Kilo, Qwen Code, OpenClaw
        "[Old tool output cleared to save context space]",  # Hermes (context_compressor)
        # opencode-dynamic-context-pruning:
        "[Output removed to save context - information superseded or no longer needed]",
        "[[NOTE] This file read has been removed to save space in the context window. Refer to the latest file read for"
        " the most up to date version of this file.]",  # Cline and its forks (duplicateFileReadNotice)
        "[Cleared: older tool result removed to save context. Re-run the tool if you need this output.]",
        "[Old tool result cleared]",
        "[Old tool result cleared to save context]",
        "[Old tool result cleared to save context space]",
        "[Old tool output cleared]",
        "[Tool result cleared]",
        "[tool result cleared]",
        "[tool output cleared to save context space]",
        "[content removed to save context]",
        "[Previous screenshot removed to save context]",
        "[screenshot removed to save context]",
        "<MASKED>",  # OpenHands (observation masking)
    )
)
"""The whole result, white space around it aside."""

SHAPES: tuple[re.Pattern[str], ...] = (
    re.compile(r"Old environment output: \(\d{1,9} lines omitted\)"),  # SWE-agent (LastNObservations)
    re.compile(r"\[Old inline media cleared: [\w.+/-]{1,100}\]"),  # Qwen Code (microcompaction)
    re.compile(r"\[Old tool result content cleared\b[^\[\]\n]{0,120}\]"),  # forks that add the old size
    re.compile(r"\[[Tt]ool result cleared\b[^\[\]\n]{0,120}\]"),
)
"""Placeholders with a count or a type in them; the whole result again."""

LONGEST = 2_000
"""Characters: what is longer is no placeholder and is not looked at."""
