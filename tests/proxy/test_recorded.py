"""Recorded requests of all dialects, their answers, and what repair makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from policies.flatten import flatten
from proxy.audit import Audit
from proxy.audit_repair import Repair
from proxy.recorded import Recorded, Trace, dialect_of, echoed

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "x"}
RESP = {
    "reasoning": "I think",
    "text": "I look",
    "calls": [{"name": "read", "args": '{"a": 1}', "id": "c1"}, {"function": {"name": "ls", "arguments": {}}}],
}
SYSTEM = "You are a coding agent.\nWorking directory: {cwd}\nToday's date: {date}\n" + "Follow the rules. " * 60


@pytest.mark.parametrize(
    ("path", "body", "dialect"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, "chat"),
        ("/v1/messages?beta=true", {"messages": [USER]}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [USER]}, None),
        ("/v1/responses", {"input": [USER]}, "responses"),
        ("/v1/embeddings", {"input": ["x"]}, None),
        ("/completion", {"prompt": "x"}, "completion"),
        ("/v1/models", {}, None),
        ("", {"messages": [USER]}, "chat"),
        ("", {"messages": [USER], "system": "s"}, "messages"),
        ("", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "r"}]}]}, "messages"),
        ("", {"input": "x"}, "responses"),
    ],
)
def test_dialects(path: str, body: Json, dialect: str | None) -> None:
    """By the path where it was recorded, else by the shapes of the body."""
    assert dialect_of(path, body) == dialect


def test_a_recorded_line(tmp_path: Path) -> None:
    """Headers in lower case, the answer as an assistant message."""
    line = {"path": "/v1/chat/completions", "headers": {"X-Session-Id": "s"}, "body": {"messages": []}, "resp": RESP}
    (tmp_path / "t.jsonl").write_text(f"\n{json.dumps(line)}\n")
    (found,) = Trace(tmp_path / "t.jsonl")
    assert (found.number, found.headers) == (2, {"x-session-id": "s"})
    assert found.reply is not None
    assert (found.reply["content"], found.reply["reasoning_content"]) == ("I look", "I think")
    calls = [call["function"] for call in found.reply["tool_calls"]]
    assert calls == [{"name": "read", "arguments": '{"a": 1}'}, {"name": "ls", "arguments": "{}"}]


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_answers_in_every_dialect(tmp_path: Path, dialect: Any) -> None:
    """The same texts in the same order, wherever a dialect puts them."""
    (tmp_path / "t.jsonl").write_text(json.dumps({"body": {"messages": []}, "resp": RESP}))
    (found,) = Trace(tmp_path / "t.jsonl")
    name = "input" if dialect == "responses" else "messages"
    pieces = flatten({name: [USER, *echoed(dialect, found.reply or {})]})
    assert [p.text for p in pieces if p.text] == ["x", "I think", "I look", "read", '{"a": 1}', "ls", "{}"]


def asked(*texts: str, date: str = "Sun Nov 29 2026", cwd: str = "/home/dev/repo") -> Json:
    """A chat body with volatile values at the start."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": SYSTEM.format(date=date, cwd=cwd)}, *messages]}


def report(*bodies: Json) -> Json:
    """The report on some chat bodies, repaired ones beside them."""
    with Repair() as repair:
        audit = Audit(sent=repair.sent)
        for i, body in enumerate(bodies, 1):
            audit.add(Recorded(i, body, "chat"))
    return audit.to_json()


def test_repair_keeps_a_conversation_over_midnight() -> None:
    """As it was, the next day's first request shares the lines above the date; repaired, all but what is new."""
    bodies = [asked(*"abcdefg"[: 2 * n + 1], date="Sun Nov 29 2026" if n < 3 else "Mon Nov 30 2026") for n in range(4)]
    found = report(*bodies)
    base = len(SYSTEM) / 3.8
    assert found["was"]["processed_tokens"] > 1.9 * base
    assert found["repaired"]["processed_tokens"] < 1.2 * base
    assert found["repaired"]["hit_rate"] > found["was"]["hit_rate"] + 0.2
    assert found["not_repaired"] == 0


def test_repair_makes_two_directories_one_base() -> None:
    """The second session of an agent in another directory finds the first one's base."""
    found = report(asked("a"), asked("b", cwd="/srv/other/place"))
    assert found["was"]["hit_rate"] < 0.1 < 0.4 < found["repaired"]["hit_rate"]


def test_what_slotkeeper_refuses_is_counted_as_it_came() -> None:
    """A body that no engine would read is no reason to end the audit."""
    found = report(asked("a"), {"messages": [{"content": "no role"}]}, asked("a", "b", "c"))
    assert found["not_repaired"] == 1 and found["requests"] == 3
