"""Summaries in the place of old messages: asked for, checked, kept, dropped; without an engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from policies.compaction import Replacement
from policies.message_parts import size_of
from policies.types import Match
from proxy import compact
from proxy.api.read import Told, read
from proxy.aside import Collected
from proxy.compact import Compaction
from proxy.config import Settings
from proxy.engine import Engine
from proxy.engine_errors import too_long
from proxy.errors import ContextExceeded
from proxy.ledger import Ledger
from proxy.lines import Identity, new_line
from proxy.prepare import Prepared, keep, prepare
from proxy.rendering import Tokens
from proxy.settle import Record
from tests.proxy.talk import Json, Talk, answer, call, result, sent, system, text, tool, user

GOOD = "Task: look. Decisions: none. Open steps: look at the rest."
N_CTX, BYTES_PER_TOKEN = 2000, 4


def history(n: int, size: int = 400) -> list[Json]:
    """So many turns of twice that many bytes, and one more question."""
    turns = [m for i in range(n) for m in (user(f"ask {i} " + "x" * size), answer(f"said {i} " + "y" * size))]
    return [system(), *turns, user("last")]


@dataclass
class Client(Talk):
    """A talk whose requests may be compacted, by a model that says `answers`, one after the other."""

    answers: list[Json] = field(default_factory=list)
    asked: list[Prepared] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    is_refused: bool = False
    record: Record = field(default_factory=lambda: Record("r", "t", "chat", "main", 0.0))

    def say(self, messages: list[Json], tools: list[Json] | None = None, *, off: bool = False) -> Prepared:
        """One request, as an exchange would send it, and what it does behind the answer."""
        return asyncio.run(self._say(messages, tools, off))

    async def _say(self, messages: list[Json], tools: list[Json] | None, off: bool) -> Prepared:
        self.service.settings = Settings()
        body = {"messages": messages, "max_tokens": 100, **({"tools": tools} if tools else {})}
        told = Told(self.headers, self.mode, self.service.normals, compaction=not off)
        r = read("chat", "/v1/chat/completions", orjson.dumps(body), Identity("local", self.session), told)
        prepared = await prepare(self.service, r)
        found = prepared.found
        line = found.line if found.is_same_line and found.line else new_line(r.who, r.prompt, r.first_user, "main")
        self.record = Record("r", "t", "chat", "main", time.time())
        engine = cast(Engine, SimpleNamespace(n_ctx=N_CTX, can_rewind=True))
        prepared = await Compaction(self.service, engine, line, r, self.record, self._ask).fitted(prepared)
        self.service.lines.advance(line, prepared.request.prompt, n_tokens(prepared))
        if prepared.ledger is not None:
            keep(self.service, line, prepared.ledger)
        return prepared

    def refused(self, messages: list[Json], n_prompt: int) -> Prepared:
        """The engine says that a request is longer than we counted."""
        self.is_refused = True
        self.service.settings = Settings()
        told = Told({}, self.mode, self.service.normals, compaction=True)
        body = orjson.dumps({"messages": messages, "max_tokens": 100})
        r = read("chat", "/v1/chat/completions", body, Identity("local", self.session), told)
        line = new_line(r.who, r.prompt, r.first_user, "main")
        engine = cast(Engine, SimpleNamespace(n_ctx=N_CTX, can_rewind=True))

        async def run() -> Prepared:
            prepared = await prepare(self.service, r)
            work = Compaction(self.service, engine, line, r, self.record, self._ask)
            return await work.forced(await work.fitted(prepared), too_long(n_prompt, N_CTX))

        return asyncio.run(run())

    async def _ask(self, prepared: Prepared, is_sure: bool) -> Collected:
        assert is_sure is not self.is_refused, "that it fits is known before anybody is asked"
        self.asked.append(prepared)
        out = Collected()
        found = {"finish_reason": "stop", "message": answer(GOOD)} | (self.answers.pop(0) if self.answers else {})
        message = found.pop("message") or {}
        calls = [{"index": i, **c} for i, c in enumerate(message.get("tool_calls", ()))]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        for choice in ({"delta": delta, "finish_reason": None}, {"delta": {}, **found}):
            await out.write(b"data: " + orjson.dumps({"choices": [{"index": 0, **choice}]}) + b"\n\n")
        return out


def n_tokens(prepared: Prepared) -> int:
    n = sum(size_of(orjson.dumps(m)) for m in sent(prepared)) + len(orjson.dumps(prepared.request.body.get("tools")))
    return n // BYTES_PER_TOKEN


@pytest.fixture(autouse=True)
def rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token for every four bytes."""

    async def render(engine: Any, request: Any, line: Any) -> Tokens:
        n = sum(size_of(orjson.dumps(m)) for m in request.body["messages"])
        n += len(orjson.dumps(request.body.get("tools")))
        return Tokens(bytes(4 * (n // BYTES_PER_TOKEN)))

    monkeypatch.setattr(compact, "render", render)


def test_a_summary_takes_the_place_and_stays() -> None:
    client = Client()
    messages = history(9)
    client.say(messages[:-4])
    one = client.say(messages)
    assert client.record.compaction["outcome"] == "summary"
    assert GOOD in text(one) and "ask 2" not in text(one) and "ask 0" in text(one) and "ask 8" in text(one)
    assert n_tokens(one) < 0.6 * N_CTX
    (question,) = client.asked
    shown = sent(question)
    assert shown[:-1] == sent(client.ask(messages))[: len(shown) - 1]
    assert shown[-1]["content"].startswith("Stop here.")
    assert question.kind == "compaction" and question.request.max_tokens is not None
    two = client.say([*messages, answer("ok"), user("more")])
    assert two.found.match is Match.EXTENDS
    assert sent(two)[: len(sent(one))] == sent(one)
    assert len(client.asked) == 1


def test_it_survives_state_db() -> None:
    client = Client()
    messages = history(9)
    one = client.say(messages)
    assert one.ledger is not None
    again = Ledger.from_extra(orjson.loads(orjson.dumps(one.ledger.to_extra())))
    assert again.replaced == one.ledger.replaced != []
    line = next(iter(client.service.lines))
    again.sent, line.ledger = None, again
    two = client.say([*messages, answer("ok"), user("more")])
    assert sent(two)[: len(sent(one))] == sent(one)


def test_an_edit_in_the_span_drops_it_and_one_behind_does_not() -> None:
    client = Client()
    messages = history(9)
    one = client.say(messages)
    assert one.ledger is not None
    behind = [*messages[:-1], user("something else"), answer(), user("go on")]
    assert GOOD in text(client.say(behind))
    inside = [*messages[:4], *history(1)[1:]]
    assert GOOD not in text(client.say(inside))
    assert "ask 1" in text(client.say(inside))


@pytest.mark.parametrize(
    ("unfit", "n_asked", "outcome"),
    [
        ([{"message": answer("")}], 2, "summary"),
        ([{"message": call()}, {"message": answer(" fox" * 50)}], 2, "digest"),
        ([{"finish_reason": "length"}, {"finish_reason": "length"}], 2, "digest"),
        ([{"message": answer("z " * 4000)}, {"message": None}], 2, "digest"),
    ],
)
def test_what_is_no_summary_is_asked_for_once_more(unfit: list[Json], n_asked: int, outcome: str) -> None:
    client = Client(answers=unfit)
    one = client.say(history(9), [tool("look")])
    assert (len(client.asked), client.record.compaction["outcome"]) == (n_asked, outcome)
    assert client.asked[0].request.body["temperature"] == 0
    assert client.asked[-1].request.body["temperature"] > 0
    assert client.asked[0].request.body["tool_choice"] == "none"
    assert client.asked[0].request.body["tools"] == one.request.body["tools"]
    if outcome == "digest":
        assert "User: ask 5" in text(one)


def test_a_second_one_replaces_the_first() -> None:
    client = Client()
    messages = history(9)
    one = client.say(messages)
    more = [m for i in range(9, 14) for m in (answer(f"said {i} " + "y" * 400), user(f"ask {i} " + "x" * 400))]
    client.answers = [{"message": answer("")}] * 2
    two = client.say([*messages, *more])
    assert client.record.compaction["outcome"] == "digest"
    assert one.ledger is not None and two.ledger is not None
    assert len(two.ledger.replaced) == 2
    assert text(two).count("replaced by this summary") == 1
    assert "Open steps: look at the rest" in text(two), "what the first one said is not lost"
    assert n_tokens(two) < n_tokens(one) + 600


def test_values_told_in_the_span_are_told_again() -> None:
    client = Client()
    messages = history(9)
    client.say([*messages[:3], user("early")])
    later = [system("Mon Nov 30 2026"), *messages[1:]]
    client.say([*later[:5], user("midnight")])
    client.say([*later[:7], user("after")])
    one = client.say(later)
    assert GOOD in text(one)
    assert text(one).count("[[env:date]] is now Mon Nov 30 2026") == 1


def test_prunes_come_first() -> None:
    client = Client()
    steps = [m for i in range(9) for m in (call(id_=f"c{i}"), result("r" * 700, f"c{i}"))]
    messages = [system(), user("go"), *steps]
    client.say(messages[:-2])
    pruned = [{**m, "content": "[Old tool result content cleared]"} if m.get("tool_call_id") else m for m in steps[:-2]]
    one = client.say([system(), user("go"), *pruned, *steps[-2:]])
    assert client.record.compaction["outcome"] == "pruned"
    assert client.asked == []
    assert text(one).count("cleared]") == 8
    assert "r" * 700 in text(one)


def test_prunes_that_are_not_enough() -> None:
    """The summary is asked for on what the slot holds, the prunes undone; what is sent then has them done."""
    client = Client()
    steps = [m for i in range(9) for m in (call(id_=f"c{i}"), result(f"{i} " + "r" * 800, f"c{i}"))]
    messages = [system(), user("go"), *steps]
    before = client.say(messages[:-4])
    pruned = [
        {**m, "content": "[Old tool result content cleared]"} if m.get("tool_call_id") == "c1" else m for m in steps
    ]
    one = client.say([system(), user("go"), *pruned])
    assert client.record.compaction["outcome"] == "summary"
    (question,) = client.asked
    shown = sent(question)[:-1]
    assert shown == sent(before)[: len(shown)] and len(shown) > 4
    assert "0 rrr" not in text(one) and text(one).count("cleared]") <= 1


@pytest.mark.parametrize("at", [1, 5])
def test_an_image_is_not_as_long_as_its_data(at: int) -> None:
    """Wherever it stands: old text goes, though nearly all bytes are the image's."""
    client, messages = Client(), history(6)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * 50_000}}
    messages[at] = {"role": "user", "content": [{"type": "text", "text": "see"}, picture]}
    one = client.say(messages)
    assert client.record.compaction["outcome"] in ("summary", "digest")
    assert ("data:image" in text(one)) is (at == 1)
    assert 2 <= text(one).count(" " + "y" * 300) <= 4


def test_off_sends_what_the_client_sent() -> None:
    client = Client()
    messages = history(9)
    client.say(messages)
    whole = client.say([*messages, answer("ok"), user("more")], off=True)
    assert GOOD not in text(whole) and "ask 3" in text(whole)
    assert (whole.found.match, whole.found.shared) == (Match.EDITED, 2)
    observed = Client(mode="observe")
    assert len(sent(observed.say(messages))) == len(messages)


def test_nothing_helps() -> None:
    client = Client()
    one = client.say([system(), user("a"), answer("b"), user("x" * N_CTX * BYTES_PER_TOKEN)])
    assert client.record.compaction == {} and client.asked == []
    assert len(sent(one)) == 4


def test_what_the_engine_refuses_is_compacted_once() -> None:
    client = Client()
    one = client.refused(history(8), N_CTX + 100)
    assert GOOD in text(one)
    assert client.record.compaction["outcome"] == "summary"
    hopeless = Client()
    with pytest.raises(ContextExceeded, match=f"request \\({N_CTX * 2} tokens\\)"):
        hopeless.refused([system(), user("a"), answer("b"), user("x" * 9000)], N_CTX * 2)
    impossible = "slotkeeper_compactions_total", {"outcome": "impossible"}
    assert hopeless.service.metrics.registry.get_sample_value(*impossible) == 1


def test_clients_that_compact_by_themselves() -> None:
    """Known by what they call themselves, or by their asking for a summary; which is sent as it is while it fits."""
    client = Client(headers={"user-agent": "opencode/1.18.33"})
    client.say(history(1))
    assert all(line.has_own for line in client.service.lines)
    asks = Client()
    messages = history(9)
    asks.say(messages[:-1])
    one = asks.say([*messages[:-1], user("Summarize the conversation so far. " + "z" * 600)])
    assert one.kind == "compaction" and asks.record.compaction == {}
    assert all(line.has_own for line in asks.service.lines)


def test_sizes_are_those_of_what_is_sent() -> None:
    ledger = Ledger(sent=[b"a" * 10, b"b" * 20, b"c" * 30, b"d" * 40, b"e" * 50])
    ledger = replace(ledger, replaced=[Replacement(1, 4, (3,), "12345")])
    assert ledger.sizes() == (10, 5, 0, 40, 50)
    assert ledger.branch(4).replaced and not ledger.branch(3).replaced


def test_a_tail_of_more_tokens_than_its_bytes_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept may be of another script than what goes: it is counted, and more goes where that was not enough."""
    client, messages = Client(), history(9)
    messages[-4] = answer("文" * 500)

    async def render(engine: Any, request: Any, line: Any) -> Tokens:
        n = sum(len(m["content"]) // 40 + m["content"].count("文") * 4 for m in request.body["messages"])
        return Tokens(bytes(4 * n))

    monkeypatch.setattr(compact, "render", render)
    one = client.say(messages)
    assert client.record.compaction["after"] < N_CTX / 2
    assert text(one).count("文") < 200, "at most what a digest cites of it"
    assert (client.record.compaction["outcome"], len(client.asked)) == ("digest", 0), "the larger span fits no question"


def test_what_cannot_be_helped_says_nothing_of_a_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it leave half a record."""
    client, messages = Client(), history(9)
    messages[-1] = user("文" * 600)

    async def render(engine: Any, request: Any, line: Any) -> Tokens:
        n = sum(m["content"].count("文") * 4 for m in request.body["messages"])
        return Tokens(bytes(4 * n))

    monkeypatch.setattr(compact, "render", render)
    one = client.say(messages)
    assert len(sent(one)) == len(messages)
    assert "outcome" not in client.record.compaction
