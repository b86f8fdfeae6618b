"""Carrying out a placement: save what would be lost, make room, copy or load the prefix. Fails open, counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from llamacpp.errors import EngineError, EngineRefused
from llamacpp.reports import Progress, Timings, is_same
from policies.causes import Cause
from policies.checkpoints import after_prompt
from policies.placement import SMALL_TAIL
from policies.prefix import n_tokens
from policies.slot_state import SlotEvent, SlotState
from policies.types import Action, Place
from proxy import fingerprint
from proxy.engine import Engine
from proxy.errors import StoreError
from proxy.lines import LineBook
from proxy.metrics import SaveReason
from proxy.slots import Grant, Slot
from proxy.store_types import Kind, Snapshot

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Carried:
    """What came of a placement: where the tokens really come from, and how many are expected in the cache."""

    action: Action
    predicted_cache_n: int
    snapshot: Snapshot | None = None
    is_tainted: bool = False
    """The slot still holds what it must not be reused with: the request has to be processed whole."""


async def carry_out(engine: Engine, grant: Grant, lines: LineBook, owner: str) -> Carried:
    """Prepares the grant's target slot for line `owner` and gives back every other lease; the target stays leased.

    A step that fails leaves the target empty and the request goes on cold (design.md, rule 2). Must run to its end:
    call it shielded.
    """
    place = grant.place
    try:
        source_file = await _keep_source(engine, grant, lines)
        for victim, eviction in zip(grant.victims, place.evictions, strict=True):
            await evict(engine, victim, lines, keep=eviction.save)
    finally:
        for slot in grant.victims:
            give_back(engine, slot)
    if place.save_first:
        await save(engine, grant.target, "loss")
    if (place.erase_first or source_file is not None) and not await _empty(engine, grant.target, lines):
        return Carried(Action.COLD, 0, is_tainted=True)
    if place.action in (Action.FORK, Action.RESTORE):
        wanted = source_file or (engine.snapshot(place.snapshot) if place.snapshot else None)
        if wanted is not None and await restore(engine, grant.target, wanted, owner):
            return Carried(place.action, place.predicted_cache_n, wanted)
        return Carried(Action.COLD, 0)
    if grant.target.n_tokens == 0 and place.predicted_cache_n:
        return Carried(Action.COLD, 0)
    _note_loss(grant.target, place, lines, owner)
    return Carried(place.action, place.predicted_cache_n)


async def _keep_source(engine: Engine, grant: Grant, lines: LineBook) -> Snapshot | None:
    """The file that a fork copies, its slot given back; None when there is none."""
    if grant.source is None:
        return None
    try:
        if grant.place.cut:
            return await _cut_out(engine, grant.source, grant.place.cut, lines)
        return await save(engine, grant.source, "fork")
    finally:
        give_back(engine, grant.source)


async def _cut_out(engine: Engine, slot: Slot, at: int, lines: LineBook) -> Snapshot | None:
    """A file of a slot's first tokens, where a slot can be cut back and a file cannot. Its owner gets its end back."""
    owner, tokens = slot.line, slot.tokens[: 4 * at]
    await _end_at_boundary(engine, slot)
    whole = engine.snapshot(slot.snapshot) if slot.snapshot and engine.table.saved_of(slot) == slot.n_tokens else None
    whole = whole or await save(engine, slot, "fork")
    if whole is None or owner is None or await prime(engine, slot, tokens) is None:
        return None
    cut = await save(engine, slot, "fork", kind="base")
    if not await restore(engine, slot, whole, owner) and (line := lines.get(owner)) is not None:
        line.lost = Cause.EVICTED
    return cut


async def _end_at_boundary(engine: Engine, slot: Slot) -> None:
    """Cuts a slot back to the end of its last complete message, where a file can only be used whole: the reply, and
    what the template opens it with, may be spelled otherwise when they come back.

    Costs the engine 1-4 tokens, as its last checkpoint lies so far before the prompt's end (one micro-batch more behind
    a template with a longer opening) and, should the reply come back after all, its tokens.
    """
    if engine.files_rewind or slot.replies_return or slot.boundary is None:
        return
    at = slot.boundary - (engine.opening if slot.body is not None else 0)
    if not 0 < at < slot.n_tokens or n_tokens(slot.tokens) < at:
        return
    await prime(engine, slot, slot.tokens[: 4 * at])


