"""Which text of a base never, seldom or always changes between the requests of one agent?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.changes import VALUES
from policies.flatten import Piece
from policies.prefix import common

ALWAYS = 0.5
"""Share of requests in which a line changed, from which on it is volatile; below it is semi-static, at 0 static."""
MASKED = 200
"""Characters at the start of a line by which it is known when its values change."""
MOST_SHOWN = 8
"""Lines that are shown for each group."""
_NUMBER = re.compile(r"\d+")
_NAME = re.compile(r'"name": "([^"\\]{1,80})"')


def shape_of(line: str) -> str:
    """A line without what changes in it by itself: dates, paths, ids and numbers."""
    shape = line[:MASKED]
    for kind, pattern in VALUES:
        shape = pattern.sub(f"<{kind}>", shape)
    return _NUMBER.sub("0", shape)


def lines_of(base: Sequence[Piece]) -> list[tuple[str, str]]:
    """(shape, line) of a base: the lines of its system text, and each tool as one."""
    system = "".join(piece.text for piece in base if piece.section == "system")
    lines = [(shape_of(line), line) for line in system.split("\n")] if system else []
    for piece in base:
        if piece.section == "tools" and piece.text != "]":
            name = _NAME.search(piece.text[:2000])
            lines.append((f"tool {name[1] if name else piece.path}", piece.text.lstrip("[, ")))
    return lines


@dataclass(slots=True)
class Steadiness:
    """The bases of one agent's requests of one kind, in their order."""

    n_requests: int = 0
    _digest: bytes = b""
    _lines: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _changes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _examples: dict[str, tuple[str, str]] = field(default_factory=dict)

    def see(self, digest: bytes, base: Sequence[Piece]) -> None:
        """One more request. `digest`: of its base."""
        self.n_requests += 1
        if digest == self._digest:
            return
        found: dict[str, list[str]] = defaultdict(list)
        for shape, line in lines_of(base):
            found[shape].append(line)
        lines = {shape: tuple(texts) for shape, texts in found.items()}
        if self.n_requests > 1:
            for shape in {**self._lines, **lines}:
                old, new = self._lines.get(shape, ()), lines.get(shape, ())
                if old != new:
                    self._changes[shape] += 1
                    self._examples[shape] = _first_other(old, new)
        self._digest, self._lines = digest, lines

    def to_json(self) -> dict[str, Any]:
        """Characters of the newest base by how often they changed, and the lines that did."""
        sizes = {"static": 0, "semi-static": 0, "volatile": 0}
        for shape, lines in self._lines.items():
            sizes[self._class(shape)] += sum(len(line) + 1 for line in lines)
        often = sorted(filter(None, self._changes), key=lambda shape: -self._changes[shape])[:MOST_SHOWN]
        return {
            "requests": self.n_requests,
            "characters": sizes,
            "changing": [
                {
                    "part": self._class(shape),
                    "changes": self._changes[shape],
                    "old": self._examples[shape][0][:MASKED],
                    "new": self._examples[shape][1][:MASKED],
                }
                for shape in often
            ],
            "more": len(self._changes) - len(often),
        }

    def _class(self, shape: str) -> str:
        changes = self._changes.get(shape, 0)
        if not changes:
            return "static"
        return "volatile" if changes >= ALWAYS * (self.n_requests - 1) else "semi-static"


def _first_other(old: Sequence[str], new: Sequence[str]) -> tuple[str, str]:
    """The first lines of a shape that are not the same, "" where one is missing; long ones from near the change on."""
    for i in range(max(len(old), len(new))):
        a, b = (lines[i] if i < len(lines) else "" for lines in (old, new))
        if a != b:
            start = max(0, common(a, b) - MASKED // 4) if max(len(a), len(b)) > MASKED else 0
            return a[start:], b[start:]
    return "", ""
