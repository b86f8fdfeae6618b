"""What one running proxy owns, handed to whoever needs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from proxy.api.read import Json
from proxy.config import Settings
from proxy.engine_metrics import EngineMetrics
from proxy.engines import Engines
from proxy.errors import Dialect, ShuttingDown
from proxy.explain import Explainer, texts_of
from proxy.jobs import Jobs
from proxy.layouts import Layouts
from proxy.ledger import TextBudget
from proxy.lines import LineBook
from proxy.metrics import Metrics
from proxy.normals import Normals
from proxy.settle import Record
from proxy.store import Store
from proxy.tasks import Tasks
from proxy.tenants import Tenants

if TYPE_CHECKING:
    from proxy.exchange import Exchange

log = structlog.get_logger(__name__)

DRAINED = 0.8
"""Share of the drain time that running answers get; the rest is for telling their clients."""

MOST_DROPPED = 256
"""Names of fields without effect that are logged in the life of a process."""
MOST_RECORDS = 1000
"""Requests that /slotkeeper/requests remembers."""
MOST_BODIES = 32
"""Bodies kept with --show-prompts; an agent's is 50 KB to a few MB."""


@dataclass(eq=False)
class Service:
    """Settings, engines, lines, store, metrics and background tasks of one process."""

    settings: Settings
    tenants: Tenants
    store: Store
    metrics: Metrics
    engines: Engines
    lines: LineBook
    tasks: Tasks
    layouts: Layouts = field(default_factory=Layouts)
    normals: Normals = field(default_factory=Normals)
    texts: TextBudget = field(default_factory=TextBudget)
    records: OrderedDict[str, Record] = field(default_factory=OrderedDict)
    stopping: bool = False
    hurried: asyncio.Event = field(default_factory=asyncio.Event)
    """Whoever stops us waits for nothing more, not even for slot files."""
    running: set[Exchange] = field(default_factory=set)
    jobs: Jobs = field(default_factory=Jobs)
    explainer: Explainer = field(init=False)
    engine_metrics: EngineMetrics = field(init=False)
    _dropped: set[str] = field(default_factory=set)
    _bodies: OrderedDict[str, dict[str, Json]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.engine_metrics = EngineMetrics(self.tasks)
        self.explainer = Explainer(self.tasks, self.lines.get, self._explained)

    def _explained(self, record: Record) -> None:
        """A request's divergence was found, perhaps after it had ended."""
        if record.id in self.records:
            self.store.put_request(record.to_json())

    def show_record(self, record: Record) -> None:
        """Shows a request in /slotkeeper/requests, the oldest beyond MOST_RECORDS out: from the moment that the engine
        has told its figures, so that whoever has the end of an answer finds it there."""
        self.records[record.id] = record
        while len(self.records) > MOST_RECORDS:
            self.records.popitem(last=False)

    def remember(self, record: Record) -> None:
        """Keeps a request that has ended, and logs it."""
        self.show_record(record)
        self.store.put_request(record.to_json())
        log.info(
            "answered" if record.outcome == "ok" else "not_answered",
            cached=record.cache_n,
            computed=record.prompt_n,
            generated=record.predicted_n,
            seconds=record.seconds,
            cause=record.cause,
            outcome=record.outcome,
            error=record.error,
            placement=record.placement,
            engine=record.engine or None,
            slot=record.slot,
            line=record.line or None,
            kind=record.kind,
            request=record.id,
        )

    def note_dropped(self, dialect: Dialect, names: list[str]) -> None:
        """Fields of a request that have no effect here: counted, and each name logged once."""
        if not names:
            return
        self.metrics.dropped(dialect, len(names))
        new = sorted(set(names) - self._dropped)[: MOST_DROPPED - len(self._dropped)]
        if new:
            self._dropped.update(new)
            log.info("fields_without_effect", dialect=dialect, fields=new)

    def is_ready(self) -> bool:
        """What /readyz says: an engine can be asked, and we do not stop."""
        return not self.stopping and self.engines.is_ready()

    def begin_stop(self, *, at_once: bool) -> None:
        """No new requests; those that run get most of the drain time, or none, and are told why they end. At once:
        slot files that are not written yet are given up, too."""
        self.stopping = True
        if at_once:
            self.hurried.set()
        self.jobs.end_left()
        seconds = 0.0 if at_once else self.settings.drain_seconds * DRAINED
        asyncio.get_running_loop().call_later(seconds, self._end_running)

    async def unless_hurried(self, work: Coroutine[Any, Any, None]) -> None:
        """Does `work`, or as much of it as a hurried stop lets."""
        task, hurry = asyncio.create_task(work, name="last-saves"), asyncio.create_task(self.hurried.wait())
        try:
            await asyncio.wait({task, hurry}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (task, hurry):
                one.cancel()
            await asyncio.gather(hurry, return_exceptions=True)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def _end_running(self) -> None:
        for exchange in list(self.running):
            exchange.end(ShuttingDown("Slotkeeper is stopping; send the request again in a moment.", retry_after=5))

    def show(self, request: str, body: Json, *, sent: bool = False) -> None:
        """Keeps a request's body for /slotkeeper/requests/ID, in memory, with --show-prompts only: the client's own
        and, where another one was `sent` in its place, that as well."""
        if not self.settings.show_prompts:
            return
        kept = self._bodies.setdefault(request, {"body": body})
        if sent and body is not kept["body"]:
            kept["sent"] = body
        while len(self._bodies) > MOST_BODIES:
            self._bodies.popitem(last=False)

    def body_of(self, request: str) -> Json | None:
        """A client's body, if it may be shown and is still kept."""
        return self._bodies.get(request, {}).get("body")

    def described(self, record: Record) -> Json:
        """A request for its tenant: positions and hashes, and the body where prompts may be shown."""
        shown = {**record.to_json(), "tenant": owner(record.tenant)}
        if self.settings.show_prompts and (explained := self.explainer.get(record.id)):
            shown["texts"] = texts_of(explained)
        return shown | self._bodies.get(record.id, {})

    def recall(self, found: list[dict[str, Any]]) -> None:
        """Requests of earlier runs, oldest first."""
        self.records.update((r.id, r) for r in map(Record.from_json, found) if r is not None)

    def recent(self, last: int, tenant: str | None) -> list[dict[str, Any]]:
        """The newest requests, newest first; of one tenant unless `tenant` is None."""
        mine = (r for r in reversed(self.records.values()) if tenant in (None, owner(r.tenant)))
        return [self.described(r) for r, _ in zip(mine, range(last), strict=False)]


def owner(tenant: str) -> str:
    """The tenant of an API key, without the salt that a request may add to it."""
    return tenant.partition("\x1f")[0]
