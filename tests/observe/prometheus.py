"""Debian's Prometheus with this repository's configuration, scraping one Slotkeeper every second."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.bench.process import free_port
from tests.servers import until

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
MISSING = "Debian's package 'prometheus' is not installed (apt-get install prometheus); .ci/run installs it"


def is_installed() -> bool:
    """Both programs of the package are there."""
    return all(map(shutil.which, ("prometheus", "promtool")))


@dataclass
class Prometheus:
    """One that runs. Times are seconds since the epoch."""

    client: httpx.AsyncClient

    async def instant(self, expression: str, at: float) -> list[dict[str, Any]]:
        """Series with their value at one moment."""
        found = await self._ask("query", {"query": expression, "time": at})
        return [{"metric": s["metric"], "values": [s["value"]]} for s in found]

    async def over(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """Series with their values, one a second."""
        return await self._ask("query_range", {"query": expression, "start": start, "end": end, "step": 1})

    async def targets_are_up(self) -> bool:
        """The last scrape of every target was answered."""
        found = (await self.client.get("/api/v1/targets")).json()["data"]["activeTargets"]
        return bool(found) and all(t["health"] == "up" for t in found)

    async def _ask(self, what: str, params: dict[str, Any]) -> list[dict[str, Any]]:
        answer = (await self.client.get(f"/api/v1/{what}", params=params)).json()
        assert answer["status"] == "success", (params["query"], answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


def configuration(target: str) -> str:
    """deploy/prometheus/prometheus.yml for another target and a scrape every second."""
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    for old, new in (
        ("slotkeeper:8484", target),
        ("15s", "1s"),
        ("- rules.yml", f"- {DEPLOY}/prometheus/rules.yml"),
        ("- alerts.yml", f"- {DEPLOY}/prometheus/alerts.yml"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    return text


@asynccontextmanager
async def running(target: str, folder: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus that scrapes `target` (host:port), until the body ends; its data lies in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(configuration(target))
    url = f"http://127.0.0.1:{free_port()}"
    flags = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": url.removeprefix("http://"),
        "log.level": "warn",
    }
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus", *(f"--{name}={value}" for name, value in flags.items()), stdout=log, stderr=log
        )
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            prometheus = Prometheus(client)
            await until(lambda: _is_ready(client), unless=lambda: _obituary(process, folder / "log"))
            yield prometheus
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/-/ready")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _obituary(process: asyncio.subprocess.Process, log: Path) -> str | None:
    return None if process.returncode is None else log.read_text()
