"""Finding volatile values in texts by rules, and putting placeholders in their place.

Cost: a rule with hints looks at the lines around its hints only, so a text of 100 KB takes a few milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from policies.layout_check import MAX_BLOCK, MAX_LINE, MAX_VALUE, Action, Rule, compiled, line_limit

MIN_PATH = 4
"""Characters of the shortest path that is replaced wherever it stands; "/" or "C:" alone would hit too much."""
_BEFORE, _AFTER = 200, 400
"""Characters before and behind a hint that are looked at where its line is longer than MAX_LINE."""
_LITERAL = re.compile(r"\[\[[^\[\]\n]{1,60}\]\]")


@dataclass(frozen=True, slots=True)
class Value:
    """A volatile value: the placeholder's name without its brackets, the text that stood there, the rule's action."""

    name: str
    text: str
    action: str


@dataclass(frozen=True, slots=True)
class Learned:
    """A value found by difference: it stands between `prefix` and `suffix` on the one text line that has both."""

    prefix: str
    suffix: str
    name: str


@dataclass(frozen=True, slots=True)
class Span:
    """A value at [start, end) of text number `text`."""

    text: int
    start: int
    end: int
    name: str
    action: Action


def placeholder(name: str) -> str:
    """How a value's place is marked in the prompt."""
    return f"[[{name}]]"


_INSTRUCTIONS = re.compile(
    r"^(?:<(project_instructions|instructions|user_instructions|custom_instructions|repository_instructions"
    r"|repo_instructions|agents_?md|claude_?md)\b[^>\n]{0,200}>"
    r"|(-{2,} ?Context from: [^\n]{1,300})|(?:Instructions from: |Contents of )[^\n]{1,300})$",
    re.IGNORECASE | re.MULTILINE,
)
_INSTRUCTIONS_END = re.compile(r"^(?:<[a-z_]|Instructions from: |# ?currentDate)", re.IGNORECASE | re.MULTILINE)


def instructions_at(text: str) -> list[tuple[int, int]]:
    """Where project instructions stand (AGENTS.md and the like), as far as the agents mark them."""
    regions: list[tuple[int, int]] = []
    for found in _INSTRUCTIONS.finditer(text):
        start = found.end()
        if found[1]:
            end = text.find(f"</{found[1]}>", start)
        elif found[2]:
            end = text.find("End of Context from", start)
        else:
            follows = _INSTRUCTIONS_END.search(text, start)
            end = follows.start() if follows else -1
        regions.append((start, len(text) if end < 0 else end))
    return regions


def take_out(
    texts: Sequence[str], n_system: int, rules: Sequence[Rule], learned: Sequence[Learned]
) -> tuple[list[str], list[Value]]:
    """The texts with placeholders, and the values in the order of their first place.

    The first `n_system` texts are system text, the others tools'. Placeholders never take a name that stands in the
    texts already. Taking out again finds nothing.
    """
    values: dict[tuple[str, str], Value] = {}
    out = list(texts)
    for _ in range(4):  # what is taken out can bring a cue and a second value together: until nothing is found
        spans = _by_rules(out, n_system, rules)
        if not spans:
            break
        out = _replace(out, spans, values)
    spans = _by_difference(out[:n_system], learned)
    return (_replace(out, spans, values) if spans else out), list(values.values())


def _by_rules(texts: Sequence[str], n_system: int, rules: Sequence[Rule]) -> list[Span]:
    lowered = [text.lower() for text in texts]
    taken: list[list[tuple[int, int]]] = [[] for _ in texts]
    spans: list[Span] = []
    system, tools = range(n_system), range(n_system, len(texts))
    shielded = [instructions_at(text) for text in texts[:n_system]]
    tool_blob = "\n".join(lowered[n_system:])
    for rule in rules:
        places = [*(system if rule.where != "tools" else ()), *(tools if _may_be_in(rule, tool_blob) else ())]
        for i in places:
            closed = shielded[i] if i < n_system else []
            for start, end in _matches(rule, texts[i], lowered[i]):
                if all(end <= a or b <= start for a, b in (*taken[i], *closed)):
                    taken[i].append((start, end))
                    spans.append(Span(i, start, end, rule.name, rule.action))
    return [*spans, *_other_places(texts, spans, taken)]


def _may_be_in(rule: Rule, blob: str) -> bool:
    return rule.where != "system" and (not rule.hints or any(hint in blob for hint in rule.hints))


def _matches(rule: Rule, text: str, lowered: str) -> Iterator[tuple[int, int]]:
    """Spans of the rule's group in `text`, whose lower-case form is `lowered` (of the same length)."""
    if len(lowered) != len(text):  # a few letters change their length: then hints cannot be looked up
        lowered = text
    pattern = compiled(rule)
    most = MAX_BLOCK if rule.block else MAX_VALUE
    done = 0
    for start, end in _windows(rule, text, lowered):
        for found in pattern.finditer(text, max(start, done), end):
            a, b = found.span(1)
            if rule.action == "path":
                b = a + len(_bare_path(text[a:b]))
            if 0 < b - a <= most and "[[" not in text[a:b] and "]]" not in text[a:b]:
                yield a, b
                done = max(done, b)


def _bare_path(path: str) -> str:
    return path.rstrip("/\\") or path


