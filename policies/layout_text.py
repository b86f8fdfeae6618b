"""Finding volatile values in texts by rules, and putting placeholders in their place.

Cost: a rule with hints looks at the lines around its hints only, so a text of 100 KB takes a few milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import AnyStr

from policies.layout_check import MAX_BLOCK, MAX_LINE, MAX_VALUE, Action, Rule, compiled, line_limit, shape_of
from policies.layout_shapes import DAY, MONTH

MIN_PATH = 4
"""Characters of the shortest path that is replaced wherever it stands; "/" or "C:" alone would hit too much."""
MAX_PLACES = 64
"""Places of one rule in one text; where there are more they are no values of a prompt, and all stay."""
MIN_SHARED = 8
"""Characters from which on equal values share a placeholder; shorter ones ("2MB", "yes") may be equal by chance, and
then the base would depend on it."""
_EVERYWHERE = frozenset("/tmp /var /var/tmp /usr /etc /opt /mnt /home /root /dev /bin /src /Users C:\\Windows".split())
"""Paths that stand in static texts, too: only replaced where a rule finds them."""
MAX_PASSES = 4
"""Times that the rules are applied; the second one finds nothing, as a rule."""
MAX_WORDS = 4
"""Words of a value without figures and signs; more are a sentence."""
_SIGN = re.compile(r"\d|[/\\@#%~$_=]|\[\[env:")
"""A digit, or what paths, names of things and meters are written with; or a placeholder, which was volatile before."""
_CALENDAR = re.compile(rf"[\W]*(?:{DAY}|{MONTH})[\W]*", re.IGNORECASE)
MARK = re.compile(r"\[\[env:[^\[\]\n]{1,60}\]\]")
"""A placeholder in a text."""
MOST_MARK = 70
"""Characters that no MARK is longer than."""


@dataclass(frozen=True, slots=True)
class Value:
    """A volatile value: the placeholder's name without its brackets, the text that stood there, the rule's action."""

    name: str
    text: str
    action: str


@dataclass(frozen=True, slots=True)
class Learned:
    """A value found by difference: it stands between `prefix` and `suffix` on the one text line that has both, and is
    shaped like a value or, where `is_words`, a few words."""

    prefix: str
    suffix: str
    name: str
    is_words: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A value at [start, end) of text number `text`."""

    text: int
    start: int
    end: int
    name: str
    action: Action


def placeholder(name: str) -> str:
    """How a value's place is marked in the prompt. The prefix keeps it apart from what people and models write: R's
    `df[[date]]`, a wiki's `[[date]]`, TOML's `[[files]]` are nobody's placeholders."""
    return f"[[env:{name}]]"


def touches_mark(text: str, start: int, end: int) -> bool:
    """Whether [start, end) of a text holds a placeholder or cuts through one."""
    around = MARK.finditer(text, max(0, start - MOST_MARK), end + MOST_MARK)
    return any(found.start() < end and start < found.end() for found in around)


_INSTRUCTIONS = re.compile(
    r"^(?:<(project_instructions|instructions|user_instructions|custom_instructions?|repository_instructions"
    r"|repo_instructions|agents_?md|claude_?md|file path=)\b[^>\n]{0,200}>"
    r"|-{2,} ?Context from: [^\n]{1,300}|(`{5,})[^\n`]{0,40}|USER'S CUSTOM INSTRUCTIONS"
    r"|(?:Instructions from: |Contents of )[^\n]{1,300})$",
    re.IGNORECASE | re.MULTILINE,
)
_INSTRUCTIONS_END = re.compile(
    r"^(?:<[a-z_]|Instructions from: |# ?currentDate|-{2,} ?End of Context from: )", re.IGNORECASE | re.MULTILINE
)


def instructions_at(text: str) -> list[tuple[int, int]]:
    """Where project instructions stand (AGENTS.md and the like), as far as the agents mark them.

    Between tags (pi, OpenHands, Crush) or long fences (Zed); from a heading to the next tag or the end (opencode,
    Claude Code, Qwen Code, Roo).
    """
    regions: list[tuple[int, int]] = []
    for found in _INSTRUCTIONS.finditer(text):
        start = found.end()
        if regions and start < regions[-1][1]:
            continue
        if closing := found[1] or found[2]:
            mark = f"\n{closing}" if found[2] else f"</{closing.split(' ')[0]}>"
            end = text.find(mark, start)
        else:
            follows = _INSTRUCTIONS_END.search(text, start)
            end = follows.start() if follows else -1
        regions.append((start, len(text) if end < 0 else end))
    return regions


def take_out(
    texts: Sequence[str],
    n_system: int,
    rules: Sequence[Rule],
    learned: Sequence[Learned],
    literal: Callable[[], str] = str,
) -> tuple[list[str], list[Value]]:
    """The texts with placeholders, and the values in the order of their first place.

    The first `n_system` texts are system text, the others tools'. Placeholders never take a name that stands in the
    texts or in what `literal` returns already. Taking out again finds nothing.
    """
    values = _Values(literal)
    out = list(texts)
    looked_at: Iterable[int] = range(len(out))
    for _ in range(MAX_PASSES):  # what is taken out can bring a cue and another value together
        spans = _by_rules(out, n_system, rules, looked_at)
        if not spans:
            break
        out = _replace(out, spans, values)
        looked_at = sorted({span.text for span in spans})
    spans = _by_difference(out, n_system, learned)
    return (_replace(out, spans, values) if spans else out), values.found


