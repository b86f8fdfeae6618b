"""Every metric, on a registry of its own. Names and labels are those of contract.md; counters of tokens and seconds.

Labels come from closed sets: a value outside its set is a mistake of ours and raises ValueError, and an engine or model
that was not announced by `add_engine` is counted as "other", so that no client can make series.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition
from prometheus_client.registry import Collector

from llamacpp.exposition import Family
from proxy import __version__
from proxy.errors import Outcome

Kind = Literal["main", "side", "subagent", "compaction", "warm", "other"]
CompactionOutcome = Literal["summary", "digest", "pruned", "impossible"]
Decision = Literal["continue", "guest", "fork", "restore", "cold"]
SaveReason = Literal["loss", "exit", "idle", "base", "fork", "manual"]
SaveOutcome = Literal["ok", "failed"]
RestoreOutcome = Literal["ok", "failed", "ineffective"]
SlotState = Literal["empty", "idle", "leased", "busy", "restoring", "saving", "unknown"]
DialectLabel = Literal["chat", "completion", "native", "messages", "responses"]
Cause = Literal[
    "new_line",
    "base_changed",
    "tools_changed",
    "history_edited",
    "reasoning_dropped",
    "template_rewrite",
    "template_clock",
    "compaction",
    "evicted",
    "engine_restart",
    "cancelled",
    "checkpoint_missing",
    "restore_ineffective",
    "isolation",
    "image",
    "unknown",
]

# Seconds. From a warm first token (milliseconds) to a cold prefill of 100k tokens on a CPU (tens of minutes).
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
# Seconds. The proxy's own share is wanted below 6 ms (issue 2); loaded machines reach hundreds.
_OVERHEAD = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
# Tokens. Powers of four from one short message to the longest contexts in use.
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_ENGINE, _MODEL_KIND = ("engine",), ("engine", "model", "kind")
OTHER = "other"
OPENMETRICS, TEXT = "application/openmetrics-text", "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What the proxy counts. Methods take labels by name from their closed sets; none of them awaits."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # one more series per counter that nobody reads
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._passed = _Passed()
        self.registry.register(self._passed)
        self._engines: dict[str, str] = {}
        self._models: set[str] = set()
        self._rules: set[str] = set()
        self._make_token_counters()
        self._make_event_counters()
        self._make_histograms()
        self._make_gauges()

    # -- what is announced ------------------------------------------------------------------------------------------

    def add_engine(self, engine: str, model: str, capacity: int) -> None:
        """An engine and the model it serves may be used as labels from now on. capacity: tokens of its context."""
        if self._engines.get(engine) != model:
            self._engines[engine] = model
            self._models.add(model)
            self._begin(engine, model if capacity else None)
        self._capacity.labels(engine).set(capacity)

    def _begin(self, engine: str, model: str | None) -> None:
        """Counters begin at 0 where their labels are known: increase() does not see the step to a first value."""
        for counter in (self._waits, self._evictions, self._restarts, self._saved_bytes):
            counter.labels(engine)
        for counter, values in (
            (self._placements, Decision),
            (self._saves, SaveReason),
            (self._save_failures, SaveReason),
            (self._restores, RestoreOutcome),
        ):
            for value in get_args(values):
                counter.labels(engine, value)
        if model is not None:
            for cause in get_args(Cause):
                self._reprocessed.labels(engine, model, cause)
            for kind in get_args(Kind):
                for counter in self._by_model_and_kind:
                    counter.labels(engine, model, kind)

    # -- counters ---------------------------------------------------------------------------------------------------

    def add_rules(self, names: Iterable[str]) -> None:
        """Rules of repair that may be used as labels from now on."""
        self._rules.update(names)

    def prompt(self, engine: str, model: str, kind: Kind, *, cached: int, processed: int, seconds: float) -> None:
        """One answered prompt: the engine's own cache_n and prompt_n in tokens, and prompt_ms as seconds."""
        labels = self._model_kind(engine, model, kind)
        self._prompt_tokens.labels(*labels).inc(cached + processed)
        self._cached.labels(*labels).inc(cached)
        self._processed.labels(*labels).inc(processed)
        self._prompt_seconds.labels(*labels).inc(seconds)
        self._request_prompt.labels(kind).observe(cached + processed)
        self._request_processed.labels(kind).observe(processed)

    def predicted(self, engine: str, model: str, kind: Kind, *, tokens: int, seconds: float) -> None:
        """Generated tokens (predicted_n) and the time they took (predicted_ms as seconds)."""
        labels = self._model_kind(engine, model, kind)
        self._predicted.labels(*labels).inc(tokens)
        self._predicted_seconds.labels(*labels).inc(seconds)

    def reprocessed(self, engine: str, model: str, cause: Cause, tokens: int) -> None:
        """Tokens that were processed although an earlier prompt had held them, and why."""
        labels = (self._engine(engine), self._model(model), _checked(cause, Cause))
        self._reprocessed.labels(*labels).inc(tokens)

    def request(self, dialect: DialectLabel, kind: Kind, outcome: Outcome) -> None:
        """One model request has ended."""
        labels = _checked(dialect, DialectLabel), _checked(kind, Kind), _checked(outcome, Outcome)
        self._requests.labels(*labels).inc()

    def dropped(self, dialect: DialectLabel, count: int) -> None:
        """Fields of a request that have no effect on the engine."""
        self._dropped.labels(_checked(dialect, DialectLabel)).inc(count)

    def repaired(self, rules: Iterable[str]) -> None:
        """Changes that were made to a request so that its prompt extends what was sent before, by their rule."""
        for rule in rules:
            self._repairs.labels(rule if rule in self._rules else OTHER).inc()

    def compacted(self, outcome: CompactionOutcome, before: int = 0, after: int = 0) -> None:
        """A prompt that no longer fitted; tokens of it before and after, where something was replaced."""
        self._compactions.labels(_checked(outcome, CompactionOutcome)).inc()
        self._compaction_tokens.labels("before").inc(before)
        self._compaction_tokens.labels("after").inc(after)

    def placement(self, engine: str, decision: Decision) -> None:
        """One prompt was placed: where its tokens came from."""
        self._placements.labels(self._engine(engine), _checked(decision, Decision)).inc()

    def waited(self, engine: str) -> None:
        """One request had to wait for a slot or for room in the pool."""
        self._waits.labels(self._engine(engine)).inc()

    def evicted(self, engine: str) -> None:
        """One slot lost a line's tokens to make room."""
        self._evictions.labels(self._engine(engine)).inc()

    def engine_restarted(self, engine: str) -> None:
        """An engine was started again, by us or unseen."""
        self._restarts.labels(self._engine(engine)).inc()

    def orphans(self, count: int) -> None:
        """Slot files that no record named, or that did not hold what their record said, were removed."""
        self._orphans.inc(count)

    # -- snapshots --------------------------------------------------------------------------------------------------

    def saved(self, engine: str, reason: SaveReason, kind: Kind, *, seconds: float, n_bytes: int) -> None:
        """A snapshot was published: engine time in seconds, file size in bytes."""
        name = self._engine(engine)
        self._saves.labels(name, _checked(reason, SaveReason)).inc()
        self._save_seconds.labels(name, _checked(kind, Kind)).observe(seconds)
        self._saved_bytes.labels(name).inc(n_bytes)

    def save_failed(self, engine: str, reason: SaveReason) -> None:
        """A snapshot could not be written or published; the request goes on without it (design rule 2)."""
        self._save_failures.labels(self._engine(engine), _checked(reason, SaveReason)).inc()

    def restored(self, engine: str, outcome: RestoreOutcome, kind: Kind, *, seconds: float) -> None:
        """A restore was tried. ineffective: the engine took the file, and the next cache_n did not show it."""
        name = self._engine(engine)
        self._restores.labels(name, _checked(outcome, RestoreOutcome)).inc()
        self._restore_seconds.labels(name, _checked(kind, Kind)).observe(seconds)

    # -- durations of a request, in seconds --------------------------------------------------------------------------

    def first_token(self, engine: str, kind: Kind, seconds: float) -> None:
        """From the request's last byte to the first generated token."""
        self._first_token.labels(self._engine(engine), _checked(kind, Kind)).observe(seconds)

    def queued(self, engine: str, kind: Kind, seconds: float) -> None:
        """Time in the waiting line, zero included."""
        self._queue_seconds.labels(self._engine(engine), _checked(kind, Kind)).observe(seconds)

    def finished(self, engine: str, kind: Kind, *, seconds: float, overhead: float) -> None:
        """The whole request, and our own share of it: what was neither waiting nor the engine."""
        labels = self._engine(engine), _checked(kind, Kind)
        self._request_seconds.labels(*labels).observe(seconds)
        self._overhead.labels(*labels).observe(max(0.0, overhead))

    # -- gauges: set before a scrape ----------------------------------------------------------------------------------

    def set_engine(
        self, engine: str, *, up: bool, slots: Mapping[SlotState, int], slot_tokens: int, waiting: int
    ) -> None:
        """One engine's table now: number of slots by state, tokens held in them, requests waiting for it."""
        name = self._engine(engine)
        self._up.labels(name).set(up)
        for state in get_args(SlotState):
            self._slots.labels(name, state).set(slots.get(state, 0))
        self._slot_tokens.labels(name).set(slot_tokens)
        self._waiting.labels(name).set(waiting)

    def set_store(self, *, lines: int, snapshots: int, n_bytes: int, budget: int) -> None:
        """What is remembered now: conversations, slot files, their bytes and the most allowed."""
        self._lines.set(lines)
        self._snapshots.set(snapshots)
        self._snapshot_bytes.set(n_bytes)
        self._snapshot_budget.set(budget)

    def set_limit(self, waiting: int) -> None:
        """The most requests that may wait for an engine."""
        self._waiting_limit.set(waiting)

    def set_passed(self, families: Mapping[str, Sequence[Family]]) -> None:
        """llama-server's own metrics, by engine."""
        self._passed.families = {self._engine(name): found for name, found in families.items()}

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics where the Accept header asks for it, else text."""
        # Not prometheus_client's choose_encoder: it fails on versions that are no numbers, and sends them back.
        if OPENMETRICS in (part.partition(";")[0].strip().lower() for part in accept.split(",")):
            return exposition.generate_latest(self.registry), exposition.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
        return generate_latest(self.registry), TEXT

    # -- making ------------------------------------------------------------------------------------------------------

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"slotkeeper_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"slotkeeper_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"slotkeeper_{name}", text, labels, registry=self.registry)

    def _make_token_counters(self) -> None:
        c, who = self._counter, _MODEL_KIND
        self._prompt_tokens = c("prompt_tokens", "Prompt tokens of answered requests (cache_n + prompt_n).", who)
        self._cached = c("prompt_tokens_cached", "Prompt tokens taken from the cache (cache_n).", who)
        self._processed = c("prompt_tokens_processed", "Prompt tokens that the engine computed (prompt_n).", who)
        self._reprocessed = c(
            "prompt_tokens_reprocessed",
            "Prompt tokens computed although an earlier prompt had held them (prompt_n against the ledgers), by cause.",
            ("engine", "model", "cause"),
        )
        self._predicted = c("predicted_tokens", "Generated tokens (predicted_n).", who)
        self._prompt_seconds = c("prompt_seconds", "Seconds the engine spent on prompts (prompt_ms).", who)
        self._predicted_seconds = c("predicted_seconds", "Seconds the engine spent generating (predicted_ms).", who)
        self._by_model_and_kind = (
            *(self._prompt_tokens, self._cached, self._processed, self._predicted),
            *(self._prompt_seconds, self._predicted_seconds),
        )

    def _make_event_counters(self) -> None:
        c = self._counter
        self._requests = c("requests", "Model requests ended (counted at settling).", ("dialect", "kind", "outcome"))
        for dialect in get_args(DialectLabel):
            for outcome in get_args(Outcome):
                self._requests.labels(dialect, "main", outcome)
        self._dropped = c(
            "dropped_fields", "Fields of requests without effect on the engine (readers of the dialects).", ("dialect",)
        )
        self._repairs = c(
            "repairs", "Changes that keep prompts append-only (layout, ledger, replay), by rule.", ("rule",)
        )
        self._compactions = c(
            "compactions",
            "Prompts that did not fit (compaction): a summary or a digest took the place of old messages, the client's "
            "own prunes were enough, or nothing helped.",
            ("outcome",),
        )
        for outcome in get_args(CompactionOutcome):
            self._compactions.labels(outcome)
        self._compaction_tokens = c(
            "compaction_tokens", "Prompt tokens before and after compactions (estimated).", ("side",)
        )
        for side in ("before", "after"):
            self._compaction_tokens.labels(side)
        self._placements = c(
            "placements", "Prompts placed (slot table), by where their tokens came from.", ("engine", "decision")
        )
        self._waits = c("waits", "Requests that waited for a slot or for room in the pool (waiting line).", _ENGINE)
        self._evictions = c("evictions", "Slots whose tokens were given up to make room (slot table).", _ENGINE)
        self._restarts = c("engine_restarts", "Starts of an engine after its first (supervisor).", _ENGINE)
        self._saves = c("snapshot_saves", "Slot files published (store), by reason.", ("engine", "reason"))
        self._save_failures = c(
            "snapshot_save_failures",
            "Slot files not written or refused (engine, store), by reason.",
            ("engine", "reason"),
        )
        self._saved_bytes = c("snapshot_saved_bytes", "Bytes of slot files written (engine's n_written).", _ENGINE)
        self._restores = c("snapshot_restores", "Restores tried (engine), by outcome.", ("engine", "outcome"))
        self._orphans = c("snapshot_orphans", "Slot files removed because no valid record named them (store).")

    def _make_histograms(self) -> None:
        h, who = self._histogram, ("engine", "kind")
        self._save_seconds = h("snapshot_save_seconds", "Seconds to save a slot (our clock).", who, _SECONDS)
        self._restore_seconds = h("snapshot_restore_seconds", "Seconds to restore a slot (our clock).", who, _SECONDS)
        self._first_token = h(
            "time_to_first_token_seconds", "Seconds from request to first generated token (our clock).", who, _SECONDS
        )
        self._queue_seconds = h("queue_seconds", "Seconds in the waiting line (our clock).", who, _SECONDS)
        self._request_seconds = h(
            "request_seconds", "Seconds from request to end of answer (our clock).", who, _SECONDS
        )
        self._overhead = h(
            "proxy_overhead_seconds", "Seconds of a request spent in the proxy itself (our clock).", who, _OVERHEAD
        )
        kind = ("kind",)
        self._request_prompt = h("request_prompt_tokens", "Tokens of a prompt (cache_n + prompt_n).", kind, _TOKENS)
        self._request_processed = h(
            "request_processed_tokens", "Tokens computed of a prompt (prompt_n).", kind, _TOKENS
        )

    def _make_gauges(self) -> None:
        g = self._gauge
        self._slots = g("slots", "Slots by state (slot table).", ("engine", "state"))
        self._slot_tokens = g("slot_tokens", "Tokens held in slots (slot table).", _ENGINE)
        self._capacity = g("context_tokens_capacity", "Tokens that an engine's context holds (/props).", _ENGINE)
        self._waiting = g("waiting_requests", "Requests waiting (waiting line).", _ENGINE)
        self._waiting_limit = g("waiting_limit", "Most requests that may wait for an engine (--max-waiting).")
        self._up = g("engine_up", "1 while the engine answers, else 0 (/health, /props).", _ENGINE)
        self._lines = g("lines", "Conversations remembered (ledgers).")
        self._snapshots = g("snapshots", "Slot files on disk (store).")
        self._snapshot_bytes = g("snapshot_bytes", "Bytes of slot files on disk, temporary copies included (store).")
        self._snapshot_budget = g("snapshot_budget_bytes", "Most bytes of slot files (--disk-budget).")
        self._gauge("build_info", "Always 1, with the version (package).", ("version",)).labels(__version__).set(1)

    # -- labels ------------------------------------------------------------------------------------------------------

    def _engine(self, name: str) -> str:
        return name if name in self._engines else OTHER

    def _model(self, name: str) -> str:
        return name if name in self._models else OTHER

    def _model_kind(self, engine: str, model: str, kind: Kind) -> tuple[str, str, str]:
        return self._engine(engine), self._model(model), _checked(kind, Kind)


class _Passed(Collector):
    """llama-server's own metrics under its own names, `llamacpp:` written `llamacpp_`, with the engine as a label."""

    def __init__(self) -> None:
        self.families: dict[str, Sequence[Family]] = {}

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """One family per name and set of labels; engines of several builds may differ in what they have. In
        OpenMetrics a counter has no `_total`, and a name that comes twice fails the scrape: the first has it."""
        made: dict[str, tuple[CounterMetricFamily | GaugeMetricFamily, str, tuple[str, ...]]] = {}
        for engine, families in self.families.items():
            for family in (f for f in families if f.samples):
                name, labels = family.name, tuple(name for name, _ in family.samples[0].labels)
                metric, *taken = made.setdefault(name.removesuffix("_total"), (_metric(family, labels), name, labels))
                for sample in family.samples if taken == [name, labels] else ():
                    metric.add_metric([engine, *(v for _, v in sample.labels)], sample.value)
        yield from (metric for metric, _, _ in made.values())


def _metric(family: Family, labels: tuple[str, ...]) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    name, text = (
        f"llamacpp_{family.name.removesuffix('_total')}",
        f"{family.help or 'No words of its own'} (llama-server).",
    )
    return kind(name if family.kind == "counter" else f"llamacpp_{family.name}", text, labels=("engine", *labels))


def _checked(value: str, allowed: object) -> str:
    if value not in get_args(allowed):
        raise ValueError(f"{value!r} is not one of the labels {get_args(allowed)}")
    return value