async def prime(
    engine: Engine, slot: Slot, tokens: bytes, tell: Callable[[Progress], Awaitable[None]] | None = None
) -> Timings | None:
    """Has a leased slot hold exactly these tokens, processing those that it lacks. None when the engine would not.
    `tell` hears of its progress. Cancelling it leaves the slot's content in doubt."""
    try:
        timings = await engine.client.prime(slot.id, tokens, tell)
    except EngineError as error:
        log.warning("not_cut", engine=engine.name, slot=slot.id, error=str(error))
        return None
    slot.tokens, slot.n_tokens = tokens, n_tokens(tokens)
    slot.checkpoints = after_prompt(engine.memory, slot.checkpoints, timings.cache_n, slot.n_tokens)
    slot.rigid, slot.saved = min(slot.rigid, timings.cache_n), min(slot.saved, timings.cache_n)
    return timings


async def save(
    engine: Engine, slot: Slot, reason: SaveReason, kind: Kind = "line", prompt: bytes | None = None
) -> Snapshot | None:
    """Writes a leased slot to a snapshot. None when that failed or there was no room; the slot keeps its content.
    `prompt`: the chat body that it is made of; without one the slot's own, of a line.

    Publishing comes last (design.md, rule 5): temporary name, the header checked, renamed, recorded.
    """
    if not engine.can_save or engine.slot_dir is None or engine.fingerprint is None or not slot.n_tokens:
        return None
    store = engine.store
    temp = store.temp_name(engine.fingerprint)
    n_bytes = int(slot.n_tokens * engine.costs.bytes_per_token)
    if not await _has_room(engine, temp, n_bytes):
        engine.metrics.save_failed(engine.name, reason)
        log.warning("snapshot_has_no_room", engine=engine.name, slot=slot.id, n_tokens=slot.n_tokens)
        await _discard(engine, temp)
        return None
    if kind == "line" and reason != "fork":
        await _end_at_boundary(engine, slot)
    slot.apply(SlotEvent.SAVE)
    try:
        report = await engine.client.save_slot(slot.id, temp)
        if not report.n_tokens:
            engine.doubt()
            raise EngineError("the slot was empty when it was to be saved; does the engine clear idle slots?")
        snapshot = await store.publish(
            temp,
            dir=engine.slot_dir,
            fingerprint=engine.fingerprint,
            tenant=slot.tenant or "",
            model=engine.model,
            kind=kind,
            line=slot.line,
            reason=reason,
            expect_bytes=report.n_bytes,
            supersede=engine.files_rewind and kind == "line",
        )
    except (EngineError, StoreError) as error:
        engine.metrics.save_failed(engine.name, reason)
        log.warning("save_failed", engine=engine.name, slot=slot.id, reason=reason, error=str(error))
        await _discard(engine, temp)
        slot.file_done(SlotState.SAVING)
        return None
    await _keep_prompt(engine, snapshot, prompt or (slot.body if kind == "line" else None))
    engine.learn_save(report)
    engine.metrics.saved(engine.name, reason, "main", seconds=report.seconds, n_bytes=report.n_bytes)
    if slot.file_done(SlotState.SAVING) and kind == "line":
        slot.tokens, slot.is_rendered = store.tokens(snapshot), True
        slot.n_tokens = slot.saved = snapshot.n_tokens
        slot.snapshot = snapshot.id
    return snapshot


async def _keep_prompt(engine: Engine, snapshot: Snapshot, body: bytes | None) -> None:
    if body is None:
        return
    try:
        await engine.store.put_prompt(snapshot.id, body)
    except StoreError as error:
        log.warning("prompt_not_kept", engine=engine.name, snapshot=snapshot.id, error=str(error))


async def _has_room(engine: Engine, temp: str, n_bytes: int) -> bool:
    try:
        return await engine.store.make_room(n_bytes, temp=temp, dir=engine.slot_dir)
    except StoreError as error:
        log.warning("store_failed", engine=engine.name, error=str(error))
        return False


async def _discard(engine: Engine, temp: str) -> None:
    """What a failed discard leaves is deleted at the next start."""
    try:
        await engine.store.discard(temp)
    except StoreError as error:
        log.warning("store_failed", engine=engine.name, error=str(error))


