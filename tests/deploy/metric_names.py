"""The names under which this version's metrics are scraped."""

import re

from proxy.metrics import Metrics
from tests.proxy.test_metrics import feed


def _labels() -> dict[str, set[str]]:
    metrics = Metrics()
    metrics.add_engine("e0", "tiny", 1)
    feed(metrics)
    return {sample.name: set(sample.labels) for family in metrics.registry.collect() for sample in family.samples}


LABELS = _labels()
"""By name."""
KNOWN = set(LABELS)


def named_in(text: str) -> set[str]:
    """Our metrics and llama-server's that an expression reads (recorded ones, with a colon, are left out)."""
    return set(re.findall(r"(?<![\w:])(?:slotkeeper|llamacpp)_\w+(?=[\[{)\s]|\Z)(?!\s*:)", text))
