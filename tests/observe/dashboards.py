"""The queries of deploy/grafana/dashboards, with Grafana's variables replaced as Grafana would."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.observe.prometheus import DEPLOY, Prometheus

FILES = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RATE_INTERVAL = "20s"
"""$__rate_interval at a scrape a second: Grafana takes at least four scrapes."""


@dataclass(frozen=True)
class Query:
    """One target of one panel."""

    dashboard: str
    panel: str
    legend: str
    expression: str
    is_instant: bool

    def filled(self, seconds: float) -> str:
        """The expression for the last `seconds`, every variable at "All"."""
        text = self.expression
        for name in ("engine", "model", "kind"):
            text = text.replace(f"${name}", ".*")
        return text.replace("$__rate_interval", RATE_INTERVAL).replace("$__range", f"{math.ceil(seconds)}s")


@dataclass(frozen=True)
class Series:
    """What Grafana would draw as one line: its legend and its finite values, oldest first."""

    legend: str
    values: tuple[float, ...]


def queries() -> Iterator[Query]:
    """Every query of every dashboard."""
    for file in FILES:
        dashboard = json.loads(file.read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                names = dashboard["title"], panel["title"], target["legendFormat"]
                yield Query(*names, target["expr"], target.get("instant", False))


async def ask(prometheus: Prometheus, query: Query, start: float, end: float) -> list[Series]:
    """Its series between two moments, in seconds since the epoch; those without a finite value are left out."""
    expression = query.filled(end - start)
    if query.is_instant:
        found = await prometheus.instant(expression, end)
    else:
        found = await prometheus.over(expression, start, end)
    series = [Series(_legend(query.legend, s["metric"]), _finite(s["values"])) for s in found]
    return [s for s in series if s.values]


def _finite(values: list[list[Any]]) -> tuple[float, ...]:
    return tuple(v for v in (float(text) for _, text in values) if math.isfinite(v))


def _legend(form: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        form = form.replace("{{" + name + "}}", value)
    return form
