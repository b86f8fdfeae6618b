"""A slow prefill is not lost: a client that gives up on it and asks again finds it going on, or done."""

import asyncio
from contextlib import suppress

import httpx
import pytest

from tests.conftest import StartProxy
from tests.live.talk import (
    CHATML,
    FOX,
    Json,
    all_free,
    engine_state,
    events_of,
    foxes,
    piece_of,
    post,
    until_engine,
    user,
)
from tests.servers import ProxyServer

LONG = 20_000
"""Tokens of the prompt."""
RETRIES = 5
REPORTED: Json = {**FOX, "stream": True, "return_progress": True}
FLAGS = ("--parallel", "2", "--ctx-size", "49152")


async def records(proxy: ProxyServer) -> list[Json]:
    """Requests that are over."""
    found: list[Json] = (await proxy.client.get("/slotkeeper/requests")).json()["requests"]
    return found


async def until_share(proxy: ProxyServer, body: Json, share: float) -> bool:
    """A client that leaves when so much of its prompt is done; False when it was answered before."""
    async with proxy.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for event in events_of(answer):
            progress = event.get("prompt_progress")
            if progress and progress["processed"] > share * progress["total"]:
                return True
            if piece_of(event):
                return False
    return False


@pytest.mark.parametrize("model", ["dense", "swa", "hybrid"])
async def test_five_retries_cost_one_prefill(model: str, proxy_server: StartProxy) -> None:
    """A client that gives up after every third of the prompt and asks again: processed at most 1.02 times the prompt,
    on memory that can be rewound and on memory that cannot."""
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    body = {"messages": user(foxes(LONG)), "max_tokens": 4, **REPORTED}
    shares = (0.3, 0.3, 0.6, 0.6, 0.9)[:RETRIES]
    assert await until_share(proxy, body, shares[0])
    for share in shares[1:]:
        if not await until_share(proxy, body, share):
            break
    last = (await post(proxy, "/v1/chat/completions", body)).raw["timings"]
    await until_engine(proxy, all_free)
    n_prompt = last["cache_n"] + last["prompt_n"]
    assert n_prompt > LONG
    processed = sum(record["prompt_n"] for record in await records(proxy))
    assert processed <= 1.02 * n_prompt, await records(proxy)
    assert sum(record["joined"] for record in await records(proxy)) >= 3


@pytest.mark.parametrize("model", ["dense", "hybrid"])
async def test_nobody_comes_back(model: str, proxy_server: StartProxy) -> None:
    """The prompt is processed to its end and stays in its slot: the same question, and the next, find it there."""
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    body = {"messages": user(foxes(6000)), "max_tokens": 2000, **REPORTED}
    assert await until_share(proxy, body, 0.1)
    await until_engine(proxy, lambda e: all_free(e) and max(s["n_tokens"] for s in e["slots"]) > 6000)
    first = (await records(proxy))[0]
    assert first["outcome"] == "client_left" and first["prompt_n"] > 6000
    slot = max((await engine_state(proxy))["slots"], key=lambda s: s["n_tokens"])
    assert slot["n_tokens"] < first["prompt_n"] + 1000, "it went on to the answer's end"
    again = (await proxy.client.post("/v1/chat/completions", json={**body, "stream": False, "max_tokens": 2})).json()
    assert again["timings"]["prompt_n"] <= 64
    messages = [*body["messages"], again["choices"][0]["message"], *user("And then?")]
    longer = {**body, "stream": False, "messages": messages, "max_tokens": 2}
    more = (await proxy.client.post("/v1/chat/completions", json=longer)).json()
    assert more["timings"]["prompt_n"] <= 64


@pytest.mark.parametrize("model", ["dense", "swa"])
async def test_signs_of_life(model: str, proxy_server: StartProxy) -> None:
    """Between the reports of a real engine, also while it processes the base alone, and none once it speaks."""
    proxy = await proxy_server(*FLAGS, "--keep-alive", "0.1s", model=model, engine_flags=CHATML)
    messages = [{"role": "system", "content": foxes(8000)}, *user("hi")]
    body = {"messages": messages, "max_tokens": 4, "stream": True, **FOX}
    signs, text = 0, ""
    async with proxy.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for event in events_of(answer):
            text += piece_of(event)
            delta = event["choices"][0]["delta"] if event.get("choices") else None
            signs += delta == {} and event["choices"][0]["finish_reason"] is None
            assert "prompt_progress" not in event
            assert not (text and delta == {} and event["choices"][0]["finish_reason"] is None)
    assert signs >= 2 and "fox" in text


async def test_a_timeout_in_the_middle(proxy_server: StartProxy) -> None:
    """A client whose own watchdog ends each attempt is served in the end, whatever the moment."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    body = {"messages": user(foxes(8000)), "max_tokens": 4, **FOX}
    answers = []
    async with asyncio.timeout(120):
        while not answers:
            with suppress(httpx.TimeoutException):
                answers.append(await proxy.client.post("/v1/chat/completions", json=body, timeout=0.4))
    await until_engine(proxy, all_free)
    processed = sum(record["prompt_n"] for record in await records(proxy))
    last = answers[0].json()["timings"]
    assert processed <= 1.02 * (last["cache_n"] + last["prompt_n"])
