"""Recorded sessions: consecutive requests of one conversation reconcile, as sent and in other words."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policies.append_only import (
    Appended,
    Diverged,
    Repaired,
    defaults_of,
    normal,
    reconcile,
)
from policies.message_parts import only_reminders, reminders
from policies.reminders import new_reminders
from policies.replay import give_back
from proxy.api import read_messages, read_responses
from tests.policies.respellings import Message

TRACES = sorted(Path("/work/shared/traces").glob("*.jsonl"))
EDITORS = ("aider", "opencode-errors")
"""Sessions whose client really edits: aider moves its file block every turn, opencode replaces a prompt that was too
long (agents.md, sections 4 and 7)."""
LEADING = ("system", "developer")

pytestmark = pytest.mark.skipif(not TRACES, reason="the recorded sessions are not here")


def requests(path: Path) -> Iterator[tuple[list[Message], Any]]:
    """The messages behind the base, and the tools' defaults, of each request to a model."""
    for line in path.read_text().strip().split("\n"):
        record = json.loads(line)
        body = record["body"] if record["method"] == "POST" else None
        if not isinstance(body, dict):
            continue
        reader = {"/v1/messages": read_messages.read, "/v1/responses": read_responses.read}
        read = reader.get(record["path"].partition("?")[0])
        body = read(body, record["headers"]).body if read else body
        messages = body["messages"]
        first = next((i for i, m in enumerate(messages) if m["role"] not in LEADING), len(messages))
        yield messages[first:], defaults_of(body.get("tools"))


def related(path: Path, words: Any) -> Iterator[tuple[list[Message], list[Message], Any]]:
    """Each request that continues or edits an earlier one: that one's messages as sent, its own, and the relation."""
    ledgers: list[list[Message]] = []
    for messages, defaults in requests(path):
        incoming = [words(message) for message in messages]
        found = [(ledger, reconcile(ledger, incoming, defaults)) for ledger in ledgers]
        found.sort(key=lambda each: getattr(each[1], "at", 10_000 + len(each[0])))
        ledger, got = found[-1] if found else ([], Diverged(0, "content"))
        if isinstance(got, Diverged):
            ledgers.append(messages)
            if got.at == 0:
                continue
        else:
            ledgers[[each is ledger for each in ledgers].index(True)] = [*ledger, *messages[got.n_shared :]]
        yield ledger, incoming, got


def as_sent(message: Message) -> Message:
    return message


def as_resumed(message: Message) -> Message:
    """What agents do at a resume, all at once: thoughts gone, arguments sorted and escaped, parts, no reminders."""
    out = {key: value for key, value in message.items() if key not in ("reasoning_content", "name")}
    if out.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _sorted(call["function"]["arguments"])}}
            for call in out["tool_calls"]
        ]
    if isinstance(out.get("content"), str):
        text = out["content"]
        for block in reminders(message):
            text = text.replace(block, "").strip()
        out["content"] = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    return out


def _sorted(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_conversation_goes_on(path: Path) -> None:
    got = [relation for _, _, relation in related(path, as_sent)]
    assert got
    edits = [relation.why for relation in got if isinstance(relation, Diverged)]
    assert set(edits) <= ({"content", "cancelled"} if path.stem.startswith(EDITORS) else set())


@pytest.mark.parametrize(
    "path", [path for path in TRACES if not path.stem.startswith(EDITORS)], ids=lambda path: path.stem
)
def test_a_conversation_goes_on_in_other_words(path: Path) -> None:
    n = 0
    for ledger, incoming, got in related(path, as_resumed):
        assert not isinstance(got, Diverged)
        assert not new_reminders(ledger, incoming[: got.n_shared])
        n += isinstance(got, Repaired)
    assert n


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_every_answer_is_given_back(path: Path) -> None:
    for messages, defaults in requests(path):
        for message in messages:
            if message["role"] != "assistant":
                continue
            own = {**message, "reasoning_content": "Hm."}
            got, kinds = give_back(own, as_resumed(message), defaults)
            assert got["reasoning_content"] == "Hm." and "reasoning" in kinds
            assert got.get("tool_calls") == message.get("tool_calls")
            assert give_back(own, got, defaults) == (got, ())


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_messages_that_differ_do_not_become_equal(path: Path) -> None:
    """Within a session each text is another fact: equal forms come of equal texts, reminders aside."""
    forms: dict[bytes, Message] = {}
    for messages, defaults in requests(path):
        for message in messages:
            other = forms.setdefault(normal(message, defaults), message)
            if not (reminders(message) or reminders(other) or only_reminders(message)):
                assert _text(other) == _text(message)


def _text(message: Message) -> str:
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [json.dumps(part.get("text", part)) for part in content]
    return "".join(texts).strip('"').rstrip() if len(texts) == 1 else "\0".join(texts)


def test_the_relations_are_all_kinds() -> None:
    kinds = {type(got) for path in TRACES for _, _, got in related(path, as_sent)}
    assert kinds == {Appended, Repaired, Diverged}
