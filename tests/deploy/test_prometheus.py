"""Scrape configuration, recording rules and alerts: promtool's checks, a case for each alert, no stray metric."""

import re
from pathlib import Path

from tests.deploy.metric_names import KNOWN, named_in
from tests.deploy.tools import need, run

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "prometheus"
ALERTS = re.findall(r"- alert: (\w+)", (FOLDER / "alerts.yml").read_text())
CASES = (FOLDER / "tests" / "alerts_test.yml").read_text()
WANTED = """EngineDown HitShareCollapsed ReprocessedHigh WaitingLineFull RestoresIneffective DiskBudgetFull
SavesFailing""".split()


def test_configuration() -> None:
    """promtool reads the configuration and the rule files it names."""
    found = run(need("promtool", "prometheus"), "check", "config", str(FOLDER / "prometheus.yml"))
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("rules found") >= 2


def test_cases() -> None:
    """Every alert fires when it should and does not when it should not."""
    found = run(need("promtool", "prometheus"), "test", "rules", str(FOLDER / "tests" / "alerts_test.yml"))
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_case_can_fail(tmp_path: Path) -> None:
    """The cases look at what the rules say: with another threshold one of them fails."""
    promtool = need("promtool", "prometheus")
    (tmp_path / "tests").mkdir()
    for name in ("rules.yml", "tests/alerts_test.yml"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    alerts = (FOLDER / "alerts.yml").read_text()
    assert "slotkeeper_engine_up == 0" in alerts
    (tmp_path / "alerts.yml").write_text(alerts.replace("slotkeeper_engine_up == 0", "slotkeeper_engine_up == 2"))
    found = run(promtool, "test", "rules", str(tmp_path / "tests" / "alerts_test.yml"))
    assert "an engine is down" in found.stdout + found.stderr
    assert found.returncode != 0


def test_every_alert_has_a_case() -> None:
    """One firing, and series beside it that must not fire."""
    assert {f"Slotkeeper{name}" for name in WANTED} <= set(ALERTS)
    for name in ALERTS:
        assert f"alertname: {name}\n        exp_alerts:\n          - exp_labels" in CASES, name


def test_the_rules_name_metrics_that_there_are() -> None:
    """What rules and cases read is fed by this version."""
    for name in ("rules.yml", "alerts.yml", "tests/alerts_test.yml"):
        found = named_in((FOLDER / name).read_text())
        assert found
        assert found - KNOWN == set(), name
