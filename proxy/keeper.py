"""Background work, each piece under a lease: relief when the pool fills, idle saves, base snapshots, saves at exit."""

from __future__ import annotations

import asyncio
import time

import structlog

from llamacpp.errors import EngineError
from policies.prefix import common_prefix, n_tokens
from policies.upkeep import DAILY_BYTES, Growth, IdleSlot, is_worth, next_base, next_save, relieve
from proxy.carry_out import evict, give_back, restore, save
from proxy.compact_ahead import Ahead
from proxy.engine import Engine
from proxy.errors import StoreError
from proxy.exchange import Exchange
from proxy.rendering import BASE_AT_LEAST, base_body, base_tokens, has_base, render_slot
from proxy.saving import save_idle
from proxy.service import Service
from proxy.slots import Slot, SlotTable
from proxy.store_types import Snapshot
from proxy.warm import IdleWarmer

log = structlog.get_logger(__name__)

ROUND_SECONDS = 1.0
"""Pause between two looks at what is idle."""
RECONCILE_SECONDS = 30.0
RENDER_IDLE_SECONDS = 3.0
"""A slot idle for so long is rendered ahead, so that a new prompt has something to be compared with."""
DAY = 86_400.0


class Keeper:
    """One per process. `run` until cancelled, then `save_all`."""

    def __init__(self, service: Service) -> None:
        self._service, self._warmer = service, IdleWarmer(service)
        self._ahead = Ahead(service, Exchange)
        self._day, self._written = time.time(), 0.0
        self._pressed: set[str] = set()
        self._reconciled: dict[str, float] = {}
        """When an engine's slots were looked at, by its clock."""

    async def run(self) -> None:
        """Rounds of upkeep for every engine that is idle, each engine's apart: a summary may take minutes. Cancelled,
        it leaves a round that is under way to its end: a slot whose save was broken off would be nobody's, and could
        not be saved at exit."""
        kept: set[Engine] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                for engine in set(self._service.engines.all) - kept:
                    group.create_task(self._rounds(engine), name=f"keeper-{engine.name}")
                    kept.add(engine)
                await asyncio.sleep(ROUND_SECONDS)

    async def _rounds(self, engine: Engine) -> None:
        while engine in self._service.engines.all:
            await asyncio.sleep(ROUND_SECONDS)
            await asyncio.shield(self._service.tasks.spawn(self._safe_round(engine), f"upkeep-{engine.name}"))

    async def _safe_round(self, engine: Engine) -> None:
        """Whatever goes wrong in one round, there is a next one."""
        try:
            await self._round(engine)
        except (EngineError, StoreError) as error:
            log.warning("upkeep_failed", engine=engine.name, error=str(error))
        except Exception as error:
            log.error("upkeep_broken", engine=engine.name, exc_info=error)

    async def _round(self, engine: Engine) -> None:
        if not engine.ready or engine.table.runners() or engine.table.n_waiting:
            return
        await self._service.engines.beliefs.notice_sleep(engine)
        await self._reconcile(engine)
        if not self._service.stopping and await self._ahead.one(engine):
            return
        await self._render_ahead(engine)
        if engine.can_save and not self._service.stopping:
            await self._save_one(engine)
        if engine.can_save and not self._service.stopping:
            await self._base_one(engine)
        if engine.can_save and not self._service.stopping and not engine.n_requests:
            await self._warmer.one(engine)

    async def _reconcile(self, engine: Engine) -> None:
        """Once in a while, and only when it was used since: each question keeps an engine from falling asleep."""
        used, now = max((s.last_used for s in engine.table.slots), default=0.0), engine.clock()
        looked = self._reconciled.get(engine.name)
        if looked is not None and (now - looked <= RECONCILE_SECONDS or used <= looked):
            return
        self._reconciled[engine.name] = now
        if looked is not None:  # else its slots were taken over a moment ago
            await self._service.engines.beliefs.reconcile(engine)
        await self._service.engines.identify(engine)

    async def _render_ahead(self, engine: Engine) -> None:
        now = engine.clock()
        due = [s for s in engine.table.slots if not s.is_rendered and now - s.last_used > RENDER_IDLE_SECONDS]
        if any(now - s.last_used < ROUND_SECONDS for s in engine.table.slots):
            return  # between two turns of an agent, which are not to wait for it
        if not any(s.is_idle for s in due) or await self._service.engines.beliefs.is_asleep(engine):
            return
        for slot in due:
            if slot.is_idle:
                await render_slot(engine, slot)

    # --- idle saves -------------------------------------------------------------------------------------------------

    async def _save_one(self, engine: Engine) -> None:
        if time.time() - self._day > DAY:
            self._day, self._written = time.time(), 0.0
        a, per_token = engine.table.abilities, engine.costs.bytes_per_token
        left = DAILY_BYTES - self._written
        found = next_save(self._idle(engine), a.save_cost, left, per_token, sleep_seconds=engine.sleep_seconds)
        if found is None or await self._service.engines.beliefs.is_asleep(engine):
            return
        slot = engine.table.slots[found]
        await render_slot(engine, slot)
        if not slot.is_idle:
            return
        engine.table.lease(slot)
        try:
            snapshot = await save(engine, slot, "idle")
            self._written += snapshot.bytes if snapshot else 0
        finally:
            give_back(engine, slot)

    def _idle(self, engine: Engine) -> tuple[IdleSlot, ...]:
        now = engine.clock()
        return tuple(
            IdleSlot(
                s.id, s.n_tokens, s.n_tokens - engine.table.saved_of(s), now - s.last_used, self._wants_base(engine, s)
            )
            for s in engine.table.slots
            if s.is_idle and s.n_tokens
        )

    # --- base snapshots ---------------------------------------------------------------------------------------------

    def _wants_base(self, engine: Engine, slot: Slot) -> bool:
        """A slot whose base may deserve a snapshot of its own (memory that can be rewound; else it was cut before)."""
        if (
            slot.body is None
            or slot.is_purged
            or not engine.files_rewind
            or slot.n_tokens < BASE_AT_LEAST
            or slot.tenant is None
        ):
            return False
        base = engine.bases.get((slot.tenant, slot.base))
        return base is None or (n_tokens(base) >= BASE_AT_LEAST and not has_base(engine, slot.tenant, base))

    async def _base_one(self, engine: Engine) -> None:
        """Copies a slot through its file into an empty one, cuts it at the base's end there, and saves that."""
        found = next_base(self._idle(engine), sleep_seconds=engine.sleep_seconds)
        target = next((s for s in engine.table.slots if s.is_idle and not s.n_tokens), None)
        if found is None or target is None or await self._service.engines.beliefs.is_asleep(engine):
            return
        slot = engine.table.slots[found]
        if slot.body is None or slot.tenant is None:
            return
        base = await base_tokens(engine, slot.tenant, slot.base, slot.body)
        await render_slot(engine, slot)
        size, room = n_tokens(base), engine.table.capacity
        fits = room is None or engine.table.used() + slot.n_tokens <= room
        a = engine.table.abilities
        if size < BASE_AT_LEAST or common_prefix(base, slot.tokens) < size or not fits:
            return
        if not (slot.is_idle and target.is_idle and is_worth(size, slot.n_tokens, a.save_cost)):
            return
        engine.table.lease(slot)
        engine.table.lease(target)
        try:
            await self._cut(engine, slot, target, base)
        finally:
            give_back(engine, slot)
            give_back(engine, target)

    async def _cut(self, engine: Engine, slot: Slot, target: Slot, base: bytes) -> None:
        tenant, line, body = slot.tenant, slot.line or "", slot.body or b"{}"
        whole = engine.snapshot(slot.snapshot) if slot.snapshot and slot.saved >= n_tokens(base) else None
        whole = whole or await save(engine, slot, "fork")
        if whole is None or self._service.stopping or not await restore(engine, target, whole, line):
            return
        try:
            await engine.client.prime(target.id, base)
            target.clear()
            target.tokens, target.n_tokens, target.tenant, target.line = base, n_tokens(base), tenant, line
            await save(engine, target, "base", "base", base_body(body))
        finally:
            await engine.client.erase_slot(target.id)
            target.clear()

    # --- a pool that fills ------------------------------------------------------------------------------------------

    def press(self, engine: Engine) -> None:
        """A runner has outgrown its reserve, or its prompt what it was taken for: look after the pool until all fit."""
        if engine.name not in self._pressed:
            self._pressed.add(engine.name)
            self._service.tasks.spawn(self._relieve(engine), f"relieve-{engine.name}")

    async def _relieve(self, engine: Engine) -> None:
        try:
            while _is_pressed(engine.table):
                await self._relieve_once(engine)
                await asyncio.sleep(0.02)
        finally:
            self._pressed.discard(engine.name)

    async def _relieve_once(self, engine: Engine) -> None:
        table = engine.table
        if table.capacity is None:
            return
        runners = tuple(
            Growth(s.id, s.runner.order, s.runner.n_prompt + s.runner.n_decoded, _rate(s))
            for s in table.runners()
            if s.runner
        )
        idle = sorted((s for s in table.slots if s.is_idle and s.n_tokens), key=lambda s: s.last_used)
        gone, ended = relieve(table.used(), table.capacity, tuple((s.id, s.n_tokens) for s in idle), runners)
        for slot in (table.slots[number] for number in gone):
            if not slot.is_idle:
                continue
            table.lease(slot)
            try:
                await evict(engine, slot, self._service.lines, keep=not slot.is_purged)
            finally:
                give_back(engine, slot)
        if ended is not None and (runner := table.slots[ended].runner) is not None and not runner.stopped:
            runner.stopped = True
            log.warning("runner_ended", engine=engine.name, slot=ended, n_decoded=runner.n_decoded)
            runner.stop()

    # --- exit -------------------------------------------------------------------------------------------------------

    async def save_all(self, seconds: float, saved: list[Snapshot]) -> None:
        """Saves what is worth it, most at stake first, within a deadline; `saved` tells what was, also when it ends
        early."""
        try:
            async with asyncio.timeout(seconds):
                for engine in self._service.engines.all:
                    await save_idle(engine, self._service.engines.beliefs, "exit", saved)
        except TimeoutError:
            log.warning("exit_deadline", consequence="slots that were not saved in time will be processed again")


def _is_pressed(table: SlotTable) -> bool:
    """Some runner may take more than was set aside for it."""
    runners = [slot.runner for slot in table.slots if slot.runner is not None]
    is_over = table.capacity is not None and table.used() > table.capacity
    return any(r.has_outgrown for r in runners) or (is_over and bool(runners))


def _rate(slot: Slot) -> float:
    """Tokens a second that a runner generates, from its first token on."""
    runner = slot.runner
    if runner is None or not runner.first_token:
        return 0.0
    return runner.n_decoded / max(0.05, time.perf_counter() - runner.first_token)
