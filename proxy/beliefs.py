"""What we believe of an engine's slots, against what the engine says: restarts unseen, sleep, others who use them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from llamacpp.errors import EngineError
from llamacpp.reports import Props, SlotReport, is_same
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
QUIET_SECONDS = 30.0
"""The same after one that found all slots but the suspected one as believed: that one's own answers tell what it holds.
As long as the keeper's between two looks without suspicion."""


@dataclass(eq=False)
class Beliefs:
    """Corrects slot tables; a line that has lost its slot is told why."""

    lines: LineBook
    metrics: Metrics
    tasks: Tasks
    renew: Callable[[Engine, Props | None], Awaitable[None]]
    """Told of an attached engine that was started anew between two looks, and what it says of itself now, if it does:
    how it computes, which its files depend on, may be another matter by now."""
    _suspected: set[str] = field(default_factory=set)
    """Engines of which a suspicion has come since their last comparison began."""
    _urgent: dict[str, asyncio.Event] = field(default_factory=dict)
    """Of engines that are compared again and again; set: it may have been started anew, so the next one is due."""
    _newest: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Instance of each engine, and the newest task that it was seen to have worked on: it counts them from 0."""

    def suspect(self, engine: Engine, told: Slot | None = None, *, is_doubtful: bool = False) -> None:
        """A cache hit fell far short of what was predicted, or a connection broke: was the engine restarted unseen?

        `told`: the slot whose answer says so, and says with it what that slot holds: asked is for the others.
        `is_doubtful`: the connection broke, or nothing at all was found in a slot that should have held a prefix. An
        engine that shows no slots can not be asked about the others then; they are taken to be empty, too.
        """
        if not is_doubtful and not any(s.n_tokens for s in engine.table.slots if s is not told):
            return
        if not engine.has_slots_endpoint and told is not None and is_doubtful:
            self._lost(engine, engine.table.lose_idle())
        if engine.has_slots_endpoint or is_doubtful:
            self._suspected.add(engine.name)
            if engine.name not in self._urgent:
                self._urgent[engine.name] = asyncio.Event()
                self.tasks.spawn(self._recheck(engine), "reconcile")
            if is_doubtful:
                self._urgent[engine.name].set()

    async def _recheck(self, engine: Engine) -> None:
        """Compares until no suspicion has come during the last comparison and the pause after it."""
        urgent = self._urgent[engine.name]
        try:
            while engine.name in self._suspected:
                self._suspected.discard(engine.name)
                was_wrong = await self.reconcile(engine)
                await asyncio.sleep(RECHECK_SECONDS)
                if not was_wrong:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(urgent.wait(), QUIET_SECONDS)
        finally:
            del self._urgent[engine.name]

    async def is_asleep(self, engine: Engine) -> bool:
        """Whether it has put its model away, and what lay in its slots with it. Asking does not wake it."""
        asleep = False
        with contextlib.suppress(EngineError):
            asleep = (await engine.client.props()).is_sleeping
        self._lost(engine, engine.table.lose_idle() if asleep else [])
        return asleep

    async def reconcile(self, engine: Engine) -> bool:
        """Compares our table with GET /slots; a slot that the engine says is emptier than we believe is corrected.
        Returns whether there was any."""
        urgent = self._urgent.get(engine.name)
        is_doubtful = urgent is not None and urgent.is_set()
        if urgent is not None:
            urgent.clear()
        if engine.props is None or not engine.ready or not (engine.has_slots_endpoint or is_doubtful):
            return False
        before = {
            s.id: (s.n_tokens, s.last_used) for s in engine.table.slots if s.is_idle and s.n_tokens and s.last_used
        }
        try:
            props = await engine.client.props()
            if props.is_sleeping:
                self._lost(engine, engine.table.lose_idle())
                return True
            reports = await engine.client.slots() if engine.has_slots_endpoint else []
        except EngineError:
            if is_doubtful and await engine.client.is_gone():
                await self.renew(engine, None)
            return True
        was_renewed = self._is_new(engine, reports, before)
        n_wrong = sum(self._compare(engine, report, before) for report in reports)
        has_room = any(s.is_idle and not s.n_tokens for s in engine.table.slots)
        if was_renewed or not is_same(engine.props, props) or (is_doubtful and has_room):
            await self.renew(engine, props)
        return n_wrong > 0 or was_renewed

    def _compare(self, engine: Engine, report: SlotReport, before: dict[int, tuple[int, float]]) -> bool:
        slot = engine.table.slots[report.id] if report.id < len(engine.table.slots) else None
        is_known = slot is not None and before.get(report.id) == (slot.n_tokens, slot.last_used)
        if slot is None or not is_known or not slot.is_idle or report.is_processing:
            return False
        real = report.n_prompt_tokens
        differs = abs(real - slot.n_tokens) > SMALL_TAIL or (real == 0 and slot.n_tokens > 0)
        if not differs or (report.id_task < 0 and slot.was_restored):
            return False
        log.warning("slot_differs", engine=engine.name, slot=slot.id, ours=slot.n_tokens, real=real)
        self._lost(engine, engine.table.correct(slot, real))
        return True

    def _is_new(self, engine: Engine, reports: list[SlotReport], before: dict[int, tuple[int, float]]) -> bool:
        """Whether it has forgotten what it worked on: a slot that answered was never used, or tasks count anew."""
        newest = max((r.id_task for r in reports), default=-1)
        instance, known = self._newest.get(engine.name, (engine.instance, -1))
        self._newest[engine.name] = engine.instance, newest
        answered = {i for i in before if not engine.table.slots[i].was_restored}
        return (instance == engine.instance and newest < known) or any(
            r.id_task < 0 for r in reports if r.id in answered
        )

    async def notice_sleep(self, engine: Engine) -> None:
        """An engine that sleeps has unloaded its model: waking is a restart. Asks when it may sleep by now."""
        if engine.may_sleep() and await self.is_asleep(engine):
            log.info("engine_sleeps", engine=engine.name)

    def _lost(self, engine: Engine, lost: list[str]) -> None:
        for line in filter(None, map(self.lines.get, lost)):
            line.lost = Cause.ENGINE_RESTART
        if lost:
            self.metrics.engine_restarted(engine.name)
