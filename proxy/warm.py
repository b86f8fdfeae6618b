"""Prompts that are processed and kept before anyone asks: bases of recorded requests, and what a changed engine lost.

A base goes the way of any request through layout (proxy/prepare.py), so that the first real request of that agent finds
it; then it is processed alone in a slot, and saved. What the state directory holds of another fingerprint (another
model or build) is processed again from the chat body that lies beside its snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from llamacpp.errors import EngineError
from llamacpp.reports import Progress, Timings
from policies.prefix import n_tokens
from policies.types import Match
from proxy.abandon import Left, abandon
from proxy.api.read import Door, Told, identity, read
from proxy.carry_out import carry_out, give_back, save
from proxy.engine import Engine
from proxy.errors import BadRequest, Dialect, SlotkeeperError, StoreError
from proxy.lines import Line, new_line
from proxy.logs import describe
from proxy.prepare import prepare
from proxy.recorded import recorded
from proxy.rendering import BASE_AT_LEAST, base_body, base_tokens, has_base, render_chat
from proxy.service import Service
from proxy.slots import Slot, Want
from proxy.store_types import Kind, Snapshot

log = structlog.get_logger(__name__)

Json = dict[str, Any]
Tell = Callable[[int, int], None]
"""Told of tokens that are done, and of how many there are."""
PATHS: dict[str, tuple[Door | Dialect, str]] = {
    "chat": ("chat", "/v1/chat/completions"),
    "messages": ("messages", "/v1/messages"),
    "responses": ("responses", "/v1/responses"),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt to be kept: the chat `body` that is sent, its packed `tokens` and `line`, whether it is a base alone,
    and the snapshot of another engine whose place it takes."""

    engine: Engine
    line: Line
    body: bytes
    tokens: bytes
    kind: Kind
    old: Snapshot | None = None

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.line.who.tenant


