"""The fake llama-server tells the truth about prefixes, notices clients that leave, and does what it is cued to do."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A chat body with alternating roles."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, "max_tokens": 4, "id_slot": 0} | more


async def timings(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The engine's timings of a whole answer."""
    return (await client.post("/v1/chat/completions", json=body)).json()["timings"]


async def test_cache_n_is_the_common_prefix() -> None:
    """A turn that extends the slot computes the new tokens only; another slot computes all."""
    async with FakeLlama() as fake, httpx.AsyncClient(base_url=fake.url) as client:
        first = await timings(client, chat("read the file"))
        answer = "".join(f" w{i}" for i in range(4))
        second = await timings(client, chat("read the file", answer, "and now"))
        assert second["cache_n"] == first["prompt_n"] + 4 - 1
        assert (await timings(client, chat("read the file", id_slot=1)))["cache_n"] == 0


async def test_stream_and_whole_say_the_same() -> None:
    """A streamed answer joins to the text of a whole one, and progress comes first when asked for."""
    async with FakeLlama() as fake, httpx.AsyncClient(base_url=fake.url) as client:
        whole = (await client.post("/v1/chat/completions", json=chat("hi"))).json()
        streamed = await client.post("/v1/chat/completions", json=chat("hi", stream=True, return_progress=True))
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
        assert text == whole["choices"][0]["message"]["content"]
        assert [e["prompt_progress"]["cache"] for e in events if "prompt_progress" in e] == [7, 7]  # 8 tokens


async def test_a_client_that_leaves_frees_the_slot() -> None:
    """Closing the connection during a held prefill ends the request."""
    async with FakeLlama() as fake, httpx.AsyncClient(base_url=fake.url) as client:
        fake.cues.append(Cue(hold_before=asyncio.Event()))
        request = asyncio.create_task(client.post("/v1/chat/completions", json=chat("hi")))
        await fake.arrived(1)
        request.cancel()
        await fake.abandoned(1)
        await fake.idle()
        assert fake.slots[0].tokens == []


async def test_break_and_error_on_cue() -> None:
    """A cut connection and an error event come where they were asked for."""
    async with FakeLlama() as fake, httpx.AsyncClient(base_url=fake.url) as client:
        fake.cues.extend([Cue(break_at=2), Cue(error_at=1), Cue(status=500)])
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/chat/completions", json=chat("hi", stream=True))
        broken = await client.post("/v1/completions", json={"prompt": "a b", "stream": True})
        assert broken.text.splitlines()[-2].startswith('data: {"error"')
        assert (await client.post("/completion", json={"prompt": "a"})).status_code == 500


async def test_slot_files_carry_tokens(tmp_path: Path) -> None:
    """What is saved can be restored into another slot; a truncated file is refused and empties the slot."""
    async with FakeLlama(slot_dir=tmp_path) as fake, httpx.AsyncClient(base_url=fake.url) as client:
        prompt_n = (await timings(client, chat("read the file")))["prompt_n"]
        saved = await client.post("/slots/0", params={"action": "save"}, json={"filename": "a.bin"})
        assert saved.json()["n_saved"] == prompt_n + 3
        await client.post("/slots/1", params={"action": "restore"}, json={"filename": "a.bin"})
        assert fake.slots[1].tokens == fake.slots[0].tokens
        whole = (tmp_path / "a.bin").read_bytes()
        (tmp_path / "a.bin").write_bytes(whole[:-1])
        refused = await client.post("/slots/1", params={"action": "restore"}, json={"filename": "a.bin"})
        assert refused.status_code == 400
        assert fake.slots[1].tokens == []


async def test_loading_and_keys() -> None:
    """503 while loading, 401 without the key."""
    async with FakeLlama(api_key="k") as fake, httpx.AsyncClient(base_url=fake.url) as client:
        assert (await client.get("/props")).status_code == 401
        assert (await client.get("/props", headers={"authorization": "Bearer k"})).status_code == 200
        fake.loading = True
        assert (await client.get("/health")).status_code == 503
