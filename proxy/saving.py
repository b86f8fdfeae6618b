"""Saving what lies in an engine's idle slots before the engine, or its model, goes away."""

from __future__ import annotations

from policies.upkeep import IdleSlot, exit_order
from proxy.beliefs import Beliefs
from proxy.carry_out import give_back, save
from proxy.engine import Engine
from proxy.metrics import SaveReason
from proxy.rendering import render_slot
from proxy.store_types import Snapshot


async def save_idle(engine: Engine, beliefs: Beliefs, reason: SaveReason, saved: list[Snapshot]) -> None:
    """Saves every idle slot that is worth it, most at stake first, and adds to `saved` what was. Raises EngineError,
    StoreError where `save` does."""
    if not engine.ready or not engine.can_save or await beliefs.is_asleep(engine):
        return
    table = engine.table
    idle = (s for s in table.slots if s.is_idle and s.n_tokens)
    found = tuple(IdleSlot(s.id, s.n_tokens, s.n_tokens - table.saved_of(s), 0.0) for s in idle)
    for number in exit_order(found):
        slot = table.slots[number]
        if not engine.files_rewind:
            await render_slot(engine, slot)  # to know where its prompt ends
        if slot.is_idle:
            table.lease(slot)
            try:
                snapshot = await save(engine, slot, reason)
                saved += [snapshot] if snapshot else []
            finally:
                give_back(engine, slot)
