"""The application: routes, the guard in front of them, and the life of what it owns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.routing import Route

from policies.layout_rules import RULES
from proxy import __version__, errors
from proxy.api.count import Counting
from proxy.api.door import ERROR_BODIES, ModelDoor, dialect_of, path_of
from proxy.api.guard import Guard
from proxy.api.ops import Ops, control_app
from proxy.api.page import Page
from proxy.api.passthrough import ADMIN, EMBEDDING, READABLE, Passthrough
from proxy.config import Settings
from proxy.engines import Engines
from proxy.errors import SlotkeeperError
from proxy.keeper import Keeper
from proxy.layouts import REPAIRS, Layouts
from proxy.lines import Line, LineBook
from proxy.metrics import Metrics
from proxy.page.text import count, size
from proxy.service import Service
from proxy.state_dir import StateDirLock, ensure_private_dir, remember_budget
from proxy.store import Store
from proxy.store_types import Snapshot
from proxy.tasks import Tasks
from proxy.tenants import load as load_tenants

log = structlog.get_logger(__name__)

MODEL_DOORS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/completions": "completion",
    "/completions": "native",
    "/completion": "native",
    "/infill": "infill",
    "/v1/messages": "messages",
    "/messages": "messages",
    "/v1/responses": "responses",
    "/responses": "responses",
}
"""llama-server's routes for model requests that take a slot (tools/server/server.cpp; `/completions` is its old name of
`/completion`)."""


HURRIED_SECONDS = 1.0
"""What an engine gets to end by itself after a second signal; one that writes a slot file hears nothing before."""
COUNT_DOORS = ("/v1/messages/count_tokens", "/messages/count_tokens")


def create_app(settings: Settings) -> FastAPI:
    """The application for these settings. Nothing is opened or started before its lifespan begins."""
    app = FastAPI(
        title="Slotkeeper",
        version=__version__,
        lifespan=lambda app: _life(app, settings),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        exception_handlers={SlotkeeperError: _answer},
    )
    return app


@asynccontextmanager
async def _life(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Opens in order: lock, store, ledgers, engines; closes in reverse, saving slots before their engine ends."""
    tenants = load_tenants(settings.api_key_file)
    with StateDirLock(ensure_private_dir(settings.state_dir)).acquire() as lock:
        store = await Store.open(
            settings.state_dir,
            budget=settings.disk_budget,
            max_lines=settings.max_lines,
            persist=settings.persist,
            adopt_for=tenants.names,
            lock=lock,
        )
        remember_budget(settings.state_dir, settings.disk_budget)
        metrics, lines, tasks = Metrics(), LineBook(settings.max_lines), Tasks()
        engines = Engines(settings, store, metrics, lines, tasks)
        layouts = Layouts((*RULES, *settings.layout_rules), store.put_layout)
        for tenant, blob in await store.load_layouts():
            layouts.load(tenant, blob)
        await _load_lines(store, lines, layouts)
        metrics.add_rules({*layouts.rule_names, *REPAIRS})
        service = Service(settings, tenants, store, metrics, engines, lines, tasks, layouts)
        service.recall(store.load_requests())
        keeper = Keeper(service)
        engines.on_pressure = keeper.press
        try:
            await engines.start()
            _mount(app, service)
            upkeep = asyncio.create_task(keeper.run(), name="keeper")
            try:
                yield
            finally:
                service.stopping = True
                upkeep.cancel()
                await asyncio.gather(upkeep, return_exceptions=True)
                await _close(service, keeper)
        finally:
            await store.close()


async def _close(service: Service, keeper: Keeper) -> None:
    left = service.settings.exit_deadline_seconds - service.settings.drain_seconds
    saved: list[Snapshot] = []
    await service.unless_hurried(_save(service, keeper, left, saved))
    await service.engines.stop(HURRIED_SECONDS if service.hurried.is_set() else left / 4)
    await service.tasks.settle(1.0)
    _tell_stopped(saved, service.store)


def _tell_stopped(saved: list[Snapshot], store: Store) -> None:
    """What the next start finds: saved now, and kept in all (earlier saves and bases among it)."""
    n_bytes, kept = sum(s.bytes for s in saved), len(store.all())
    now = f"{count(len(saved), 'conversation')} saved ({size(n_bytes)})" if saved else "nothing new to save"
    in_all = f"; {count(kept, 'snapshot')} kept in all ({size(store.total_bytes)})"
    sentence = f"Stopped: {now}{in_all if kept > len(saved) else ''}."
    log.info("stopped", sentence=sentence, saved=len(saved), bytes=n_bytes, kept=kept, kept_bytes=store.total_bytes)


async def _save(service: Service, keeper: Keeper, left: float, saved: list[Snapshot]) -> None:
    await service.engines.wait_released(left / 4)
    await keeper.save_all(left / 2, saved)


async def _load_lines(store: Store, lines: LineBook, layouts: Layouts) -> None:
    for record in await store.load_ledgers():
        try:
            line = Line.from_record(record)
            if line.ledger is not None and line.ledger.n_learned > layouts.n_learned(record.tenant):
                raise ValueError("the values that its base was laid out by are lost, and others will have their names")
            lines.keep(line)
        except ValueError as error:
            log.warning("ledger_dropped", error=str(error))


def _mount(app: FastAPI, service: Service) -> None:
    """Routes, the most used first; the guard around all of them."""
    through, ops = Passthrough(service), Ops(service)
    doors = {path: ModelDoor(service, door, path) for path, door in MODEL_DOORS.items()}  # type: ignore[arg-type]
    routes = [Route(path, door, methods=["POST"]) for path, door in doors.items()]
    counting = Counting(service)
    routes += [Route(path, counting, methods=["POST"]) for path in COUNT_DOORS]
    routes += [
        Route("/healthz", ops.healthz),
        Route("/readyz", ops.readyz),
        Route("/api/hello", ops.hello),
        Route("/metrics", ops.metrics),
        *Page(service).routes(),
        Route("/slotkeeper/state", ops.state),
        Route("/slotkeeper/requests", ops.requests),
        Route("/slotkeeper/requests/{id}", ops.one_request),
        Route("/v1/models", through.models),
        Route("/models", through.models),
        Route("/v1/models/{model:path}", through.one_model, methods=["GET"]),
        Route("/models/{model:path}", through.one_model, methods=["GET"]),
        Route("/slots", through.slots),
    ]
    routes += [Route(path, through.read, methods=[method]) for method, paths in READABLE.items() for path in paths]
    routes += [Route(path, through.embed, methods=["POST"]) for path in EMBEDDING]
    routes += [Route(path, through.admin, methods=[method]) for method, paths in ADMIN.items() for path in paths]
    routes.append(
        Route("/{path:path}", through.unknown, methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    )
    app.router.routes[:] = routes
    app.middleware_stack = Guard(app.build_middleware_stack(), service, doors)
    app.state.service, app.state.control = service, control_app(service)


async def _answer(request: Request, error: Exception) -> Response:
    found = error if isinstance(error, SlotkeeperError) else errors.InternalError(str(error))
    body = ERROR_BODIES.get(dialect_of(path_of(request)), errors.body)(found)
    return Response(body, found.status, dict(found.headers), "application/json")
