"""The status page's doors: the document, its assets, and the stream of what changes on it."""

from __future__ import annotations

import asyncio
from importlib.resources import files

import orjson
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from proxy.api.door import AsgiOut, headers_of, until_left
from proxy.errors import Forbidden, ShuttingDown, Unauthorised
from proxy.page.html import page
from proxy.page.view import look
from proxy.page.watch import Listener, Watch
from proxy.service import Service

ROOT = "/slotkeeper/"
CHALLENGE = 'Basic realm="Slotkeeper: the key of the tenant admin as password", charset="UTF-8"'
ASSETS = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
HEARTBEAT_SECONDS = 15.0
"""Between comments of a quiet stream: a client that is gone shows when it is written to."""
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Page:
    """The page of one service."""

    def __init__(self, service: Service) -> None:
        self._service, self.watch = service, Watch(service)
        package = files("proxy.page")
        self._assets = {name: package.joinpath(name).read_bytes() for name in ASSETS}

    def routes(self) -> list[Route]:
        """All doors of the page."""
        return [
            Route(ROOT.rstrip("/"), self.redirect),
            Route(ROOT, self.document),
            Route(f"{ROOT}events", Events(self._service, self.watch), methods=["GET"]),
            *(Route(f"{ROOT}{name}", self.asset) for name in ASSETS),
        ]

    async def redirect(self, _: Request) -> Response:
        """The page's addresses are relative to its folder."""
        return RedirectResponse("slotkeeper/", 308)

    async def document(self, request: Request) -> Response:
        """GET /slotkeeper/."""
        require_admin(self._service, request.scope)
        return Response(page(look(self._service)), media_type="text/html", headers=HEADERS)

    async def asset(self, request: Request) -> Response:
        """A file of the package."""
        file = request.scope["path"].removeprefix(ROOT)
        return Response(self._assets[file], media_type=ASSETS[file], headers=HEADERS | {"cache-control": "no-cache"})


class Events:
    """GET /slotkeeper/events: an ASGI application. Each event holds the sections that have changed, as HTML."""

    def __init__(self, service: Service, watch: Watch) -> None:
        self._service, self._watch = service, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams until the page is closed or the proxy stops; raises SlotkeeperError before the first event."""
        require_admin(self._service, scope)
        if headers_of(scope).get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Forbidden("A page of another site may not listen here.")  # an <img> there sends no Origin
        if self._service.stopping:
            raise ShuttingDown("Slotkeeper is stopping.", retry_after=5)
        listener, out = self._watch.open(), AsgiOut(send, "chat")
        try:
            await until_left(asyncio.create_task(_tell(listener, out), name="status-events"), receive, out)
        finally:
            self._watch.close(listener)


async def _tell(listener: Listener, out: AsgiOut) -> None:
    await out.start(200, HEADERS | {"content-type": "text/event-stream", "x-accel-buffering": "no"})
    await out.write(b"retry: 3000\n\n")
    while not listener.is_over:
        news = await listener.next(HEARTBEAT_SECONDS)
        await out.write(b"data: %b\n\n" % orjson.dumps(news) if news else b":\n\n")
    await out.end()


def require_admin(service: Service, scope: Scope) -> None:
    """Raises Forbidden, or asks a browser again: it would send the wrong key until it is closed."""
    if service.tenants.is_admin(scope["state"]["tenant"]):
        return
    sentence = "The status page shows every tenant's numbers: it needs a key of the tenant 'admin'."
    if headers_of(scope).get("authorization", "").lower().startswith("basic "):
        raise Unauthorised(sentence, challenge=CHALLENGE)
    raise Forbidden(sentence)
