"""llama-server's own metrics, read for ours so that one scrape suffices, and only when that wakes and delays nobody.

Reading them is a task in the engine's queue: it wakes a sleeping engine and keeps an idle one from falling asleep, and
while a request without events runs, each such task puts off the moment at which the engine notices that its client left
(llama-server.md, "Closing the connection"; design.md, rule 7). So an engine is asked only when something of ours ran
there since it was asked last, never while such a request runs, and never when GET /props says that it sleeps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from llamacpp.errors import EngineError, EngineRefused, EngineUnreachable
from llamacpp.exposition import Family, parse
from proxy.engine import Engine
from proxy.tasks import Tasks

log = structlog.get_logger(__name__)

FRESH_SECONDS = 4.0
"""Answers are shared for so long: llama-server's two throughput gauges are about the time since they were read last, so
several scrapers would falsify them."""
ANSWER_SECONDS = 1.0
"""A scrape waits so long for an engine in the middle of a batch or a slot file; then it shows what was known before."""


@dataclass(slots=True)
class _Known:
    """What one engine said last, and what had happened there by then."""

    families: tuple[Family, ...] = ()
    activity: tuple[int, int, float, float] | None = None
    instance: int = 0
    asked: float = float("-inf")
    has_none: bool = False
    """It runs without --metrics."""
    is_silent: bool = False
    """It did not answer GET /props, for which no batch and no slot file is in the way: it hangs."""
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class EngineMetrics:
    """The last known metrics of every engine."""

    tasks: Tasks
    clock: Callable[[], float] = time.monotonic
    _known: dict[str, _Known] = field(default_factory=dict)

    async def read(self, engines: Sequence[Engine]) -> dict[str, tuple[Family, ...]]:
        """By engine, at most ANSWER_SECONDS later; an engine that cannot or must not be asked shows what it said last,
        one that is down nothing. Raises nothing."""
        for engine in engines:
            known = self._known.setdefault(engine.name, _Known())
            if not engine.ready or known.instance != engine.instance:
                known.families, known.activity, known.has_none = (), None, False
                known.instance, known.is_silent = engine.instance, False
            if known.task is None and self._may_ask(engine, known):
                known.asked = self.clock()
                known.task = self.tasks.spawn(self._ask(engine, known), f"metrics-{engine.name}")
        if running := [known.task for known in self._known.values() if known.task is not None]:
            await asyncio.wait(running, timeout=ANSWER_SECONDS)
        return {name: known.families for name, known in self._known.items()}

    def is_up(self, engine: Engine) -> bool:
        """Whether it serves, or will once its router loads it for a request, as far as is known: one that hangs is
        noticed while a request of ours runs there."""
        known = self._known.get(engine.name)
        return (engine.ready or engine.unloaded) and not (known is not None and known.is_silent)

    def _may_ask(self, engine: Engine, known: _Known) -> bool:
        if not engine.ready or known.has_none or engine.n_unseen or self.clock() - known.asked < FRESH_SECONDS:
            return False
        return engine.n_requests > 0 or _activity(engine) != known.activity

    async def _ask(self, engine: Engine, known: _Known) -> None:
        instance, activity = engine.instance, _activity(engine)
        try:
            is_sleeping = await self._sleeps(engine, known)
            if is_sleeping or engine.n_unseen:
                return
            families = parse(await engine.client.metrics())
        except EngineRefused as error:
            known.has_none = error.status in (404, 501)
            return
        except EngineError as error:
            log.debug("metrics_unanswered", engine=engine.name, error=str(error))
            return
        finally:
            known.task = None
        if engine.instance == instance == known.instance:
            known.families, known.activity = families, activity

    async def _sleeps(self, engine: Engine, known: _Known) -> bool:
        try:
            props = await engine.client.props()
        except EngineUnreachable:
            known.is_silent = engine.instance == known.instance
            raise
        known.is_silent = False
        return props.is_sleeping


def _activity(engine: Engine) -> tuple[int, int, float, float]:
    """Differs when something of ours has run since: instance, requests under way, when a slot was used last, when a
    request without events ended last."""
    last_used = max((s.last_used for s in engine.table.slots), default=0.0)
    return engine.instance, engine.n_requests, last_used, engine.last_unseen
