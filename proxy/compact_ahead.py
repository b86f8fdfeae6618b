"""A compaction while nobody waits: the summary is asked for, and the prompt that it makes is processed, ahead of the
turn that would not fit. Whoever needs the engine meanwhile comes first."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import orjson
import structlog

from llamacpp.errors import EngineError
from policies.compaction import Budget, reserve_of
from policies.prefix import n_tokens
from policies.types import Match, digest
from policies.upkeep import is_worth
from proxy.api.read import CHAT_PATH, read
from proxy.carry_out import give_back, save
from proxy.compact import Collected, Compaction, ask_aside
from proxy.engine import Engine
from proxy.ledger import Ledger
from proxy.lines import Found, Line
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
MOST_TRIED = 256
"""Lines whose last state is remembered to have been tried."""


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
            await self._prepare(engine, slot, line, ledger)
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
            asked = orjson.loads(slot.body).get("max_tokens")
            reserve = reserve_of(asked if isinstance(asked, int) else None, s.reply_reserve, engine.n_ctx)
            is_due = Budget(engine.n_ctx, reserve, s.compact_prepare_at).is_over(slot.n_tokens)
            if is_due and self._tried.get(line.id) != len(line.ledger.raw):
                yield slot, line, line.ledger

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
        work = Compaction(self._service, engine, line, whole.request, record, self._ask(engine))
        found = await work.ahead(whole, before)
        if found is None or not _is_still(slot, line, ledger):
            return
        sent, after = found
        if sent.ledger is None:
            return
        line.ledger = replace(ledger, replaced=sent.ledger.replaced)
        line.prompt = replace(line.prompt, sizes=line.ledger.sizes())
        n_reply = line.tokens_of(sent.request.prompt.sizes[-1])
        line.n_tokens = max(0, after - n_reply)
        self._service.texts.hold(line.id, line.ledger)
        await self._process(engine, slot, line, sent, has_reply=has_reply)
        line.n_tokens = max(0, slot.n_tokens - (n_reply if has_reply else 0)) or line.n_tokens
        self._service.engines.remember(line)

    def _ask(self, engine: Engine) -> Callable[[Prepared], Any]:
        """Asks, and gives up as soon as somebody waits for the engine."""

        async def ask(prepared: Prepared) -> Collected:
            task = asyncio.create_task(ask_aside(self._exchange, self._service, prepared))
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
                if engine.table.has_waiting() or self._service.stopping:
                    task.cancel()
                    await asyncio.wait({task})
            return Collected() if task.cancelled() else task.result()

        return ask

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

    async def _process(self, engine: Engine, slot: Slot, line: Line, sent: Prepared, *, has_reply: bool) -> None:
        """The prompt with the summary, as far as the next one is sure to begin with it."""
        body = sent.request.body
        messages = body["messages"] if has_reply else body["messages"][:-1]
        body = {**body, "messages": messages, "add_generation_prompt": False}
        raw = orjson.dumps(body)
        tokens = (await render_chat(engine, line.who.tenant, sent.request.prompt.base, raw)).tokens
        if not slot.is_idle:
            return
        engine.table.lease(slot)
        try:
            await engine.client.prime(slot.id, tokens)
            slot.tokens, slot.n_tokens, slot.n_prompt = tokens, n_tokens(tokens), n_tokens(tokens)
            slot.tenant, slot.line, slot.body, slot.is_rendered = line.who.tenant, line.id, raw, True
            slot.saved, slot.snapshot, slot.rigid, slot.boundary = 0, None, 0, None
            slot.replies_return, slot.n_left, slot.last_used = False, None, engine.clock()
        except EngineError as error:
            log.warning("not_prepared", engine=engine.name, slot=slot.id, error=str(error))
            await engine.client.erase_slot(slot.id)
            slot.clear()
        finally:
            give_back(engine, slot)


def _is_still(slot: Slot, line: Line, ledger: Ledger) -> bool:
    return slot.is_idle and slot.line == line.id and line.ledger is ledger and not line.running


def _whole(line: Line, ledger: Ledger, body: bytes, reply: dict[str, Any]) -> Prepared:
    """What the slot holds, the answer included, as a request that extends its line."""
    sent = [*(ledger.sent or ()), orjson.dumps(reply)]
    longer = replace(ledger, raw=[*ledger.raw, b""], normal=[*ledger.normal, b""], sent=sent)
    p = line.prompt
    chain = (*p.chain, digest(p.chain[-1], sent[-1]))
    request = read("chat", CHAT_PATH, body, line.who)
    request = replace(request, prompt=replace(p, chain=chain, sizes=longer.sizes()), mode="repair", compacts=True)
    return Prepared(request, Found(line, Match.EXTENDS, len(ledger.raw)), longer)
