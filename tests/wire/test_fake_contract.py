"""The fake engine keeps a real one's contract: what it says, a llama-server says in the same fields and types."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import StartEngine
from tests.fakes.llama import FakeLlama
from tests.wire.wire import CHAT, chat, data

STREAM = {"stream": True, "return_progress": True, "id_slot": 0, "ignore_eos": True}
DOORS: dict[str, dict[str, Any]] = {
    CHAT: chat("hello there", stream_options={"include_usage": True}),
    "/v1/completions": {"prompt": "hello there", "max_tokens": 4},
    "/completion": {"prompt": "hello there", "n_predict": 4},
}
WHOLE = {"id_slot": 0, "ignore_eos": True}


def differences(fake: Any, real: Any, where: str = "") -> list[str]:
    """Where the fake says something that a real engine does not, or in another type."""
    if isinstance(fake, dict) and isinstance(real, dict):
        missing = [f"{where}/{name}: not in the real answer" for name in fake if name not in real]
        both = (differences(fake[name], real[name], f"{where}/{name}") for name in fake if name in real)
        return missing + [line for lines in both for line in lines]
    if isinstance(fake, list) and isinstance(real, list):
        return differences(fake[0], real[0], f"{where}[]") if fake and real else []
    kinds = [("number" if type(v) in (int, float) else type(v).__name__) for v in (fake, real)]
    return [] if kinds[0] == kinds[1] else [f"{where}: {kinds[0]}, really {kinds[1]}"]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The order in which kinds of events come, repetitions of content and progress left out."""
    order: list[str] = []
    for event in events:
        choice = (event.get("choices") or [{}])[0]
        if "prompt_progress" in event:
            kind = "progress"
        elif event.get("choices") == []:
            kind = "usage"
        elif choice.get("finish_reason") or event.get("stop"):
            kind = "end"
        elif "role" in choice.get("delta", {}):
            kind = "role"
        else:
            kind = "content"
        if not order or order[-1] != kind:
            order.append(kind)
    return order


@pytest.mark.live
async def test_same_fields_and_types(live_engine: StartEngine, tmp_path: Path) -> None:
    """Streams, whole answers, slots, props, models, slot files and refusals."""
    engine = await live_engine("dense", parallel=2)
    assert engine.child.api_key is not None
    key = {"authorization": f"Bearer {engine.child.api_key}"}
    fresh = httpx.Limits(max_keepalive_connections=0)  # llama-server closes kept connections without a word
    (tmp_path / "fake").mkdir()
    async with (
        FakeLlama(n_slots=2, n_ctx=4096, slot_dir=tmp_path / "fake") as fake,
        httpx.AsyncClient(base_url=fake.url, timeout=60) as said,
        httpx.AsyncClient(
            base_url=engine.child.base_url, timeout=60, headers=key, trust_env=False, limits=fresh
        ) as meant,
    ):
        for path, body in DOORS.items():
            await check_stream(path, body, said, meant)
            await check(said, meant, "POST", path, body | WHOLE)
        await check(said, meant, "GET", "/slots")
        await check(said, meant, "GET", "/props")
        await check(said, meant, "GET", "/v1/models")
        await check(said, meant, "GET", "/health")
        await check(said, meant, "POST", "/tokenize", {"content": "a b"})
        await check(said, meant, "POST", "/detokenize", {"tokens": []})
        await check(said, meant, "POST", "/apply-template", chat("x"))
        await check(said, meant, "POST", "/slots/0?action=save", {"filename": "a.bin"})
        await check(said, meant, "POST", "/slots/1?action=restore", {"filename": "a.bin"})
        await check(said, meant, "POST", "/slots/1?action=erase", {})
        await check(said, meant, "POST", "/slots/1?action=restore", {"filename": "none.bin"}, 400)
        await check(said, meant, "POST", "/slots/1?action=save", {"filename": "/"}, 400)
        await check(said, meant, "POST", CHAT, chat("word and " * 5000, id_slot=0), 400)
        await check(said, meant, "GET", "/nothing", None, 404)
        # An unused slot has no task; a used one counts what it holds.
        shown = [(await client.get("/slots")).json() for client in (said, meant)]
        assert [["id_task" in slot for slot in slots] for slots in shown] == [[True, False]] * 2
        assert all(slots[0]["n_prompt_tokens"] > 0 for slots in shown)


async def check(
    said: httpx.AsyncClient, meant: httpx.AsyncClient, method: str, path: str, body: Any = None, status: int = 200
) -> None:
    """One request to both."""
    answers = [await client.request(method, path, json=body) for client in (said, meant)]
    assert [answer.status_code for answer in answers] == [status, status], (path, answers[1].text)
    fake, real = (answer.json() for answer in answers)
    assert differences(fake, real) == [], path
    kinds_said = [answer.headers["content-type"].partition(";")[0] for answer in answers]
    assert kinds_said == ["application/json"] * 2


async def check_stream(path: str, body: dict[str, Any], said: httpx.AsyncClient, meant: httpx.AsyncClient) -> None:
    """One stream from both: events of the same kinds, in the same order, with the same fields."""
    answers = [(await client.post(path, json=body | STREAM)).content for client in (said, meant)]
    done = [answer.endswith(b"data: [DONE]\n\n") for answer in answers]
    assert done == [path != "/completion"] * 2
    events = [[data(part) for part in answer.split(b"\n\n") if part.startswith(b"data: {")] for answer in answers]
    fake, real = events
    assert kinds(fake) == kinds(real), path
    for kind in set(kinds(fake)):
        mine, theirs = ([event for event in side if kinds([event]) == [kind]] for side in events)
        assert differences(mine[-1], theirs[-1]) == [], (path, kind)
