"""The engine's reading endpoints, passed through; its writing ones, refused; everything else, unknown."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamacpp.errors import EngineError
from proxy.api.door import headers_of, read_body
from proxy.api.read import parse
from proxy.engine import Engine
from proxy.errors import Forbidden, NotFound, SlotkeeperError
from proxy.exchange import as_ours
from proxy.service import Service

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
NOT_PASSED = frozenset(
    "connection content-length transfer-encoding keep-alive te trailer upgrade proxy-authenticate proxy-authorization "
    "content-encoding server date access-control-allow-origin access-control-allow-credentials".split()
)
"""Hop-by-hop (RFC 9110, 7.6.1), ours to write, or about the engine's own origin rules."""


class Passthrough:
    """Endpoints that take no slot."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def read(self, request: Request) -> Response:
        """Passes a reading request to the engine that `?model=` or the body names, else to the first."""
        raw = await read_body(request.scope, request.receive, self._service.settings.max_body_bytes)
        engine = self._engine(request, raw)
        if request.url.path.endswith("health"):
            engine.require_ready()
        answer = await self._ask(engine, request, raw)
        if request.url.path == "/props" and answer.status_code == 200:
            return self._own_props(answer)
        return _response(answer)

    async def embed(self, request: Request) -> Response:
        """Passes on to an engine that is there for it; a chat engine would overwrite a conversation's slot."""
        raw = await read_body(request.scope, request.receive, self._service.settings.max_body_bytes)
        engine = self._service.engines.pick(request.query_params.get("model"), "embedding")
        engine.require_ready()
        return _response(await self._ask(engine, request, raw))

    async def admin(self, request: Request) -> Response:
        """A write to the engine: refused unless --allow-engine-admin; our table is checked against it afterwards."""
        if not self._service.settings.allow_engine_admin:
            raise Forbidden(
                f"{request.method} {request.url.path} changes the engine behind Slotkeeper's back, so it is refused. "
                "Start Slotkeeper with --allow-engine-admin to open it."
            )
        raw = await read_body(request.scope, request.receive, self._service.settings.max_body_bytes)
        engine = self._engine(request, raw)
        answer = await self._ask(engine, request, raw)
        self._service.engines.suspect(engine)
        return _response(answer)

    async def models(self, request: Request) -> Response:
        """GET /v1/models: all engines' models, with the context that one request can use."""
        found: dict[str, dict[str, Any]] = {}
        for engine in self._service.engines.all:
            if not engine.ready:
                continue
            answer = await self._ask(engine, request, b"")
            for model in orjson.loads(answer.content).get("data", []):
                meta = {**(model.get("meta") or {}), "n_ctx": engine.n_ctx}
                found[model["id"]] = {**model, "meta": meta, "context_length": engine.n_ctx}
        if not found:
            self._service.engines.pick(None).require_ready()
        return Response(orjson.dumps({"object": "list", "data": list(found.values())}), media_type="application/json")

    async def slots(self, request: Request) -> Response:
        """GET /slots in llama-server's shape, from our own table: the engine is not asked (design.md, rule 7)."""
        engine = self._engine(request, b"")
        engine.require_ready()
        slots = [
            {
                "id": s.id,
                "n_ctx": engine.n_ctx,
                "speculative": engine.speculative,
                "is_processing": s.runner is not None,
                "n_prompt_tokens": s.n_tokens,
            }
            for s in engine.table.slots
        ]
        return Response(orjson.dumps(slots), media_type="application/json")

    async def unknown(self, request: Request) -> Response:
        """Everything that is not on the list."""
        raise NotFound(
            f"{request.method} {request.url.path} is not served here. Slotkeeper lets through a fixed list of "
            "llama-server's endpoints (README, 'Endpoints'); ask the engine itself for others."
        )

    def _engine(self, request: Request, raw: bytes) -> Engine:
        model = request.query_params.get("model")
        if not model and raw:
            named = parse(raw).get("model")
            model = named if isinstance(named, str) else None
        engines = self._service.engines
        try:
            engine = engines.pick(model)
        except SlotkeeperError:
            if model:
                raise
            engine = engines.all[0]
        engine.require_ready()
        return engine

    async def _ask(self, engine: Engine, request: Request, raw: bytes) -> httpx.Response:
        headers = {n: v for n, v in headers_of(request.scope).items() if n in ("content-type", "accept")}
        params = {n: v for n, v in request.query_params.items() if n not in ("model", "autoload")}
        try:
            return await engine.client.request(
                request.method, request.url.path, content=raw or None, params=params, headers=headers, seconds=60
            )
        except EngineError as error:
            raise as_ours(error) from error

    def _own_props(self, answer: httpx.Response) -> Response:
        props = orjson.loads(answer.content)
        for name in ("model_path", "slot_save_path"):
            if isinstance(props.get(name), str):
                props[name] = props[name].rsplit("/", 1)[-1]
        return Response(orjson.dumps(props), media_type="application/json")


def _response(answer: httpx.Response) -> Response:
    headers = {name: value for name, value in answer.headers.items() if name.lower() not in NOT_PASSED}
    return Response(answer.content, answer.status_code, headers)
