"""What a compaction says: the instruction, what makes a summary unfit, and the digest that stands in for one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from policies.message_parts import Message, as_dict, as_list, plain, role_of, texts_of

TOKENS_PER_WORD = 2.0
"""More than English has, names and paths in it: small models write more words than they are asked for."""
OPEN = "[Earlier messages were replaced by this summary.]"
ALSO = "Also named: "
_IDENTIFIER = re.compile(
    r"https?://[^\s<>\"'`)\]}]{3,200}"
    r"|(?:~|\.{1,2})?(?:/[\w.@+~-]{1,80}){2,24}"  # paths
    r"|\b[\w@+-]{1,60}(?:/[\w.@+-]{1,60}){0,12}\.[A-Za-z][A-Za-z0-9]{0,7}\b(?::\d{1,7})?"  # files, with a line
    r"|\b[0-9a-f]{7,64}\b|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"  # hashes, UUIDs
    r"|\b[A-Z][A-Z0-9]{0,20}-\d{1,9}\b|#\d{1,9}\b"  # tickets
    r"|\b[A-Za-z]\w{0,60}_\w{1,60}\b|\b[A-Z]?[a-z0-9]{1,40}(?:[A-Z][a-z0-9]{1,40}){1,8}\b"  # snake_case, CamelCase
    r"|--[a-z][a-z0-9-]{1,40}\b|\bv?\d{1,5}(?:\.\d{1,6}){1,3}\b|\b\d{4,18}\b"  # flags, versions, numbers
)
_WEIGHT = {"user": 3, "assistant": 2, "tool": 1}
"""Whose identifiers are told first where not all can be."""
MOST_IDENTIFIER = 200
MOST_READ = 100_000
"""Characters of one text in which names are looked for: the expressions take up to 1.5 s for a million."""
IDENTIFIER_PART = 3
"""A summary's identifiers that the model left out may take this part of its room."""
WORDS_LOOKED_AT = 6
MOST_REPEATS = 4
"""A summary that says the same six words so often, or the same line, runs in circles."""
LEAST_WORDS = 30
LEAST_VARIETY = 0.25
"""Share of different words below which a text of LEAST_WORDS or more runs in circles."""
LINES_AT_LEAST, LEAST_LINE = 6, 24
"""A digest has at least so many lines, of at least so many characters each."""
CUT_USER, CUT_ANSWER, CUT_RESULT, CUT_CALL = 240, 160, 120, 100
"""Characters of the first line of each that a digest keeps."""


def instruction(n_summary: int) -> str:
    """What the model is asked, as the newest user message; short, because it is all that is new in that prompt."""
    words = int(n_summary / TOKENS_PER_WORD)
    return (
        f"Stop here. In at most {words} words of plain text, without tools, sum up this conversation for somebody who "
        "goes on with it and has nothing else. Headings: Task, Decisions, Constraints, Files and their state, Commands "
        "and results, Errors, Open steps. Copy names, paths, numbers and ids verbatim."
    )


def short_instruction(n_summary: int) -> str:
    """The same for a model that could not follow it: small ones take its headings for the summary."""
    return f"Summarize this conversation in at most {int(n_summary / TOKENS_PER_WORD)} words."


def fault(text: str, *, has_calls: bool, is_cut: bool, asked: str) -> str | None:
    """Why an answer is no summary: "tool_call", "empty", "too_long" or "repeats"; None when it is one.

    `is_cut`: it reached its bound of tokens. `asked`: the instruction, which it must not echo.
    """
    if has_calls:
        return "tool_call"
    if not text.strip():
        return "empty"
    if is_cut:
        return "too_long"
    return "repeats" if _repeats(text) or asked[:100] in text else None


