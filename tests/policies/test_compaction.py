"""What is replaced by a summary: properties over histories of any shape."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import compaction
from policies.compaction import Budget, Compact, Keep, Replacement, applied, plan, reserve_of, source_end
from policies.system_text import fold

Json = dict[str, Any]


def user(text: str = "ask") -> Json:
    return {"role": "user", "content": text}


def answer(text: str = "said", *ids: str) -> Json:
    calls = [{"id": i, "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if ids else {})}


def result(id_: str, text: str = "found") -> Json:
    return {"role": "tool", "tool_call_id": id_, "content": text}


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Json], list[int]]:
    """A conversation as agents have them, up to its newest question or results, and the tokens of each message."""
    messages: list[Json] = [{"role": "system", "content": "be kind"}] * draw(st.integers(0, 2))
    for turn in range(draw(st.integers(1, 7))):
        messages += [user(f"ask {turn}")] * draw(st.integers(1, 2))
        for step in range(draw(st.integers(0, 5))):
            ids = [f"c{turn}.{step}.{n}" for n in range(draw(st.integers(1, 3)))]
            messages += [answer("", *ids), *(result(i) for i in draw(st.permutations(ids)))]
        messages.append(answer(f"done {turn}"))
    if draw(st.booleans()):
        messages += [user("last")] * draw(st.integers(1, 2))
    else:
        messages += [user("last"), answer("", "x", "y"), result("x"), result("y")]
    n = len(messages)
    return messages, draw(st.lists(st.integers(1, 400), min_size=n, max_size=n))


def n_leading(messages: list[Json]) -> int:
    return sum(m["role"] == "system" for m in messages)


def planned(messages: list[Json], tokens: list[int], n_ctx: int) -> compaction.Plan:
    return plan(messages, tokens, n_leading(messages), 50, Budget(n_ctx, 64))


@given(histories(), st.integers(200, 8000))
def test_pairs_are_never_split(found: tuple[list[Json], list[int]], n_ctx: int) -> None:
    """Every result that is sent follows its call, and every call that is sent has its results."""
    messages, tokens = found
    p = planned(messages, tokens, n_ctx)
    if isinstance(p, Keep):
        return
    sent = [m for _, m in applied(messages, Replacement(p.start, p.end, p.pinned, "SUMMARY"))]
    calls = [c["id"] for m in sent for c in m.get("tool_calls", ())]
    results = [m["tool_call_id"] for m in sent if m["role"] == "tool"]
    assert sorted(calls) == sorted(results)
    for i, message in enumerate(sent):
        if message["role"] == "tool":
            assert any(message["tool_call_id"] in str(m.get("tool_calls")) for m in sent[:i])


@given(histories(), st.integers(200, 8000))
def test_what_stays(found: tuple[list[Json], list[int]], n_ctx: int) -> None:
    """The base, the first question, the newest one and the summary once; two exchanges unless the prompt cannot run."""
    messages, tokens = found
    p = planned(messages, tokens, n_ctx)
    if isinstance(p, Keep):
        return
    sent = [m for _, m in applied(messages, Replacement(p.start, p.end, p.pinned, "SUMMARY"))]
    head = compaction.head_end(messages, n_leading(messages))
    assert messages[: head - 1] == sent[: head - 1]
    assert sent[head - 1]["content"].startswith(messages[head - 1]["content"])
    assert [m for m in sent if m["role"] == "user"][-1]["content"].startswith("last")
    assert sum("SUMMARY" in m["content"] for m in sent) == 1
    n_prompt = 50 + sum(tokens)
    if n_prompt < n_ctx:
        assert 2 * p.freed >= sum(tokens[n_leading(messages) :])
        assert sum(m["role"] == "assistant" for m in messages[p.end :]) >= 2


@given(histories(), st.integers(200, 8000))
def test_roles_alternate(found: tuple[list[Json], list[int]], n_ctx: int) -> None:
    """Where they did before: a summary stands in no place that a strict template refuses."""
    messages, tokens = found
    messages = fold(messages, late_system=False, several_leading=False, must_alternate=True)
    p = planned(messages, tokens[: len(messages)], n_ctx)
    if isinstance(p, Keep):
        return
    sent = [m for _, m in applied(messages, Replacement(p.start, p.end, p.pinned, "SUMMARY"))]
    again = fold(list(sent), late_system=False, several_leading=False, must_alternate=True)
    assert [m["role"] for m in again] == [m["role"] for m in sent]


@given(histories(), st.integers(200, 8000))
def test_budget_is_respected(found: tuple[list[Json], list[int]], n_ctx: int) -> None:
    """A prompt that could not run can afterwards; Keep for one that could not means that nothing helps."""
    messages, tokens = found
    budget = Budget(n_ctx, 64)
    p = planned(messages, tokens, n_ctx)
    n_prompt = 50 + sum(tokens)
    if isinstance(p, Compact):
        assert p.freed > 0
        assert not budget.cannot_run(n_prompt - p.freed)
    assert p == planned(messages, tokens, n_ctx)


def test_the_newest_request_of_a_long_loop_stays() -> None:
    """One question and sixty steps: the steps go, the question does not."""
    steps = [m for n in range(60) for m in (answer("", f"c{n}"), result(f"c{n}"))]
    messages = [user("first"), answer(), user("do it"), *steps]
    p = plan(messages, [50] * len(messages), 0, 500, Budget(6500, 200))
    assert isinstance(p, Compact)
    assert p.pinned == (2,)
    assert p.end == len(messages) - 4
    sent = [m for _, m in applied(messages, Replacement(p.start, p.end, p.pinned, "SUMMARY"))]
    assert [m["role"] for m in sent] == ["user", "assistant", "user", *["assistant", "tool"] * 2]
    one = [user("first"), *steps]
    p = plan(one, [50] * len(one), 0, 500, Budget(6500, 200))
    assert isinstance(p, Compact)
    sent = [m for _, m in applied(one, Replacement(p.start, p.end, p.pinned, "SUMMARY"))]
    assert [m["role"] for m in sent] == ["user", *["assistant", "tool"] * 2]
    assert sent[0]["content"].endswith("SUMMARY")


def test_small_steps_are_not_worth_it() -> None:
    """Half of what lies after the base, else nothing."""
    messages = [user(), answer(), user(), answer(), user(), answer(), user()]
    assert isinstance(plan(messages, [500] * 7, 0, 4000, Budget(8192, 800)), Keep)


def test_a_second_compaction_replaces_the_first() -> None:
    """Its span begins where the first one's did."""
    messages = [m for n in range(20) for m in (user(f"{n}"), answer())] + [user("last")]
    tokens = [100] + [200] + [0] * 9 + [300] * 30
    p = plan(messages, tokens, 0, 0, Budget(9000, 200), old_end=11)
    assert isinstance(p, Compact)
    assert (p.start, p.end) == (1, 36)


