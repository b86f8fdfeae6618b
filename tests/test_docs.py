"""The README names every setting and every metric, in the words of the code.

`python -m tests.test_docs` prints both tables as the README must hold them.
"""

from pathlib import Path

import pytest

from proxy.config import ENV_PREFIX, Settings, flag_name
from proxy.flags import NOT_FLAGS, choices, shown_default
from proxy.metrics import Metrics
from tests.proxy.test_metrics import feed

README = Path(__file__).parent.parent / "README.md"
ELSEWHERE = {
    "upstream_api_key": "in the environment or file only",
    "engine_flags": "everything after `--`",
    "layout_rules": "in the file only",
}


def setting_rows() -> list[str]:
    """One row for each setting: flag, environment variable, default, description."""
    rows = []
    for name, field in Settings.model_fields.items():
        values = "".join(f"{sign}{word}" for sign, word in zip((" ", *["\\|"] * 9), choices(field), strict=False))
        flag = ELSEWHERE[name] if name in NOT_FLAGS else f"`{flag_name(name)}{values}`"
        text = (field.description or "").replace("|", "\\|")
        rows.append(f"| {flag} | `{ENV_PREFIX}{name.upper()}` | {shown_default(name, field)} | {text} |")
    return rows


def metric_rows() -> list[str]:
    """One row for each metric of ours: name as scraped, kind, labels, help."""
    metrics = Metrics()
    metrics.add_engine("e0", "tiny", 1)
    feed(metrics)
    rows = []
    for family in metrics.registry.collect():
        if family.name.startswith("slotkeeper_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = ", ".join(label for label in family.samples[0].labels if label != "le")
            rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return rows


@pytest.mark.parametrize("row", setting_rows())
def test_every_setting_is_in_the_readme(row: str) -> None:
    """Flag, variable, default and words are the code's."""
    assert row in README.read_text().splitlines()


@pytest.mark.parametrize("row", metric_rows())
def test_every_metric_is_in_the_readme(row: str) -> None:
    """Name, labels and words are the code's."""
    assert row in README.read_text().splitlines()


def test_the_readme_names_nothing_else() -> None:
    """No setting and no metric that is gone: each table row of theirs is one of the rows above."""
    known = {*setting_rows(), *metric_rows()}
    table = [line for line in README.read_text().splitlines() if line.startswith("| ")]
    stray = [line for line in table if f"| `{ENV_PREFIX}" in line or line.startswith("| `slotkeeper_")]
    assert [line for line in stray if line not in known] == []
    assert len(stray) == len(known)


if __name__ == "__main__":
    print("\n".join(["SETTINGS", *setting_rows(), "METRICS", *metric_rows()]))
