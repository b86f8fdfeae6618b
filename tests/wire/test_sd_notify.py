"""What systemd is told, by the real command: READY=1 when /readyz would say so, STOPPING=1 when the stop begins."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy import sd_notify
from tests.conftest import StartProxy
from tests.fakes.llama import FakeLlama
from tests.servers import PATIENCE, ProxyServer, until


class Manager:
    """The end of the socket that systemd holds."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(address)

    async def told(self) -> list[str]:
        """The lines of the next datagram."""
        async with asyncio.timeout(PATIENCE):
            return (await asyncio.get_running_loop().sock_recv(self.socket, 4096)).decode().split("\n")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A manager at a path."""
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.socket.close()


async def test_the_life_of_a_service(proxy_server: StartProxy, manager: Manager, tmp_path: Path) -> None:
    """Loading, ready, stopping; ready only when an engine can be asked."""
    async with FakeLlama() as fake:
        fake.loading = True
        told_to = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        proxy = await proxy_server("--upstream", fake.url, environment=told_to, wait=False)
        first = await manager.told()
        assert first[0].startswith("STATUS=not ready: engine0")
        await proxy.listening()
        assert (await proxy.client.get("/readyz")).status_code == 503
        fake.loading = False
        while (lines := await manager.told())[0] != "READY=1":
            assert lines[0].startswith("STATUS=not ready")
        assert (await proxy.client.get("/readyz")).status_code == 200
        proxy.process.send_signal(signal.SIGTERM)
        assert (await manager.told())[0] == "STOPPING=1"
        assert await proxy.ended() == 0


async def test_people_are_told_too(proxy_server: StartProxy) -> None:
    """On a console the last line of a start says what it serves and where to look."""
    async with FakeLlama(alias="tiny") as fake:
        proxy = await proxy_server("--upstream", fake.url, "--log-format", "console", wait=False)
        await until(lambda: _has_said(proxy, "status page"))
        ready = proxy.text[-1]
        url = ready.split()[1].removesuffix("/v1")
        assert ready == f"Ready: {url}/v1  model tiny  status page {url}/slotkeeper/"
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{url}/slotkeeper/")).status_code == 200


async def _has_said(proxy: ProxyServer, words: str) -> bool:
    return words in proxy.said()


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/notify", "vsock:2:1", "/" + "x" * 200])
def test_nobody_to_tell(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a manager, or with one that cannot be reached, nothing happens."""
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not sd_notify.notify("READY=1")


@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="the abstract namespace is Linux's")
async def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """systemd may give a name that begins with @."""
    name = f"slotkeeper-{tmp_path.name}-{id(tmp_path)}"
    manager = Manager("\0" + name)
    monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
    assert sd_notify.notify("READY=1", "STATUS=ready")
    assert await manager.told() == ["READY=1", "STATUS=ready"]
    manager.socket.close()


async def test_the_watch_ends_with_its_body() -> None:
    """A stop before anything was ready leaves no task behind."""
    before = asyncio.all_tasks()
    async with sd_notify.told(lambda: False, lambda: "it loads", lambda: pytest.fail("it is not ready")):
        pass
    assert asyncio.all_tasks() == before
