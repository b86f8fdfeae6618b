"""How `serve` ends: signals, a drain during which new requests are still answered (503), a deadline for all of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from proxy import sd_notify

if TYPE_CHECKING:
    from proxy.service import Service

log = structlog.get_logger()

DONE, FAILED, INTERRUPTED = 0, 1, 130
STOP_GRACE = 5.0
"""Seconds beyond the exit deadline after which a stop that hangs is cut off; engines die with us (llamacpp's guard)."""
LOOK_SECONDS = 0.05
"""Pause between two looks at what still runs."""


class Server(Protocol):
    """What is asked of uvicorn's server."""

    should_exit: bool
    config: Any


class Stop:
    """SIGTERM and SIGINT: the first asks for an orderly stop, the second for a quick one, and time makes sure."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.exit_code = DONE
        self.failure: Exception | None = None
        """Why it stops by itself."""
        self._asked = False
        self._server: Server | None = None
        self._service: Service | None = None
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take both signals while the body runs; must be entered inside the event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def watch(self, server: Server, service: Service | None) -> None:
        """The server that a signal stops, and what is told first; a signal that came before the server did counts."""
        self._server, self._service = server, service
        server.should_exit = self._asked
        if service is not None:
            service.engines.on_hopeless = self.fail

    def ask(self, number: int) -> None:
        """A signal came. Ctrl-C is reported as 130, SIGTERM is how services are stopped and is no failure."""
        self.exit_code = INTERRUPTED if number == signal.SIGINT else self.exit_code
        again = "a second signal ends everything at once, unsaved"
        sentence = f"Stopping, within {self.deadline:g} s: answers end, conversations are saved; {again}."
        self._begin(sentence=sentence, deadline_seconds=round(self.deadline, 1), again=again)

    def fail(self, error: Exception) -> None:
        """Nothing can come of this process any more: it ends, and `failure` says why."""
        self.failure, self.exit_code = error, FAILED
        self._begin(reason="no engine can be used")

    def _begin(self, **said: object) -> None:
        if self._service is not None:
            self._service.begin_stop(at_once=self._asked)
        if self._asked:
            return
        self._asked = True
        log.info("stopping", **said)
        sd_notify.stopping()
        watchdog = threading.Timer(self.deadline + STOP_GRACE, self._cut_off)
        watchdog.daemon = True
        watchdog.start()
        self._draining = asyncio.get_running_loop().create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        """uvicorn closes its listeners as soon as it is to exit: held off while answers run, so that whoever comes
        meanwhile is told to come again, not refused a connection."""
        service, server, began = self._service, self._server, time.monotonic()
        while service is not None and service.running:
            if time.monotonic() - began > service.settings.drain_seconds:
                break
            await asyncio.sleep(LOOK_SECONDS)
        if server is not None:
            graceful = server.config.timeout_graceful_shutdown
            if graceful is not None:
                server.config.timeout_graceful_shutdown = max(1, graceful - round(time.monotonic() - began))
            server.should_exit = True

    def _cut_off(self) -> None:
        """A thread, because what hangs may be the event loop."""
        log.error("stop took too long, ending now", deadline_seconds=self.deadline)
        os._exit(FAILED)
