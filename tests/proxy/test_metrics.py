"""Metrics have the contract's names and labels, count in tokens and seconds, and accept no label from outside."""

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamacpp.exposition import parse
from proxy.metrics import TEXT, Metrics

# What GET /metrics of b11549 has, without its words and values.
LLAMA_NAMES = {
    "counter": "prompt_tokens_total prompt_tokens_cached_total prompt_seconds_total tokens_predicted_total "
    "tokens_predicted_seconds_total n_decode_total n_tokens_max spec_decode_num_draft_tokens_total "
    "spec_decode_num_accepted_tokens_total spec_decode_num_drafts_total",
    "gauge": "prompt_tokens_seconds predicted_tokens_seconds requests_processing requests_deferred "
    "n_busy_slots_per_decode",
}
LLAMA = "".join(
    f"# HELP llamacpp:{name} Words of its own\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} 7\n"
    for kind, names in LLAMA_NAMES.items()
    for name in names.split()
)

ACCEPTS = ("application/openmetrics-text", "text/plain")
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# contract.md, Metrics: name -> labels. Counters without their _total.
CONTRACT = {
    "prompt_tokens": {"engine", "model", "kind"},
    "prompt_tokens_cached": {"engine", "model", "kind"},
    "prompt_tokens_processed": {"engine", "model", "kind"},
    "prompt_tokens_reprocessed": {"engine", "model", "cause"},
    "predicted_tokens": {"engine", "model", "kind"},
    "prompt_seconds": {"engine", "model", "kind"},
    "predicted_seconds": {"engine", "model", "kind"},
    "requests": {"dialect", "kind", "outcome"},
    "placements": {"engine", "decision"},
    "repairs": {"rule"},
    "compactions": {"outcome"},
    "compaction_tokens": {"side"},
    "waits": {"engine"},
    "evictions": {"engine"},
    "snapshot_saves": {"engine", "reason"},
    "snapshot_restores": {"engine", "outcome"},
    "snapshot_save_seconds": {"engine", "kind"},
    "snapshot_restore_seconds": {"engine", "kind"},
    "time_to_first_token_seconds": {"engine", "kind"},
    "queue_seconds": {"engine", "kind"},
    "request_seconds": {"engine", "kind"},
    "proxy_overhead_seconds": {"engine", "kind"},
    "request_prompt_tokens": {"kind"},
    "request_processed_tokens": {"kind"},
    "slots": {"engine", "state"},
    "slot_tokens": {"engine"},
    "context_tokens_capacity": {"engine"},
    "waiting_requests": {"engine"},
    "waiting_limit": set(),
    "engine_up": {"engine"},
    "lines": set(),
    "snapshots": set(),
    "snapshot_bytes": set(),
    "snapshot_budget_bytes": set(),
    "build_info": {"version"},
}


@pytest.fixture
def metrics() -> Metrics:
    """One engine, one model."""
    made = Metrics()
    made.add_engine("e0", "tiny", 4096)
    return made