def _windows(rule: Rule, text: str, lowered: str) -> Iterable[tuple[int, int]]:
    if not rule.hints:
        return _lines(text, line_limit(rule.pattern))
    at = sorted({i for hint in rule.hints for i in _places(lowered, hint)})
    return _merged(text, at, MAX_BLOCK if rule.block else 0)


def _places(lowered: str, hint: str) -> Iterator[int]:
    i = lowered.find(hint)
    while i >= 0:
        yield i
        i = lowered.find(hint, i + len(hint))


def _merged(text: str, at: Iterable[int], reach: int) -> Iterator[tuple[int, int]]:
    done = -1
    for i in at:
        if i >= done:
            start, done = _around(text, i, reach)
            yield start, done


def _around(text: str, i: int, reach: int) -> tuple[int, int]:
    """From the start of the line at `i` to the end of the line behind it, or `reach` characters from `i`.

    Of lines longer than MAX_LINE only what is near `i`.
    """
    line = text.rfind("\n", max(0, i - MAX_LINE), i) + 1
    start = line if line or i <= MAX_LINE else i - _BEFORE
    end = text.find("\n", i, i + MAX_LINE)
    if end < 0:
        end = min(len(text), i + (MAX_LINE if len(text) - i <= MAX_LINE else _AFTER))
    elif (following := text.find("\n", end + 1, end + MAX_VALUE + 20)) >= 0:
        end = following
    else:
        end = min(len(text), end + MAX_VALUE + 20)
    return start, min(len(text), max(end, i + reach))


def _lines(text: str, limit: int) -> Iterator[tuple[int, int]]:
    start = 0
    for line in text.split("\n"):
        if 0 < len(line) <= limit:
            yield start, start + len(line)
        start += len(line) + 1


def _other_places(texts: Sequence[str], spans: Sequence[Span], taken: Sequence[list[tuple[int, int]]]) -> list[Span]:
    """Where the values of path rules stand besides, longer values first, taken or not by another rule."""
    names: dict[str, str] = {}
    for span in sorted(spans, key=lambda span: (span.text, span.start)):
        value = texts[span.text][span.start : span.end]
        if span.action == "path" and len(value) >= MIN_PATH:
            names.setdefault(value, span.name)
    found: list[Span] = []
    for value in sorted(names, key=len, reverse=True):
        for i, text in enumerate(texts):
            for start in _places(text, value):
                end = start + len(value)
                if _is_path_at(text, start, end) and all(end <= a or b <= start for a, b in taken[i]):
                    taken[i].append((start, end))
                    found.append(Span(i, start, end, names[value], "path"))
    return found


_BEFORE_PATH = re.compile(r"(?:^|[^\w.~/\\-]|://)\Z")
_BEHIND_PATH = re.compile(r"(?![\w-])(?!\.\w)")


def _is_path_at(text: str, start: int, end: int) -> bool:
    """Whether the path at [start, end) is not a piece of a longer component."""
    return bool(_BEFORE_PATH.search(text[max(0, start - 3) : start])) and bool(_BEHIND_PATH.match(text, end))


def _replace(texts: Sequence[str], spans: Sequence[Span], values: dict[tuple[str, str], Value]) -> list[str]:
    """`texts` with placeholders in the places of `spans`; new values are added to `values` by (rule name, text)."""
    used = {literal for text in texts for literal in _LITERAL.findall(text)}
    used.update(placeholder(value.name) for value in values.values())
    pieces: list[list[str]] = [[] for _ in texts]
    done = [0] * len(texts)
    for span in sorted(spans, key=lambda span: (span.text, span.start)):
        text = texts[span.text]
        value = _value(span, text[span.start : span.end], used, values)
        pieces[span.text] += [text[done[span.text] : span.start], placeholder(value.name)]
        done[span.text] = span.end
    return ["".join([*piece, text[end:]]) for piece, text, end in zip(pieces, texts, done, strict=True)]


def _value(span: Span, text: str, used: set[str], values: dict[tuple[str, str], Value]) -> Value:
    known = values.get((span.name, text))
    if known is None:
        name, number = span.name, 1
        while placeholder(name) in used:
            number += 1
            name = f"{span.name}_{number}"
        used.add(placeholder(name))
        known = values[span.name, text] = Value(name, text, span.action)
    return known


def _by_difference(texts: Sequence[str], learned: Sequence[Learned]) -> list[Span]:
    spans: list[Span] = []
    for known in learned:
        places = [Span(i, a, b, known.name, "move") for i, text in enumerate(texts) for a, b in lines_of(text, known)]
        if len(places) == 1 and not _overlaps(places[0], spans) and "[[" not in _cut(texts, places[0]):
            spans += places
    return spans


def lines_of(text: str, known: Learned) -> Iterator[tuple[int, int]]:
    """Where a value may stand between the prefix and the suffix of `known` on one line of `text`."""
    for i in _places(text, known.prefix) if known.prefix else (start for start, _ in _lines(text, len(text))):
        start = i + len(known.prefix)
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        is_line = (i == 0 or text[i - 1] == "\n") and text.endswith(known.suffix, start, end)
        if is_line and start < end - len(known.suffix) <= start + MAX_VALUE:
            yield start, end - len(known.suffix)


def _overlaps(span: Span, spans: Sequence[Span]) -> bool:
    return any(other.text == span.text and other.start < span.end and span.start < other.end for other in spans)


def _cut(texts: Sequence[str], span: Span) -> str:
    return texts[span.text][span.start : span.end]
