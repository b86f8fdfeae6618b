"""What kind of change is it that makes a prompt diverge? Recognised by structure and shape, not by an agent's texts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from policies.append_only import normal
from policies.flatten import Group, Json, dumps, role_of


class Kind(StrEnum):
    """What changed at the first divergence; a closed set."""

    DATE = "date"
    CLOCK = "clock"
    PATH = "path"
    GIT_STATUS = "git status"
    ID = "id"
    METER = "meter"
    TOOLS_ORDER = "tools order"
    TOOLS_ADDED = "tools added"
    TOOLS_REMOVED = "tools removed"
    TOOLS_EDITED = "tools edited"
    REASONING_DROPPED = "reasoning dropped"
    ARGUMENTS = "arguments respelled"
    REMINDER = "reminder moved"
    FORM = "content form"
    WHITE_SPACE = "white space"
    PRUNED = "pruned result"
    COMPACTION = "compaction"
    SHORTENED = "shortened"
    SETTING = "setting"
    EDITED = "edited"


@dataclass(frozen=True, slots=True)
class Change:
    """Two prompts, and the texts in which they first differ; None where one of them has none there. `at`: offset."""

    before: Json
    now: Json
    old: Group | None
    new: Group | None
    at: int

    @property
    def is_in_one_text(self) -> bool:
        """Both prompts have the same text of the same message there, in two versions."""
        return self.old is not None and self.new is not None and self.old.key == self.new.key


WINDOW = 200
"""Characters on each side of a change in which values are looked for; the longest value that is moved has as many."""
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_DAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}"
VALUES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (Kind.ID, re.compile(r"x-anthropic-billing-header:[^\n]{0,200}|cc_version=[^\s;]{1,40}")),
    (
        Kind.DATE,
        re.compile(
            rf"(?:{_DAY},? )?(?:\d{{1,2}}(?:st|nd|rd|th)?\.? )?{_MONTH}\.?"
            r"(?: \d{1,2}(?:st|nd|rd|th)?\b)?(?:,? \d{4})?"
            rf"|{_DAY}(?=[\s,])|\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}"
        ),
    ),
    (Kind.CLOCK, re.compile(r"\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?: ?[AaPp]\.?[Mm])?|\b1[5-9]\d{8}(?:\d{3})?\b")),
    (
        Kind.ID,
        re.compile(
            r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}|\b[0-9A-HJKMNP-TV-Z]{26}\b"
            r"|(?i:\bpid\b)[ :=]{1,3}\d{1,10}|\b[a-z]{2,12}[-_](?=[A-Za-z0-9]{0,31}\d)[A-Za-z0-9]{8,32}\b"
            r"|\b[0-9a-f]{7,64}\b"
        ),
    ),
    (Kind.PATH, re.compile(r"(?:~|\b[A-Za-z]:)?(?:[/\\][\w.@+~-]{1,80}){2,24}")),
    (Kind.METER, re.compile(r"\d[\d.,]{0,12}\s?(?:%|[kKMGT]i?B\b|ms\b|s\b|min\b|h\b|tokens\b)")),
)
"""Shapes of values that change by themselves, the most telling first."""
_GIT = re.compile(r"git ?status|git snapshot|recent commits|current branch|^on branch |<git", re.I | re.M)
_GIT_LOOKS_BACK = 2000
"""Characters before a change in which a git block's heading is looked for."""
_REMINDER = "reminder>"
"""Part of the tags of blocks that agents move; policies/normal_form knows the whole of them."""
_SUMMARY = re.compile(
    r"summar(?:y|i[sz])|continued from a previous|what did we do so far|compact(?:ed|ion)|context checkpoint", re.I
)
PRUNED_BELOW = 120
"""Characters of the longest text that stands for a tool result that was taken away (issue 4)."""


def kind_of(change: Change) -> Kind:
    """What changed, as far as its shape shows it. A value in the base is named before the reason for its change."""
    if (value := _base_value(change)) is not None:
        return value
    if _is_compaction(change):
        return Kind.COMPACTION
    for group in (change.old, change.new):
        if group is not None and group.section == "tools":
            return tools_kind(change.before.get("tools"), change.now.get("tools"))
    if change.old is None or change.new is None:
        return Kind.SHORTENED if change.new is None else Kind.EDITED
    if change.old.name == "reasoning" and not change.is_in_one_text:
        return Kind.REASONING_DROPPED
    if not change.is_in_one_text:
        return Kind.EDITED
    return _spelling(change.old, change.new) or value_kind(change.old.text, change.new.text, change.at) or Kind.EDITED


