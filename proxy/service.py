"""What one running proxy owns, handed to whoever needs it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from proxy.config import Settings
from proxy.engines import Engines
from proxy.lines import LineBook
from proxy.metrics import Metrics
from proxy.settle import Record
from proxy.store import Store
from proxy.tasks import Tasks
from proxy.tenants import Tenants

MOST_RECORDS = 1000
"""Requests that /slotkeeper/requests remembers."""


@dataclass(eq=False)
class Service:
    """Settings, engines, lines, store, metrics and background tasks of one process."""

    settings: Settings
    tenants: Tenants
    store: Store
    metrics: Metrics
    engines: Engines
    lines: LineBook
    tasks: Tasks
    records: OrderedDict[str, Record] = field(default_factory=OrderedDict)
    stopping: bool = False

    def remember(self, record: Record) -> None:
        """Keeps a finished request for /slotkeeper/requests, the oldest beyond MOST_RECORDS out."""
        self.records[record.id] = record
        while len(self.records) > MOST_RECORDS:
            self.records.popitem(last=False)
        self.store.put_request(record.to_json())

    def recall(self, found: list[dict[str, Any]]) -> None:
        """Requests of earlier runs, oldest first."""
        self.records.update((r.id, r) for r in map(Record.from_json, found) if r is not None)

    def recent(self, last: int, tenant: str | None) -> list[dict[str, Any]]:
        """The newest requests, newest first; of one tenant unless `tenant` is None."""
        mine = (r for r in reversed(self.records.values()) if tenant in (None, owner(r.tenant)))
        return [{**r.to_json(), "tenant": owner(r.tenant)} for r, _ in zip(mine, range(last), strict=False)]


def owner(tenant: str) -> str:
    """The tenant of an API key, without the salt that a request may add to it."""
    return tenant.partition("\x1f")[0]