async def restore(engine: Engine, slot: Slot, snapshot: Snapshot, owner: str) -> bool:
    """Loads a snapshot into a leased slot for line `owner`; the next `cache_n` has to prove it. On failure the slot is
    empty."""
    store = engine.store
    if not _fits(engine, slot, snapshot):
        log.warning("restore_has_no_room", engine=engine.name, slot=slot.id, n_tokens=snapshot.n_tokens)
        engine.metrics.restored(engine.name, "failed", "main", seconds=0.0)
        return False
    with store.holding(snapshot):
        if not await store.verify(snapshot):
            engine.metrics.restored(engine.name, "failed", "main", seconds=0.0)
            return False
        slot.apply(SlotEvent.RESTORE)
        try:
            report = await engine.client.restore_slot(slot.id, snapshot.file)
        except EngineError as error:
            slot.clear()
            slot.file_done(SlotState.RESTORING)
            engine.metrics.restored(engine.name, "failed", "main", seconds=0.0)
            log.warning("restore_failed", engine=engine.name, slot=slot.id, snapshot=snapshot.id, error=str(error))
            if isinstance(error, EngineRefused):
                await _refused(engine, slot, snapshot)
            return False
    if not slot.file_done(SlotState.RESTORING):
        return False
    engine.learn_restore(report)
    engine.metrics.restored(engine.name, "ok", "main", seconds=report.seconds)
    slot.clear()
    slot.tokens, slot.tenant = store.tokens(snapshot), snapshot.tenant
    slot.n_tokens = slot.saved = report.n_tokens
    slot.rigid = 0 if engine.files_rewind else report.n_tokens
    slot.checkpoints = engine.checkpoints_in(snapshot)
    slot.snapshot, slot.line, slot.was_restored = snapshot.id, owner, True
    await store.touch(snapshot.id)
    return True


def _fits(engine: Engine, slot: Slot, snapshot: Snapshot) -> bool:
    """The engine has the cells: it answers "no space" and "invalid file" alike."""
    others = sum(s.n_tokens for s in engine.table.slots if s is not slot) if engine.table.capacity is not None else 0
    return snapshot.n_tokens + others <= (engine.table.capacity or engine.n_ctx)


async def _refused(engine: Engine, slot: Slot, snapshot: Snapshot) -> None:
    """The engine had the room and would not read the file: it is not tried again, and the slot is emptied. A file that
    was read in part may have spoilt the engine (llama.cpp #27068): one that computes otherwise now is given up. One
    that says otherwise of itself was started anew: the file is not to blame, and stays.
    """
    try:
        await engine.client.erase_slot(slot.id)
        if engine.props is not None and not is_same(engine.props, await engine.client.props()):
            engine.doubt()
            return
        with suppress(StoreError):
            await engine.store.remove(snapshot.id)
        is_unchanged = await fingerprint.is_unchanged(
            engine.client, slot.id, engine.slot_dir, engine.store, engine.fingerprint
        )
    except (EngineError, OSError, StoreError) as error:
        log.warning("not_compared", engine=engine.name, error=str(error))
        return
    if not is_unchanged:
        engine.give_up("it computes otherwise since it refused a slot file")


async def evict(engine: Engine, slot: Slot, lines: LineBook, *, keep: bool) -> None:
    """Empties a leased slot; its line is told why it will be processed again if no snapshot holds it."""
    if keep:
        await save(engine, slot, "loss")
    await _empty(engine, slot, lines)
    engine.metrics.evicted(engine.name)


async def _empty(engine: Engine, slot: Slot, lines: LineBook) -> bool:
    """Erases a leased slot; False when the engine would not: its content is nobody's then, and still in the pool."""
    line = lines.get(slot.line)
    if line is not None:
        line.lost = Cause.EVICTED
    try:
        await engine.client.erase_slot(slot.id)
    except EngineError as error:
        log.warning("erase_failed", engine=engine.name, slot=slot.id, error=str(error))
        slot.clear_owner()
        return False
    slot.clear()
    return True


def _note_loss(target: Slot, place: Place, lines: LineBook, owner: str) -> None:
    """Whoever runs in a slot that holds more than it reuses takes the rest from the slot's line."""
    line = lines.get(target.line)
    if line is not None and line.id != owner and target.n_tokens - place.predicted_cache_n > SMALL_TAIL:
        line.lost = Cause.EVICTED


def give_back(engine: Engine, slot: Slot) -> None:
    """Releases a lease of ours whose slot's counts are right."""
    if slot.state is SlotState.LEASED:
        engine.table.release(slot)
