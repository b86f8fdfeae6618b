"""A question of ours on a line's own slot, beside a client's request or in idle time, and its answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from proxy.errors import SlotkeeperError
from proxy.ledger import assembled
from proxy.prepare import Prepared
from proxy.service import Service
from proxy.settle import Record

Json = dict[str, Any]


async def unheard() -> None:
    """Nobody waits for an answer."""


class Collected:
    """A streamed answer that is read here (proxy.relay.Out). `heard`: awaited whenever the engine says something."""

    def __init__(self, heard: Callable[[], Awaitable[None]] = unheard) -> None:
        self.started = False
        self.parts: list[bytes] = []
        self._heard = heard
        self.error: SlotkeeperError | None = None
        self.record: Record | None = None

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Nobody is told."""
        self.started = True

    async def write(self, data: bytes) -> None:
        """Events of the answer, or a sign of life."""
        self.parts.append(data)
        await self._heard()

    async def end(self) -> None:
        """It is whole."""

    async def fail(self, error: SlotkeeperError, headers: Mapping[str, str]) -> None:
        """There is none."""
        self.error = error

    @property
    def choice(self) -> Json:
        """The answer's choice; empty when there is none."""
        return assembled(b"".join(self.parts))


Ask = Callable[[Prepared, bool], Awaitable[Collected]]


async def ask_aside(
    exchange: Callable[..., Any], service: Service, prepared: Prepared, heard: Callable[[], Awaitable[None]] = unheard
) -> Collected:
    """Runs a question of ours on a line's own slot. `exchange`: the class, which cannot be imported here."""
    out, r = Collected(heard), prepared.request
    record = Record(f"req_{secrets.token_hex(8)}", r.who.tenant, r.dialect, prepared.kind, time.time())
    await exchange(service, r, out, record, prepared=prepared).run()
    out.record = record
    return out
