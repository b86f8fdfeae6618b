"""The engine's reading endpoints, passed through; its writing ones, refused; everything else, unknown."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamacpp.errors import EngineError
from proxy import __version__
from proxy.api.door import headers_of, path_of, read_body
from proxy.api.read import parse
from proxy.engine import Engine, names_of
from proxy.engine_errors import answered, as_ours
from proxy.errors import EngineFailed, Forbidden, NotFound, SlotkeeperError, UnknownModel
from proxy.service import Service, owner
from proxy.serving import wake

READABLE = {
    "GET": ("/props", "/health", "/v1/health", "/lora-adapters"),
    "POST": (
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/v1/chat/completions/input_tokens",
        "/chat/completions/input_tokens",
        "/v1/responses/input_tokens",
        "/responses/input_tokens",
    ),
}
"""Passed through as they are (contract.md, "HTTP")."""
ADMIN = {
    "POST": ("/props", "/slots/{slot}", "/lora-adapters", "/models/load", "/models/unload"),
    "DELETE": ("/models", "/models/{model}"),
}
"""Writes; open only with --allow-engine-admin."""
EMBEDDING = (
    *("/embedding", "/embeddings", "/v1/embeddings", "/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
    "/v1/audio/transcriptions",
)
"""They take slots and cannot be pinned (llama-server.md, "Requests"): only engines with kind=embedding get them."""
PASSED = ("content-type", "retry-after")
"""Response headers that are the client's; all others are hop-by-hop (RFC 9110, 7.6.1), ours to write, or about the
engine's own connection and origin rules."""


class Passthrough:
    """Endpoints that take no slot."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def read(self, request: Request) -> Response:
        """Passes a reading request to the engine that `?model=` or the body names, else to the first."""
        raw = await read_body(request.scope, request.receive, self._service.settings.max_body_bytes)
        engine = await self._engine(request, raw)
        if path_of(request).endswith("health"):
            engine.require_ready()
        answer = await self._ask(engine, request, raw)
        if path_of(request) == "/props" and answer.status_code == httpx.codes.OK:
            return self._own_props(answer)
        return _response(answer)

    async def embed(self, request: Request) -> Response:
        """Passes on to an engine that is there for it; a chat engine would overwrite a conversation's slot."""
        raw = await read_body(request.scope, request.receive, self._service.settings.max_body_bytes)
        is_json = "json" in request.headers.get("content-type", "")  # transcriptions are forms
        model = named_in(request, raw if is_json else b"")
        await wake(self._service.engines, model, "embedding")
        engine = self._service.engines.pick(model, "embedding")
        engine.require_ready()
        async with engine.unseen(True):
            return _response(await self._ask(engine, request, raw))

    async def admin(self, request: Request) -> Response:
        """A write to the engine: refused unless --allow-engine-admin; our table is checked against it afterwards."""
        if not self._service.settings.allow_engine_admin:
            raise Forbidden(
                f"{request.method} {path_of(request)} changes the engine behind Slotkeeper's back, so it is refused. "
                "Start Slotkeeper with --allow-engine-admin to open it."
            )
        if not self._service.tenants.is_admin(request.state.tenant):
            raise Forbidden(f"{path_of(request)} reaches every tenant's slots: it needs a key of the tenant 'admin'.")
        raw = await read_body(request.scope, request.receive, self._service.settings.max_body_bytes)
        engine = await self._engine(request, raw, loads=path_of(request) != "/models/load")
        answer = await self._ask(engine, request, raw)
        self._service.engines.beliefs.suspect(engine)
        return _response(answer)

    async def models(self, request: Request) -> Response:
        """GET /v1/models: all engines' models, with the context that one request can use."""
        data = list((await self._all_models()).values())
        return Response(orjson.dumps({"object": "list", "data": data}), media_type="application/json")

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/ID, by the id of the list or another name that requests may use."""
        name, found = request.path_params["model"], await self._all_models()
        model = found.get(name) or next((found[e.model] for e in self._named(name) if e.model in found), None)
        if model is None:
            raise UnknownModel(f"No engine here serves the model '{name[:80]}'. Served are: {', '.join(found)}.")
        return Response(orjson.dumps(model), media_type="application/json")

    def _named(self, name: str) -> list[Engine]:
        return [engine for engine in self._service.engines.all if name in names_of(engine)]

    async def _all_models(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for engine in self._service.engines.all:
            if engine.wake is not None:
                found[engine.model] = _routed(engine)
            elif engine.ready:
                found |= await self._models_of(engine)
        if not found:
            self._service.engines.pick(None).require_ready()
        return found

    async def _models_of(self, engine: Engine) -> dict[str, dict[str, Any]]:
        try:
            answer = await engine.client.request("GET", "/v1/models", seconds=60)
        except EngineError as error:
            raise as_ours(error) from error
        if answer.status_code != httpx.codes.OK:
            raise answered(answer.status_code, answer.content)
        found = {}
        for model in _entries(_object(answer, "GET /v1/models").get("data")):
            meta = {**(model.get("meta") or {}), "n_ctx": engine.n_ctx}
            found[model["id"]] = {**model, "meta": meta, "context_length": engine.n_ctx}
        return found

    async def slots(self, request: Request) -> Response:
        """GET /slots in llama-server's shape, from our own table: the engine is not asked (design.md, rule 7)."""
        engine = await self._engine(request, b"")
        slots = [
            {
                "id": s.id,
                "n_ctx": engine.n_ctx,
                "speculative": engine.speculative,
                "is_processing": s.runner is not None,
                **({"n_prompt_tokens": s.n_tokens} if self._may_see(request, s.tenant) else {}),
            }
            for s in engine.table.slots
        ]
        return Response(orjson.dumps(slots), media_type="application/json")

    def _may_see(self, request: Request, tenant: str | None) -> bool:
        """How much a slot holds is its tenant's business (design.md, rule 3)."""
        asking: str = request.state.tenant
        return self._service.tenants.is_admin(asking) or (tenant is not None and owner(tenant) == asking)

    async def unknown(self, request: Request) -> Response:
        """Everything that is not on the list."""
        path = path_of(request)
        if path == "/":
            how = "For people: /slotkeeper/ shows the status; clients have /v1 as their base URL."
        elif path.startswith("/v1/v1/"):
            how = "Your client adds /v1 by itself: leave it out of the base URL."
        elif path.endswith("/"):
            how = "Leave out the slash at its end."
        else:
            how = "Slotkeeper lets through a fixed list of llama-server's endpoints."
            if any(engine.kind == "attached" for engine in self._service.engines.all):
                how += " Ask the engine itself for others."
        raise NotFound(f"{request.method} {path} is not served here. {how} (README, 'HTTP')")

    async def _engine(self, request: Request, raw: bytes, *, loads: bool = True) -> Engine:
        """The engine that is asked for, ready. A router loads its model for a POST (unless not `loads`: then it need
        not be ready), and for nothing that a client may poll."""
        model, engines = named_in(request, raw), self._service.engines
        try:
            engine = engines.pick(model)
        except SlotkeeperError:
            if model:
                raise
            engine = engines.all[0]
        if engine.wake is not None and request.method == "POST" and loads:
            await engine.wake()
        if loads or engine.wake is None:
            engine.require_ready()
        return engine

    async def _ask(self, engine: Engine, request: Request, raw: bytes) -> httpx.Response:
        headers = {n: v for n, v in headers_of(request.scope).items() if n in ("content-type", "accept")}
        params = {n: v for n, v in request.query_params.items() if n not in ("model", "autoload")}
        # llama-server knows no HEAD, and closes the connection; the server in front of us drops the body of our answer.
        method = "GET" if request.method == "HEAD" else request.method
        try:
            return await engine.client.request(
                method, path_of(request), content=raw or None, params=params, headers=headers, seconds=60
            )
        except EngineError as error:
            raise as_ours(error) from error

    def _own_props(self, answer: httpx.Response) -> Response:
        props = _object(answer, "GET /props") | {"slotkeeper": __version__}  # what llamacpp.engines.attached refuses
        for name in ("model_path", "slot_save_path"):
            if isinstance(props.get(name), str):
                props[name] = props[name].rsplit("/", 1)[-1]
        return Response(orjson.dumps(props), media_type="application/json")


