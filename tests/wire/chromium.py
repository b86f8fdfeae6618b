"""Debian's Chromium, driven over its own debugging protocol: what a person would see and type."""

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

from tests.servers import PATIENCE

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --no-default-browser-check "
    "--disable-background-networking --disable-component-update --disable-sync --disable-extensions "
    "--disable-dev-shm-usage --hide-scrollbars --remote-debugging-port=0"
).split()
"""Without the networking flags it looks up its maker's hosts at every start."""
Json = dict[str, Any]


class Tab:
    """One page. `console` holds what it said and what went wrong in it, as text."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._ids = socket, count(1)
        self._answers: dict[int, asyncio.Future[Json]] = {}
        self._loaded = asyncio.Event()
        self.console: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def send(self, method: str, **params: Any) -> Json:
        """One command and its result; fails with the browser's message."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(PATIENCE):
            answer = await self._answers[number]
        assert "error" not in answer, f"{method}: {answer['error']}"
        found: Json = answer["result"]
        return found

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Loads a page and waits until it is there."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        async with asyncio.timeout(PATIENCE):
            await self._loaded.wait()

    async def js(self, expression: str) -> Any:
        """The value of an expression; fails when it throws."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Returns once the expression is true."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not await self.js(expression):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never: {expression}; {self.console}") from None

    async def key(self, name: str, *, shift: bool = False) -> None:
        """Presses a key: Tab, Enter, Space."""
        codes = {"Tab": 9, "Enter": 13, "Space": 32}
        text = {"Enter": "\r", "Space": " "}.get(name)
        press: Json = {"key": " " if name == "Space" else name, "code": name, "windowsVirtualKeyCode": codes[name]}
        press |= {"modifiers": 8 if shift else 0}
        await self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **press, **_text(text))
        await self.send("Input.dispatchKeyEvent", type="keyUp", **press)

    async def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        found = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    async def close(self) -> None:
        """Stops listening to it."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        async for raw in self._socket:
            message = json.loads(raw)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            else:
                self._heard(message["method"], message["params"])

    def _heard(self, event: str, params: Json) -> None:
        if event == "Page.loadEventFired":
            self._loaded.set()
        elif event == "Runtime.consoleAPICalled":
            self.console.append(f"{params['type']}: {params['args']}")
        elif event == "Runtime.exceptionThrown":
            self.console.append(f"exception: {params['exceptionDetails']}")
        elif event == "Log.entryAdded":
            self.console.append(f"{params['entry']['level']}: {params['entry']['text']} {params['entry'].get('url')}")


def _text(text: str | None) -> Json:
    return {"text": text} if text else {}


class Chromium:
    """One browser process with an empty profile."""

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """A new tab."""
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE, trust_env=False) as http:
            target = (await http.put("/json/new?about:blank")).json()
        async with connect(target["webSocketDebuggerUrl"], max_size=2**26, proxy=None) as socket:
            tab = Tab(socket)
            try:
                yield tab
            finally:
                await tab.close()


@asynccontextmanager
async def chromium(program: str, profile: Path) -> AsyncIterator[Chromium]:
    """Starts it, and ends it with all its processes."""
    process = await asyncio.create_subprocess_exec(
        *(program, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield Chromium(f"http://127.0.0.1:{await _port(process, profile / 'DevToolsActivePort')}")
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 9)
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)


async def _port(process: asyncio.subprocess.Process, file: Path) -> int:
    async with asyncio.timeout(PATIENCE):
        while not file.exists() or not file.read_text().strip():
            assert process.returncode is None, "chromium ended at once"
            await asyncio.sleep(0.05)
    return int(file.read_text().split()[0])
