"""The snapshot index in memory: plain reads, and the sums that retention needs. Changed on the event loop only."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

from policies.retention import LineItem, Room, StoredItem, make_room
from proxy.errors import StoreError
from proxy.store_files import Signature
from proxy.store_types import Snapshot

TOKENS_CACHE_BYTES = 32 * 2**20  # 8 Mi tokens: more than 20 GiB of any model's KV but the tiniest


class SnapshotIndex:
    """Which snapshots there are, what is being written, and what may not go now."""

    def __init__(self, budget: int, cache_bytes: int = TOKENS_CACHE_BYTES) -> None:
        self.budget = budget
        self.total_bytes = 0
        self.active: set[Path] = set()
        self.temps: dict[str, int] = {}
        self.holds: Counter[str] = Counter()
        self.signatures: dict[str, Signature] = {}
        """Of files whose checksum was right when they looked like this."""
        self._by_id: dict[str, Snapshot] = {}
        self._by_owner: dict[tuple[str, str], dict[str, Snapshot]] = {}
        self._tokens: OrderedDict[str, bytes] = OrderedDict()
        self._cache_bytes, self._cached = cache_bytes, 0

    def __contains__(self, id_: str) -> bool:
        return id_ in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, id_: str) -> Snapshot | None:
        """The snapshot of exactly this id."""
        return self._by_id.get(id_)

    def all(self) -> list[Snapshot]:
        """Every recorded snapshot, also of directories that no engine of this run uses."""
        return list(self._by_id.values())

    def put(self, snapshot: Snapshot, tokens: bytes | None = None) -> None:
        """Add or replace; `tokens` go to the cache."""
        self.drop(snapshot.id)
        self._by_id[snapshot.id] = snapshot
        self._by_owner.setdefault((snapshot.tenant, snapshot.fingerprint), {})[snapshot.id] = snapshot
        self.total_bytes += snapshot.bytes
        if tokens is not None:
            self.cache(snapshot.id, tokens)

    def drop(self, id_: str) -> Snapshot | None:
        """Remove; None when it was not there."""
        snapshot = self._by_id.pop(id_, None)
        if snapshot is None:
            return None
        self.total_bytes -= snapshot.bytes
        owner = (snapshot.tenant, snapshot.fingerprint)
        del self._by_owner[owner][id_]
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        self._cached -= len(self._tokens.pop(id_, b""))
        self.signatures.pop(id_, None)
        return snapshot

    def change(self, id_: str, **fields: Any) -> Snapshot | None:
        """Replace fields that are no keys (times, pinned, effective); None when it is not there."""
        snapshot = self._by_id.get(id_)
        if snapshot is None:
            return None
        changed = replace(snapshot, **fields)
        self._by_id[id_] = changed
        self._by_owner[(changed.tenant, changed.fingerprint)][id_] = changed
        return changed

    def candidates(self, tenant: str, fingerprint: str) -> list[Snapshot]:
        """Snapshots in directories in use that this tenant may restore into an engine of this fingerprint, longest
        first.
        """
        owned = self._by_owner.get((tenant, fingerprint), {}).values()
        return sorted((s for s in owned if s.dir in self.active), key=lambda s: -s.n_tokens)

    def find(self, prefix: str) -> Snapshot:
        """By the unique beginning of an id. Raises StoreError when none or several begin so."""
        exact = self._by_id.get(prefix)
        found = [exact] if exact else [s for id_, s in self._by_id.items() if prefix and id_.startswith(prefix)]
        if len(found) == 1:
            return found[0]
        if found:
            raise StoreError(f"{len(found)} snapshots have ids that begin with {prefix}: give more characters.")
        raise StoreError(f"No snapshot has an id that begins with {prefix!r}: see `slotkeeper snapshots ls`.")

    def cached(self, id_: str) -> bytes | None:
        """Packed tokens from the cache."""
        tokens = self._tokens.get(id_)
        if tokens is not None:
            self._tokens.move_to_end(id_)
        return tokens

    def cache(self, id_: str, tokens: bytes) -> None:
        """Remember packed tokens; the least recently read go when the cache is full."""
        self._cached += len(tokens) - len(self._tokens.pop(id_, b""))
        self._tokens[id_] = tokens
        while self._cached > self._cache_bytes and self._tokens:
            _, old = self._tokens.popitem(last=False)
            self._cached -= len(old)

    def room(
        self, wanted: int, *, free: int | None = None, disk_of: Path | None = None, keep: str | None = None
    ) -> Room:
        """What to evict so that `wanted` bytes fit; `free` bytes are left on the disk of directory `disk_of`."""
        items = [
            StoredItem(
                id=s.id,
                n_bytes=s.bytes,
                last_used=s.last_used,
                locked=s.pinned or self.holds[s.id] > 0 or s.id == keep,
                effective=s.effective,
                same_disk=disk_of is None or s.dir == disk_of,
            )
            for s in self._by_id.values()
        ]
        return make_room(items, budget=self.budget, temporary=sum(self.temps.values()), wanted=wanted, free=free)

    def shorter_of_line(self, new: Snapshot) -> list[Snapshot]:
        """What `new` may supersede, before anybody looks at tokens; not what is being restored now."""
        return [
            s
            for s in self._by_owner.get((new.tenant, new.fingerprint), {}).values()
            if s.line == new.line and s.dir == new.dir and s.n_tokens < new.n_tokens and not self.holds[s.id]
        ]


def line_item(snapshot: Snapshot, tokens: bytes) -> LineItem:
    """A snapshot as `policies.retention.superseded` sees it."""
    namespace = (str(snapshot.dir), snapshot.fingerprint, snapshot.tenant, snapshot.model)
    return LineItem(snapshot.id, snapshot.line, snapshot.kind, namespace, tokens, snapshot.pinned)
