"""A stand-in for llama-swap, which cannot be had here: what its documentation says of the doors that we use.

Sources, of mostlygeek/llama-swap: README.md ("llama-swap custom API endpoints": `/upstream/:model_id`, direct access to
the upstream server; `/running`, the running models; "How does llama-swap work?": the wrong server is replaced by the
right one), docs/configuration.md (`ttl`: unloaded after so many seconds without a request), and for the JSON of
`/running` its fields `model`, `state` and `ttl`. It starts nothing: a model is a FakeLlama, empty again when unloaded.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

from tests.fakes.http import Answer, Broken, Request, Server
from tests.fakes.llama import FakeLlama


class FakeSwap:
    """One model at a time. `touched`: every request that came to a model's own path, as (model, path)."""

    def __init__(self, models: Iterable[FakeLlama]) -> None:
        self.models = {fake.alias: fake for fake in models}
        self.loaded: str | None = None
        self.touched: list[tuple[str, str]] = []
        self.n_looks = 0
        self.cannot_load = self.is_gone = False
        self.ttl = 0
        self.may_load = asyncio.Event()
        """Cleared: a model that is to be loaded waits, and the one before it still answers."""
        self.may_load.set()
        self._server = Server(self._handle)

    @property
    def url(self) -> str:
        """Its base URL."""
        return self._server.url

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._server.__aexit__(*details)

    def unload(self) -> None:
        """What `ttl` or a swap does."""
        if self.loaded is not None:
            self.models[self.loaded].restart()
        self.loaded = None

    async def _handle(self, request: Request, answer: Answer) -> None:
        if self.is_gone:
            raise Broken
        if request.path == "/running":
            self.n_looks += 1
            running = [{"model": self.loaded, "state": "ready", "ttl": self.ttl}] if self.loaded else []
            return await answer.json({"running": running})
        if request.path == "/v1/models":
            return await answer.json({"object": "list", "data": [{"id": m, "object": "model"} for m in self.models]})
        if request.path == "/health":
            return await answer.whole(200, b"OK", "text/plain")
        first, model, *rest = [*request.path.split("/")[1:], "", ""][: max(2, request.path.count("/"))]
        if first != "upstream" or model not in self.models:
            return await answer.whole(404, b"404 page not found", "text/plain")
        self.touched.append((model, "/" + "/".join(rest)))
        if self.cannot_load and self.loaded != model:
            return await answer.whole(500, b"unable to start process", "text/plain")
        if self.loaded != model:
            await self.may_load.wait()
            self.unload()
            self.loaded = model
        await self.models[model]._handle(replace(request, path="/" + "/".join(rest)), answer)
