"""What a layout rule is, and whether it can be trusted: rules come from users' configuration, too."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

Where: TypeAlias = Literal["system", "tools", "both"]
Action: TypeAlias = Literal["move", "clock", "path"]

MAX_VALUE = 200
"""Characters of a value on one line (issue 4)."""
MAX_BLOCK = 4000
"""Characters of a value of several lines: git's status and log as agents cut them."""
MAX_LINE = 2000
"""Characters of the longest line that a rule without hints is tried on: with `line_limit` a bound of each match."""
MAX_STEPS = 20_000_000
"""Steps of the regular expression engine on one line, about half a second."""
MIN_LINE = 80
"""A rule that could not be tried on lines of this length within MAX_STEPS is refused."""

_FLAGS = re.IGNORECASE | re.MULTILINE
_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}\Z")


@dataclass(frozen=True, slots=True)
class Rule:
    """One shape of volatile text. Several rules may share a name; equal values of a name share a placeholder.

    `pattern`: a regular expression (case ignored, `^` and `$` at line ends) with exactly one capturing group, the
    value.
    `action`: move (placeholder, value told in the first user message), clock (the same, but later values are told only
    when they are 30 minutes away), path (the same, and every other occurrence of the value becomes the placeholder).
    `example`: text that it matches. `hints`: texts of which one stands in each match, as `shape_of` spells them; the
    rule is tried on the lines around them only, without hints on each line. `near`: texts of which one stands on those
    lines, too, spelled alike. Lines around hints may be long, so a user's rule with hints may hold one open repetition
    at most. `block`: the value may have several lines.
    """

    name: str
    where: Where
    pattern: str
    action: Action
    example: str
    hints: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    block: bool = False


def shape_of(text: str) -> bytes:
    """One byte per character: letters in lower case, 0 for a digit, " for quotes, brackets, = and *, a space for white
    space, ? for what is not in Latin-1."""
    return text.encode("latin-1", "replace").translate(_SHAPE)


_SHAPE = bytes(
    ord("0")
    if 48 <= i <= 57
    else i + 32
    if 65 <= i <= 90
    else ord(" ")
    if i < 32
    else ord('"')
    if i in b"'`<>=()[]*"
    else i
    for i in range(256)
)


@lru_cache(maxsize=1024)
def compiled(rule: Rule) -> re.Pattern[str]:
    """The rule's expression. Raises re.error."""
    return re.compile(rule.pattern, _FLAGS)


_ANY_TEXTS = ("", "word", "Use the tool.", "- item 1, (see above)", "x" * 40, "/", "0")


def problem(rule: Rule, *, trusted: bool) -> str | None:
    """What is wrong with a rule, None for nothing. `trusted`: its cost was seen to."""
    if not _NAME.match(rule.name):
        return "its name must be a lower-case word of at most 31 letters, digits and underscores"
    if rule.where not in ("system", "tools", "both") or rule.action not in ("move", "clock", "path"):
        return f"unknown where or action: {rule.where}, {rule.action}"
    try:
        pattern = compiled(rule)
    except (re.error, OverflowError, RecursionError) as error:
        return f"its expression does not compile: {error}"
    if pattern.groups != 1:
        return f"its expression needs exactly one capturing group, the value; it has {pattern.groups}"
    if rule.block and not rule.hints:
        return "a block needs hints"
    if not trusted and line_limit(rule.pattern) < (MAX_LINE if rule.hints else MIN_LINE):
        return (
            "its expression may take too long: bound its repetitions, like .{0,80}, repeat no group that repeats, and "
            "write no comments"
        )
    if any(pattern.search(text) for text in _ANY_TEXTS):
        return "it matches everything"
    found = pattern.search(rule.example)
    if found is None or not found[1]:
        return "it does not match its example"
    if len(found[1]) > (MAX_BLOCK if rule.block else MAX_VALUE):
        return "the value in its example is too long"
    for texts in (rule.hints, rule.near):
        if any(shape_of(text) != text.encode("latin-1", "ignore") or not text for text in texts):
            return "its hints are not spelled as shape_of spells them"
        if texts and not any(text.encode("latin-1") in shape_of(rule.example) for text in texts):
            return "none of its hints stands in its example"
    return None


_COMMENT = re.compile(r"\(\?(?:#|[a-zA-Z]*x)")
"""What `line_limit` does not see through."""
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:P<\w+>|<?[=!]|[a-zA-Z-]*:|[a-zA-Z]+\)))?|\)|\||[*+?]|\{\d*,?\d*\}|.",
    re.DOTALL,
)


@lru_cache(maxsize=1024)
def line_limit(pattern: str) -> int:
    """Characters of the longest line on which `pattern` needs at most MAX_STEPS steps; 0: a repetition repeats.

    A repetition that may run to the line's end multiplies the steps by the line's length, a bounded one by its bound.
    """
    if _COMMENT.search(pattern):
        return 0
    tokens = _TOKEN.findall(pattern)
    factors: list[int] = []  # 0: open
    inside = [False]  # per open group: holds a repetition or an alternative
    for token, follow in zip(tokens, [*tokens[1:], ""], strict=True):
        if token.startswith("(") and not token.endswith(")"):
            inside.append(False)
        elif token == "|":
            inside[-1] = True
        most = _most(token)
        if most is not None and most != 1:
            inside[-1] = True
            factors.append(most)
        if token == ")" and len(inside) > 1:
            varies = inside.pop()
            inside[-1] = inside[-1] or varies
            if varies and _repeats(follow):
                return 0
    return _longest(factors)


def _repeats(token: str) -> bool:
    """Whether a quantifier lets its item stand more than once."""
    high = token[1:-1].rpartition(",")[2] if token.startswith("{") and _most(token) is not None else ""
    return int(high) > 1 if high else _most(token) not in (None, 2)


def _most(token: str) -> int | None:
    """How often a quantifier lets its item stand, 0 for no bound; None for other tokens."""
    if token in ("*", "+"):
        return 0
    if token == "?":
        return 2
    if token.startswith("{") and token.endswith("}") and len(token) > 2:
        low, comma, high = token[1:-1].partition(",")
        if not comma:
            return 1
        return int(high) - int(low or 0) + 1 if high else 0
    return None


def _longest(factors: list[int]) -> int:
    n_open = factors.count(0)
    bounded = math.prod(factor for factor in factors if factor)
    room = MAX_STEPS * math.factorial(n_open + 1) / bounded
    return min(MAX_LINE, int(room ** (1 / (n_open + 1))))
