"""llama-server in router mode (engine A; engine B has none): each model with slots and files of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from llamacpp.engines import free_port
from tests.conftest import StartProxy
from tests.live.talk import CHATML, Conversation, Json, foxes
from tests.servers import ONE_THREAD, ProxyServer, clean_environment, until

pytestmark = pytest.mark.native


@pytest.fixture
def engine_kind() -> str:
    """Engine A alone."""
    return "binary"


class LlamaRouter:
    """A llama-server without a model, and its own word on what is loaded."""

    def __init__(self, port: int, folder: Path) -> None:
        self.url, self.folder = f"http://127.0.0.1:{port}", folder
        self.client = httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False)

    async def loaded(self) -> set[str]:
        """The models that are loaded now."""
        models = (await self.client.get("/models")).json()["data"]
        return {m["id"] for m in models if m["status"]["value"] != "unloaded"}

    async def answers(self) -> bool:
        """Whether it is up."""
        try:
            return (await self.client.get("/health")).status_code == 200
        except httpx.TransportError:
            return False


@asynccontextmanager
async def routing(server: Path, models: dict[str, Path], folder: Path, *flags: str) -> AsyncIterator[LlamaRouter]:
    """Runs the router over links to `models`, two slots each, files of all in one directory."""
    (folder / "models").mkdir(parents=True)
    (folder / "slots").mkdir()
    for name, path in models.items():
        (folder / "models" / f"{name}.gguf").symlink_to(path)
    words = ["--models-dir", str(folder / "models"), "--slot-save-path", f"{folder / 'slots'}/", "--metrics"]
    words += ["--parallel", "2", "--ctx-size", "4096", "--port", str(port := free_port()), *ONE_THREAD, *CHATML, *flags]
    with (folder / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(server, *words, env=clean_environment(), stdout=log, stderr=log)
    router = LlamaRouter(port, folder)
    try:
        await until(router.answers)
        yield router
    finally:
        process.terminate()
        await process.wait()
        await router.client.aclose()


async def engines(proxy: ProxyServer) -> dict[str, Json]:
    """The engines in /slotkeeper/state, by model."""
    found: list[Json] = (await proxy.client.get("/slotkeeper/state")).json()["engines"]
    return {e["model"]: e for e in found}


async def test_models_that_push_each_other_out(
    proxy_server: StartProxy, native_server: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """One model fits at a time: each conversation goes on from its file, also behind a restart of ours."""
    wanted = {"dense": tiny_models["dense"], "hybrid": tiny_models["hybrid"]}
    async with routing(native_server, wanted, tmp_path / "router", "--models-max", "1") as router:
        upstream = f"{router.url},slots={router.folder / 'slots'}"
        proxy = await proxy_server("--upstream", upstream)
        assert await router.loaded() == set()
        talks = {m: Conversation(proxy, foxes(1200, m), session=m) for m in wanted}
        held = {}
        for model, talk in talks.items():
            first = await talk.say("hello", model=model)
            assert (first.raw["model"], await router.loaded()) == (model, {model})
            second = await talk.say("go on", model=model)
            assert second.headers["x-slotkeeper-placement"] == "continue"
            assert second.cache_n >= first.n_prompt - 4, second
            held[model] = second.n_prompt
        for model, talk in talks.items():
            back = await talk.say("and back", model=model)
            assert back.headers["x-slotkeeper-placement"] == "restore", proxy.said()
            assert back.cache_n >= held[model] - 4, back
        before = await engines(proxy)
        assert {m: (e["ready"], e["unloaded"]) for m, e in before.items()} == {
            "dense": (False, True),
            "hybrid": (True, False),
        }
        assert before["dense"]["fingerprint"] != before["hybrid"]["fingerprint"]
        metrics = (await proxy.client.get("/metrics")).text
        for model in wanted:
            labels = f'engine="engine0/{model}",kind="main",model="{model}"'
            assert f"slotkeeper_prompt_tokens_cached_total{{{labels}}}" in metrics

        await proxy.stop()
        proxy = await proxy_server("--upstream", upstream)
        for model, talk in talks.items():
            talk.proxy = proxy
            back = await talk.say("after a restart", model=model)
            assert back.headers["x-slotkeeper-placement"] == "restore", proxy.said()
            assert back.cache_n >= held[model] - 4, back


async def test_idle_models_stay_unloaded(
    proxy_server: StartProxy, native_server: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Looking loads nothing: not ours, a scrape, a list of models. A new model appears, a wrong one is refused."""
    async with routing(native_server, {"dense": tiny_models["dense"]}, tmp_path / "router") as router:
        (router.folder / "models" / "swa.gguf").symlink_to(tiny_models["swa"])
        proxy = await proxy_server("--upstream", f"{router.url},slots={router.folder / 'slots'}")
        talk = Conversation(proxy, foxes(300, "idle"))
        await talk.say("hello", model="dense")
        assert (await router.client.post("/models/unload", json={"model": "dense"})).status_code == 200
        assert (await router.client.get("/models", params={"reload": "1"})).status_code == 200

        async def is_noticed() -> bool:
            found = await engines(proxy)
            return set(found) == {"dense", "swa"} and all(e["unloaded"] for e in found.values())

        await until(is_noticed)
        for path in ("/metrics", "/v1/models", "/slotkeeper/state", "/readyz", "/v1/models/swa"):
            assert (await proxy.client.get(path)).status_code == 200, path
        assert (await proxy.client.get("/props", params={"model": "dense"})).status_code == 503
        assert await router.loaded() == set()
        listed = (await proxy.client.get("/v1/models")).json()["data"]
        assert {m["id"]: m.get("context_length") for m in listed} == {"dense": 2048, "swa": None}
        wrong = await proxy.client.post("/v1/chat/completions", json={"model": "llama", "messages": talk.messages})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
        again = await talk.say("go on", model="dense")
        assert again.headers["x-slotkeeper-placement"] == "cold"
        assert await router.loaded() == {"dense"}
