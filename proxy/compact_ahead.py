"""A compaction while nobody waits: the summary is asked for, and the prompt that it makes is processed, ahead of the
turn that would not fit. Whoever needs the engine meanwhile comes first."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import orjson
import structlog

from llamacpp.errors import EngineError
from llamacpp.reports import Timings
from policies.causes import Cause
from policies.compaction import Budget, reserve_of
from policies.prefix import n_tokens
from policies.types import Match, digest
from policies.upkeep import is_worth
from proxy.api.read import CHAT_PATH, read
from proxy.aside import Ask, Collected, ask_aside
from proxy.carry_out import give_back, save
from proxy.compact import Compaction
from proxy.engine import Engine
from proxy.kept_json import kept_json
from proxy.ledger import Ledger
from proxy.lines import Found, Line
from proxy.logs import describe
from proxy.prepare import Prepared
from proxy.rendering import render_chat
from proxy.service import Service
from proxy.settle import Record
from proxy.slots import Slot

log = structlog.get_logger(__name__)

IDLE_SECONDS = 3.0
"""A slot unused for so long is taken to be waiting for a person, or for a tool that takes its time."""
LOOK_SECONDS = 0.1
"""Pause between two looks whether somebody waits for the engine."""
CANCEL_SECONDS = 20.0
"""As in proxy/exchange: until the engine has noticed that a prompt is no longer wanted."""
MOST_TRIED = 256
"""Lines whose last state is remembered to have been tried."""


T = TypeVar("T")


class GaveUpError(Exception):
    """Somebody needs the engine: what was prepared for later has to wait."""


class Ahead:
    """Prepares compactions of one process. `exchange`: the class, for questions of ours."""

    def __init__(self, service: Service, exchange: Callable[..., Any]) -> None:
        self._service, self._exchange = service, exchange
        self._tried: dict[str, int] = {}

    async def one(self, engine: Engine) -> bool:
        """The first line that needs it; False when none does."""
        for slot, line, ledger in self._due(engine):
            self._tried[line.id] = len(ledger.raw)
            if len(self._tried) > MOST_TRIED:
                del self._tried[next(iter(self._tried))]
            try:
                await self._prepare(engine, slot, line, ledger)
            except GaveUpError:
                self._tried.pop(line.id, None)
            return True
        return False

    def _due(self, engine: Engine) -> Iterator[tuple[Slot, Line, Ledger]]:
        s = self._service.settings
        for slot in engine.table.slots if s.compaction else ():
            line = self._service.lines.get(slot.line)
            if line is None or line.ledger is None or line.has_own or not line.compacts or line.running:
                continue
            is_waiting = engine.clock() - slot.last_used > IDLE_SECONDS
            if not slot.is_idle or slot.body is None or not is_waiting or line.ledger.sent is None:
                continue
            if self._tried.get(line.id) == len(line.ledger.raw) or not self._is_over(engine, slot, None):
                continue  # the body, which may be large, says at most that less is reserved
            asked = orjson.loads(slot.body).get("max_tokens")
            if self._is_over(engine, slot, asked if isinstance(asked, int) else None):
                yield slot, line, line.ledger

    def _is_over(self, engine: Engine, slot: Slot, asked: int | None) -> bool:
        s = self._service.settings
        reserve = reserve_of(asked, s.reply_reserve, engine.n_ctx)
        return Budget(engine.n_ctx, reserve, s.compact_prepare_at).is_over(slot.n_tokens)

    async def _prepare(self, engine: Engine, slot: Slot, line: Line, ledger: Ledger) -> None:
        reply = ledger.reply.message
        if reply is None or slot.body is None:
            return
        await self._keep(engine, slot)
        if not _is_still(slot, line, ledger):
            return
        whole = _whole(line, ledger, slot.body, reply)
        before, has_reply = slot.n_tokens, engine.can_rewind or slot.replies_return
        record = Record(f"idle_{secrets.token_hex(4)}", line.who.tenant, "chat", "compaction", time.time())
        record.line, record.engine, record.model, record.slot = line.id, engine.name, engine.model, slot.id
        work = Compaction(self._service, engine, line, whole.request, record, self._ask(engine))
        found = await work.ahead(whole, before)
        if found is None:
            return
        try:
            await self._take(engine, slot, line, ledger, found, record, has_reply=has_reply)
        finally:
            record.compaction["ahead"] = True
            record.seconds = round(time.time() - record.started, 4)
            self._service.remember(record)

    async def _take(
        self,
        engine: Engine,
        slot: Slot,
        line: Line,
        ledger: Ledger,
        found: tuple[Prepared, int],
        record: Record,
        *,
        has_reply: bool,
    ) -> None:
        """Puts the summary into the line's ledger, and has the prompt with it processed."""
        if not _is_still(slot, line, ledger):
            return
        sent, after = found
        if sent.ledger is None:
            return
        line.ledger = replace(ledger, replaced=sent.ledger.replaced)
        line.prompt = replace(line.prompt, sizes=line.ledger.sizes())
        n_reply = line.tokens_of(sent.request.prompt.sizes[-1])
        line.n_tokens = max(0, after - n_reply)
        self._service.texts.hold(line.id, line.ledger)
        self._service.engines.remember(line)
        if await self._process(engine, slot, line, sent, record, has_reply=has_reply):
            line.n_tokens = max(0, slot.n_tokens - (n_reply if has_reply else 0)) or line.n_tokens
            self._service.engines.remember(line)

    def _ask(self, engine: Engine) -> Ask:
        async def ask(prepared: Prepared, _: bool) -> Collected:
            answer = await self._unless_needed(engine, ask_aside(self._exchange, self._service, prepared), n_ours=1)
            if answer.error is not None:  # nobody waits: no digest is needed because the engine failed
                raise EngineError(f"A summary could not be made ahead: {answer.error}")
            return answer

        return ask

    async def _unless_needed(self, engine: Engine, work: Coroutine[Any, Any, T], *, n_ours: int) -> T:
        """The work's result. Raises GaveUpError as soon as the engine has a request that is not one of `n_ours`: a
        free slot is no comfort, the engine shares its time between them."""
        task: asyncio.Task[T] = self._service.tasks.spawn(work, "prepare")
        while not task.done():
            await asyncio.wait({task}, timeout=LOOK_SECONDS)
            if engine.n_requests > n_ours or self._service.stopping:
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            raise GaveUpError
        return task.result()

    async def _keep(self, engine: Engine, slot: Slot) -> None:
        """The whole conversation, should the client go back in it, where a file costs less than processing again."""
        saved = engine.table.saved_of(slot)
        if not engine.can_save or not is_worth(slot.n_tokens - saved, slot.n_tokens, engine.table.abilities.save_cost):
            return
        engine.table.lease(slot)
        try:
            await save(engine, slot, "loss")
        finally:
            give_back(engine, slot)

    async def _process(
        self, engine: Engine, slot: Slot, line: Line, sent: Prepared, record: Record, *, has_reply: bool
    ) -> bool:
        """The prompt with the summary, as far as the next one is sure to begin with it; False when it was not."""
        body = sent.request.body
        messages = body["messages"] if has_reply else body["messages"][:-1]
        body = {**body, "messages": messages, "add_generation_prompt": False}
        raw = kept_json(body)
        tokens = (await render_chat(engine, line.who.tenant, sent.request.prompt.base, raw)).tokens
        if not slot.is_idle:
            return False
        engine.table.lease(slot)
        try:
            done = await self._unless_needed(engine, engine.client.prime(slot.id, tokens), n_ours=0)
        except GaveUpError:
            report = await engine.wait_idle(slot.id, CANCEL_SECONDS)
            n_done = report.n_prompt_tokens if report is not None else 0
            await self._emptied(engine, slot) if not n_done else _holds(slot, line, tokens[: 4 * n_done], raw)
            return False
        except EngineError as error:
            log.warning("not_prepared", engine=engine.name, slot=slot.id, error=describe(error))
            await self._emptied(engine, slot)
            return False
        else:
            summary = sent.ledger.replaced[-1].text if sent.ledger is not None else ""
            _tell(engine, record, done, n_new=line.tokens_of(len(summary.encode())))
            _holds(slot, line, tokens, raw)
            slot.last_used = engine.clock()
            return True
        finally:
            give_back(engine, slot)

    async def _emptied(self, engine: Engine, slot: Slot) -> None:
        """What it holds is in doubt."""
        slot.clear_owner()
        await engine.client.erase_slot(slot.id)
        slot.clear()


