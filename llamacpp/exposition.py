"""llama-server's own metrics: GET /metrics (`--metrics`), Prometheus text, prefix `llamacpp:` (server-context.cpp)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MOST_SAMPLES = 256
"""Of one engine; b11549 has 15 and one more for each token of a draft. What comes after is no llama-server's."""

MOST_CHARACTERS = 256 * 1024
"""Of an exposition; b11549's has 3 KB."""

_NAME = re.compile(r"llamacpp:[a-z][a-z0-9_]{0,79}\Z")
_SAMPLE = re.compile(r"(llamacpp:[a-z][a-z0-9_]{0,79})(?:\{([^}]{0,200})\})?[ \t]+(\S{1,40})\Z")
_LABEL = re.compile(r'([a-z][a-z0-9_]{0,39})="([A-Za-z0-9_.:-]{0,80})"\Z')


@dataclass(frozen=True, slots=True)
class Sample:
    """One value and its own labels; most have none."""

    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `name` is without the prefix, counters keep their `_total`; a counter that has none is a gauge here
    (`n_tokens_max` is called one and is a maximum)."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: tuple[Sample, ...]


def parse(text: str) -> tuple[Family, ...]:
    """The metrics of an exposition, in its order, one family per name, labels by name. Lines of another shape and what
    comes after MOST_CHARACTERS are left out."""
    helps: dict[str, str] = {}
    counters: set[str] = set()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    n_samples = 0
    for line in text[:MOST_CHARACTERS].splitlines():
        if line.startswith("#"):
            _describe(line, helps, counters)
        elif (read := _sample(line.strip())) is not None and n_samples < MOST_SAMPLES:
            name, labels, value = read
            n_samples += 1
            found.setdefault(name, {})[labels] = value
    return tuple(_family(name, values, helps, counters) for name, values in found.items())


def _describe(line: str, helps: dict[str, str], counters: set[str]) -> None:
    """`# HELP name text` and `# TYPE name counter`."""
    words = line.split(maxsplit=3)
    if len(words) < 4 or not _NAME.match(words[2]):
        return
    if words[1] == "HELP":
        helps[words[2]] = words[3].strip()[:200]
    elif words[1] == "TYPE" and words[3].strip() == "counter":
        counters.add(words[2])


def _sample(line: str) -> tuple[str, tuple[tuple[str, str], ...], float] | None:
    match = _SAMPLE.match(line)
    if match is None:
        return None
    labels = [_LABEL.match(part.strip()) for part in (match[2] or "").split(",") if part.strip()]
    try:
        value = float(match[3])
    except ValueError:
        return None
    named = {x[1]: x[2] for x in labels if x and x[1] != "engine"}
    return match[1], tuple(sorted(named.items())), value


def _family(
    name: str, values: dict[tuple[tuple[str, str], ...], float], helps: dict[str, str], counters: set[str]
) -> Family:
    is_counter = name in counters and name.endswith("_total")
    names = {label for labels in values for label, _ in labels}
    samples = tuple(Sample(labels, value) for labels, value in values.items() if {k for k, _ in labels} == names)
    return Family(name.partition(":")[2], "counter" if is_counter else "gauge", helps.get(name, ""), samples)
