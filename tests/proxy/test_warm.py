"""Which prompts are warmed, and what is kept beside a snapshot to make it anew."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.cli import main
from proxy.errors import UsageError
from proxy.rendering import base_body
from proxy.warm_cli import requests_in
from tests.fakes.store import open_store, publish

SYSTEM = {"role": "system", "content": "You help."}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def chat(text: str, **more: Any) -> dict[str, Any]:
    """A first request."""
    return {"messages": [SYSTEM, {"role": "user", "content": text}], "tools": TOOLS, **more}


@pytest.mark.parametrize("indent", [None, 2])
def test_one_json(indent: int | None, tmp_path: Path) -> None:
    """A body, on one line or many; or a recorded request around it."""
    file = tmp_path / "one.json"
    for found in (chat("hi"), {"path": "/v1/chat/completions", "headers": {}, "body": chat("hi")}):
        file.write_text(json.dumps(found, indent=indent))
        assert requests_in(file) == [{"body": chat("hi"), "path": found.get("path", ""), "headers": {}}]


@pytest.mark.parametrize(
    "found", [{"tools": TOOLS}, {"system": "You help.", "tools": TOOLS}, {"body": {"tools": TOOLS}}]
)
def test_tools_alone(found: dict[str, Any], tmp_path: Path) -> None:
    """What an agent begins with, without a question."""
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(found))
    [asked] = requests_in(file)
    assert asked["body"] == found.get("body", found) | {"messages": [{"role": "user", "content": "hi"}]}


def test_json_lines(tmp_path: Path) -> None:
    """One request for each base, in the order they came; the questions behind it make no difference."""
    bodies = [chat("a"), chat("b"), {**chat("a"), "tools": []}, {"input": "a", "instructions": "i"}, chat("c")]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(body) for body in bodies))
    assert [request["body"] for request in requests_in(file)] == [bodies[0], bodies[2], bodies[3]]


HOSTILE = [
    "",
    "[1]",
    "{",
    "5",
    "{}",
    '{"prompt": "x"}\n{"prompt": "y"}',
    '{"body": 5}',
    '{"body": null, "messages": []}',
    '{"path": "/v1/messages", "body": {"input": "x"}}',
    '{"messages": "x"}',
    '{"status": 400, "body": {"messages": []}}',
    '{"messages": ' + "[" * 300 + "]" * 300 + "}",
    '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}',
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_to_warm(text: str, tmp_path: Path) -> None:
    """One sentence that names the file."""
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=str(file)):
        requests_in(file)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ([], 2, "one of the two"),
        (["FILE", "--from-state"], 2, "one of the two"),
        (["/no/such/file"], 2, "cannot be read"),
        (["FILE"], 1, "No Slotkeeper runs"),
        (["--from-state"], 1, "No Slotkeeper runs"),
    ],
)
def test_wrong_usage(
    words: list[str], code: int, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence and an exit code, no traceback."""
    file = tmp_path / "one.json"
    file.write_text(json.dumps(chat("hi")))
    given = [str(file) if word == "FILE" else word for word in words]
    assert main(["warm", *given, "--state-dir", str(tmp_path)]) == code
    assert sentence in capsys.readouterr().err


def test_headers_that_are_none(tmp_path: Path) -> None:
    """Whatever a recording holds in their place."""
    file = tmp_path / "one.json"
    for headers in ([1], "x", {"a": 1}, None):
        file.write_text(json.dumps({"path": 5, "headers": headers, "body": chat("hi")}))
        assert requests_in(file) == [{"body": chat("hi"), "path": "", "headers": {}}]


def test_the_body_of_a_base() -> None:
    """What stands before the first question, and what decides how that is rendered; nothing of the conversation."""
    body = chat("secret", temperature=0.5, reasoning_effort="high", max_tokens=9)
    body["messages"] += [{"role": "assistant", "content": "secret"}, SYSTEM]
    found = orjson.loads(base_body(orjson.dumps(body)))
    assert found == {
        "messages": [SYSTEM, {"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "reasoning_effort": "high",
    }


async def test_a_prompt_lives_as_long_as_its_snapshot(tmp_path: Path) -> None:
    """It survives a restart, goes with its record, and is not kept for one that is gone."""
    store = await open_store(tmp_path)
    one, two = await publish(store, 1, 2), await publish(store, 3, 4, kind="base")
    await store.put_prompt(one.id, b'{"a":1}')
    await store.put_prompt(two.id, b'{"b":2}')
    await store.remove(one.id)
    await store.put_prompt(one.id, b"late")
    await store.close()
    store = await open_store(tmp_path)
    assert (await store.load_prompt(one.id), await store.load_prompt(two.id)) == (None, b'{"b":2}')
    await store.purge()
    assert await store.load_prompt(two.id) is None
    await store.close()
    assert b"late" not in (tmp_path / "state.db").read_bytes()
