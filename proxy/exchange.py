"""The story of one request, top to bottom: prepare, place, carry out, send, relay, settle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from llamacpp.client import chunks_of
from llamacpp.errors import EngineUnreachable
from llamacpp.reports import Progress, Timings
from llamacpp.wire import Asked
from policies.causes import Cause
from policies.placeholders import Resolver
from policies.slot_state import SlotEvent, SlotState
from policies.types import Action, Match
from proxy.abandon import Left, abandon, note
from proxy.api.read import ModelRequest
from proxy.aside import Collected, ask_aside, unheard
from proxy.carry_out import Carried, carry_out, give_back, prime, save
from proxy.compact import Compaction
from proxy.engine import Engine
from proxy.engine_errors import refused, too_long, whatever
from proxy.errors import ClientLeft, ContextExceeded, PoolExceeded, ShuttingDown, SlotkeeperError
from proxy.jobs import Job
from proxy.keep_alive import KeepAlive
from proxy.kept_json import kept_json
from proxy.ledger import Ledger, Reply
from proxy.lines import Found, Line, new_line
from proxy.prepare import Prepared, keep, prepare
from proxy.relay import Out, Relay, say_early
from proxy.rendering import base_body, base_cuts, render, render_pending
from proxy.service import Service
from proxy.settle import Clock, Record, after_answer, fill, judge, signs_of, tell
from proxy.slots import Grant, NeedsTokens, Slot, Want

T = TypeVar("T")

CLOSE_TO_FULL = 0.9
"""Share of the pool above which an estimate of a prompt's tokens is not good enough and it is rendered."""
MISPREDICTED = 64
"""Tokens short of the prediction that make us ask whether the engine was restarted unseen."""


