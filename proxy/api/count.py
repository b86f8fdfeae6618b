"""How many tokens would this Messages request be? Rendered by the engine, without taking a slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamacpp.errors import EngineError
from proxy.api import read_messages
from proxy.api.door import headers_of, path_of, read_body
from proxy.api.read import Told, folded, identity, read
from proxy.engine_errors import as_ours
from proxy.rendering import render_chat

if TYPE_CHECKING:
    from proxy.service import Service


class Counting:
    """POST /v1/messages/count_tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def messages(self, request: Request) -> Response:
        """`{"input_tokens": N}`: exact, media estimated."""
        raw = await read_body(request.scope, request.receive, self._service.settings.max_body_bytes)
        headers = headers_of(request.scope)
        asked = read("messages", path_of(request), raw, identity(request.state.tenant, headers), Told(headers))
        body = folded(asked.body, self._service.engines.template)
        engine = self._service.engines.pick(asked.model)
        engine.require_ready()
        try:
            tokens = await render_chat(engine, asked.who.tenant, asked.prompt.base, orjson.dumps(body))
        except EngineError as error:
            raise as_ours(error) from error
        return Response(read_messages.count(tokens.n_tokens), media_type="application/json")