def _by_rules(texts: Sequence[str], n_system: int, rules: Sequence[Rule], looked_at: Iterable[int]) -> list[Span]:
    taken = [bytearray(len(text)) for text in texts]  # per character: 1 taken, 2 closed to rules
    spans: list[Span] = []
    for i in looked_at:
        text, marks = _Text(texts[i]), taken[i]
        for start, end in instructions_at(texts[i]) if i < n_system else ():
            marks[start:end] = b"\2" * (end - start)
        for rule in rules:
            if rule.where == ("tools" if i < n_system else "system"):
                continue
            places = list(islice(text.matches(rule), MAX_PLACES + 1))
            for start, end in places if len(places) <= MAX_PLACES else ():
                if marks.count(0, start, end) == end - start:
                    marks[start:end] = b"\1" * (end - start)
                    spans.append(Span(i, start, end, rule.name, rule.action))
    return [*spans, *_other_places(texts, spans, taken)] if spans else []


class _Text:
    """A text that many rules are tried on: where hints stand is looked up once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._shape = shape_of(text)
        self._around: dict[tuple[tuple[str, ...], bool], list[tuple[int, int]]] = {}

    def matches(self, rule: Rule) -> Iterator[tuple[int, int]]:
        """Spans of the rule's group."""
        pattern, text = compiled(rule), self.text
        most = MAX_BLOCK if rule.block else MAX_VALUE
        done = 0
        for start, end in self._windows(rule):
            for found in pattern.finditer(text, max(start, done), end):
                a, b = found.span(1)
                if rule.action == "path":
                    b = a + len(text[a:b].rstrip("/\\") or text[a:b])
                if 0 < b - a <= most and not touches_mark(text, a, b):
                    yield a, b
                    done = max(done, b)

    def _windows(self, rule: Rule) -> Iterable[tuple[int, int]]:
        """What of the text a rule is tried on: the lines around its hints, else each line that is short enough."""
        if not rule.hints:
            return _lines(self.text, line_limit(rule.pattern))
        key = rule.hints, rule.block
        if key not in self._around:
            self._around[key] = list(self._find(*key))
        if not rule.near:
            return self._around[key]
        near = [text.encode("latin-1") for text in rule.near]
        return (
            (start, end)
            for start, end in self._around[key]
            if any(self._shape.find(text, start, end) >= 0 for text in near)
        )

    def _find(self, hints: tuple[str, ...], block: bool) -> Iterator[tuple[int, int]]:
        done = -1
        for i in sorted({i for hint in hints for i in _places(self._shape, hint.encode("latin-1"))}):
            if i >= done:
                start, done = _around(self.text, i, MAX_BLOCK if block else 0)
                yield start, done


def _places(text: AnyStr, piece: AnyStr) -> Iterator[int]:
    i = text.find(piece)
    while i >= 0:
        yield i
        i = text.find(piece, i + len(piece))


def _line_before(text: str, start: int) -> int:
    """Where the line before the one at `start` begins; `start` if there is none or it is longer than MAX_VALUE."""
    before = text.rfind("\n", max(0, start - 1 - MAX_VALUE), max(0, start - 1)) + 1
    return before if before or start <= MAX_VALUE else start


def _around(text: str, i: int, reach: int) -> tuple[int, int]:
    """The line at `i`, the two before and the one behind it, and `reach` characters from `i`.

    Of lines longer than MAX_LINE only what is near `i`, of the lines beside it MAX_VALUE characters.
    """
    line = text.rfind("\n", max(0, i - MAX_LINE), i) + 1
    cut = not line and i > MAX_LINE
    start = i - MAX_VALUE if cut else _line_before(text, _line_before(text, line))
    end = text.find("\n", i + 1, i + MAX_LINE)
    if end < 0:
        end = len(text) if len(text) - i <= MAX_LINE else i + 2 * MAX_VALUE
    else:
        following = text.find("\n", end + 1, end + MAX_VALUE)
        end = following if following >= 0 else end + MAX_VALUE
    return start, min(len(text), max(end, i + reach))


def _lines(text: str, limit: int) -> Iterator[tuple[int, int]]:
    start = 0
    for line in text.split("\n"):
        if 0 < len(line) <= limit:
            yield start, start + len(line)
        start += len(line) + 1