def _base_value(change: Change) -> Kind | None:
    if change.old is None or change.new is None or change.old.section != "system" or not change.is_in_one_text:
        return None
    return value_kind(change.old.text, change.new.text, change.at)


def _spelling(old: Group, new: Group) -> Kind | None:
    """The same said otherwise, or a result taken away."""
    if old.name.endswith(".arguments"):
        return Kind.ARGUMENTS if same_arguments(old.text, new.text) else None
    if old.name.endswith("id"):
        return Kind.ID
    if _REMINDER in old.text or _REMINDER in new.text:
        one, other = (normal({"role": "user", "content": group.text}, {}) for group in (old, new))
        if one == other:
            return Kind.REMINDER
    if "".join(old.text.split()) == "".join(new.text.split()):
        return Kind.FORM if len(old.pieces) != len(new.pieces) else Kind.WHITE_SPACE
    is_result = old.role == "tool" or any(".content" in piece.path for piece in old.pieces)
    if is_result and len(new.text) < PRUNED_BELOW < len(old.text):
        return Kind.PRUNED
    return None


def same_arguments(old: str, new: str) -> bool:
    """Two argument texts say the same: equal as JSON, whatever the order, or one with more parameters (defaults)."""
    try:
        one, other = json.loads(old), json.loads(new)
    except (ValueError, RecursionError):
        return False
    if one == other or not isinstance(one, dict) or not isinstance(other, dict):
        return bool(one == other)
    return all(one[name] == other[name] for name in one.keys() & other.keys()) and (
        one.keys() <= other.keys() or other.keys() <= one.keys()
    )


def tools_kind(old: object, new: object) -> Kind:
    """How one list of tools became another."""
    was, now = (Counter(map(_spelled, tools if isinstance(tools, list) else [])) for tools in (old, new))
    if was == now:
        return Kind.TOOLS_ORDER
    if was <= now:
        return Kind.TOOLS_ADDED
    return Kind.TOOLS_REMOVED if now <= was else Kind.TOOLS_EDITED


def _spelled(tool: object) -> str:
    try:
        return json.dumps(tool, sort_keys=True, default=str)
    except (RecursionError, ValueError, TypeError):
        return dumps(tool)


def value_kind(old: str, new: str, at: int) -> Kind | None:
    """The value of known shape that the first difference of two texts lies in; `at`: its offset in both."""
    back = _GIT_LOOKS_BACK
    windows = [_line(text, at) for text in (old, new)]
    for kind, pattern in VALUES:
        if any(_covers(pattern, text, column) for text, column in windows):
            return (
                Kind.GIT_STATUS if kind in (Kind.ID, Kind.PATH) and _GIT.search(new[max(0, at - back) : at]) else kind
            )
    return Kind.GIT_STATUS if _GIT.search(old[max(0, at - back) : at]) else None


def _line(text: str, at: int) -> tuple[str, int]:
    """The part of a line around an offset, and the offset in it."""
    start = max(text.rfind("\n", 0, at) + 1, at - WINDOW)
    end = text.find("\n", at)
    return text[start : min(at + WINDOW, len(text) if end < 0 else end)], at - start


def _covers(pattern: re.Pattern[str], text: str, column: int) -> bool:
    return any(found.start() <= column <= found.end() for found in pattern.finditer(text))


def _is_compaction(change: Change) -> bool:
    """Fewer messages, and one of the first that changed speaks of a summary; a shorter history alone is none."""
    before, now = (_messages(body) for body in (change.before, change.now))
    if len(now) >= len(before) or change.new is None:
        return False
    same = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(now))
    asked = [message for message in now[same : same + 4] if role_of(message) != "tool"]
    return any(_SUMMARY.search(dumps(message)[:4000]) for message in asked)


def _messages(body: Mapping[str, Any]) -> list[Any]:
    found = body.get("messages", body.get("input"))
    return found if isinstance(found, list) else []
