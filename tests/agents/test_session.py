"""The pure parts of a session: what is answered to which request, what counts as wrong, what is sent again when."""

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.agents import AGENTS, AIDER, CODEX, OPENCODE, Agent, quoted
from tests.agents.checks import WANTED, wrong
from tests.agents.engines import Puppet, ScriptedLlama, instead, split
from tests.agents.install import commands
from tests.agents.play import Room
from tests.agents.readme import Block
from tests.agents.replay import before, short
from tests.agents.script import AFTER, BEFORE, DONE, TASKS, Answer, Steps, answer, is_main, place
from tests.agents.tap import Seen
from tests.conftest import StartProxy
from tests.fakes.llama import FakeLlama
from tests.live.talk import events_of

Json = dict[str, Any]
WITH_TOOLS = [agent for agent in AGENTS if agent is not AIDER]


def called(said: Answer, number: int) -> Json:
    """An answer as it comes back in the history."""
    assert said.call is not None
    function = {"name": said.call.name, "arguments": json.dumps(said.call.arguments)}
    return {"role": "assistant", "tool_calls": [{"id": f"call{number:05}", "type": "function", "function": function}]}


def session(steps: Steps, tools: list[Json]) -> list[Json]:
    """The bodies of a whole session, answered by `answer`."""
    messages: list[Json] = [{"role": "system", "content": "Be brief."}]
    bodies = []
    for task in TASKS:
        messages.append({"role": "user", "content": [{"type": "text", "text": f"<env/>{task}"}]})
        while True:
            body = {"tools": tools, "messages": messages[:]}
            bodies.append(body)
            said = answer(body, steps)
            if said.call is None:
                messages.append({"role": "assistant", "content": said.text})
                break
            messages += [called(said, len(bodies)), {"role": "tool", "content": "ok"}]
    return bodies


@pytest.mark.parametrize("agent", WITH_TOOLS, ids=lambda a: a.name)
def test_the_script_goes_on(agent: Agent) -> None:
    """Each request of a session gets the next answer, the last of each task says so."""
    bodies = session(agent.steps, [{"type": "function"}])
    said = [answer(body, agent.steps) for body in bodies]
    assert said == [step for task in agent.steps for step in task]
    assert [s.text for s in said if s.call is None] == list(DONE)
    assert place(bodies[-1]) == (1, 1)


def test_the_script_edits_without_tools() -> None:
    """aider's answer holds a search-and-replace block whose old lines stand in the file, once."""
    body = {
        "messages": [{"role": "system", "content": "a *SEARCH/REPLACE block*"}, {"role": "user", "content": TASKS[0]}]
    }
    text = answer(body, AIDER.steps).text
    old, new = text.split("SEARCH\n")[1].split("\n>>>>>>>")[0].split("\n=======\n")
    assert BEFORE.count(old) == 1
    assert BEFORE.replace(old, new) == AFTER


def test_side_requests_are_told_apart() -> None:
    """A title has no tools; where JSON is wanted it gets JSON."""
    title: Json = {"messages": [{"role": "user", "content": f"A title for: {TASKS[0]}"}], "tools": []}
    assert not is_main(title)
    assert answer(title, OPENCODE.steps).call is None
    wanted = answer(title | {"response_format": {"type": "json_schema"}}, OPENCODE.steps)
    assert json.loads(wanted.text) == {"title": "Greet in German"}


@pytest.mark.parametrize("step", [s for a in AGENTS for task in a.steps for s in task])
def test_deltas_hold_the_whole_answer(step: Answer) -> None:
    """Put together they are the text and the arguments."""
    deltas = step.deltas(7)
    assert "".join(d.get("content", "") for d in deltas) == step.text
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert bool(calls) == (step.call is not None)
    if step.call is not None:
        assert calls[0]["id"] == "call00007"
        assert json.loads("".join(c["function"]["arguments"] for c in calls)) == step.call.arguments


def seen(number: int, *, tools: bool = True, **more: Any) -> Seen:
    """A request that began at second 2n and was answered a second later."""
    body: Json = {"tools": [{}]} if tools else {}
    placed = "continue" if number else "cold"
    facts: Json = {"ended": 2.0 * number + 1, "status": 200, "line": "main", "placement": placed}
    return Seen("POST", "/v1/chat/completions", body, 2.0 * number, **(facts | more))


GOOD = [seen(0), seen(1, tools=False, line="side", placement="cold"), seen(2), seen(3)]


def test_a_good_session_has_nothing_wrong() -> None:
    """A side request in between is no turn."""
    assert wrong(GOOD, WANTED, 3) == []


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (2, {"status": 503}, "answered with 503"),
        (2, {"status": 0}, "answered with 0"),
        (3, {"placement": "fork"}, "turn 3 was placed 'fork'"),
        (1, {"line": "main"}, "side request 1"),
        (1, {"status": 400}, "answered with 400"),
    ],
)
def test_what_is_wrong_is_said(number: int, change: Json, said: str) -> None:
    """One thing changed, one sentence."""
    requests = [replace(s, **change) if i == number else s for i, s in enumerate(GOOD)]
    [sentence] = wrong(requests, WANTED, 3)
    assert said in sentence


def test_missing_turns_and_files_are_wrong() -> None:
    """An agent that gave up early, or changed nothing."""
    assert wrong(GOOD, WANTED | {"greet.py": BEFORE}, 4) == [f"greet.py holds {BEFORE!r}", "3 turns, not 4"]


