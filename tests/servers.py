"""Real processes for tests: an engine started as the proxy starts it, and the proxy itself as `slotkeeper serve`."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from llamacpp.client import LlamaClient
from llamacpp.engines import Child, EngineSpec, start

ROOT = Path(__file__).parent.parent
PATIENCE = 60.0  # seconds until a start or stop counts as failed; loaded CI machines are slow
ONE_THREAD = ("-t", "1")  # llama-server.md: the engine's threads spin, a second process beside them costs ten times


@dataclass
class LiveEngine:
    """A healthy llama-server and a client for it."""

    child: Child
    client: LlamaClient
    slot_dir: Path

    async def stop(self) -> int:
        """End it; the exit code."""
        await self.client.aclose()
        return await self.child.stop(5)


async def start_engine(spec: EngineSpec, state_dir: Path) -> LiveEngine:
    """Start an engine and wait until it is healthy. spec.slot_dir must be set."""
    child = await start(spec, state_dir=state_dir)
    client = LlamaClient(child.base_url, child.api_key)
    ended = asyncio.create_task(child.wait())
    try:
        await until(client.health, unless=lambda: child.tail() if ended.done() else None)
    finally:
        ended.cancel()
    assert spec.slot_dir is not None
    return LiveEngine(child, client, spec.slot_dir)


async def until(true: Callable[[], Awaitable[bool]], unless: Callable[[], str | None] = lambda: None) -> None:
    """Ask again until `true` says so. Fails when `unless` gives a reason, or after PATIENCE."""
    async with asyncio.timeout(PATIENCE):
        while not await true():
            if (reason := unless()) is not None:
                raise AssertionError(reason)
            await asyncio.sleep(0.02)


class ProxyServer:
    """One `slotkeeper serve` process. `lines` are its log lines, parsed where they are JSON."""

    def __init__(self, process: asyncio.subprocess.Process, state_dir: Path) -> None:
        self.process = process
        self.state_dir = state_dir
        self.lines: list[dict[str, Any]] = []
        self.text: list[str] = []
        self.url = ""
        self.client: httpx.AsyncClient
        self._listening = asyncio.Event()
        self._heard_more = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    async def ready(self) -> None:
        """Return once /readyz answers 200. Raises AssertionError with the log when the process ends first."""
        await self.listening()
        await until(self._is_ready, unless=lambda: None if self.process.returncode is None else self.said())

    async def listening(self) -> None:
        """Return once it answers connections."""
        first = asyncio.create_task(self._listening.wait())
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait({first, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        assert self._listening.is_set(), self.said()

    async def logged(self, event: str) -> dict[str, Any]:
        """Return the first log line of this event, once it is there (JSON logs)."""
        async with asyncio.timeout(PATIENCE):
            while True:
                for line in self.lines:
                    if line.get("event") == event:
                        return line
                self._heard_more.clear()
                await self._heard_more.wait()

    def said(self) -> str:
        """Everything on stderr."""
        return "\n".join(self.text)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code (negative: the signal that ended it)."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(PATIENCE):
            code = await self.process.wait()
            await self._reading
        if hasattr(self, "client"):
            await self.client.aclose()
        return code

    async def ended(self) -> int:
        """The exit code of one that ends by itself."""
        async with asyncio.timeout(PATIENCE):
            code = await self.process.wait()
            await self._reading
        return code

    async def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self.client.get("/readyz")).status_code == 200
        return False

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode(errors="replace").rstrip()
            self.text.append(line)
            with contextlib.suppress(orjson.JSONDecodeError):
                self._heard(orjson.loads(line))

    def _heard(self, entry: object) -> None:
        if not isinstance(entry, dict):
            return
        self.lines.append(entry)
        self._heard_more.set()
        if entry.get("event") == "listening":
            self.url = f"http://127.0.0.1:{entry['port']}"
            self.client = httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, trust_env=False)
            self._listening.set()


async def start_proxy(
    arguments: Sequence[str],
    state_dir: Path,
    *,
    engine_flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    port: int = 0,
) -> ProxyServer:
    """Start the real command on a free port (or `port`). The caller awaits `ready` or `listening`."""
    words = ["serve", "--port", str(port), "--state-dir", str(state_dir), "--log-format", "json", *arguments]
    if engine_flags:
        words += ["--", *engine_flags]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", *words),
        cwd=ROOT,
        env=clean_environment() | dict(environment or {}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    return ProxyServer(process, state_dir)


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of a developer's own, but with the cache directory."""
    keep = {"SLOTKEEPER_CACHE_DIR"}
    return {k: v for k, v in os.environ.items() if k in keep or not k.startswith(("SLOTKEEPER_", "LLAMA_"))}