@pytest.mark.parametrize(
    ("asked", "reserve"), [(None, 2048), (256, 256), (32000, 2048), (0, 0)], ids=["none", "few", "many", "zero"]
)
def test_reserve(asked: int | None, reserve: int) -> None:
    """What the request asks for, the setting at most, and never the window's larger part."""
    assert reserve_of(asked, 4096, 8192) == reserve


def test_source_ends_where_nothing_is_split() -> None:
    """As much as the slot holds; less where the answer would not fit; never less than the span."""
    messages = [user(), answer("", "a"), result("a"), answer(), user(), answer("", "b"), result("b")]
    tokens = [100] * 7
    assert source_end(messages, tokens, 3, 5, 1000) == 5
    assert source_end(messages, tokens, 3, 6, 1000) == 5
    assert source_end(messages, tokens, 3, 5, 400) == 4
    assert source_end(messages, tokens, 3, 5, 200) is None


OPENCODES = "Here is the conversation so far:\n\n<conversation>\n[User]: " + "fix it " * 200 + "\n</conversation>"
CLAUDES = (
    "CRITICAL: Respond with TEXT ONLY. "
    + "Tell all " * 600
    + (
        "Do NOT call any tools. Respond with plain text only — an <analysis> block followed by a <summary> block. Tool "
        "calls will be rejected and you will fail the task."
    )
)
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "ok"}


@pytest.mark.parametrize(
    "newest",
    [user(OPENCODES), user(CLAUDES), {"role": "user", "content": [RESULT, {"type": "text", "text": CLAUDES}]}],
    ids=["opencode", "claude", "claude in a loop"],
)
def test_recorded_requests_for_a_summary(newest: Json) -> None:
    """As opencode 1.18.33 and Claude Code 2.1.332 ask (recorded sessions; what they say else is left out)."""
    assert compaction.asks_for_summary([user("hi"), answer(), newest])
    assert not compaction.asks_for_summary([user("hi"), newest, answer()])


def test_shapes_of_requests_for_a_summary() -> None:
    """The instruction is long, newest, and the user's."""
    assert compaction.asks_for_summary([user("x" * 600 + "an <analysis> block and then a <summary> block.")])
    assert not compaction.asks_for_summary([user("x" * 600 + "<task><summary>done</summary></task>")])
    assert compaction.asks_for_summary([user("x" * 700 + "\nSummarize this conversation for a successor.")])
    assert not compaction.asks_for_summary([user("<conversation>")])
    assert not compaction.asks_for_summary([answer("<conversation>" + "x" * 600)])
    assert not compaction.asks_for_summary([])
    assert compaction.compacts_itself("claude-cli/2.1.332 (external, cli)")
    assert not compaction.compacts_itself("pi/1.6.0 (linux; node/v22.23.3; x64)")
