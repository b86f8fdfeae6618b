"""Real engines for these tests: the demo model, embedded (mark live) or the built binary (mark native)."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from llamacpp.client import LlamaClient
from llamacpp.engines import Child, EngineSpec, start
from llamacpp.engines.models import fetch_demo

# `-t 1`: the engine's threads spin, and two of them beside the tests on two cores cost ten times as much.
QUICK = ("-t", "1", "--no-warmup")

KINDS = [
    pytest.param("embedded", marks=pytest.mark.live),
    pytest.param("binary", marks=pytest.mark.native),
]


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_demo(tmp_path_factory.mktemp("models"))


def native_server() -> Path:
    """The binary that `make test-native` built."""
    path = os.environ.get("SLOTKEEPER_TEST_SERVER")
    if not path:
        pytest.fail("SLOTKEEPER_TEST_SERVER is not set; `make test-native` sets it.")
    return Path(path)


def spec_for(kind: str, model: Path, **changes: object) -> EngineSpec:
    server = native_server() if kind == "binary" else None
    settings: dict[str, object] = {"ctx_size": 1024, "parallel": 2, "extra": QUICK} | changes
    return EngineSpec(model=model, kind=kind, llama_server=server, **settings)  # type: ignore[arg-type]


async def ready(child: Child) -> LlamaClient:
    """A client of `child`, once it serves; fails with the engine's own words when it ends instead."""
    client = LlamaClient(child.base_url, child.api_key)
    while not await client.health():
        if child.exit_code is not None:
            await client.aclose()
            pytest.fail(child.obituary())
        await asyncio.sleep(0.02)
    return client


Starter = Callable[[EngineSpec], Awaitable[tuple[Child, LlamaClient]]]


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Starter]:
    """Starts engines that are serving, and ends them after the test."""
    running: list[tuple[Child, LlamaClient]] = []

    async def starter(spec: EngineSpec) -> tuple[Child, LlamaClient]:
        child = await start(spec, state_dir=tmp_path)
        try:
            running.append((child, await ready(child)))
        except BaseException:
            await child.stop(0)
            raise
        return running[-1]

    yield starter
    for child, client in running:
        await client.aclose()
        await child.stop(5)
