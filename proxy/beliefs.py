"""What we believe of an engine's slots, against what the engine says: restarts unseen, sleep, others who use them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import structlog

from llamacpp.errors import EngineError
from policies.causes import Cause
from policies.placement import SMALL_TAIL
from proxy.engine import Engine
from proxy.lines import LineBook
from proxy.metrics import Metrics
from proxy.slots import Slot
from proxy.tasks import Tasks

log = structlog.get_logger(__name__)

RECHECK_SECONDS = 1.0
"""Pause between two comparisons with an engine that is suspected again and again: somebody else uses its slots, too."""


@dataclass(eq=False)
class Beliefs:
    """Corrects slot tables; a line that has lost its slot is told why."""

    lines: LineBook
    metrics: Metrics
    tasks: Tasks
    _suspected: dict[str, int] = field(default_factory=dict)
    """Suspicions per engine since its comparison began."""

    def suspect(self, engine: Engine, told: Slot | None = None, *, was_empty: bool = False) -> None:
        """A cache hit fell far short of what was predicted, or a connection broke: was the engine restarted unseen?

        `told`: the slot whose answer says so, and says with it what that slot holds: asked is for the others.
        `was_empty`: nothing at all was found in a slot that should have held a prefix. An engine that shows no slots
        can not be asked about the others; they are taken to be empty, too.
        """
        if not any(s.n_tokens for s in engine.table.slots if s is not told):
            return
        if engine.has_slots_endpoint:
            self._suspected[engine.name] = self._suspected.get(engine.name, 0) + 1
            if self._suspected[engine.name] == 1:
                self.tasks.spawn(self._recheck(engine), "reconcile")
        elif was_empty:
            self._lost(engine, engine.table.lose_idle())

    async def _recheck(self, engine: Engine) -> None:
        """Compares until no suspicion has come during the last comparison and the pause after it."""
        try:
            seen = 0
            while seen < self._suspected[engine.name]:
                seen = self._suspected[engine.name]
                await self.reconcile(engine)
                await asyncio.sleep(RECHECK_SECONDS)
        finally:
            del self._suspected[engine.name]

    async def is_asleep(self, engine: Engine) -> bool:
        """Whether it has put its model away, and what lay in its slots with it. Asking does not wake it."""
        asleep = False
        with contextlib.suppress(EngineError):
            asleep = (await engine.client.props()).is_sleeping
        self._lost(engine, engine.table.lose_idle() if asleep else [])
        return asleep

    async def reconcile(self, engine: Engine) -> None:
        """Compares our table with GET /slots; a slot that the engine says is emptier than we believe is corrected."""
        if not engine.has_slots_endpoint or engine.props is None or not engine.ready:
            return
        before = {
            s.id: (s.n_tokens, s.last_used) for s in engine.table.slots if s.is_idle and s.n_tokens and s.last_used
        }
        try:
            if await self.is_asleep(engine):
                return
            reports = await engine.client.slots()
        except EngineError:
            return
        for report in reports:
            slot = engine.table.slots[report.id] if report.id < len(engine.table.slots) else None
            is_known = slot is not None and before.get(report.id) == (slot.n_tokens, slot.last_used)
            if slot is None or not is_known or not slot.is_idle or report.is_processing:
                continue
            real = report.n_prompt_tokens
            differs = abs(real - slot.n_tokens) > SMALL_TAIL or (real == 0 and slot.n_tokens > 0)
            if differs and (report.id_task >= 0 or not slot.was_restored):
                log.warning(
                    "slot_differs", engine=engine.name, slot=slot.id, ours=slot.n_tokens, real=report.n_prompt_tokens
                )
                self._lost(engine, engine.table.correct(slot, report.n_prompt_tokens))

    async def notice_sleep(self, engine: Engine) -> None:
        """An engine that sleeps has unloaded its model: waking is a restart. Asks when it may sleep by now."""
        if engine.may_sleep() and await self.is_asleep(engine):
            log.info("engine_sleeps", engine=engine.name)

    def _lost(self, engine: Engine, lost: list[str]) -> None:
        for line in filter(None, map(self.lines.get, lost)):
            line.lost = Cause.ENGINE_RESTART
        if lost:
            self.metrics.engine_restarted(engine.name)
