"""Looking after an engine that somebody else runs: attach when it answers, notice when it goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from llamacpp.engines.attached import AttachedSpec
from llamacpp.errors import EngineUnreachable
from llamacpp.routers import find_router
from proxy.engine import Engine
from proxy.engine_errors import not_attached
from proxy.routed import Fleet

if TYPE_CHECKING:
    from proxy.engines import Engines

log = structlog.get_logger(__name__)

WATCH_SECONDS = 2.0
"""Pause between two looks at an attached engine."""


@dataclass(eq=False)
class Watch:
    """One --upstream; behind a router `engine` stands for it as long as that lists no model."""

    engines: Engines
    engine: Engine
    spec: AttachedSpec
    _fleet: Fleet | None = None
    _was_silent: bool = False
    """It did not answer at first: what is wrong with it when it does ends no start any more."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Looks again and again."""
        while not stopping.is_set():
            try:
                await self._look()
            except Exception as error:  # whatever it is: without this loop nobody would look again
                log.error("engine_not_watched", engine=self.engine.name, exc_info=error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), WATCH_SECONDS)

    async def _look(self) -> None:
        engine = self.engine
        if self._fleet is None and not engine.ready and (router := await find_router(engine.client)) is not None:
            self._fleet = Fleet(self.engines, engine, self.spec, router)
        if self._fleet is not None:
            await self._fleet.look()
        elif engine.ready:
            await self._notice_loss()
        else:
            is_start = engine.instance == 0 and not self._was_silent and await engine.client.health()
            self._was_silent = not is_start
            await self.engines.attach(engine, self.spec, is_start=is_start)

    async def _notice_loss(self) -> None:
        """What has just served need not be asked; what works hard may not answer in time."""
        engine = self.engine
        if time.monotonic() - engine.client.served < WATCH_SECONDS or await engine.client.health():
            return
        if not engine.table.runners() or await engine.client.is_gone():
            self.engines.lost_instance(engine, "its /health does not answer")
            log.warning("engine_gone", engine=engine.name, url=self.spec.url)


def say_not_attached(engine: Engine, spec: AttachedSpec, error: Exception, *, has_key: bool) -> None:
    """Why not, said once."""
    why = not_attached(error, has_key=has_key)
    if why != engine.why_not:
        what = "engine_does_not_answer" if isinstance(error, EngineUnreachable) else "engine_not_attached"
        log.warning(what, engine=engine.name, url=spec.url, why=why, again_in_seconds=WATCH_SECONDS)
    engine.why_not, engine.is_loading = why, False