def _other_places(texts: Sequence[str], spans: Sequence[Span], taken: Sequence[bytearray]) -> list[Span]:
    """Where the values of path rules stand besides, longer values first, in project instructions, too."""
    names: dict[str, str] = {}
    for span in sorted(spans, key=lambda span: (span.text, span.start)):
        value = texts[span.text][span.start : span.end]
        if span.action == "path" and len(value) >= MIN_PATH and value not in _EVERYWHERE:
            names.setdefault(value, span.name)
    found: list[Span] = []
    for value in sorted(names, key=len, reverse=True):
        for i, text in enumerate(texts):
            for start in _places(text, value):
                end = start + len(value)
                is_free = taken[i].find(1, start, end) < 0 and not touches_mark(text, start, end)
                if is_free and _is_path_at(text, start, end):
                    taken[i][start:end] = b"\1" * len(value)
                    found.append(Span(i, start, end, names[value], "path"))
    return found


_BEFORE_PATH = re.compile(r"(?:^|[^\w.~/\\-]|://)\Z")
_BEHIND_PATH = re.compile(r"(?![\w-])(?!\.\w)")


def _is_path_at(text: str, start: int, end: int) -> bool:
    """Whether the path at [start, end) is not a piece of a longer component."""
    return bool(_BEFORE_PATH.search(text[max(0, start - 3) : start])) and bool(_BEHIND_PATH.match(text, end))


class _Values:
    """The values found so far, and which placeholders are free."""

    def __init__(self, literal: Callable[[], str]) -> None:
        self.found: list[Value] = []
        self._by_text: dict[tuple[str, str], Value] = {}
        self._last: dict[str, int] = {}
        self._used: set[str] = set()
        self._literal = literal

    def reserve(self, texts: Iterable[str]) -> None:
        """Take no name that stands in `texts`; at the first call none of the whole base, either."""
        more = () if self._used else (self._literal(),)
        self._used.update(literal for text in (*texts, *more) for literal in MARK.findall(text))

    def get(self, span: Span, text: str) -> Value:
        shared = span.action == "path" or len(text) >= MIN_SHARED
        known = self._by_text.get((span.name, text)) if shared else None
        if known is None:
            known = Value(self._free(span.name), text, span.action)
            self.found.append(known)
            self._by_text.setdefault((span.name, text), known)
        return known

    def _free(self, name: str) -> str:
        number = self._last.get(name, 0) + 1
        while placeholder(numbered := name if number == 1 else f"{name}_{number}") in self._used:
            number += 1
        self._last[name] = number
        self._used.add(placeholder(numbered))
        return numbered


def _replace(texts: Sequence[str], spans: Sequence[Span], values: _Values) -> list[str]:
    """`texts` with placeholders in the places of `spans`; new values are added to `values`."""
    values.reserve(texts)
    pieces: list[list[str]] = [[] for _ in texts]
    done = [0] * len(texts)
    for span in sorted(spans, key=lambda span: (span.text, span.start)):
        text = texts[span.text]
        value = values.get(span, text[span.start : span.end])
        pieces[span.text] += [text[done[span.text] : span.start], placeholder(value.name)]
        done[span.text] = span.end
    return [
        "".join([*piece, text[end:]]) if end else text for piece, text, end in zip(pieces, texts, done, strict=True)
    ]


def _by_difference(texts: Sequence[str], n_system: int, learned: Sequence[Learned]) -> list[Span]:
    """Values of `learned`, none in project instructions: a line may stand there that was learned elsewhere."""
    spans: list[Span] = []
    regions = {i: instructions_at(text) for i, text in enumerate(texts[:n_system])} if learned else {}
    for known in sorted(learned, key=lambda known: len(known.prefix) + len(known.suffix)):  # the widest span first
        places = [
            Span(i, a, b, known.name, "move")
            for i, text in enumerate(texts)
            for a, b in lines_of(text, known)
            if not any(start <= a < end for start, end in regions.get(i, ()))
        ]
        if len(places) != 1 or _overlaps(places[0], spans):
            continue
        (place,) = places
        if not touches_mark(texts[place.text], place.start, place.end):
            spans.append(place)
    return spans


def has_shape(text: str) -> bool:
    """Whether it looks like a value rather than like words for the model: a day or month, or at least every other word
    is a figure, a path or a name with signs in it."""
    words = text.split()
    n_signed = sum(_SIGN.search(word) is not None for word in words)
    return 2 * n_signed >= len(words) > 0 or _CALENDAR.fullmatch(text) is not None


def lines_of(text: str, known: Learned) -> Iterator[tuple[int, int]]:
    """Where a value may stand between the prefix and the suffix of `known` on one line of `text`."""
    for i in _places(text, known.prefix) if known.prefix else (start for start, _ in _lines(text, len(text))):
        start = i + len(known.prefix)
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        is_line = (i == 0 or text[i - 1] == "\n") and text.endswith(known.suffix, start, end)
        end -= len(known.suffix)
        if not is_line or not start < end <= start + MAX_VALUE:
            continue
        if has_shape(text[start:end]) or (known.is_words and len(text[start:end].split()) <= MAX_WORDS):
            yield start, end


def _overlaps(span: Span, spans: Sequence[Span]) -> bool:
    return any(other.text == span.text and other.start < span.end and span.start < other.end for other in spans)
