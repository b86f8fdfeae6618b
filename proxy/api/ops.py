"""What operators and scripts read: health, metrics, state, recent requests; and the control socket's application."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from policies.slot_state import SlotState
from proxy import __version__, errors
from proxy.api.door import path_of
from proxy.api.warm import WarmDoor
from proxy.doctor import DoctorDesk
from proxy.engine import Engine
from proxy.errors import Forbidden, NotFound, SlotkeeperError, StoreError
from proxy.explain import ExplainDesk
from proxy.service import MOST_RECORDS, Service, owner
from proxy.settle import Record
from proxy.snapshots import Desk


class Ops:
    """The operators' doors of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def healthz(self, _: Request) -> Response:
        """200 while the process lives."""
        return JSONResponse({"status": "ok"})

    async def hello(self, _: Request) -> Response:
        """What Anthropic's API answers to Claude Code's first question, which is whether anybody is there."""
        return JSONResponse({"message": "hello"})

    async def readyz(self, _: Request) -> Response:
        """200 when an engine can be asked and the index is loaded, else 503 with the reason."""
        if self._service.stopping:
            return JSONResponse({"status": "stopping"}, 503, {"retry-after": "5"})
        if self._service.is_ready():
            return JSONResponse({"status": "ready"})
        reason = self._service.engines.why_not_ready()
        return JSONResponse({"status": "not ready", "reason": reason}, 503, {"retry-after": "2"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, or OpenMetrics when asked for."""
        self._admin(request)
        s = self._service
        s.metrics.set_passed(await s.engine_metrics.read(s.engines.all))
        self._gauges()
        body, content_type = self._service.metrics.render(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    async def state(self, request: Request) -> Response:
        """GET /slotkeeper/state."""
        self._admin(request)
        return Response(orjson.dumps(describe(self._service)), media_type="application/json")

    async def requests(self, request: Request) -> Response:
        """GET /slotkeeper/requests[?last=N]: newest first."""
        found = self._service.recent(_last(request, "50"), self._seen_by(request))
        return Response(orjson.dumps({"requests": found}), media_type="application/json")

    async def one_request(self, request: Request) -> Response:
        """GET /slotkeeper/requests/ID."""
        name, tenant = request.path_params["id"], self._seen_by(request)
        record = self._service.records.get(name)
        if record is None or tenant not in (None, owner(record.tenant)):
            raise NotFound(f"No request {name[:40]!r} among the last {MOST_RECORDS}; see x-slotkeeper-request-id.")
        return Response(orjson.dumps(self._service.described(record)), media_type="application/json")

    def _admin(self, request: Request) -> None:
        if not self._service.tenants.is_admin(request.state.tenant):
            raise Forbidden(f"{path_of(request)} shows every tenant's numbers: it needs a key of the tenant 'admin'.")

    def _seen_by(self, request: Request) -> str | None:
        tenant: str = request.state.tenant
        return None if self._service.tenants.is_admin(tenant) else tenant

    def _gauges(self) -> None:
        s = self._service
        for e in s.engines.all:
            counts = {state.value: sum(x.state is state for x in e.table.slots) for state in SlotState}
            tokens, up = sum(x.n_tokens for x in e.table.slots), s.engine_metrics.is_up(e)
            s.metrics.set_engine(e.name, up=up, slots=counts, slot_tokens=tokens, waiting=e.table.n_waiting)  # type: ignore[arg-type]
        store = s.store
        s.metrics.set_store(
            lines=len(s.lines), snapshots=len(store.all()), n_bytes=store.total_bytes, budget=store.budget
        )
        s.metrics.set_limit(s.settings.max_waiting)


def _last(request: Request, default: str) -> int:
    """How many requests are asked for; raises BadRequest."""
    text = request.query_params.get("last", default)
    if not re.fullmatch("[0-9]{1,9}", text):
        raise errors.BadRequest(f"last={text[:20]} is not a whole number from 0 on.", param="last")
    return min(int(text), MOST_RECORDS)


def describe(service: Service) -> dict[str, Any]:
    """Engines, slots, lines, waiting, snapshots, budgets: positions and names, no text."""
    store = service.store
    return {
        "version": __version__,
        "mode": service.settings.mode,
        "stopping": service.stopping,
        "engines": [_engine(e) for e in service.engines.all],
        "lines": [
            {
                "id": x.id,
                "tenant": owner(x.who.tenant),
                "kind": x.kind,
                "n_tokens": x.n_tokens,
                "requests": x.n_requests,
            }
            for x in service.lines
        ],
        "snapshots": {"count": len(store.all()), "bytes": store.total_bytes, "budget_bytes": store.budget},
        "limits": {
            "max_waiting": service.settings.max_waiting,
            "max_wait_seconds": service.settings.max_wait_seconds,
            "max_body_bytes": service.settings.max_body_bytes,
            "max_lines": service.settings.max_lines,
        },
    }


def _engine(e: Engine) -> dict[str, Any]:
    return {
        "name": e.name,
        "kind": e.kind,
        "model": e.model,
        "url": e.client.base_url,
        "ready": e.ready,
        "why_not": None if e.ready else e.why_not,
        "unloaded": e.unloaded,
        "instance": e.instance,
        "build": e.props.build_info if e.props else None,
        "n_ctx": e.n_ctx,
        "fingerprint": e.fingerprint,
        "can_save": e.can_save,
        "can_rewind": e.can_rewind,
        "missing": e.missing,
        "waiting": e.table.n_waiting,
        "capacity_tokens": e.table.capacity,
        "used_tokens": e.table.used(),
        "slots": [
            {"id": s.id, "state": s.state, "line": s.line, "n_tokens": s.n_tokens, "saved_tokens": e.table.saved_of(s)}
            for s in e.table.slots
        ],
    }


def control_app(service: Service) -> Starlette:
    """The application on control.sock: only this user can reach it (0600)."""
    desk = Desk(service.store)

    async def listed(_: Request) -> Response:
        return JSONResponse(desk.listed())

    async def shown(request: Request) -> Response:
        return JSONResponse(desk.shown(request.path_params["id"]))

    async def changed(request: Request) -> Response:
        change = {"pin": desk.pin, "unpin": desk.unpin}[request.path_params["what"]]
        return JSONResponse(await change(request.path_params["id"]))

    async def removed(request: Request) -> Response:
        return JSONResponse(await desk.remove(request.path_params["id"]))

    async def pruned(_: Request) -> Response:
        return JSONResponse(await desk.prune())

    async def purged(_: Request) -> Response:
        return JSONResponse(await desk.purge() | {"in_memory": _forget_slots(service)})

    engines = service.engines.all
    explain = ExplainDesk(service.explainer, lambda name: next((e for e in engines if e.name == name), None))

    async def explained(request: Request) -> Response:
        telling = (r for r in reversed(service.records.values()) if r.cause is not None or "outcome" in r.compaction)
        found = islice(telling, _last(request, "10"))
        return Response(orjson.dumps({"requests": [await explain.told(r) for r in tuple(found)]}))

    async def explained_one(request: Request) -> Response:
        return Response(orjson.dumps({"requests": [await explain.told(_named(service, request.path_params["id"]))]}))

    doctor = DoctorDesk(service.engines)

    async def examined(request: Request) -> Response:
        wants = {name: request.query_params.get(name) == "1" for name in ("probe", "determinism")}
        return Response(orjson.dumps(await doctor.told(**wants)), media_type="application/json")

    return Starlette(
        routes=[
            Route("/warm", WarmDoor(service), methods=["POST"]),
            Route("/doctor", examined, methods=["POST"]),
            Route("/explain", explained),
            Route("/explain/{id}", explained_one),
            Route("/snapshots", listed),
            Route("/snapshots/prune", pruned, methods=["POST"]),
            Route("/snapshots/purge", purged, methods=["POST"]),
            Route("/snapshots/{id}", shown),
            Route("/snapshots/{id}", removed, methods=["DELETE"]),
            Route("/snapshots/{id}/{what:str}", changed, methods=["POST"]),
        ],
        exception_handlers={SlotkeeperError: _refused, StoreError: _unknown},
    )


def _forget_slots(service: Service) -> int:
    """What lies in slots is not saved again unless it is used again. The number of slots that hold something."""
    full = [slot for engine in service.engines.all for slot in engine.table.slots if slot.n_tokens]
    for slot in full:
        slot.is_purged, slot.snapshot, slot.saved = True, None, 0
    return len(full)


def _named(service: Service, name: str) -> Record:
    """The request of an id, or of the beginning of one; raises NotFound."""
    exact = service.records.get(name)
    found = [exact] if exact is not None else [r for r in service.records.values() if r.id.startswith(name)]
    if len(found) != 1:
        how = f"{len(found)} requests have ids that begin" if found else "No request has an id that begins"
        raise NotFound(f"{how} with {name[:40]!r}: see /slotkeeper/requests.")
    return found[0]


async def _refused(_: Request, error: Exception) -> Response:
    found = error if isinstance(error, SlotkeeperError) else errors.InternalError(str(error))
    return Response(errors.body(found), found.status, dict(found.headers), "application/json")


async def _unknown(_: Request, error: Exception) -> Response:
    return Response(errors.body(NotFound(str(error))), 404, media_type="application/json")