def named_in(request: Request, raw: bytes) -> str | None:
    """The model that the query names, else the body, where it is JSON."""
    model = request.query_params.get("model")
    if not model and raw:
        named = parse(raw).get("model")
        model = named if isinstance(named, str) else None
    return model


def _routed(engine: Engine) -> dict[str, Any]:
    """A router's model, loaded or not; how much one request can use is known once it was."""
    entry: dict[str, Any] = {"id": engine.model, "aliases": engine.aliases, "object": "model", "owned_by": "llamacpp"}
    entry |= {"created": int(time.time()), "status": {"value": "unloaded" if engine.unloaded else "loaded"}}
    if engine.n_ctx:
        entry |= {"meta": {"n_ctx": engine.n_ctx}, "context_length": engine.n_ctx}
    return entry


def _object(answer: httpx.Response, what: str) -> dict[str, Any]:
    """The JSON object of an answer that is looked into; raises EngineFailed for anything else."""
    with contextlib.suppress(orjson.JSONDecodeError):
        if isinstance(found := orjson.loads(answer.content), dict):
            return found
    raise EngineFailed(f"The engine's answer to {what} is no JSON object. Check that --upstream names a llama-server.")


def _entries(found: object) -> list[dict[str, Any]]:
    """The models of a list; raises EngineFailed for anything else."""
    if isinstance(found, list) and all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in found):
        return found
    raise EngineFailed("The engine's list of models makes no sense. Check that --upstream names a llama-server.")


def _response(answer: httpx.Response) -> Response:
    headers = {name: answer.headers[name] for name in PASSED if name in answer.headers}
    return Response(answer.content, answer.status_code, headers)