def _tell(engine: Engine, record: Record, done: Timings, *, n_new: int) -> None:
    """What processing the new prompt took: all of it but the summary's `n_new` tokens an earlier prompt had held."""
    record.cache_n, record.prompt_n, record.prompt_ms = done.cache_n, done.prompt_n, done.prompt_ms
    record.reprocessed = max(0, done.prompt_n - n_new)
    record.cause = Cause.COMPACTION
    m, model, kind, seconds = engine.metrics, engine.model, record.kind, done.prompt_ms / 1000
    m.prompt(engine.name, model, kind, cached=done.cache_n, processed=done.prompt_n, seconds=seconds)
    m.reprocessed(engine.name, model, Cause.COMPACTION.value, record.reprocessed)


def _holds(slot: Slot, line: Line, tokens: bytes, body: bytes) -> None:
    slot.tokens, slot.n_tokens, slot.n_prompt = tokens, n_tokens(tokens), n_tokens(tokens)
    slot.tenant, slot.line, slot.body, slot.is_rendered = line.who.tenant, line.id, body, True
    slot.saved, slot.snapshot, slot.rigid, slot.boundary = 0, None, 0, None
    slot.replies_return, slot.n_left = False, None


def _is_still(slot: Slot, line: Line, ledger: Ledger) -> bool:
    return slot.is_idle and slot.line == line.id and line.ledger is ledger and not line.running


def _whole(line: Line, ledger: Ledger, body: bytes, reply: dict[str, Any]) -> Prepared:
    """What the slot holds, the answer included, as a request that extends its line."""
    sent = [*(ledger.sent or ()), kept_json(reply)]
    longer = replace(ledger, raw=[*ledger.raw, b""], normal=[*ledger.normal, b""], sent=sent)
    p = line.prompt
    chain = (*p.chain, digest(p.chain[-1], sent[-1]))
    request = read("chat", CHAT_PATH, body, line.who)
    request = replace(request, prompt=replace(p, chain=chain, sizes=longer.sizes()), mode="repair", compacts=True)
    return Prepared(request, Found(line, Match.EXTENDS, len(ledger.raw)), longer)
