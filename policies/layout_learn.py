"""The net under the rules: what differs between two texts that should be one, found by comparing them line by line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from policies.layout_check import MAX_VALUE
from policies.layout_text import Learned, instructions_at, lines_of

MAX_SPANS = 16
"""Spans that may differ; more are another prompt, not another day."""
MIN_EQUAL = 0.75
"""Share of the characters that has to be the same."""
MIN_CONTEXT = 4
"""Letters and digits that have to stand beside a span on its line, or nothing says where it belongs."""
MAX_NOTE = 300
"""Characters of a changed line that are told whole; of a longer one only what is near the change."""

_WORD = re.compile(r"[\w.:%/+-]")


@dataclass(frozen=True, slots=True)
class _Change:
    """Lines `old` and `new` differ between `start` and `len(line) - tail`, whole words; in text number `text`."""

    text: int
    old: str
    new: str
    start: int
    tail: int

    @property
    def prefix(self) -> str:
        return self.old[: self.start]

    @property
    def suffix(self) -> str:
        return self.old[len(self.old) - self.tail :]


def learn(old_texts: Sequence[str], new_texts: Sequence[str], first_number: int) -> tuple[Learned, ...] | None:
    """What differs between two laid-out system texts (one per leading message), as values value_N from `first_number`.

    None when they are equal, or differ in more than MAX_SPANS spans of MAX_VALUE characters on one line each, in
    project instructions, in a line that has nothing else on it or that another line looks like.
    """
    changes = _changes(old_texts, new_texts)
    if not changes:
        return None
    learned = tuple(
        Learned(change.prefix, change.suffix, f"value_{number}") for number, change in enumerate(changes, first_number)
    )
    unique = all(_is_the_one(known, texts) for known in learned for texts in (old_texts, new_texts))
    return learned if unique else None


def changed_lines(old_texts: Sequence[str], new_texts: Sequence[str]) -> list[tuple[str, str]] | None:
    """The lines that differ, old and new, where `learn` would take the difference; of long lines an excerpt."""
    if learn(old_texts, new_texts, 1) is None:
        return None
    return [_excerpt(change) for change in _changes(old_texts, new_texts) or ()]


def _changes(old_texts: Sequence[str], new_texts: Sequence[str]) -> list[_Change] | None:
    if len(old_texts) != len(new_texts):
        return None
    changes: list[_Change] = []
    for i, (old, new) in enumerate(zip(old_texts, new_texts, strict=True)):
        if old == new:
            continue
        old_lines, new_lines = old.split("\n"), new.split("\n")
        if len(old_lines) != len(new_lines):
            return None
        changes += [_change(i, a, b) for a, b in zip(old_lines, new_lines, strict=True) if a != b]
        if len(changes) > MAX_SPANS or _in_instructions(old, old_lines, new_lines):
            return None
    n_changed = sum(max(len(each.old), len(each.new)) - each.start - each.tail for each in changes)
    enough = n_changed <= (1 - MIN_EQUAL) * sum(map(len, old_texts))
    return changes if enough and all(map(_is_plain, changes)) else None


def _in_instructions(text: str, old_lines: Sequence[str], new_lines: Sequence[str]) -> bool:
    regions = instructions_at(text)
    start = 0
    for old, new in zip(old_lines, new_lines, strict=True):
        if old != new and any(a <= start < b for a, b in regions):
            return True
        start += len(old) + 1
    return False


def _change(number: int, old: str, new: str) -> _Change:
    shorter = min(len(old), len(new))
    start = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    tail = next((i for i in range(shorter - start) if old[-1 - i] != new[-1 - i]), shorter - start)
    while start and _WORD.match(old[start - 1]):
        start -= 1
    while tail and _WORD.match(old[len(old) - tail]):
        tail -= 1
    return _Change(number, old, new, start, tail)


def _is_plain(change: _Change) -> bool:
    """Short spans without placeholders, with enough beside them to know the line again."""
    spans = [line[change.start : len(line) - change.tail] for line in (change.old, change.new)]
    beside = change.prefix + change.suffix
    if change.prefix.rfind("[[") > change.prefix.rfind("]]"):  # within a placeholder
        return False
    return all(0 < len(span) <= MAX_VALUE and "[[" not in span and "]]" not in span for span in spans) and (
        sum(map(str.isalnum, beside)) >= MIN_CONTEXT
    )


def _is_the_one(known: Learned, texts: Sequence[str]) -> bool:
    return sum(1 for text in texts for _ in lines_of(text, known)) == 1


def _excerpt(change: _Change) -> tuple[str, str]:
    if max(len(change.old), len(change.new)) <= MAX_NOTE:
        return change.old, change.new
    start = max(0, change.start - 60)
    tail = max(0, change.tail - 60)
    return change.old[start : len(change.old) - tail], change.new[start : len(change.new) - tail]
