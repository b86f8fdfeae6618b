"""Who looks at the status page now. One task looks at the tables for all of them, and only while somebody listens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.errors import Busy
from proxy.page.html import sections
from proxy.page.view import look

if TYPE_CHECKING:
    from proxy.service import Service

MOST_LISTENERS = 16
"""Open pages. One costs a connection, and the sections that its client has not read yet (about 100 KB)."""
SAMPLE_SECONDS = 1.0


class Listener:
    """One open page: the newest of each section that it has not seen; what it is too slow for is never sent."""

    def __init__(self) -> None:
        self._news: dict[str, str] = {}
        self._changed = asyncio.Event()
        self.is_over = False

    def tell(self, news: dict[str, str]) -> None:
        """Sections that have changed."""
        self._news |= news
        if news:
            self._changed.set()

    def end(self) -> None:
        """There will be no more."""
        self.is_over = True
        self._changed.set()

    async def next(self, seconds: float) -> dict[str, str]:
        """What has changed since the last call; empty after so many seconds without news, or at the end."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return {}
        news, self._news = self._news, {}
        if not self.is_over:
            self._changed.clear()
        return news


class Watch:
    """The listeners and their task. Plain `def`s: nothing comes between looking and taking."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._listeners: set[Listener] = set()
        self._seen: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def is_looking(self) -> bool:
        """Whether the task runs."""
        return self._task is not None and not self._task.done()

    def __len__(self) -> int:
        return len(self._listeners)

    def open(self) -> Listener:
        """One more; it is told everything at once, and changes from then on. Raises Busy."""
        if len(self._listeners) >= MOST_LISTENERS:
            raise Busy(f"{MOST_LISTENERS} status pages are open already; close one.", retry_after=10)
        listener = Listener()
        if self.is_looking:
            listener.tell(self._seen)
        else:
            self._seen = {}
            self._task = self._service.tasks.spawn(self._look(), "status-page")
        self._listeners.add(listener)
        return listener

    def close(self, listener: Listener) -> None:
        """One less; the task ends with its next look when it was the last."""
        self._listeners.discard(listener)

    async def _look(self) -> None:
        try:
            while self._listeners and not self._service.stopping:
                now = sections(look(self._service))
                news = {key: html for key, html in now.items() if self._seen.get(key) != html}
                self._seen = now
                for listener in self._listeners:
                    listener.tell(news)
                await asyncio.sleep(SAMPLE_SECONDS)
        finally:
            for listener in self._listeners:
                listener.end()
