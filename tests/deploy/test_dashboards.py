"""The dashboards: valid, provisioned, and reading metrics that there are."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.metric_names import KNOWN, LABELS, named_in
from tests.observe.dashboards import FILES, queries

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "grafana"
DASHBOARDS = [pytest.param(json.loads(f.read_text()), id=f.stem) for f in FILES]


def test_there_are_three() -> None:
    """Issue 7."""
    assert [f.stem for f in FILES] == ["cache-reuse", "engines", "slots-and-memory"]


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_dashboard(dashboard: dict[str, Any]) -> None:
    """Variables, the provisioned data source, words on every panel, no two panels in one place."""
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["engine", "model", "kind"]
    source = re.search(r"uid: (\S+)", (FOLDER / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert source is not None
    panels = dashboard["panels"]
    assert [p["id"] for p in panels] == list(range(1, len(panels) + 1))
    for panel in panels:
        assert panel["datasource"]["uid"] == source[1]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [t["refId"] for t in panel["targets"]] == [chr(65 + i) for i in range(len(panel["targets"]))]
    places = sorted((p["gridPos"]["y"], p["gridPos"]["x"], p["gridPos"]["w"]) for p in panels)
    assert all(a[0] < b[0] or a[1] + a[2] <= b[1] for a, b in pairwise(places))
    assert all(x + w <= 24 for _, x, w in places)


def test_identities_differ() -> None:
    """Grafana tells dashboards apart by uid."""
    found = [json.loads(f.read_text())[key] for key in ("uid", "title") for f in FILES]
    assert len(set(found)) == len(found)


def test_queries_read_metrics_that_there_are() -> None:
    """By name; that each returns data is tests/live/test_observe."""
    for query in queries():
        found = named_in(query.expression)
        assert found or "process_" in query.expression, query
        assert found - KNOWN == set(), query


WHOLE = ("Prefill seconds saved", "Prefill seconds saved over time", "Computed: ours against llama-server's")
"""Panels with figures of an engine beside those of a model or kind: the speed of all its prefill, its own counts."""


def test_variables_choose_what_is_shown() -> None:
    """With two engines, or two models on one: each selector takes the variables for which its metric has a label."""
    for query in queries():
        for name, selector in re.findall(r"((?:slotkeeper|llamacpp)_\w+)(\{[^}]*\})?", query.expression):
            wanted = LABELS[name] & ({"engine"} if query.panel in WHOLE else {"engine", "model", "kind"})
            assert {v for v in wanted if f'{v}=~"${v}"' not in selector} == set(), query