def test_requests_run_beside_each_other_as_they_did() -> None:
    """One that came before another was answered does not wait for it."""
    assert before(GOOD) == [[], [0], [0, 1], [0, 1, 2]]
    assert before([seen(0, ended=5.0), seen(1), seen(3)]) == [[], [], [0, 1]]


def test_replayed_requests_are_short() -> None:
    """One token, in the dialect's own field."""
    one = replace(GOOD[0], path="/v1/responses", body={"input": [], "max_completion_tokens": 9})
    assert short(one) == {"input": [], "max_output_tokens": 1}


async def test_the_puppets_events() -> None:
    """Progress, role, figures and [DONE] are the engine's; the text is the script's, before the finish."""

    async def data() -> Any:
        for piece in (
            b'data: {"choices":[{"delta":{"content":null,"role":"assistant"}}]}\n',
            b"\ndata: [DO",
            b"NE]\n\n",
        ):
            yield piece

    assert [event async for event in split(data())] == [
        b'data: {"choices":[{"delta":{"content":null,"role":"assistant"}}]}',
        b"data: [DONE]",
    ]
    for kept in (b'data: {"prompt_progress":{}}', b'data: {"choices":[],"timings":{}}', b"data: [DONE]", b": comment"):
        assert instead(kept, [{"content": "x"}], "stop") == [kept + b"\n\n"]
    assert instead(b'data: {"choices":[{"delta":{"content":"fox"},"finish_reason":null}]}', [], "stop") == []
    last = b'data: {"choices":[{"delta":{},"finish_reason":"length"}],"timings":{"prompt_n":5}}'
    made = [json.loads(e.removeprefix(b"data: ")) for e in instead(last, [{"content": "x"}], "stop")]
    assert [m["choices"][0]["finish_reason"] for m in made] == [None, "stop"]
    assert [m.get("timings") for m in made] == [None, {"prompt_n": 5}]


async def test_the_puppet_asks_for_one_token() -> None:
    """The engine computes the prompt; the client gets the script, and everything else as the engine has it."""
    async with FakeLlama(api_key="engine-key") as fake, Puppet(fake.url, "engine-key", CODEX.steps) as puppet:
        async with httpx.AsyncClient(base_url=puppet.url, trust_env=False) as client:
            assert (await client.get("/props", headers={"authorization": "Bearer other"})).json()["total_slots"] == 2
            body = {"messages": [{"role": "user", "content": TASKS[0]}], "tools": [{}], "max_completion_tokens": 99}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            async with client.stream("POST", "/v1/chat/completions", json=body) as found:
                message, finish = assembled([event async for event in events_of(found)])
        [asked] = fake.model_requests
    assert (asked.body["max_tokens"], "max_completion_tokens" in asked.body) == (1, False)
    assert (message["content"], finish) == (CODEX.steps[0][0].text, "tool_calls")


def test_an_agent_sees_nothing_of_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its home is the README's; keys and settings of the person who runs this stay away from it."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    room = Room(tmp_path)
    room.furnish(Block(((".one/settings.json", "{}"),), "one"))
    environment = room.environment(Path("/programs"), AIDER)
    assert "secret" not in environment.values()
    assert environment["PATH"].startswith("/programs:")
    assert (Path(environment["HOME"]) / ".one" / "settings.json").read_text() == "{}"
    assert room.files() == {"greet.py": BEFORE}


@pytest.mark.parametrize("word", [*TASKS, "it's", "a b", "$HOME"])
def test_a_task_is_one_word(word: str) -> None:
    """Whatever stands in it."""
    assert shlex.split(quoted(word)) == [word]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda a: a.name)
def test_installed_at_its_version(agent: Agent) -> None:
    """The registry's ordinary client, a pinned version, a folder of its own."""
    words = [word for command in commands(agent, Path("/place")) for word in command]
    pin = "==" if agent.registry == "python" else "@"
    assert f"{agent.package}{pin}{agent.version}" in words
    assert "/place" in words


async def test_a_scripted_session_through_slotkeeper(proxy_server: StartProxy) -> None:
    """Codex's script by a plain client: every turn after the first goes on where the last prompt ended."""
    async with ScriptedLlama(CODEX.steps) as fake:
        proxy = await proxy_server("--upstream", fake.url)
        messages: list[Json] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TASKS[0]}]
        tools = [{"type": "function", "function": {"name": "exec_command", "parameters": {"type": "object"}}}]
        finished = ""
        while finished != "stop":
            body = {"model": "your-model", "messages": messages, "tools": tools, "stream": True}
            async with proxy.client.stream("POST", "/v1/chat/completions", json=body) as found:
                events = [event async for event in events_of(found)]
            message, finished = assembled(events)
            messages += [message, {"role": "tool", "tool_call_id": "x", "content": "ok"}]
        records = (await proxy.client.get("/slotkeeper/requests")).json()["requests"][::-1]
    assert [r["placement"] for r in records] == ["cold", "continue", "continue", "continue"]
    for one, two in pairwise(records):
        assert two["cache_n"] >= one["cache_n"] + one["prompt_n"] - 1  # a fake token may reach over the border


def assembled(events: list[Json]) -> tuple[Json, str]:
    """(assistant message, finish reason) of a stream."""
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    message: Json = {"role": "assistant", "content": text}
    if calls:
        function = {"name": calls[0]["function"]["name"]}
        function["arguments"] = "".join(c["function"]["arguments"] for c in calls)
        message["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": function}]
    return message, next(reason for e in reversed(events) for c in e["choices"] if (reason := c["finish_reason"]))
