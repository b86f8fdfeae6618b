"""The end of a request, whatever it was: ledger, slot, metrics, cause, record. Once each."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from llamacpp.reports import Timings
from policies.append_only import diff_kinds, normal
from policies.causes import Turn, Verdict, explain
from policies.checkpoints import Memory, after_prompt
from policies.replay import has_other_thoughts
from policies.types import Action, Match
from proxy.engine import Engine
from proxy.errors import Dialect, Outcome
from proxy.lines import Found, Line, today
from proxy.metrics import Kind, Metrics
from proxy.slots import Slot
from proxy.store import Store
from proxy.store_types import Snapshot

Json = dict[str, Any]


@dataclass(slots=True)
class Record:
    """One request as /slotkeeper/requests shows it: numbers, names and hashes, never text."""

    id: str
    tenant: str
    dialect: Dialect
    kind: Kind
    started: float
    line: str = ""
    engine: str = ""
    model: str = ""
    slot: int = -1
    placement: str = ""
    reason: str = ""
    match: str = ""
    predicted_cache_n: int = 0
    cache_n: int = 0
    prompt_n: int = 0
    predicted_n: int = 0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    waited_ms: float = 0.0
    seconds: float = 0.0
    cause: str | None = None
    reprocessed: int = 0
    outcome: Outcome = "ok"
    error: str | None = None
    joined: int = 0
    """Clients that came again for it, after one before them had left."""
    repairs: list[str] = field(default_factory=list)
    """Rules that changed the spelling of this request."""
    compaction: dict[str, Any] = field(default_factory=dict)
    """What a compaction did for this request: its outcome, tokens before and after (estimated), the span of messages
    that the summary stands for, the requests that asked for it; `ahead`: done in idle time (no client's request)."""
    divergence: dict[str, Any] = field(default_factory=dict)
    """First message that differs from the ledger: its index and the positions around it in tokens (estimated)."""

    def to_json(self) -> dict[str, Any]:
        """For the ops door and state.db."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def headers(self) -> dict[str, str]:
        """What the client is told of its request so far (contract.md, response headers)."""
        headers = {"x-slotkeeper-request-id": self.id}
        if self.line:
            headers["x-slotkeeper-line"] = self.line
        if self.placement:
            headers |= {
                "x-slotkeeper-slot": str(self.slot),
                "x-slotkeeper-placement": self.placement,
                "x-slotkeeper-waited-ms": str(round(self.waited_ms)),
                "x-slotkeeper-predicted-cache-n": str(self.predicted_cache_n),
            }
        return headers

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Record | None:
        """A record of an earlier run; None when another version wrote it."""
        try:
            return cls(**found)
        except TypeError:
            return None


@dataclass(slots=True)
class Clock:
    """Marks of one request, in seconds of one monotonic clock; 0.0 where not reached."""

    start: float = field(default_factory=time.perf_counter)
    sent: float = 0.0
    waited: float = 0.0
    first: float = 0.0


@dataclass(frozen=True, slots=True)
class Signs:
    """What else may have changed a prompt (policies/causes.Turn)."""

    dropped_reasoning: bool = False
    rewrites_reasoning: bool = False
    clock_ticked: bool = False


def signs_of(engine: Engine, found: Found, body: Json, before: bytes | None) -> Signs:
    """`body`: the chat as it was sent; `before`: the one of the line that it departs from, if it is still known."""
    if found.line is None:
        return Signs()
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    last_user = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=0)
    return Signs(
        dropped_reasoning=found.match is Match.EDITED and _dropped_reasoning(messages, found.shared, before),
        rewrites_reasoning=engine.drops_reasoning and any(m.get("reasoning_content") for m in messages[:last_user]),
        clock_ticked=engine.prints_clock and found.line.day not in ("", today()),
    )


def _dropped_reasoning(messages: list[Json], at: int, before: bytes | None) -> bool:
    try:
        old, new = orjson.loads(before or b"")["messages"][at], messages[at]
        is_alike = normal(old, {}) == normal(new, {}) and "reasoning" in diff_kinds(old, new)
        return is_alike and not has_other_thoughts(old, new)
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return False


def after_answer(engine: Engine, line: Line, found: Found, record: Record, timings: Timings, signs: Signs) -> Verdict:
    """What the engine did, told to costs, metrics and record. Call before the ledger advances."""
    stem = found.line
    record.cache_n, record.prompt_n, record.predicted_n = timings.cache_n, timings.prompt_n, timings.predicted_n
    record.prompt_ms, record.predicted_ms = timings.prompt_ms, timings.predicted_ms
    engine.costs.learn("prefill", timings.prompt_ms / 1000, timings.prompt_n)
    verdict = explain(
        Turn(
            match=found.match,
            held=min(_held(found, stem, timings), timings.cache_n + timings.prompt_n),
            cache_n=timings.cache_n,
            predicted_cache_n=record.predicted_cache_n,
            same_tools=found.line is None or found.line.prompt.tools == line.prompt.tools,
            shared=found.held,
            lost=stem.lost if stem is not None else line.lost,
            restored=record.placement in (Action.RESTORE, Action.FORK),
            can_rewind=engine.can_rewind,
            dropped_reasoning=signs.dropped_reasoning,
            rewrites_reasoning=signs.rewrites_reasoning,
            clock_ticked=signs.clock_ticked,
            is_compacted="outcome" in record.compaction or record.kind == "compaction",
        )
    )
    record.cause, record.reprocessed = verdict.cause, verdict.reprocessed
    m, model, kind = engine.metrics, engine.model, record.kind
    m.prompt(
        engine.name, model, kind, cached=timings.cache_n, processed=timings.prompt_n, seconds=timings.prompt_ms / 1000
    )
    m.predicted(engine.name, model, kind, tokens=timings.predicted_n, seconds=timings.predicted_ms / 1000)
    if verdict.cause is not None:
        m.reprocessed(engine.name, engine.model, verdict.cause.value, verdict.reprocessed)
    return verdict


def _held(found: Found, stem: Line | None, timings: Timings) -> int:
    """Tokens that an earlier prompt held; before a change of base or history all of its content counts."""
    if found.match in (Match.BASE, Match.EDITED) and stem is not None:
        return min(stem.n_tokens, timings.cache_n + timings.prompt_n)
    return found.held


def tell(metrics: Metrics, record: Record, clock: Clock) -> None:
    """The request is over, whatever its end: counted, and its times measured."""
    r, now = record, time.perf_counter()
    r.seconds = round(now - clock.start, 4)
    metrics.request(r.dialect, r.kind, r.outcome)
    if r.engine:
        engine_seconds = (r.prompt_ms + r.predicted_ms) / 1e3
        overhead = now - clock.start - clock.waited - engine_seconds
        metrics.finished(r.engine, r.kind, seconds=now - clock.start, overhead=overhead)
        if clock.first:
            metrics.first_token(r.engine, r.kind, clock.first - clock.start)


def judge(store: Store, snapshot: Snapshot, timings: Timings, *, is_effective: bool) -> None:
    """What a restore was worth. A file that ends with the prompt may be useless for this prompt alone, where the
    engine cannot go back by a token (Learned.steps_back): the next turn extends it."""
    if snapshot.n_tokens < timings.cache_n + timings.prompt_n:
        store.mark_effective(snapshot.id, is_effective)


CHECKPOINT_AT_LEAST = 8
"""Processed tokens behind which a checkpoint lies: it is made 4 tokens before a prompt's end (llama-server.md)."""


def fill(
    slot: Slot, line: Line, timings: Timings, memory: Memory, *, tokens: bytes | None, is_guest: bool, now: float
) -> None:
    """What the slot holds after a complete answer: the prompt and all generated tokens but the last.

    The last sampled token is never decoded (server-context.cpp, update_slots): it has no cell.
    """
    n_prompt = timings.cache_n + timings.prompt_n
    if slot.line == line.id and slot.n_prompt is not None and slot.n_tokens > slot.n_prompt:
        slot.replies_return = timings.cache_n >= slot.n_tokens
    slot.boundary = n_prompt if timings.prompt_n >= CHECKPOINT_AT_LEAST else None
    slot.checkpoints = after_prompt(memory, slot.checkpoints, timings.cache_n, n_prompt)
    slot.n_tokens = n_prompt + max(0, timings.predicted_n - 1)
    slot.tokens = tokens if tokens is not None else slot.tokens[: 4 * timings.cache_n]
    slot.is_rendered = tokens is not None or slot.body is None
    slot.saved, slot.rigid = min(slot.saved, timings.cache_n), min(slot.rigid, timings.cache_n)
    slot.tenant, slot.last_used = line.who.tenant, now
    slot.was_restored = slot.is_purged = False
    if is_guest:
        slot.n_left = min(slot.n_owned, timings.cache_n)
    else:
        slot.line, slot.n_prompt, slot.n_left = line.id, n_prompt, None