def _repeats(text: str) -> bool:
    words = text.split()
    if len(words) >= LEAST_WORDS and len(set(words)) < LEAST_VARIETY * len(words):
        return True
    runs = Counter(tuple(words[i : i + WORDS_LOOKED_AT]) for i in range(len(words) - WORDS_LOOKED_AT + 1))
    lines = Counter(line.strip() for line in text.splitlines() if len(line.strip()) > MOST_REPEATS)
    return any(max(found.values(), default=0) > MOST_REPEATS for found in (runs, lines))


def identifiers(messages: Sequence[Message], most: int, told: str = "") -> list[str]:
    """Paths, names, numbers and ids that the messages hold and `told` does not, in at most `most` characters: the
    user's first, then the model's, then those of results, the newest first."""
    weight: dict[str, tuple[int, int]] = {}
    for at, message in enumerate(messages):
        worth = _WEIGHT.get(role_of(message) or "", 0)
        for text in (*texts_of(message), *_arguments(message)):
            for found in _IDENTIFIER.finditer(plain(text[:MOST_READ])):
                name = found.group().rstrip(".")
                if len(name) <= MOST_IDENTIFIER and name not in told:
                    weight[name] = max(weight.get(name, (0, 0)), (worth, at))
    names, left = [], most
    for name in sorted(weight, key=lambda n: (-weight[n][0], -weight[n][1], n)):
        left -= len(name) + 2
        if left < 0:
            break
        names.append(name)
    return names


def _arguments(message: Message) -> Iterable[str]:
    for call in as_list(message.get("tool_calls")):
        found = as_dict(as_dict(call).get("function")).get("arguments")
        yield found if isinstance(found, str) else str(found or "")


def finished(summary: str, span: Sequence[Message], n_chars: int, notes: Sequence[str] = ()) -> str:
    """The text that takes the span's place: the summary, the identifiers that it left out, and `notes` that were told
    in the span. `n_chars`: what a summary may have. One that begins with an earlier one has its heading once."""
    names = identifiers(span, n_chars // IDENTIFIER_PART, summary)
    parts = [OPEN, summary.strip().removeprefix(OPEN).lstrip(), ALSO + ", ".join(names) if names else "", *notes]
    return "\n".join(part for part in parts if part)


def digest_of(span: Sequence[Message], n_chars: int) -> str:
    """A summary without a model: what was asked, said, called and found, one cut line each, in order. Of what does not
    fit the oldest is left out; half of the room is the user's."""
    room = n_chars - n_chars // IDENTIFIER_PART
    longest = max(LEAST_LINE, room // LINES_AT_LEAST)
    lines = [(role_of(m) == "user", line[:longest]) for m in span for line in _told(m)]
    kept = _newest([i for i, (is_users, _) in enumerate(lines) if is_users], lines, room // 2)
    left = room - sum(len(lines[i][1]) + 1 for i in kept)
    kept |= _newest([i for i in range(len(lines)) if i not in kept], lines, left)
    missing = [] if len(kept) == len(lines) else ["(some messages left out)"]
    return "\n".join([*missing, *(lines[i][1] for i in sorted(kept))])


def _newest(places: Sequence[int], lines: Sequence[tuple[bool, str]], room: int) -> set[int]:
    kept: set[int] = set()
    for i in reversed(places):
        room -= len(lines[i][1]) + 1
        if room < 0:
            break
        kept.add(i)
    return kept


def _told(message: Message) -> Iterable[str]:
    role, line = role_of(message), _first_line("\n".join(map(plain, texts_of(message))))
    if role == "user" and line:
        yield f"User: {line[:CUT_USER]}"
    elif role == "assistant":
        if line:
            yield f"Answer: {line[:CUT_ANSWER]}"
        for call, arguments in zip(as_list(message.get("tool_calls")), _arguments(message), strict=True):
            name = as_dict(as_dict(call).get("function")).get("name")
            yield f"Called {name} {arguments[:CUT_CALL]}".rstrip()
    elif role == "tool" and line:
        yield f"Result: {line[:CUT_RESULT]}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
