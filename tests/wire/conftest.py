"""The proxy's real application on a real socket, in front of a fake engine that does what it is told."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.app import create_app
from proxy.cli import _server
from proxy.config import Settings, load
from tests.fakes.llama import FakeLlama
from tests.servers import until
from tests.wire.wire import Wire

Serve = Callable[..., Awaitable[Wire]]


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Wire]:
    """Runs the application as `slotkeeper serve` does, in this event loop."""
    application = create_app(settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with application.router.lifespan_context(application):
            server = _server(application, settings)
            running = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                async with Wire(f"http://127.0.0.1:{listener.getsockname()[1]}") as wire:
                    wire.service = application.state.service
                    yield wire
            finally:
                server.should_exit = True
                await running


@pytest.fixture
async def fake() -> AsyncIterator[FakeLlama]:
    """An engine of two slots."""
    async with FakeLlama(n_slots=2) as fake:
        yield fake


@pytest.fixture
async def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    """Start a proxy: `wire = await serve(fake, max_waiting=1)`. More engines: `upstream=(...)`."""
    monkeypatch.delenv("SLOTKEEPER_CONFIG", raising=False)
    async with AsyncExitStack() as stack:

        async def start(fake: FakeLlama | None = None, *, wait: bool = True, **options: Any) -> Wire:
            if fake is not None:
                options.setdefault("upstream", (fake.url,))
            options = {"state_dir": tmp_path / "state", "exit_deadline_seconds": 3.0} | options
            wire = await stack.enter_async_context(serving(load(options)))
            if wait:
                await until(wire.is_ready)
            return wire

        yield start


@pytest.fixture
async def wire(serve: Serve, fake: FakeLlama) -> Wire:
    """A proxy with every default in front of `fake`."""
    return await serve(fake)
