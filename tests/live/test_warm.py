"""Prompts that are processed before anyone asks: `slotkeeper warm`, and what a changed engine lost."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartProxy
from tests.live.talk import CHATML, FOX, Json, engine_state, foxes, until_engine
from tests.servers import ProxyServer

FLAGS = ("--parallel", "2", "--ctx-size", "16384")
SPARE = 64
"""Tokens beyond its own messages that the first real request may cost (issue 8, "Must show")."""


def request(directory: str, date: str, text: str) -> Json:
    """What an agent of Anthropic's dialect sends first, in some directory on some day."""
    system = [
        {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude."},
        {"type": "text", "text": f"{foxes(1500)}\nWorking directory: {directory}\nToday's date: {date}\n{foxes(300)}"},
    ]
    tools = [{"name": n, "description": foxes(100, n), "input_schema": {"type": "object"}} for n in ("read", "write")]
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    return {"system": system, "tools": tools, "messages": messages, "max_tokens": 4, "temperature": 0}


async def command(proxy: ProxyServer, *words: str) -> Any:
    """`slotkeeper warm --json` beside the running server; what came of each item."""
    arguments = ("-m", "proxy", "warm", *words, "--json", "--state-dir", str(proxy.state_dir))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode() + out.decode() + proxy.said()
    return json.loads(out)["warmed"]


async def asked(proxy: ProxyServer, body: Json) -> tuple[int, int]:
    """Prompt tokens of a request's answer: from the cache, and processed."""
    answer = await proxy.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["cache_read_input_tokens"], usage["input_tokens"]


@pytest.mark.parametrize("model", ["dense", "swa", "hybrid"])
async def test_a_recorded_base(model: str, proxy_server: StartProxy, tmp_path: Path) -> None:
    """Warmed on a fresh machine; after a restart the first real request, elsewhere and another day, costs its own
    messages. Warmed twice it costs nothing."""
    file = tmp_path / "recorded.json"
    recorded = {"path": "/v1/messages?beta=true", "body": request("/home/a/one", "2026-11-29", "recorded")}
    file.write_text(json.dumps(recorded))
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    (done,) = await command(proxy, str(file))
    assert (done["state"], done["processed"]) == ("saved", done["tokens"])
    assert done["tokens"] > 2000
    (again,) = await command(proxy, str(file))
    assert (again["state"], again["processed"]) == ("known", 0)
    assert await proxy.stop() == 0
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    cached, processed = await asked(proxy, request("/home/b/two", "2026-11-30", "What is in here?"))
    assert processed <= cached + processed - done["tokens"] + SPARE, proxy.said()
    assert cached >= done["tokens"] - SPARE


async def test_system_text_alone(proxy_server: StartProxy, tmp_path: Path) -> None:
    """Nobody is there to be told a date and a directory near its top: it is kept as real requests will have it."""

    def chat(date: str, directory: str, *texts: str) -> Json:
        system = f"You help.\nToday's date: {date}\nWorking directory: {directory}\n{foxes(900)}"
        users = [{"role": "user", "content": text} for text in texts]
        return {"messages": [{"role": "system", "content": system}, *users], "max_tokens": 2}

    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    file = tmp_path / "system.json"
    file.write_text(json.dumps(chat("2026-11-29", "/home/a/one")))
    (done,) = await command(proxy, str(file))
    answer = await proxy.client.post("/v1/chat/completions", json=chat("2026-11-30", "/home/b/two", "What is here?"))
    assert answer.headers["x-slotkeeper-placement"] in ("fork", "restore", "guest"), proxy.said()
    assert answer.json()["timings"]["cache_n"] >= done["tokens"] - SPARE


async def test_a_base_in_a_running_server(proxy_server: StartProxy, tmp_path: Path) -> None:
    """It takes a slot of its own: a conversation that runs with the same base keeps what it holds."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    body = {**request("/home/a", "2026-11-29", "recorded"), **FOX}
    first = sum(await asked(proxy, body))
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps({"path": "/v1/messages", "body": body}) for _ in range(3)))
    (done,) = await command(proxy, str(file))
    assert done["state"] in ("saved", "known")
    assert (await asked(proxy, body)) == (first - 1, 1)


async def test_another_build(proxy_server: StartProxy, tmp_path: Path) -> None:
    """A pinned base is processed again in idle time for an engine whose KV is another, the pin goes over, and the next
    request finds it; `--from-state` does it for the others at once."""
    files = []
    for name in ("one", "two"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(
            json.dumps({"body": request("/home/a", "2026-11-29", "hi") | {"system": foxes(900, name)}})
        )
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    ((pinned,), (other,)) = [await command(proxy, str(file)) for file in files]
    await snapshots(proxy, "pin", pinned["snapshot"])
    assert await proxy.stop() == 0
    flags = (*CHATML, "--rope-freq-base", "50000")
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=flags)
    await until_engine(proxy, lambda engine: engine["snapshots"]["count"] == 3)
    listed = (await snapshots(proxy, "ls"))["snapshots"]
    (new,) = [s for s in listed if s["pinned"]]
    assert new["id"] != pinned["snapshot"] and new["n_tokens"] == pinned["tokens"]
    assert other["tokens"] in {s["n_tokens"] for s in listed}
    done = await command(proxy, "--from-state")
    assert sorted(item["state"] for item in done) == ["known", "saved"]
    for file, item in zip(files, (pinned, other), strict=True):
        cached, _ = await asked(proxy, json.loads(file.read_text())["body"])
        assert cached >= item["tokens"] - SPARE


async def snapshots(proxy: ProxyServer, *words: str) -> Any:
    """`slotkeeper snapshots ... --json`."""
    arguments = ("-m", "proxy", "snapshots", *words, "--json", "--state-dir", str(proxy.state_dir))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(out)


async def test_idle_slots_are_not_filled_with_it(proxy_server: StartProxy, tmp_path: Path) -> None:
    """What was warmed is nobody's: the next conversation takes its slot, and nothing is saved for that."""
    proxy = await proxy_server("--parallel", "1", "--ctx-size", "8192", model="dense", engine_flags=CHATML)
    file = tmp_path / "one.json"
    file.write_text(json.dumps(request("/home/a", "2026-11-29", "hi")))
    await command(proxy, str(file))
    await asked(proxy, {"messages": [{"role": "user", "content": "something else"}], "max_tokens": 2})
    assert (await engine_state(proxy))["snapshots"]["count"] == 1
