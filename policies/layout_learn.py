"""The net under the rules: what differs between two texts that should be one, found by comparing them line by line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from policies.layout_check import MAX_VALUE
from policies.layout_text import MARK, Learned, has_shape, instructions_at, lines_of, touches_mark
from policies.prefix import common

MAX_SPANS = 16
"""Spans that may differ; more are another prompt, not another day."""
MIN_EQUAL = 0.75
"""Share of the characters that has to be the same."""
MIN_EQUAL_IN_LINE = 0.5
"""The same between two requests of one conversation: it goes on for certain, and short prompts differ in much."""
MIN_CONTEXT = 4
"""Letters and digits that have to stand beside a span on its line, or nothing says where it belongs."""
WORDS_CONTEXT = 12
"""The same for words in place of a value: "- Never" alone says nothing of what follows."""
MAX_NOTE = 300
"""Characters of a changed line that are told whole; of a longer one only what is near the change."""
NEAR = 60
"""Characters that are told on both sides of it; more where that stands on the line twice."""
MOST_CHANGED = 8000
"""Characters of a line whose changes are told: a ledger keeps both whole lines of each."""

_WORD = re.compile(r"[\w.:%/+-]")
_OWN = re.compile(r"\[\[env:value_\d+(?:_\d+)?\]\]")
"""Placeholders of learned values. On a line that is learned anew they are part of what changes, and the wider span
counts from then on (`policies/layout_text`): two days of "Montag, 10:00" have one base though the hours came first."""


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


def learn(
    old_texts: Sequence[str], new_texts: Sequence[str], first_number: int, *, wording: bool = False
) -> tuple[Learned, ...] | None:
    """What differs between two laid-out system texts (one per leading message), as values value_N from `first_number`.

    None when they are equal, or differ in more than MAX_SPANS spans of MAX_VALUE characters on one line each, in
    project instructions, in plain words (unless `wording`), in a line that has nothing else on it or that another
    line looks like.
    """
    changes = _changes(old_texts, new_texts, MIN_EQUAL)
    if not changes or not all(_is_plain(change, wording=wording) for change in changes):
        return None
    learned = tuple(
        Learned(change.prefix, change.suffix, f"value_{number}", wording and not _is_volatile(change))
        for number, change in enumerate(changes, first_number)
    )
    unique = all(_is_the_one(known, texts) for known in learned for texts in (old_texts, new_texts))
    return learned if unique else None


def changed_lines(old_texts: Sequence[str], new_texts: Sequence[str]) -> list[tuple[str, str]] | None:
    """The lines that differ within a conversation, old and new, whole, where it is clear which they are. None where
    nothing differs, or too much (MAX_SPANS, MAX_VALUE, MIN_EQUAL_IN_LINE, MOST_CHANGED), or wording."""
    changes = _changes(old_texts, new_texts, MIN_EQUAL_IN_LINE)
    if not changes or not all(_is_volatile(change) for change in changes):
        return None
    # Two lines that differ in their values alone could read what the other one did.
    places = {(change.prefix, change.suffix) for change in changes}
    is_clear = len(places) == len(changes) and all(_is_clear(change, old_texts, new_texts) for change in changes)
    return [(change.old, change.new) for change in changes] if is_clear else None


def excerpts(old: str, new: str) -> tuple[str, str]:
    """What is told of a line that has changed: it whole, or of a long one what is near the change. The first stands on
    the old line once, and with the second in its place that is the new line."""
    if max(len(old), len(new)) <= MAX_NOTE:
        return old, new
    change, near = _change(0, old, new), NEAR
    while True:
        start, tail = max(0, change.start - near), max(0, change.tail - near)
        told = old[start : len(old) - tail]
        if (told and old.find(told) == old.rfind(told)) or not (start or tail):
            return told, new[start : len(new) - tail]
        near *= 2


def _changes(old_texts: Sequence[str], new_texts: Sequence[str], min_equal: float) -> list[_Change] | None:
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
    return changes if n_changed <= (1 - min_equal) * sum(map(len, old_texts)) else None


def _in_instructions(text: str, old_lines: Sequence[str], new_lines: Sequence[str]) -> bool:
    regions = instructions_at(text)
    start = 0
    for old, new in zip(old_lines, new_lines, strict=True):
        if old != new and any(a <= start < b for a, b in regions):
            return True
        start += len(old) + 1
    return False


def _change(number: int, old: str, new: str) -> _Change:
    start = common(old, new)
    tail = min(common(old[::-1], new[::-1]), min(len(old), len(new)) - start)
    begin = max(0, start - MAX_VALUE)  # a word beyond it is too long for a value, wherever it begins
    while start > begin and _WORD.match(old[start - 1]):
        start -= 1
    least = max(0, tail - MAX_VALUE)
    while tail > least and _WORD.match(old[len(old) - tail]):
        tail -= 1
    if first := _OWN.search(old):
        start = min(start, first.start())
        tail = min(tail, len(old) - [found.end() for found in _OWN.finditer(old)][-1])
    return _Change(number, old, new, start, tail)


def _spans(change: _Change) -> list[str]:
    return [line[change.start : len(line) - change.tail] for line in (change.old, change.new)]


def _is_volatile(change: _Change) -> bool:
    return all(map(has_shape, _spans(change)))


def _is_clear(change: _Change, old_texts: Sequence[str], new_texts: Sequence[str]) -> bool:
    """A short change of a line that stands in its text once, as does what is told of it; none that cuts through a
    placeholder, or makes the line another that was there."""
    ends = [(line, at) for line in (change.old, change.new) for at in (change.start, len(line) - change.tail)]
    is_cut = any(touches_mark(line, at, at) for line, at in ends)
    is_short = all(len(span) <= MAX_VALUE for span in _spans(change))
    if is_cut or not is_short or max(len(change.old), len(change.new)) > MOST_CHANGED:
        return False
    old_lines, new_lines = ([line for text in texts for line in text.split("\n")] for texts in (old_texts, new_texts))
    if (old_lines.count(change.old), new_lines.count(change.new), old_lines.count(change.new)) != (1, 1, 0):
        return False
    told = excerpts(change.old, change.new)
    all_texts = ("\n".join(old_texts), "\n".join(new_texts))
    is_excerpt = told[0] != change.old
    return not is_excerpt or all(part and text.count(part) == 1 for text, part in zip(all_texts, told, strict=True))


def _is_plain(change: _Change, *, wording: bool) -> bool:
    """Short spans without placeholders, with enough beside them to know the line again; values, or words if wanted."""
    is_volatile = _is_volatile(change)
    if not is_volatile and not wording:
        return False
    spans = [_OWN.sub("", span) for span in _spans(change)]
    beside = change.prefix + change.suffix
    if any(_touches_other_mark(change, line) for line in (change.old, change.new)):
        return False
    return all(0 < len(span) <= MAX_VALUE for span in spans) and (
        sum(map(str.isalnum, beside)) >= (MIN_CONTEXT if is_volatile else WORDS_CONTEXT)
    )


def _touches_other_mark(change: _Change, line: str) -> bool:
    """Whether the span holds or cuts through a placeholder that is not that of a learned value."""
    start, end = change.start, len(line) - change.tail
    marks = (found for found in MARK.finditer(line) if found.start() < end and start < found.end())
    return any(not _OWN.fullmatch(mark[0]) for mark in marks)


def _is_the_one(known: Learned, texts: Sequence[str]) -> bool:
    return sum(1 for text in texts for _ in lines_of(text, known)) == 1