class Exchange:
    """One model request on one engine."""

    def __init__(
        self,
        service: Service,
        request: ModelRequest,
        out: Out,
        record: Record,
        *,
        job: Job | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        """`job`: what may outlive its client, if this is one. `prepared`: a question of ours, beside a client's."""
        self.service, self.request, self.out, self.record, self.job = service, request, out, record, job
        self._prepared, self._is_aside = prepared, prepared is not None
        self.clock = Clock()
        self._alive = KeepAlive(0.0 if self._is_aside else service.settings.keep_alive, self.clock.start)
        self.stopped: SlotkeeperError | None = None
        self._task: asyncio.Task[object] | None = None
        self._line: Line | None = None
        """To be written to state.db, once the client has its answer."""
        self._ledger: Ledger | None = None
        """What the line's ledger will be once this prompt was sent."""
        self._base: Timings | None = None
        """What processing the base ahead of this cold prompt took: it is part of the prompt's own work."""

    async def run(self) -> None:
        """Answers the client, also with an error; raises only CancelledError or ClientLeft, when the client left."""
        self._task = asyncio.current_task()
        self.service.running.add(self)
        try:
            self.service.show(self.record.id, self.request.body)
            await self._story()
        except asyncio.CancelledError:
            if self.stopped is None:
                self.record.outcome = "client_left"
                raise
            if self._task is not None:
                self._task.uncancel()
            await self._fail(self.stopped)
        except ClientLeft:
            self.record.outcome = "client_left"
            raise
        except Exception as error:
            await self._fail(whatever(error, self.record.id))
        finally:
            self.service.running.discard(self)
            if self.job is not None and self.job.has_left and self.record.outcome == "ok":
                self.record.outcome = "client_left"  # answered to nobody
            tell(self.service.metrics, self.record, self.clock)
            self.service.remember(self.record)
            if self._line is not None:
                self.service.engines.remember(self._line)

    def stop(self) -> None:
        """Ends the request because the pool would overflow; called by the keeper on the younger runner."""
        self.end(
            PoolExceeded(
                "This answer outgrew the engine's context beside an older one, which goes on. Send it again, ask for "
                "fewer tokens (max_tokens), or start the engine with a larger --ctx-size.",
                retry_after=5,
            )
        )

    def end(self, error: SlotkeeperError) -> None:
        """Ends the request where it stands; the client is told why."""
        self.stopped = self.stopped or error
        if self._task is not None:
            self._task.cancel()

    async def _fail(self, error: SlotkeeperError) -> None:
        self.record.outcome, self.record.error = error.outcome, str(error.code)
        await self.out.fail(error, self.record.headers())

    # --- the story --------------------------------------------------------------------------------------------------

    async def _story(self) -> None:
        if self.service.stopping:
            raise ShuttingDown("Slotkeeper is stopping; send the request again in a moment.", retry_after=5)
        asked = self.request
        prepared = self._prepared or await prepare(self.service, asked)
        r, found = prepared.request, prepared.found
        self.record.repairs, self.record.kind = list(prepared.repairs), prepared.kind
        engine = self.service.engines.pick(r.model, r.door, found.line.id if found.line else None)
        await self.service.engines.beliefs.notice_sleep(engine)
        await self.service.engines.awake(engine)
        engine.table.require_place(engine.n_requests)
        line = prepared.line or (found.line if found.line is not None and found.is_same_line else None)
        line = line or new_line(r.who, r.prompt, r.first_user, r.kind)
        self._describe(engine, line, found)
        compaction = Compaction(self.service, engine, line, asked, self.record, self._ask)
        line.running += 1
        engine.n_requests += 1
        try:
            prepared = await compaction.fitted(prepared)
            try:
                await self._serve(engine, line, prepared)
            except SlotkeeperError as error:
                if error.kind != ContextExceeded.kind or self.out.started:
                    raise
                await self._serve(engine, line, await compaction.forced(prepared, error))
        finally:
            line.running -= 1
            engine.n_requests -= 1

    async def _ask(self, prepared: Prepared, is_sure: bool) -> Collected:
        """A question of ours within this request; whoever ends one ends both."""
        answer = await ask_aside(Exchange, self.service, prepared, self._say_alive if is_sure else unheard)
        if self.stopped is not None:
            raise self.stopped
        return answer

    async def _serve(self, engine: Engine, line: Line, prepared: Prepared) -> None:
        self.request, found, self._ledger = prepared.request, prepared.found, prepared.ledger
        self.service.show(self.record.id, self.request.body, sent=True)
        self._describe(engine, line, found)
        want = self._want(engine, line, found)
        if not want.is_hot:
            await self._render(engine, want)
        grant = await self._acquire(engine, want)
        carried = await self._carry_out(engine, grant, want)
        if self.job is not None and not self.request.is_unseen:
            self.job.begin(engine, want.n_prompt - carried.predicted_cache_n)
        if not engine.files_rewind and carried.action in (Action.COLD, Action.RESTORE, Action.FORK) and not want.fresh:
            await self._cut_base(engine, grant.target, want)
        await self._converse(engine, grant, want, found, carried)

    def _describe(self, engine: Engine, line: Line, found: Found) -> None:
        r = self.record
        r.line, r.engine, r.model, r.match = line.id, engine.name, engine.model, found.match
        if found.line is not None and found.match in (Match.EDITED, Match.BASE):
            r.divergence = {"message": found.shared, "token_estimate": found.held, "line": found.line.id}

    def _want(self, engine: Engine, line: Line, found: Found) -> Want:
        """What to ask the slot table for; unrendered when the prompt continues what a slot holds."""
        r, reserve = self.request, self._reserve(engine)
        slot = engine.table.holding(line.id) if found.match is Match.EXTENDS else None
        n_prompt = n_most = line.tokens_of(r.prompt.n_bytes)
        is_known = slot is not None and line.lost is not Cause.CANCELLED and line.n_tokens > 0
        most = line.n_tokens - 1 if is_known and not r.is_answered(found.shared) else None
        if slot is not None:
            n_most = slot.n_tokens + sum(r.prompt.sizes[found.shared :])  # no token is shorter than a byte
            n_prompt = slot.n_tokens + line.tokens_of(n_most - slot.n_tokens)
        want = Want(line, found.match, n_prompt, reserve, self.stop, fresh=r.fresh, most=most, n_most=n_most)
        want.stem = found.line.id if found.line is not None and found.line is not line else None
        is_close = n_prompt + reserve >= CLOSE_TO_FULL * (engine.table.capacity or engine.n_ctx)
        want.is_hot = slot is not None and not slot.was_restored and r.door == "chat" and not r.fresh and not is_close
        return want

    def _reserve(self, engine: Engine) -> int:
        """Tokens of the pool kept free for the reply. One that does not come as a stream cannot be watched growing,
        so it gets at once whatever it may come to (design.md, rule 8)."""
        r, usual = self.request, self.service.settings.reply_reserve
        most = engine.n_ctx if r.is_unseen else usual
        return most if r.max_tokens is None else min(r.max_tokens, most)

    async def _render(self, engine: Engine, want: Want) -> None:
        """Exact tokens for a prompt that has to be compared; refuses one that no slot can hold."""
        want.is_hot, tenant = False, self.request.who.tenant
        rendered = await render(engine, self.request, want.line)
        if rendered is None:
            return
        want.n_prompt = rendered.n_tokens
        if want.n_prompt >= engine.n_ctx:
            raise too_long(want.n_prompt, engine.n_ctx)
        if not rendered.n_media:
            tokens = want.tokens = rendered.tokens
            await render_pending(engine, tenant)
            want.snapshots = lambda: engine.snapshots_for(tenant, tokens)

    async def _acquire(self, engine: Engine, want: Want) -> Grant:
        engine.require_ready()
        waits, began = engine.table.waits, time.perf_counter()
        seconds = self.service.settings.max_wait_seconds
        try:
            grant = await engine.table.acquire(want, seconds)
        except NeedsTokens as error:
            await self._render(engine, want)
            left = max(0.0, seconds - (time.perf_counter() - began))
            grant = await engine.table.acquire(want, left, place_in_line=error.place_in_line)
        self.clock.waited = time.perf_counter() - began
        if engine.table.waits > waits and self.clock.waited > 0:
            engine.metrics.waited(engine.name)
        engine.metrics.queued(engine.name, self.record.kind, self.clock.waited)
        self.record.waited_ms = round(self.clock.waited * 1e3, 3)
        return grant

    async def _carry_out(self, engine: Engine, grant: Grant, want: Want) -> Carried:
        """Runs to its end whatever the client does: a half-done save or restore would leave a slot in doubt."""
        work = carry_out(engine, grant, self.service.lines, want.line.id)
        # What is at hand never waits, and needs no task that outlives this one.
        carried = await (work if grant.place.is_at_hand else self._to_its_end(work, engine, grant.target))
        self.record.placement, self.record.reason = carried.action, grant.place.reason
        self.record.slot, self.record.predicted_cache_n = grant.target.id, carried.predicted_cache_n
        engine.metrics.placement(engine.name, carried.action.value)
        return carried

    async def _to_its_end(self, work: Coroutine[Any, Any, T], engine: Engine, slot: Slot) -> T:
        """What must be finished for the leased slot's sake; when the client leaves meanwhile, the slot is given back
        afterwards."""
        task: asyncio.Task[T] = self.service.tasks.spawn(work, "carry-out")
        try:
            return await asyncio.shield(task)
        except BaseException:
            task.add_done_callback(lambda _: give_back(engine, slot))
            raise

    async def _cut_base(self, engine: Engine, slot: Slot, want: Want) -> None:
        """Keeps the base of a new prompt: its prefill ends with its client, like any other; its file does not."""
        # Of a base of thousands of tokens the client would hear nothing for minutes.
        if want.tokens is not None and (tell := getattr(self.request.writer, "progress", None)) is not None:
            tell(want.n_prompt, 0)
        for tokens, is_whole in await self._or_abandon(base_cuts(engine, slot, self.request, want), engine, slot, want):
            done = await self._or_abandon(prime(engine, slot, tokens, self._primed), engine, slot, want)
            if done is None:
                return
            slot.tenant, slot.line = want.tenant, want.line.id
            self._base = done if self._base is None else done.after(self._base)
            prompt = base_body(kept_json(self.request.body)) if is_whole else None
            await self._to_its_end(save(engine, slot, "base", "base", prompt), engine, slot)

    async def _or_abandon(self, work: Coroutine[Any, Any, T], engine: Engine, slot: Slot, want: Want) -> T:
        """Work in a leased slot that ends with its client; the slot's content is in doubt then."""
        try:
            return await work
        except BaseException:
            self._abandon(engine, slot, want, None)
            raise

    async def _primed(self, progress: Progress) -> None:
        """The base of the prompt is being processed."""
        if self.job is not None:
            self.job.primed(progress)
        await self._say_alive()

    async def _say_alive(self) -> None:
        """A sign of life, if one is due, ahead of a prompt that is known to fit (`_render`, Compaction)."""
        if self.request.stream and self._alive.is_due():
            await say_early(self.out, self.record, self.request.writer)

    async def _converse(self, engine: Engine, grant: Grant, want: Want, found: Found, carried: Carried) -> None:
        """Sends, relays, settles. The slot is given back when the engine is done with it, not when the client is."""
        slot, r = grant.target, self.request
        is_guest = carried.action is Action.GUEST and slot.line is not None
        takes_over = is_guest and carried.predicted_cache_n + 1 < (slot.n_prompt or slot.n_tokens)
        slot.apply(SlotEvent.SEND)
        slot.last_used = engine.clock()
        instance, runner, settled = engine.instance, slot.runner, False

        def settle(timings: Timings) -> None:
            nonlocal settled
            if slot.state is not SlotState.BUSY or engine.instance != instance:
                return
            slot.apply(SlotEvent.ANSWERED)
            self._settle(engine, slot, want, found, timings, carried, is_guest=is_guest and not takes_over)
            settled = True

        relay = Relay(r.shapes, Asked.of(r.body, r.shapes), self.out, self.record.headers(), settle, r.writer)
        if self._ledger is not None:
            relay.keeps, values = True, self._ledger.values
            relay.resolver = Resolver(values) if values else None
        relay.alive, relay.job = self._alive, self.job
        try:
            await self._send(engine, slot, relay, may_reuse=not (r.fresh or carried.is_tainted))
        except EngineUnreachable:
            engine.doubt()
            raise
        finally:
            self.clock.first = relay.first_event
            if self._ledger is not None:
                self._ledger.reply = Reply(relay.kept, relay.message)
            if not settled:
                # Also when the engine is known to be lost (the slot is LEASED then): the lease is ours to give back.
                if is_guest and not takes_over:
                    slot.n_left = min(slot.n_owned, carried.predicted_cache_n)
                elif slot.line != want.line.id:
                    slot.clear_owner()  # what was his is overwritten, or about to be
                self.record.predicted_n = runner.n_decoded if runner is not None else 0
                self._abandon(engine, slot, want, relay.progress)
            elif not r.fresh:
                self._line = None if self._is_aside else want.line

    async def _send(self, engine: Engine, slot: Slot, relay: Relay, *, may_reuse: bool) -> None:
        engine.require_ready()  # it may have died, and begun anew, while the slot was prepared
        r = self.request
        body = r.sent(slot.id, may_reuse=may_reuse)
        self.clock.sent = time.perf_counter()
        stream = engine.client.stream("POST", r.path, kept_json(body))
        async with engine.unseen(r.is_unseen), stream as response:
            if response.status_code != 200:
                raise await refused(engine.client, r.chat, response.status_code, await response.aread())
            if r.is_unseen:
                await relay.whole(await response.aread())
            else:
                await relay.events(chunks_of(response), slot.runner)

    def _settle(
        self,
        engine: Engine,
        slot: Slot,
        want: Want,
        found: Found,
        timings: Timings,
        carried: Carried,
        *,
        is_guest: bool,
    ) -> None:
        line, r = want.line, self.request
        fell_short = timings.cache_n + MISPREDICTED < carried.predicted_cache_n
        # An appended prompt finds something in its slot, unless the memory cannot be cut back to where they agree.
        was_empty = fell_short and timings.cache_n == 0 and engine.can_rewind and carried.snapshot is None
        was_empty = was_empty and engine.kind == "attached"
        if was_empty:
            line.lost = Cause.ENGINE_RESTART
        done = timings if self._base is None else timings.after(self._base)
        before = self.service.explainer.body_of(found.line) if found.match is Match.EDITED else None
        signs = signs_of(engine, found, r.body, before)
        verdict = after_answer(engine, line, found, self.record, done, signs)
        self.service.show_record(self.record)
        body = r.chat
        if not self._is_aside:
            self.service.explainer.settled(engine, want, found, self.record, body, repaired=r.mode != "observe")
        slot.body, slot.base = body, r.prompt.base
        fill(slot, line, timings, engine.memory, tokens=want.tokens, is_guest=is_guest, now=engine.clock())
        if carried.snapshot is not None:
            is_effective = verdict.cause is not Cause.RESTORE_INEFFECTIVE
            judge(self.service.store, carried.snapshot, timings, is_effective=is_effective)
        if verdict.cause is Cause.RESTORE_INEFFECTIVE:
            engine.metrics.restored(engine.name, "ineffective", self.record.kind, seconds=0.0)
        if r.fresh:
            # Its cells stay in use until the next prompt; nobody may find or keep what lies there.
            slot.line, slot.tokens, slot.body = None, b"", None
        else:
            self._advance(line, timings.cache_n + timings.prompt_n)
        if fell_short:
            self.service.engines.beliefs.suspect(engine, slot, is_doubtful=was_empty)
        self.service.engines.learned.note_turn(engine, carried, timings)
        engine.refresh_abilities()
        engine.table.release(slot)

    def _abandon(self, engine: Engine, slot: Slot, want: Want, progress: Progress | None) -> None:
        r, line = self.request, want.line
        left = Left(progress, r.chat, r.prompt.base, self._base)
        note(engine, self.record, left)
        abandon(self.service, engine, slot, want, left, lambda n_tokens: self._advance(line, n_tokens))

    def _advance(self, line: Line, n_tokens: int) -> None:
        if self._is_aside:
            return
        self.service.lines.advance(line, self.request.prompt, n_tokens)
        if self._ledger is not None:
            keep(self.service, line, self._ledger)
