"""The README's settings of each agent, and the table of what was measured, between its two markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).parent.parent.parent / "README.md"
BEGIN, END = "<!-- agents -->", "<!-- /agents -->"
HEAD = "| agent | requests | turns continued | tokens computed, Slotkeeper | tokens computed, llama-server alone |"
_NAME = re.compile(r"^\*\*(?P<name>[^*]+)\*\*(?P<rest>.*)$")
_FILE = re.compile(r"`~/(?P<path>[^`]+)`")
_ROW = re.compile(r"\| [A-Za-z ]+ \d+\.\d+\.\d+ \| \d+(?: \(\d+ aside\))? \| \d+ of \d+ \| [\d,]+ \| [\d,]+ \|")


@dataclass(frozen=True)
class Block:
    """What a person copies for one agent: files by their path under the home directory, then shell lines."""

    files: tuple[tuple[str, str], ...]
    shell: str


@dataclass(frozen=True)
class Row:
    """What one agent did on engine B. Tokens are the engine's own counts of what it computed."""

    agent: str
    version: str
    requests: int
    aside: int
    turns: int
    continued: int
    processed: int
    processed_alone: int

    def line(self) -> str:
        """As the README shows it."""
        requests = f"{self.requests} ({self.aside} aside)" if self.aside else f"{self.requests}"
        cells = f"{self.agent} {self.version}", requests, f"{self.continued} of {self.turns}"
        return "| " + " | ".join([*cells, f"{self.processed:,}", f"{self.processed_alone:,}"]) + " |"


def blocks(text: str) -> dict[str, Block]:
    """Each agent's settings, by the name in bold that stands before them."""
    found: dict[str, Block] = {}
    for name, lines in _sections(text):
        files: list[tuple[str, str]] = []
        shell, path = "", ""
        for language, content in _fences(lines):
            if language == "":
                path = paths[-1] if (paths := _FILE.findall(content)) else path
            elif language == "sh":
                shell += content
            else:
                files.append((path, content))
        if shell:
            found[name] = Block(tuple(files), shell)
    return found


def _sections(text: str) -> list[tuple[str, list[str]]]:
    """(bold name at the start of a line, the lines from there to the next one or to the next heading)."""
    sections: list[tuple[str, list[str]]] = []
    is_open = False
    for line in text.splitlines():
        if match := _NAME.match(line):
            sections.append((match["name"], [match["rest"]]))
            is_open = True
        elif line.startswith("## "):
            is_open = False
        elif is_open:
            sections[-1][1].append(line)
    return sections


def _fences(lines: Sequence[str]) -> list[tuple[str, str]]:
    """(language, content) of each fenced block; prose between them has no language."""
    found: list[tuple[str, str]] = []
    language: str | None = None
    for line in lines:
        if line.startswith("```"):
            language = None if language is not None else line[3:]
            found.append((language or "", ""))
        elif found and found[-1][0] == (language or ""):
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        else:
            found.append((language or "", line + "\n"))
    return found


def table(text: str) -> list[str]:
    """The lines between the markers, empty ones left out. Raises ValueError when a marker is missing."""
    return [line for line in text[text.index(BEGIN) + len(BEGIN) : text.index(END)].splitlines() if line]


def with_table(text: str, rows: Sequence[Row]) -> str:
    """The README with these rows, in the order of its settings; those of other agents stay as they are."""
    new = [row.line() for row in rows]
    kept = [line for line in table(text)[2:] if not any(line.startswith(f"| {row.agent} ") for row in rows)]
    names = list(blocks(text))
    ordered = sorted([*kept, *new], key=lambda line: next(i for i, n in enumerate(names) if line.startswith(f"| {n} ")))
    lines = [HEAD, "|---|---|---|---|---|", *ordered]
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n" + "".join(f"{line}\n" for line in lines) + text[end:]


def is_row(line: str) -> bool:
    """Whether a line has the form of Row.line."""
    return _ROW.fullmatch(line) is not None