class Warmer:
    """Warms one service's engines."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # --- what to keep ------------------------------------------------------------------------------------------------

    async def of_request(self, found: Json, tenant: str) -> Wanted:
        """The base of a recorded request (`body`, where known `path` and `headers`). Raises
        SlotkeeperError, EngineError."""
        asked = recorded(found)
        if asked is None or asked.dialect not in PATHS:
            raise BadRequest("This is no request with messages and tools: only their prompts begin with a base.")
        headers, body, (door, path) = asked.headers, _with_question(asked.body), PATHS[asked.dialect]
        mode = self._service.settings.mode
        told = Told(headers, mode, self._service.normals)
        request = read(door, path, orjson.dumps(body), identity(tenant, headers), told)
        request = (await prepare(self._service, request)).request
        sent = base_body(orjson.dumps(request.body))
        engine = self._service.engines.pick(request.model)
        engine.require_ready()
        tokens = await base_tokens(engine, request.who.tenant, request.prompt.base, sent)
        line = new_line(request.who, request.prompt, request.first_user, "warm")
        return Wanted(engine, line, sent, tokens, "base")

    async def of_snapshot(self, snapshot: Snapshot) -> Wanted | None:
        """What a snapshot of another engine was made of, for the engine that runs now. None when that is not known,
        or the engine has nothing to do with it. Raises SlotkeeperError, StoreError, EngineError."""
        body = await self._service.store.load_prompt(snapshot.id)
        engine = next((e for e in self._service.engines.all if e.ready and e.can_save), None)
        if body is None or engine is None:
            return None
        told = Told({}, "observe", self._service.normals)
        request = read("chat", PATHS["chat"][1], body, identity(snapshot.tenant, {}), told)
        base = request.prompt.base
        if snapshot.kind == "base":
            tokens = await base_tokens(engine, snapshot.tenant, base, body)
        else:
            rendered = await render_chat(engine, snapshot.tenant, base, body)
            tokens = b"" if rendered.n_media else rendered.tokens
        line = new_line(request.who, request.prompt, request.first_user, "warm")
        if snapshot.kind == "line" and snapshot.line is not None:
            line.id = snapshot.line
        return Wanted(engine, line, body, tokens, snapshot.kind, snapshot)

    def stale(self) -> list[Snapshot]:
        """Bases, and pinned lines, whose KV no engine that runs now can use; the last used first."""
        engines = [e for e in self._service.engines.all if e.ready and e.can_save]
        if not engines:
            return []
        now = {e.fingerprint for e in engines}
        return [s for s in self._service.store.all() if s.fingerprint not in now and (s.kind == "base" or s.pinned)]

    # --- keeping it --------------------------------------------------------------------------------------------------

    async def warm(self, wanted: Wanted, tell: Tell = lambda *_: None) -> Json:
        """Processes and saves a prompt, unless that was done; what came of it, for JSON. Raises SlotkeeperError,
        EngineError."""
        engine, size = wanted.engine, n_tokens(wanted.tokens)
        report = {"kind": wanted.kind, "tokens": size, "cached": 0, "processed": 0, "snapshot": None}
        if size < BASE_AT_LEAST:
            return {**report, "state": "too_short"}
        if size >= engine.n_ctx:
            return {**report, "state": "too_long"}
        if has_base(engine, wanted.tenant, wanted.tokens):
            return {**report, "state": "known"}
        timings, snapshot = await self._process(wanted, tell)
        engine.metrics.prompt(
            engine.name,
            engine.model,
            "warm",
            cached=timings.cache_n,
            processed=timings.prompt_n,
            seconds=timings.prompt_ms / 1000,
        )
        if snapshot is not None:
            await self._replace(wanted.old, snapshot)
        found = {"cached": timings.cache_n, "processed": timings.prompt_n, "snapshot": snapshot and snapshot.id}
        log.info("warmed", engine=engine.name, tokens=size, saved=snapshot is not None, what=wanted.kind)
        return {**report, **found, "state": "saved" if snapshot is not None else "not_saved"}

    async def _process(self, wanted: Wanted, tell: Tell) -> tuple[Timings, Snapshot | None]:
        engine, line, tokens = wanted.engine, wanted.line, wanted.tokens
        # Fresh: never a guest in a conversation's slot, which it would shorten to the base.
        want = Want(line, Match.NEW, n_tokens(tokens), 1, lambda: None, tokens=tokens, fresh=True)
        engine.n_requests += 1
        try:
            grant = await engine.table.acquire(want, self._service.settings.max_wait_seconds)
            slot = grant.target
            await _to_its_end(carry_out(engine, grant, self._service.lines, line.id), engine, slot, self._service)
            timings = await self._primed(wanted, slot, want, tell)
            slot.clear()
            slot.tokens, slot.n_tokens, slot.tenant = tokens, n_tokens(tokens), wanted.tenant
            slot.line, slot.last_used = line.id, engine.clock()
            saving = save(engine, slot, "base" if wanted.kind == "base" else "manual", wanted.kind, wanted.body)
            snapshot = await _to_its_end(saving, engine, slot, self._service)
            if wanted.kind == "base":
                slot.line = None  # nobody's, and free to be taken: its file holds it
            give_back(engine, slot)
            return timings, snapshot
        finally:
            engine.n_requests -= 1

    async def _primed(self, wanted: Wanted, slot: Slot, want: Want, tell: Tell) -> Timings:
        async def hear(progress: Progress) -> None:
            tell(progress.processed, progress.total)

        try:
            return await wanted.engine.client.prime(slot.id, wanted.tokens, hear)
        except BaseException:
            abandon(self._service, wanted.engine, slot, want, Left(), lambda _: None)
            raise

    async def _replace(self, old: Snapshot | None, new: Snapshot) -> None:
        """A pin goes over to the new file. Of the same model the old one will never be of use again."""
        store = self._service.store
        if old is None or not old.pinned:
            return
        try:
            await store.pin(new.id)
            if old.model == new.model:
                await store.unpin(old.id)
        except StoreError as error:
            log.warning("pin_not_moved", snapshot=old.id, error=str(error))


class IdleWarmer:
    """Processes pinned bases again while nobody is served, once for each engine instance."""

    def __init__(self, service: Service) -> None:
        self._service, self._warmer = service, Warmer(service)
        self._seen: set[tuple[str, int, str]] = set()

    async def one(self, engine: Engine) -> None:
        """Looks after one pinned base that the engine cannot use, if it has a slot to spare. Gives way to whoever
        comes, and goes on from there another time."""
        for snapshot in self._warmer.stale():
            key = engine.name, engine.instance, snapshot.id
            if not snapshot.pinned or snapshot.kind != "base" or key in self._seen:
                continue
            if not any(slot.is_idle and not slot.n_tokens for slot in engine.table.slots):
                return
            try:
                wanted = await self._warmer.of_snapshot(snapshot)
                if wanted is not None and wanted.engine is engine:
                    await self._warmer.warm(wanted, lambda *_: self._give_way(engine))
            except Interrupted:
                return
            except (SlotkeeperError, EngineError) as error:
                log.warning("not_warmed", engine=engine.name, snapshot=snapshot.id, error=describe(error))
            self._seen.add(key)
            return

    def _give_way(self, engine: Engine) -> None:
        if engine.n_requests > 1 or self._service.stopping:
            raise Interrupted


class Interrupted(Exception):
    """Somebody came while a base was processed in idle time."""


def _with_question(body: Json) -> Json:
    """A body that asks something. Layout moves a base's values into the first user message; without one it moves none,
    and the base would be another than that of every real request."""
    for name in ("messages", "input"):
        asked = body.get(name)
        if isinstance(asked, list) and not any(isinstance(m, dict) and m.get("role") == "user" for m in asked):
            return {**body, name: [*asked, {"role": "user", "content": "hi"}]}
    return body


async def _to_its_end(work: Any, engine: Engine, slot: Slot, service: Service) -> Any:
    """What must be finished for the leased slot's sake; cancelled meanwhile, it is given back afterwards."""
    task = service.tasks.spawn(work, "carry-out")
    try:
        return await asyncio.shield(task)
    except BaseException:
        task.add_done_callback(lambda _: give_back(engine, slot))
        raise
