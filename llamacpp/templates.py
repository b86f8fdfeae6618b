"""Two changes of a chat template's text that keep a prompt append-only; everything else in it stays as it is.

The clock: llama.cpp's `strftime_now(FORMAT)` (common/jinja/value.cpp) and the variables `date_string` and `datetime`
that it hands to every template (common/chat.cpp, common_chat_extra_context) print the date into the prompt's beginning,
so that every prompt is new at midnight. `fix_clock` makes them print a constant.
Reasoning: templates of the Qwen3 family leave out what was thought before the last question, so that each question
changes the turns before it. `keep_reasoning` makes them keep it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ENGINE_CLOCK = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}
"""Variables that llama.cpp sets to its own clock, and how (common/chat.cpp, common_chat_extra_context)."""
VALUE = "template_date"
"""Name of the first value; a second format is `template_date_2`, and so on."""
_PRINTING_FILTERS = frozenset({"trim", "string", "safe"})
"""What leaves a constant a constant."""


@dataclass(frozen=True, slots=True)
class FixedClock:
    """A template whose clock stands still.

    text: the template. It prints a mark for each of `values`: (name, strftime format of what it printed before).
    arguments: (argument, name): template arguments (`chat_template_kwargs`) that say what to print in place of the
    mark. defaults: (argument, mark): those that the engine sets to its clock by itself, unless its start says so.
    """

    text: str
    values: tuple[tuple[str, str], ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()


class Token(NamedTuple):
    """A piece of code in a template: kind is open, close, string, name or other; start and end are characters."""

    kind: str
    text: str
    start: int
    end: int


def fix_clock(template: str, mark: Callable[[str], str]) -> FixedClock:
    """Every clock whose result is only printed becomes a constant, unless a template argument says otherwise: `mark` of
    its name, which must hold nothing that ends a string literal.

    Pure, and applied to its own `text` it changes nothing. Calls with anything but one plain string literal, or whose
    result is taken apart or compared, are left alone.
    """
    tokens = list(code(template))
    calls = [i for i in _calls(tokens) if _can_be_fixed(tokens, i)]
    variables = [v for v in ENGINE_CLOCK if _reads(tokens, v) and _is_only_printed(tokens, v)]
    formats = [tokens[i + 2].text[1:-1] for i in calls] + [ENGINE_CLOCK[v] for v in variables]
    names = {form: VALUE + (f"_{n}" if n > 1 else "") for n, form in enumerate(dict.fromkeys(formats), 1)}
    edits = []
    for i in calls:
        name = names[tokens[i + 2].text[1:-1]]
        constant = f"({name} if {name} is defined else '{mark(name)}')"
        edits.append((tokens[i].start, tokens[i + 3].end, constant))
    own = {names[tokens[i + 2].text[1:-1]] for i in calls}
    given = tuple((v, names[ENGINE_CLOCK[v]]) for v in variables)
    return FixedClock(
        text=_edited(template, edits),
        values=tuple((name, form) for form, name in names.items()),
        arguments=(*((name, name) for name in names.values() if name in own), *given),
        defaults=tuple((variable, mark(name)) for variable, name in given),
    )


def prints_clock(template: str, fixed: Iterable[str] = ()) -> bool:
    """Whether a template prints the engine's clock; `fixed`: those of ENGINE_CLOCK that were given to the engine."""
    tokens = list(code(template))
    return any(True for _ in _calls(tokens)) or any(_reads(tokens, v) for v in ENGINE_CLOCK if v not in set(fixed))


def keep_reasoning(template: str) -> str | None:
    """The template with the reasoning of all assistant turns kept, where they have any; None for another family.

    Recognised is one condition `loop.index0 > ns.last_query_index` that decides whether `reasoning_content` is printed.
    A history without reasoning renders as before, and a template that was changed here comes back unchanged.
    """
    tokens = list(code(template))
    found = [(i, n) for i in range(len(tokens)) if (n := _is_behind_last_query(tokens, i))]
    if len(found) != 1:
        return None
    (start, count) = found[0]
    tag = _tag(tokens, start)
    words = [t.text for t in tokens[tag.start : tag.stop]]
    if words[1] not in ("if", "elif") or "not" in words or not _sets(tokens[: tag.start], "reasoning_content"):
        return None
    if not any(_prints(tokens, part, "reasoning_content") for part in _branch(tokens, tag.stop)):
        return None
    end = start + count
    if [t.text for t in tokens[end : end + 2]] == ["or", "reasoning_content"]:
        return template
    condition = template[tokens[start].start : tokens[end - 1].end]
    return _edited(template, [(tokens[start].start, tokens[end - 1].end, f"({condition} or reasoning_content)")])


# --- a template's code ------------------------------------------------------------------------------------------------

_OPEN = re.compile(r"\{[{%#]")
_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<name>[A-Za-z_]\w*)"""
    r"""|(?P<other>[0-9.]+[0-9]|==|!=|<=|>=|//|\*\*|\S)""",
    re.DOTALL,
)
_SPACE = re.compile(r"\s*")


