"""A slot whose request broke off or was left: its lease is given back when the engine says what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from llamacpp.reports import Progress, SlotReport, Timings
from policies.causes import Cause
from policies.slot_state import SlotEvent
from proxy.engine import Engine
from proxy.service import Service
from proxy.settle import Record, fill
from proxy.slots import Slot, Want

CANCEL_SECONDS = 20.0
"""An engine notices a closed stream within 0.7 s (llama-server.md); a batch of a large model on a CPU takes longer."""
NO_REPORT_SECONDS = 1.0
"""Pause before a cancelled slot is used again on an engine that answers no GET /slots; it defers a busy pin anyway."""


@dataclass(frozen=True, slots=True)
class Left:
    """What is known of a request that was not answered: `progress` of its prompt, the `body` and the digest of its
    `base` by which the slot's content is known if the prompt was processed whole, and the prompt's base that was
    processed ahead of it."""

    progress: Progress | None = None
    body: bytes | None = None
    base: bytes = b""
    before: Timings | None = None

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt, if it was processed whole; else 0."""
        done = self.progress
        return done.total if done is not None and done.processed >= done.total else 0

    @property
    def n_processed(self) -> int:
        """Prompt tokens that the engine said it had processed."""
        before = 0 if self.before is None else self.before.prompt_n
        return before if self.progress is None else before + max(0, self.progress.processed - self.progress.cache)

    @property
    def n_cached(self) -> int:
        """Prompt tokens that were there before."""
        before = 0 if self.before is None else self.before.prompt_n
        return 0 if self.progress is None else max(0, self.progress.cache - before)


def note(engine: Engine, record: Record, left: Left) -> None:
    """Counts what the engine did for nobody, or for whoever asks again."""
    record.cache_n, record.prompt_n = left.n_cached, left.n_processed
    record.prompt_ms = (left.progress.time_ms if left.progress else 0.0) + (left.before.prompt_ms if left.before else 0)
    if left.n_processed or left.n_cached:
        engine.metrics.prompt(
            engine.name,
            engine.model,
            record.kind,
            cached=left.n_cached,
            processed=left.n_processed,
            seconds=record.prompt_ms / 1000,
        )


def abandon(
    service: Service, engine: Engine, slot: Slot, want: Want, left: Left, advance: Callable[[int], None]
) -> None:
    """The engine still works for a client that left, or broke off: the slot's content is in doubt.

    `advance(n_tokens)` writes the prompt into its line's ledger.
    """
    slot.apply(SlotEvent.CANCELLED)
    if not want.fresh and slot.line in (None, want.line.id):
        # A repeated request has to find its line, and wait for its slot, at once.
        advance(left.n_prompt or want.line.n_tokens)
        want.line.lost = None if left.n_prompt else Cause.CANCELLED
        slot.line = want.line.id
    service.tasks.spawn(_resolve(service, engine, slot, want, left), "resolve-slot")


async def _resolve(service: Service, engine: Engine, slot: Slot, want: Want, left: Left) -> None:
    instance, report = engine.instance, None
    try:
        report = await engine.wait_idle(slot.id, CANCEL_SECONDS) if engine.has_slots_endpoint else None
        if report is None and engine.ready and engine.instance == instance:
            await asyncio.sleep(NO_REPORT_SECONDS)
    finally:
        if engine.instance != instance or not engine.ready:
            slot.clear()
        elif report is None:
            _unknown(slot, want)
        elif not _is_whole(slot, want, left, report):
            slot.n_tokens = report.n_prompt_tokens
            slot.tokens = (want.tokens if want.tokens is not None else slot.tokens)[: 4 * slot.n_tokens]
            slot.saved, slot.body, slot.is_rendered = 0, None, True
        else:
            _settle(engine, slot, want, left, report.n_prompt_tokens)
        slot.tenant = want.tenant if slot.n_tokens else None
        engine.table.release(slot)
        # A task that was still queued when the engine reported may have run a little since.
        asyncio.get_running_loop().call_later(NO_REPORT_SECONDS, service.engines.beliefs.suspect, engine)


def _unknown(slot: Slot, want: Want) -> None:
    slot.tokens, slot.n_tokens = b"", max(slot.n_tokens, want.n_prompt)
    slot.saved, slot.body, slot.is_rendered = 0, None, True


def _is_whole(slot: Slot, want: Want, left: Left, report: SlotReport) -> bool:
    """The slot holds the line's whole prompt, as after an answer: it can be rendered, saved and cut at its end."""
    is_own = slot.line == want.line.id and not want.fresh
    return is_own and 0 < left.n_prompt <= report.n_prompt_tokens


def _settle(engine: Engine, slot: Slot, want: Want, left: Left, n_tokens: int) -> None:
    n_cached = left.progress.cache if left.progress is not None else 0
    timings = Timings(n_cached, left.n_prompt - n_cached, 0.0, n_tokens - left.n_prompt + 1, 0.0)
    slot.body, slot.base = left.body, left.base
    fill(slot, want.line, timings, engine.memory, tokens=want.tokens, is_guest=False, now=engine.clock())
