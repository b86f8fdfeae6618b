"""What Codex and Claude Code send, cut short: replayed in their own dialects on a template that takes everything and on
one that refuses system text in mid-conversation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.api import read_messages, read_responses
from tests import anthropic_events
from tests.conftest import StartProxy
from tests.proxy import responses_parser
from tests.servers import ProxyServer

Json = dict[str, Any]
DATA = Path(__file__).parent.parent / "data"
CODEX: list[Json] = json.loads((DATA / "codex-cut.json").read_text())
CLAUDE: list[Json] = [json.loads(line) for line in (DATA / "claude-tool-search.jsonl").read_text().splitlines()]
SHORT = {"temperature": 0, "ignore_eos": True}
AGENTS: dict[str, tuple[str, list[Json], Json, Callable[[bytes], Any]]] = {
    "codex": ("/v1/responses", CODEX, {"max_output_tokens": 4, **SHORT}, responses_parser.parse_stream),
    "claude": ("/v1/messages?beta=true", CLAUDE, {"max_tokens": 4, **SHORT}, anthropic_events.read),
}
READERS = {"codex": read_responses.read, "claude": read_messages.read}


def goes_on(agent: str, body: Json, before: Json) -> bool:
    """Whether the engine's prompt for `body` begins with all of the one before."""
    new, old = READERS[agent](body, {}).body, READERS[agent](before, {}).body
    n = len(old["messages"])
    return new["tools"] == old["tools"] and new["messages"][:n] == old["messages"] and len(new["messages"]) > n


@pytest.mark.parametrize("template", ["chatml-tools.jinja", "strict.jinja", "alternating.jinja"])
@pytest.mark.parametrize("agent", AGENTS)
async def test_a_session_goes_on(agent: str, template: str, proxy_server: StartProxy) -> None:
    """No errors, every answer by the schema, each turn where the last one ended, no token computed twice."""
    path, bodies, short, parse = AGENTS[agent]
    flags = ("--jinja", "--chat-template-file", str(DATA / template))
    proxy = await proxy_server("--parallel", "2", "--ctx-size", "16384", model="dense", engine_flags=flags)
    held = 0
    for number, body in enumerate(bodies):
        parse(await raw(proxy, path, body | short))
        record = (await proxy.client.get("/slotkeeper/requests")).json()["requests"][0]
        assert (record["outcome"], record["cause"]) == ("ok", None)
        if number:
            assert goes_on(agent, body, bodies[number - 1])
            assert record["placement"] == "continue"
            assert record["cache_n"] >= held
        held = record["cache_n"] + record["prompt_n"]
        # A session is asked again as it is: everything but the last token is there.
        parse(await raw(proxy, path, body | short))
        again = (await proxy.client.get("/slotkeeper/requests")).json()["requests"][0]
        assert (again["line"], again["cache_n"] + again["prompt_n"]) == (record["line"], held)
    assert record["dialect"] == path.split("?")[0].removeprefix("/v1/")
    assert "Traceback" not in proxy.said()


async def raw(proxy: ProxyServer, path: str, body: Json) -> bytes:
    """The bytes of a streamed answer; fails with the body of any other."""
    answer = await proxy.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    return answer.content