def code(template: str) -> Iterator[Token]:
    """The tokens of everything within `{{ }}` and `{% %}`; text, comments and an unfinished end are passed over."""
    at = 0
    while (opening := _OPEN.search(template, at)) is not None:
        at = opening.end()
        if opening.group() == "{#":
            end = template.find("#}", at)
            at = len(template) if end < 0 else end + 2
            continue
        close = re.compile(r"[-+]?" + re.escape("}}" if opening.group() == "{{" else "%}"))
        yield Token("open", opening.group(), opening.start(), at)
        depth = 0
        if template[at : at + 1] in ("-", "+"):
            at += 1
        while True:
            at = _SPACE.match(template, at).end()  # type: ignore[union-attr]
            if depth == 0 and (closing := close.match(template, at)) is not None:
                yield Token("close", closing.group(), at, closing.end())
                at = closing.end()
                break
            if (match := _TOKEN.match(template, at)) is None:
                return
            depth += (match.group() == "{") - (match.group() == "}")
            yield Token(str(match.lastgroup), match.group(), at, match.end())
            at = match.end()


def _edited(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    """The text with the given spans replaced; spans in order and apart from each other."""
    parts, at = [], 0
    for start, end, new in edits:
        parts += [text[at:start], new]
        at = end
    return "".join([*parts, text[at:]])


def _text(tokens: Sequence[Token], i: int) -> str:
    return tokens[i].text if 0 <= i < len(tokens) else ""


def _tag(tokens: Sequence[Token], i: int) -> range:
    """The tokens of the `{{ }}` or `{% %}` that holds token i, its ends included."""
    start = next(j for j in range(i, -1, -1) if tokens[j].kind == "open")
    stop = next((j for j in range(i, len(tokens)) if tokens[j].kind == "close"), len(tokens) - 1)
    return range(start, stop + 1)


def _names(tokens: Sequence[Token], name: str) -> Iterator[int]:
    """Where a variable stands: not an attribute, not a keyword argument, not what is being assigned."""
    for i, token in enumerate(tokens):
        if token.kind == "name" and token.text == name and _text(tokens, i - 1) != "." and _text(tokens, i + 1) != "=":
            yield i


# --- the clock --------------------------------------------------------------------------------------------------------


def _calls(tokens: Sequence[Token]) -> Iterator[int]:
    return (i for i in _names(tokens, "strftime_now") if _text(tokens, i + 1) == "(")


def _reads(tokens: Sequence[Token], variable: str) -> bool:
    """Whether its value is used, not only asked for (`is defined`)."""
    return any(_text(tokens, i + 1) != "is" for i in _names(tokens, variable))


def _can_be_fixed(tokens: Sequence[Token], i: int) -> bool:
    """`strftime_now ( "..." )` whose result, or the variable that it is assigned to, is only printed."""
    if i + 3 >= len(tokens) or tokens[i + 2].kind != "string" or tokens[i + 3].text != ")":
        return False
    if "\\" in tokens[i + 2].text or "%" not in tokens[i + 2].text or _is_taken_apart(tokens, i, i + 4):
        return False
    start = _tag(tokens, i).start
    target = _text(tokens, start + 2)
    return _text(tokens, start + 1) != "set" or _is_only_printed(tokens, target)


def _is_only_printed(tokens: Sequence[Token], variable: str) -> bool:
    return not any(_is_taken_apart(tokens, i, i + 1) for i in _names(tokens, variable))


def _is_taken_apart(tokens: Sequence[Token], start: int, end: int) -> bool:
    """Whether the value of tokens start to end is compared, indexed, asked for an attribute or given to a filter."""
    after, before = _text(tokens, end), _text(tokens, start - 1)
    if after == "|":
        return _text(tokens, end + 1) not in _PRINTING_FILTERS
    compares = {"==", "!=", "<", ">", "<=", ">=", "in"}
    return after in {".", "[", *compares} or before in compares


# --- reasoning --------------------------------------------------------------------------------------------------------

_BEHIND = ("loop", ".", "index0", ">")


def _is_behind_last_query(tokens: Sequence[Token], i: int) -> int:
    """How many tokens from i on are `loop.index0 > ns.last_query_index`, or the same with a plain variable; else 0."""
    texts = [t.text for t in tokens[i : i + 7]]
    if tuple(texts[:4]) != _BEHIND:
        return 0
    if texts[4:5] == ["last_query_index"]:
        return 5
    return 7 if texts[5:] == [".", "last_query_index"] and tokens[i + 4].kind == "name" else 0


def _sets(tokens: Sequence[Token], variable: str) -> bool:
    return any(
        t.text == "set" and _text(tokens, i - 1) == "{%" and _text(tokens, i + 1) == variable
        for i, t in enumerate(tokens)
    )


def _branch(tokens: Sequence[Token], at: int) -> Iterator[range]:
    """The tags from `at` on, until the branch of an `if` ends."""
    depth = 0
    while at < len(tokens):
        tag = _tag(tokens, at)
        word = _text(tokens, at + 1) if tokens[at].text == "{%" else ""
        if depth == 0 and word in ("else", "elif", "endif"):
            return
        depth += (word == "if") - (word == "endif")
        yield tag
        at = tag.stop


def _prints(tokens: Sequence[Token], tag: range, variable: str) -> bool:
    return tokens[tag.start].text == "{{" and any(tokens[i].text == variable for i in tag)
