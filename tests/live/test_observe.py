"""Every query of every dashboard, against a real Prometheus that scraped a real Slotkeeper under replayed traffic."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.conftest import StartProxy
from tests.deploy.tools import need
from tests.live.talk import CHATML
from tests.observe import prometheus, session
from tests.observe.dashboards import ask, queries
from tests.servers import until


@pytest.mark.timeout(600)
async def test_every_query_returns_data(proxy_server: StartProxy, tmp_path: Path) -> None:
    """All of them after a session with evictions, restores, waiting; and shuffled tools are the top cause."""
    need("prometheus", "prometheus")
    proxy = await proxy_server(*session.FLAGS, model="dense", engine_flags=CHATML)
    async with prometheus.running(proxy.url.removeprefix("http://"), tmp_path / "prometheus") as scraper:
        await until(scraper.targets_are_up)
        start = time.time() - 1
        said: list[str] = []
        await session.play(proxy.url, said.append)
        await asyncio.sleep(3)  # the scrapes after the last answer
        end = time.time()
        found = {query: await ask(scraper, query, start, end) for query in queries()}
    assert [f"{q.dashboard}: {q.panel}: {q.legend}" for q, series in found.items() if not series] == []
    n = sum("answer" in line for line in said)
    assert said[-1].split() == f"answer {n} of {n} begins".split()
    top = next(series for query, series in found.items() if query.panel == "Top causes")
    causes = {s.legend: s.values[-1] for s in top}
    assert max(causes, key=lambda cause: causes[cause]) == "tools_changed", causes
