"""`make observe`: Slotkeeper with the demo model, Debian's Prometheus, a small recorded session, every dashboard query.

Exit code 1 when a query returns no data.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llamacpp.engines.cache import cache_dir
from proxy.fetch import demo_model
from proxy.stop import INTERRUPTED
from tests.live.talk import CHATML
from tests.observe import prometheus, session
from tests.observe.dashboards import Query, Series, ask, queries
from tests.servers import start_proxy, until

console = Console(width=max(120, Console().width))
SETTLE_SECONDS = 3.0
"""After the last answer: two scrapes, and the last release of a slot."""
MOST_SERIES = 6


async def observe(model: Path, folder: Path) -> list[tuple[Query, list[Series]]]:
    """Every query with what it returned."""
    arguments = ("--model", str(model), "--engine", "embedded", *session.FLAGS)
    proxy = await start_proxy(arguments, folder / "state", engine_flags=("-t", "1", *CHATML))
    try:
        console.print("Loading the demo model. All of this takes some minutes on two cores; ctrl-C ends it.")
        await proxy.ready()
        console.print(f"Slotkeeper at {proxy.url}, log in {folder}/state/logs")
        target = proxy.url.removeprefix("http://")
        async with prometheus.running(target, folder / "prometheus") as scraper:
            await until(scraper.targets_are_up)
            start = time.time() - 1
            await session.play(proxy.url, lambda what: console.print(what, markup=False))
            console.print("Asking Prometheus every query of every dashboard.")
            await asyncio.sleep(SETTLE_SECONDS)
            end = time.time()
            return [(query, await ask(scraper, query, start, end)) for query in queries()]
    finally:
        await proxy.stop()


def show(found: list[tuple[Query, list[Series]]]) -> int:
    """One table for each dashboard; how many queries returned nothing."""
    for dashboard in dict.fromkeys(query.dashboard for query, _ in found):
        table = Table("panel", "series", "last", "most", title=dashboard, title_justify="left")
        for query, series in (x for x in found if x[0].dashboard == dashboard):
            if not series:
                table.add_row(query.panel, query.legend, "no data", "", style="red")
            for one in series[:MOST_SERIES]:
                table.add_row(query.panel, one.legend, f"{one.values[-1]:,.4g}", f"{max(one.values):,.4g}")
            if len(series) > MOST_SERIES:
                table.add_row(query.panel, f"... {len(series) - MOST_SERIES} more", "", "")
        console.print(table)
    empty = sum(not series for _, series in found)
    console.print(f"{len(found) - empty} of {len(found)} queries returned data.")
    return empty


def main() -> int:
    """The exit code."""
    if not prometheus.is_installed():
        console.print(prometheus.MISSING)
        return 1
    try:
        with tempfile.TemporaryDirectory(prefix="slotkeeper-observe-") as folder:
            return 1 if show(asyncio.run(observe(demo_model(cache_dir() / "models"), Path(folder)))) else 0
    except KeyboardInterrupt:
        console.print("Interrupted: Slotkeeper and Prometheus have ended.")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
