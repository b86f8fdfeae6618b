"""Real engines for these tests: the demo model, embedded (mark live) or the built binary (mark native)."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from llamacpp.client import LlamaClient
from llamacpp.engines import Child, EngineSpec, start
from llamacpp.engines.build import built_servers

# `-t 1`: the engine's threads spin, and two of them beside the tests on two cores cost ten times as much.
QUICK = ("-t", "1", "--no-warmup")

KINDS = [
    pytest.param("embedded", marks=pytest.mark.live),
    pytest.param("binary", marks=pytest.mark.native),
]


def native_path() -> Path:
    """Engine A: the one that `make test-native` names, else one that was built before."""
    named = os.environ.get("SLOTKEEPER_TEST_SERVER")
    found = [Path(named)] if named else list(built_servers())
    assert found, "no llama-server was built: run `make test-native`, or set SLOTKEEPER_TEST_SERVER"
    return found[0]


def spec_for(kind: str, model: Path, **changes: object) -> EngineSpec:
    server = native_path() if kind == "binary" else None
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
