"""In front of every path: who may ask, from which page, with which key (design.md, rule 11)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.api.door import AsgiOut, dialect_of, headers_of
from proxy.api.page import CHALLENGE, ROOT
from proxy.errors import Forbidden, SlotkeeperError
from proxy.tenants import LOCAL, key_from

if TYPE_CHECKING:
    from proxy.service import Service

OPEN_PATHS = ("/healthz", "/readyz")
"""Answered without a key (contract.md, `--api-key-file`)."""
_HOST = re.compile(r"[A-Za-z0-9._\[\]:-]{1,300}")
"""Nothing that could end the name in a URL built from it (some versions of Starlette put the header into one)."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """Pure ASGI: checks Host (DNS rebinding), Origin (foreign web pages) and the key; sets `state.tenant`.

    `doors` take their POST requests from here at once: they answer their own errors, and a framework's layers around
    them would cost every event of a stream.
    """

    def __init__(self, app: ASGIApp, service: Service, doors: Mapping[str, ASGIApp]) -> None:
        self._app, self._service, self._doors = app, service, doors
        allowed = {name.lower() for name in service.settings.allowed_host}
        self._hosts = LOOPBACK | allowed | {service.settings.host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http":
            return
        out = AsgiOut(send, dialect_of(scope["path"]))
        headers = headers_of(scope)
        try:
            self._check_origin(headers)
            scope.setdefault("state", {})["tenant"] = self._tenant(scope, headers)
        except SlotkeeperError as error:
            await out.fail(error, {})
            return
        door = self._doors.get(scope["path"]) if scope["method"] == "POST" else None
        await (door or self._app)(scope, receive, send)

    def _check_origin(self, headers: dict[str, str]) -> None:
        given = headers.get("host", "")
        host = _name(f"//{given}") if _HOST.fullmatch(given) else ""
        if host not in self._hosts:
            raise Forbidden(
                f"The Host header names '{host[:80]}', which is not this proxy. If it should be, start Slotkeeper with "
                f"--allowed-host {host[:80] or 'NAME'}."
            )
        origin = headers.get("origin")
        if origin is not None and _name(origin) not in self._hosts:
            raise Forbidden(
                f"A page of '{origin[:80]}' may not use this proxy. If it should, start Slotkeeper with "
                "--allowed-host NAME."
            )

    def _tenant(self, scope: Scope, headers: dict[str, str]) -> str:
        if scope["path"] in OPEN_PATHS:
            return LOCAL
        # Browsers send a password by themselves, with other sites' requests, too: for what only reads.
        basic = scope["method"] in ("GET", "HEAD") and f"{scope['path']}/".startswith(ROOT)
        key = key_from(headers.get("authorization"), headers.get("x-api-key"), basic=basic)
        return self._service.tenants.tenant_of(key, CHALLENGE if basic else "Bearer")


def _name(url: str) -> str:
    """The host name of a URL, in lower case, without port and brackets; empty when there is none."""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""
