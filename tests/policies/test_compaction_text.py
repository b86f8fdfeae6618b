"""Instruction, faults, identifiers, digest."""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies.compaction_text import MOST_IDENTIFIER, OPEN, digest_of, fault, finished, identifiers, instruction

Json = dict[str, Any]
GOOD = "Task: port the parser. Decisions: keep the API. Open steps: run tests, then write the change log."


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (GOOD, None),
        (" \n", "empty"),
        (" fox" * 40, "repeats"),
        ("a line of text\n" * 6, "repeats"),
        (f"one two three four five six {GOOD} " * 5, "repeats"),
        (instruction(256), "repeats"),
    ],
)
def test_faults(text: str, found: str | None) -> None:
    """What is no summary, and why."""
    assert fault(text, has_calls=False, is_cut=False, asked=instruction(256)) == found


def test_faults_of_form() -> None:
    """A call is none whatever it says, and neither is half a text."""
    assert fault(GOOD, has_calls=True, is_cut=False, asked="") == "tool_call"
    assert fault(GOOD, has_calls=False, is_cut=True, asked="") == "too_long"


def history(seed: int) -> tuple[list[Json], list[str]]:
    """A span of agent work, and the identifiers in it that must not get lost."""
    dice = random.Random(seed)
    word = lambda: "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=6))  # noqa: E731
    required = [
        f"src/{word()}/{word()}.py",
        f"/home/{word()}/{word()}/notes.txt",
        f"{word()}_{word()}",
        f"{word().title()}{word().title()}Error",
        f"{dice.getrandbits(64):016x}",
        f"ABC-{dice.randint(10, 9999)}",
        f"--{word()}-{word()}",
        f"https://example.org/{word()}",
        str(dice.randint(10_000, 99_999)),
        f"{dice.randint(1, 9)}.{dice.randint(0, 30)}.{dice.randint(0, 9)}",
    ]
    messages: list[Json] = []
    left = list(required)
    dice.shuffle(left)
    for n in range(30):
        named = left.pop() if left and n % 3 == 0 else "nothing"
        filler = " ".join(word() for _ in range(60))
        call = {"id": f"c{n}", "type": "function", "function": {"name": "run", "arguments": f'{{"what": "{named}"}}'}}
        messages += [
            {"role": "user", "content": f"{filler}, then look at {named}." if n % 2 else filler},
            {"role": "assistant", "content": f"I look, and {filler}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{n}", "content": f"{filler}\n" * 5},
            {"role": "assistant", "content": [{"type": "text", "text": filler}]},
        ]
    return messages, required


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("is_model", [True, False], ids=["summary", "digest"])
def test_identifiers_survive(seed: int, *, is_model: bool) -> None:
    """Whoever sums up, the model that names half of them or nobody, every required one is there, within the bound."""
    span, required = history(seed)
    n_chars = 1200
    summary = f"{GOOD} {' and '.join(required[::2])}" if is_model else digest_of(span, n_chars)
    text = finished(summary, span, n_chars)
    assert [name for name in required if name not in text] == []
    assert len(text) < 1.4 * n_chars
    assert text == finished(summary, span, n_chars)


def test_digest_is_bounded_and_newest() -> None:
    """The newest lines that fit; reminders and the rest of a result are left out."""
    span = [
        {"role": "user", "content": "<system-reminder>secret rule</system-reminder>fix the bug\nplease"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "read", "arguments": {"p": 1}}}]},
        {"role": "tool", "content": "line one\nline two"},
    ]
    assert digest_of(span, 900) == "User: fix the bug\nCalled read {'p': 1}\nResult: line one"
    assert digest_of(span, 75).startswith("(some messages left out)\n")
    talk = [{"role": role, "content": f"{role} {n}"} for n in range(40) for role in ("user", "assistant")]
    lines = digest_of(talk, 300).splitlines()
    assert len("\n".join(lines)) <= 300
    assert lines[-1] == "Answer: assistant 39"
    assert sum(line.startswith("User") for line in lines) > sum(line.startswith("Answer") for line in lines)


def test_identifiers_take_any_shape() -> None:
    """Nothing is raised, and what is too long is no name."""
    odd: list[Json] = [
        {},
        {"role": "user", "content": 5},
        {"role": "tool", "content": [{"type": "text", "text": "a/b"}]},
    ]
    assert identifiers(odd, 100) == []
    assert identifiers([{"role": "user", "content": "x_" + "y" * (MOST_IDENTIFIER + 1)}], 900) == []


def test_an_earlier_summary_s_heading_is_not_repeated() -> None:
    """A digest goes on from the summary before it: one heading, the rest of that as it was."""
    first = finished("User: fix a.py", [], 900)
    assert finished(f"{first}\nUser: now b.py", [], 900) == f"{OPEN}\nUser: fix a.py\nUser: now b.py"
    assert finished(f"It said {OPEN}", [], 900) == f"{OPEN}\nIt said {OPEN}"


def test_notes_come_last() -> None:
    """What was told of changed values in the span is told again."""
    assert finished("S", [], 900, ["[[env:date]] is now Monday"]).splitlines()[1:] == [
        "S",
        "[[env:date]] is now Monday",
    ]