def feed(metrics: Metrics) -> None:
    """Use every method once."""
    metrics.prompt("e0", "tiny", "main", cached=3, processed=4, seconds=0.5)
    metrics.predicted("e0", "tiny", "main", tokens=8, seconds=0.25)
    metrics.reprocessed("e0", "tiny", "evicted", 5)
    metrics.request("chat", "main", "ok")
    metrics.dropped("messages", 2)
    metrics.add_rules(["date"])
    metrics.repaired(["date", "unheard of"])
    metrics.compacted("summary", 8000, 3000)
    metrics.placement("e0", "continue")
    metrics.waited("e0")
    metrics.evicted("e0")
    metrics.engine_restarted("e0")
    metrics.orphans(2)
    metrics.saved("e0", "idle", "main", seconds=0.1, n_bytes=1000)
    metrics.save_failed("e0", "exit")
    metrics.restored("e0", "ok", "main", seconds=0.1)
    metrics.first_token("e0", "main", 0.2)
    metrics.queued("e0", "main", 0.0)
    metrics.finished("e0", "main", seconds=1.0, overhead=-0.001)
    metrics.set_limit(64)
    metrics.set_passed({"e0": parse(LLAMA)})
    metrics.set_engine("e0", up=True, slots={"idle": 2}, slot_tokens=77, waiting=1)
    metrics.set_store(lines=1, snapshots=2, n_bytes=3, budget=4)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One sample."""
    return metrics.registry.get_sample_value(f"slotkeeper_{name}", labels)


def test_names_and_labels_are_the_contracts(metrics: Metrics) -> None:
    """Every name of contract.md that this version feeds, with exactly its labels."""
    feed(metrics)
    found = {
        family.name.removeprefix("slotkeeper_"): set(family.samples[0].labels) - {"le"}
        for family in metrics.registry.collect()
        if family.name.startswith("slotkeeper_")
    }
    assert {name: found.get(name) for name in CONTRACT} == CONTRACT


def test_every_help_text_is_there(metrics: Metrics) -> None:
    """Each metric of ours explains itself: what is counted, in which unit, and in brackets where the figure is from."""
    families = [f for f in metrics.registry.collect() if f.name.startswith("slotkeeper_")]
    assert len(families) > len(CONTRACT)
    assert [f.name for f in families if not re.fullmatch(r"[A-Z1].+\(.+\).*\.", f.documentation)] == []
    for unit in ("tokens", "seconds", "bytes"):
        named = [f for f in families if re.search(rf"_{unit}(_|$)", f.name)]
        assert [f.name for f in named if not re.search(unit, f.documentation, re.IGNORECASE)] == []


def test_counts(metrics: Metrics) -> None:
    """cache_n and prompt_n add up, and are kept apart."""
    feed(metrics)
    labels = {"engine": "e0", "model": "tiny", "kind": "main"}
    assert value(metrics, "prompt_tokens_total", **labels) == 7
    assert value(metrics, "prompt_tokens_cached_total", **labels) == 3
    assert value(metrics, "prompt_tokens_processed_total", **labels) == 4
    assert value(metrics, "predicted_seconds_total", **labels) == 0.25
    assert value(metrics, "slots", engine="e0", state="idle") == 2
    assert value(metrics, "slots", engine="e0", state="busy") == 0
    assert value(metrics, "snapshot_budget_bytes") == 4
    assert value(metrics, "proxy_overhead_seconds_sum", engine="e0", kind="main") == 0


def test_a_name_from_outside_makes_no_series(metrics: Metrics) -> None:
    """An engine or model that was not announced is counted as other."""
    metrics.prompt("evil", "gpt-9", "main", cached=0, processed=1, seconds=0)
    assert value(metrics, "prompt_tokens_total", engine="other", model="other", kind="main") == 1
    assert b"gpt-9" not in metrics.render()[0]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("request", ("chat", "main", "fine")),
        ("request", ("grpc", "main", "ok")),
        ("placement", ("e0", "wait")),
        ("reprocessed", ("e0", "tiny", "bad luck", 1)),
        ("queued", ("e0", "background", 0.1)),
        ("save_failed", ("e0", "whim")),
    ],
)
def test_a_label_outside_its_set_is_a_mistake(metrics: Metrics, method: str, arguments: tuple[Any, ...]) -> None:
    """Closed sets stay closed."""
    with pytest.raises(ValueError, match="is not one of the labels"):
        getattr(metrics, method)(*arguments)


def test_formats(metrics: Metrics) -> None:
    """Prometheus text, and OpenMetrics when asked for."""
    text, kind = metrics.render("")
    assert kind.startswith("text/plain")
    assert b"slotkeeper_build_info" in text
    open_text, open_kind = metrics.render("application/openmetrics-text; version=1.0.0")
    assert open_kind.startswith("application/openmetrics-text")
    assert open_text.endswith(b"# EOF\n")
    prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3"
    again, kind_again = metrics.render(prometheus)
    assert (_without_process(again), kind_again) == (_without_process(open_text), open_kind)


def _without_process(text: bytes) -> list[bytes]:
    """What this process used of the machine changes from one look to the next."""
    return [line for line in text.splitlines() if not line.startswith(b"process_")]


@given(
    st.text()
    | st.lists(st.sampled_from([*ACCEPTS, ";", ",", "=", "version", "escaping", "q", "1e9", "x"])).map("".join)
)
@example("application/openmetrics-text; version=abc")
def test_any_accept_header(accept: str) -> None:
    """A scrape never fails for it, and nothing of it comes back."""
    assert Metrics().render(accept)[1] in (TEXT, OPEN)


def test_no_ratios(metrics: Metrics) -> None:
    """Base units only: nothing here is a percentage or a rate."""
    names = [f.name for f in metrics.registry.collect()]
    assert [n for n in names if re.search(r"ratio|percent|rate$|_ms", n)] == []


def test_counters_begin_at_zero(metrics: Metrics) -> None:
    """Where their labels are known: the step to a first value would be no increase."""
    assert value(metrics, "evictions_total", engine="e0") == 0
    assert value(metrics, "prompt_tokens_reprocessed_total", engine="e0", model="tiny", cause="evicted") == 0
    assert value(metrics, "requests_total", dialect="chat", kind="main", outcome="overflow") == 0
    metrics.add_engine("e1", "unknown", 0)  # not asked yet
    assert value(metrics, "snapshot_restores_total", engine="e1", outcome="ok") == 0
    assert b'model="unknown"' not in metrics.render()[0]


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_llama_servers_own_metrics(metrics: Metrics, accept: str) -> None:
    """Under its names, with the engine as a label; one family for all engines, whatever each has."""
    metrics.add_engine("e1", "tiny", 4096)
    more = 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3\n'
    metrics.set_passed({"e0": parse(LLAMA), "e1": parse(LLAMA + "# TYPE llamacpp:requests_deferred gauge\n" + more)})
    lines = metrics.render(accept)[0].decode().splitlines()
    assert 'llamacpp_prompt_tokens_total{engine="e0"} 7.0' in lines
    assert 'llamacpp_prompt_tokens_total{engine="e1"} 7.0' in lines
    assert 'llamacpp_n_tokens_max{engine="e0"} 7.0' in lines
    assert any(line.startswith("llamacpp_spec") and 'engine="e1",position="0"} 3' in line for line in lines)
    assert sum(line.startswith("# TYPE llamacpp_requests_deferred ") for line in lines) == 1
    metrics.set_passed({})
    assert b"llamacpp_" not in metrics.render(accept)[0]


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_a_name_comes_once(metrics: Metrics, accept: str) -> None:
    """A counter x_total and a gauge x are one name in OpenMetrics, for which a scrape would fail."""
    metrics.add_engine("e1", "tiny", 4096)
    counter = "# TYPE llamacpp:x_total counter\nllamacpp:x_total 1\n"
    metrics.set_passed({"e0": parse(counter + "llamacpp:x 2\n"), "e1": parse("llamacpp:x 3\nllamacpp:x_total 4\n")})
    lines = [line for line in metrics.render(accept)[0].decode().splitlines() if "llamacpp_x" in line]
    assert sum(line.startswith("# TYPE") for line in lines) == 1
    samples = [line for line in lines if line[0] != "#"]
    assert samples == ['llamacpp_x_total{engine="e0"} 1.0', 'llamacpp_x_total{engine="e1"} 4.0']
