"""Servers that load models on demand and pass requests on to them: llama-server in router mode, and llama-swap.

Sources: llama.cpp, tools/server/README.md ("Using multiple models") and server-models.cpp; llama-swap's README and
docs/configuration.md (`/v1/models`, `/running`, `/upstream/MODEL/...`, `ttl`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import httpx
import orjson

from llamacpp.client import LlamaClient
from llamacpp.errors import EngineBroken, EngineError, EngineRefused

NOT_LOADED = "model is not loaded"
"""llama-server's own words (server-models.cpp, router_validate_model)."""
_RUNNING = ("loaded", "sleeping")
NO_SLOTS = 501
"""What an engine with --no-slots answers to GET /slots, once it is loaded."""

RouterKind = Literal["llama-server", "llama-swap"]


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """One model of a router's list. `instance` differs when it was loaded anew, as far as the router tells; None while
    it is not loaded. `idle_seconds`: it is unloaded when idle for so long; 0: it is not, or nobody says."""

    name: str
    aliases: tuple[str, ...] = ()
    instance: str | None = None
    is_asleep: bool = False
    has_failed: bool = False
    idle_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Router:
    """`client` speaks to the router itself. `most`: models that it keeps loaded at a time, None when it does not say
    (llama-swap's groups decide), 0 when nothing limits it."""

    kind: RouterKind
    client: LlamaClient
    most: int | None = None

    async def models(self) -> list[RoutedModel]:
        """What is listed now, loaded or not. Wakes nothing. Raises EngineError."""
        if self.kind == "llama-server":
            return [_listed(m) for m in await _entries(self.client, "/models", "data")]
        running = {m.get("model"): m for m in await _entries(self.client, "/running", "running")}
        return [_swapped(m, running.get(m.get("id"))) for m in await _entries(self.client, "/v1/models", "data")]

    def is_full(self, models: list[RoutedModel]) -> bool:
        """Another model may push out one that is loaded."""
        n_loaded = sum(m.instance is not None for m in models)
        return n_loaded >= (1 if self.most is None else self.most or len(models) + 1)

    def client_for(self, model: str, key: str | None) -> LlamaClient:
        """A client of one model, none of whose questions loads it; only `stream`, a client's request, may."""
        if self.kind == "llama-server":
            return _RoutedClient(self.client.base_url, key, model)
        return _SwappedClient(self, key, model)

    async def load(self, model: str) -> None:
        """Returns once the model is loaded and awake; the router may unload another for it. Takes as long as that.
        Raises EngineError, EngineRefused(400) where the router was told to load nothing by itself."""
        if self.kind == "llama-server":  # no `autoload`: whether it may is the router's own setting
            asked = self.client.request("GET", "/slots", params={"model": model})
        else:
            asked = self.client.request("GET", f"/upstream/{quote(model)}/health")
        answer = await asked
        if answer.status_code not in (httpx.codes.OK, NO_SLOTS):
            raise EngineRefused(answer.status_code, answer.content, f"{model} was not loaded")


async def find_router(client: LlamaClient) -> Router | None:
    """Whether a router answers there; None for a llama-server with one model, and while nobody answers."""
    try:
        answer = await client.request("GET", "/props", seconds=10)
        props = _json(answer)
        if props.get("role") == "router":
            return Router("llama-server", client, int(props.get("max_instances") or 0))
        if answer.status_code == httpx.codes.OK:
            return None
        running = _json(await client.request("GET", "/running", seconds=10)).get("running")
    except EngineError:
        return None
    return Router("llama-swap", client) if isinstance(running, list) else None


class _RoutedClient(LlamaClient):
    """One model behind llama-server's router: named in the query of a GET and in the body of a POST."""

    def __init__(self, base_url: str, key: str | None, model: str) -> None:
        super().__init__(base_url, key)
        self._model, self.identity = model, f"{self.base_url}/{model}"

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, content: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        async with super().stream(method, path, self._named(content), headers) as response:
            yield response

    async def _addressed(
        self, content: bytes | None, params: Mapping[str, str] | None
    ) -> tuple[bytes | None, Mapping[str, str] | None]:
        named = {**(params or {}), "model": self._model, "autoload": "false"}
        return self._named(content) if content is not None else None, named

    def _own_stream(self, method: str, path: str, content: bytes) -> AbstractAsyncContextManager[httpx.Response]:
        name = "" if content else f"&model={quote(self._model, safe='')}"
        return self.stream(method, f"{path}?autoload=false{name}", content)

    def _named(self, content: bytes) -> bytes:
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            return content  # the router will say so
        return orjson.dumps({**body, "model": self._model}) if isinstance(body, dict) else content


class _SwappedClient(LlamaClient):
    """One model behind llama-swap, which loads a model for whatever comes to its path: nothing is asked of one that is
    not running."""

    is_free_to_ask = False

    def __init__(self, router: Router, key: str | None, model: str) -> None:
        super().__init__(f"{router.client.base_url}/upstream/{quote(model)}", key)
        self._router, self._model = router, model

    async def _addressed(
        self, content: bytes | None, params: Mapping[str, str] | None
    ) -> tuple[bytes | None, Mapping[str, str] | None]:
        await self._check_loaded()
        return content, params

    @asynccontextmanager
    async def _own_stream(self, method: str, path: str, content: bytes) -> AsyncIterator[httpx.Response]:
        await self._check_loaded()
        async with self.stream(method, path, content) as response:
            yield response

    async def _check_loaded(self) -> None:
        running = await _entries(self._router.client, "/running", "running")
        if not any(m.get("model") == self._model and m.get("state") == "ready" for m in running):
            error = {"error": {"code": 400, "message": NOT_LOADED, "type": "invalid_request_error"}}
            raise EngineRefused(400, orjson.dumps(error), NOT_LOADED)


async def _entries(client: LlamaClient, path: str, name: str) -> list[dict[str, Any]]:
    answer = await client.request("GET", path, seconds=10)
    found = _json(answer).get(name)
    if answer.status_code != httpx.codes.OK or not isinstance(found, list):
        raise EngineBroken(f"GET {path} of the router at {client.base_url} lists nothing ({answer.status_code}).")
    return [m for m in found if isinstance(m, dict)]


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _listed(entry: dict[str, Any]) -> RoutedModel:
    """An entry of llama-server's `/models`. A model's port is chosen when it is loaded, and stands in its arguments."""
    status = entry.get("status") or {}
    is_loaded = status.get("value") in _RUNNING
    return RoutedModel(
        name=str(entry.get("id")),
        aliases=tuple(map(str, entry.get("aliases") or ())),
        instance=" ".join(map(str, status.get("args") or ())) if is_loaded else None,
        is_asleep=status.get("value") == "sleeping",
        has_failed=bool(status.get("failed")),
    )


def _swapped(entry: dict[str, Any], running: dict[str, Any] | None) -> RoutedModel:
    """An entry of llama-swap's `/v1/models`, and of its `/running`, which tells no instance."""
    is_loaded = running is not None and running.get("state") == "ready"
    ttl = (running or {}).get("ttl")
    idle_seconds = float(ttl) if isinstance(ttl, int | float) else 0.0
    name, aliases = str(entry.get("id")), tuple(map(str, entry.get("aliases") or ()))
    return RoutedModel(name, aliases, "running" if is_loaded else None, idle_seconds=max(0.0, idle_seconds))
