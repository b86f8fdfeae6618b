"""Text of a base that is edited within a conversation: whatever is told of it, in order, is what the client says."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import cast

from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.compaction import Compact
from proxy.compact import _notes
from proxy.ledger import Ledger
from tests.proxy.talk import Json, Prepared, Talk, answer, is_prefix, sent, text, user

NOTE = re.compile(r'In the system prompt, "([^"]*)" now reads "([^"]*)"\.')
PAD = "and keep the style of the code around in every file that you touch, "
STATIC = "You help people with their code.\nBe kind and brief and true in all that you say to them.\n" * 4
Figures = tuple[int, int, int, int, int, int]


def base(figures: Figures) -> str:
    """Short lines, lines that are nothing but a value, and a long line with figures that lie near and far."""
    a, b, c, d, e, f = figures
    lines = [f"Lamp {a}", f"176440000{b}", f"Only ports {c}, {d} {PAD * 3}then {e} retries {PAD * 3}.", f"Lamp {f}"]
    return STATIC + "\n".join(line for line in lines if "404" not in line)


def as_told(prepared: Prepared) -> str:
    """The system text that the model reads, with every note in order."""
    lines = str(sent(prepared)[0]["content"]).split("\n")
    for message in sent(prepared)[1:]:
        for old, new in NOTE.findall(str(message["content"])):
            whole = [i for i, line in enumerate(lines) if line == old]
            places = whole or [i for i, line in enumerate(lines) for _ in range(line.count(old))]
            assert len(places) == 1, f"nobody knows which {old!r}"
            lines[places[0]] = lines[places[0]].replace(old, new)
    return "\n".join(lines)


figure = st.sampled_from([1, 2, 3, 8001, 8002, 404])


@settings(deadline=None)
@given(st.lists(st.tuples(*[figure] * 6), min_size=2, max_size=6))
@example([(1, 1, 8001, 8002, 1, 2), (1, 1, 3, 8002, 1, 2), (1, 1, 3, 2, 1, 2), (1, 1, 8001, 8002, 1, 2)])
@example([(1, 1, 8001, 8002, 1, 2), (1, 1, 3, 8002, 1, 2), (1, 1, 8001, 8002, 3, 2)])
@example([(1, 1, 1, 1, 1, 2), (3, 1, 1, 1, 1, 8001), (8001, 1, 1, 1, 1, 8002), (1, 1, 1, 1, 1, 8001)])
def test_what_is_told_is_what_the_client_says(turns: list[Figures]) -> None:
    talk, history = Talk(session="s"), [user("go")]
    for n, figures in enumerate(turns):
        prepared = talk.send([{"role": "system", "content": base(figures)}, *history], reply=answer(f"a{n}"))
        assert as_told(prepared) == base(figures)
        history = [*history, answer(f"a{n}"), user(f"next {n}")]


def test_a_line_that_is_told_again_is_overtaken() -> None:
    """Another stretch of it is told, and no word of the one before."""
    talk, history = Talk(), [user("go")]
    edits: list[Figures] = [(1, 1, 8001, 8002, 1, 2), (1, 1, 9001, 8002, 1, 2), (1, 1, 9001, 9002, 1, 2)]
    prepared: list[Prepared] = []
    for n, figures in enumerate(edits):
        system: Json = {"role": "system", "content": base(figures)}
        prepared.append(talk.send([system, *history], reply=answer(f"a{n}")))
        history = [*history, answer(f"a{n}"), user(f"next {n}")]
    assert is_prefix(prepared[0], prepared[1]) and is_prefix(prepared[1], prepared[2])
    assert text(prepared[2]).count("now reads") == 2


def test_a_summary_tells_of_a_line_what_changed_within_its_span() -> None:
    """From what stands before the span, and nothing of a line that is again as it was there."""
    told = [(1, {"=Lamp 1": "Lamp 2", "=Luck 1": "Luck 2"}), (3, {"=Lamp 1": "Lamp 3"}), (5, {"=Lamp 1": "Lamp 1"})]
    ledger = Ledger(told=[*told, (7, {"=Seat 1": "Seat 2"}), (8, {"=Seat 1": "Seat 1"})])
    span = cast(Compact, SimpleNamespace(start=2, end=9, pinned=()))
    assert _notes(ledger, span) == ['In the system prompt, "Lamp 2" now reads "Lamp 1".']
