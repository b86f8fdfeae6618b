"""A draft model: slot files hold nothing of it, so nothing is restored; the rest is as without Slotkeeper."""

from pathlib import Path

import orjson

from tests.conftest import StartEngine, StartProxy
from tests.live.talk import CHATML, Json, engine_state, foxes

FLAGS = ("--parallel", "2", "--ctx-size", "4096")
BODY: Json = {"max_tokens": 24, "temperature": 0, "cache_prompt": True}


def drafted(answer: Json) -> tuple[str, int, int]:
    """Text, tokens drafted, tokens of them accepted."""
    t = answer["timings"]
    return answer["choices"][0]["message"]["content"], t["draft_n"], t["draft_n_accepted"]


async def test_a_draft_model_works_as_without_us(
    proxy_server: StartProxy, live_engine: StartEngine, tiny_models: dict[str, Path]
) -> None:
    """The tiny model as its own draft, three turns, a restart before the last: answers and acceptance are the same."""
    flags = (*CHATML, "--model-draft", str(tiny_models["dense"]), "--spec-type", "draft-simple")
    first = [{"role": "user", "content": foxes(300, "Draft")}]
    second = [*first, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    engine = await live_engine("dense", extra=flags)
    expected = []
    for messages in (first, second):
        body = orjson.dumps({**BODY, "messages": messages, "id_slot": 0})
        headers = {"content-type": "application/json"}
        answer = await engine.client.request("POST", "/v1/chat/completions", content=body, headers=headers)
        expected.append(drafted(answer.json()))
    await engine.client.erase_slot(0)
    body = orjson.dumps({**BODY, "messages": second, "id_slot": 0})
    answer = await engine.client.request("POST", "/v1/chat/completions", content=body, headers=headers)
    expected.append(drafted(answer.json()))
    assert expected[0][1] > 0, "nothing was drafted"
    found, placements = [], []
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=flags)
    for messages in (first, second, None):
        if messages is None:
            assert (await engine_state(proxy))["snapshots"]["count"] == 0
            assert await proxy.stop() == 0
            proxy = await proxy_server(*FLAGS, model="dense", engine_flags=flags)
        reply = await proxy.client.post("/v1/chat/completions", json={**BODY, "messages": messages or second})
        assert reply.status_code == 200, (reply.text, proxy.said())
        placements.append(reply.headers["x-slotkeeper-placement"])
        found.append(drafted(reply.json()))
    assert (found, placements) == (expected, ["cold", "continue", "cold"]), proxy.said()
