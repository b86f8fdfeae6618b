"""Recorded requests as mode repair would have sent them: the same code as the running proxy's, without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast

import orjson

from policies.types import Match
from proxy.api.read import ModelRequest, Told, identity, read
from proxy.errors import SlotkeeperError
from proxy.layouts import Layouts
from proxy.ledger import Reply, TextBudget
from proxy.lines import LineBook, new_line
from proxy.normals import Normals
from proxy.prepare import Prepared, keep, prepare
from proxy.recorded import Json, Recorded
from proxy.service import Service

PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
MOST_LINES = 1000
"""As --max-lines."""
BYTES_PER_TOKEN = 3.8


class _Nowhere:
    """A store that keeps nothing: ledgers are in memory."""

    def put_texts(self, *_: object) -> None:
        """Forget it."""

    async def load_texts(self, _: str) -> list[bytes]:
        """Nothing was kept."""
        return []


class Repair:
    """Repairs requests in the order in which they were recorded. One event loop, for as long as the context lasts."""

    def __init__(self) -> None:
        bench = SimpleNamespace(
            lines=LineBook(MOST_LINES),
            layouts=Layouts(),
            normals=Normals(),
            texts=TextBudget(),
            store=_Nowhere(),
            metrics=SimpleNamespace(repaired=lambda _: None),
            engines=SimpleNamespace(all=()),
        )
        self._service = cast(Service, bench)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()

    def sent(self, recorded: Recorded) -> Json | None:
        """The chat body that the engine would be given; None for a request that Slotkeeper refuses."""
        told = Told(recorded.headers, "repair", self._service.normals)
        try:
            raw = orjson.dumps(recorded.body)
            request = read(recorded.dialect, PATHS[recorded.dialect], raw, identity("audit", recorded.headers), told)
            prepared = self._runner.run(prepare(self._service, request))
        except (SlotkeeperError, TypeError, RecursionError):
            return None
        self._keep(request, prepared, recorded.reply)
        return prepared.request.body

    def _keep(self, request: ModelRequest, prepared: Prepared, reply: dict[str, Any] | None) -> None:
        """What the exchange does behind an answer."""
        found, sent = prepared.found, prepared.request
        line = found.line if found.match is Match.EXTENDS else None
        line = line or new_line(request.who, sent.prompt, request.first_user, request.kind)
        self._service.lines.advance(line, sent.prompt, round(sent.prompt.n_bytes / BYTES_PER_TOKEN))
        if prepared.ledger is not None:
            keep(self._service, line, prepared.ledger)
            prepared.ledger.reply = Reply(message=reply)
