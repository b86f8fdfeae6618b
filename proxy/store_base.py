"""What the store's halves share: reads from memory, and how a change is carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import structlog

from proxy import store_files
from proxy.errors import StoreError
from proxy.state_dir import StateDirLock
from proxy.store_db import StateDb
from proxy.store_files import Unreadable
from proxy.store_index import SnapshotIndex
from proxy.store_types import Row, Snapshot, to_row
from proxy.store_writer import Writer

T = TypeVar("T")

log = structlog.get_logger(__name__)


class StoreBase:
    """Reads from memory; one change at a time through the writer's thread."""

    def __init__(
        self,
        state_dir: Path,
        writer: Writer,
        index: SnapshotIndex,
        *,
        adopt_for: Collection[str] | None,
        now: Callable[[], float],
    ) -> None:
        self.state_dir, self.slots_dir, self.persist = state_dir, state_dir / "slots", True
        names = ("published", "superseded", "evicted", "dropped", "orphans", "adopted", "bad_records")
        self.counters = dict.fromkeys(names, 0)
        self._writer, self._index, self._now = writer, index, now
        self._adopt_for = adopt_for
        self._locks: list[StateDirLock] = []
        self._change = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def _carry_out(self, change: Coroutine[Any, Any, T]) -> T:
        """One change after another; a caller that is cancelled leaves, its change goes on."""
        task = asyncio.ensure_future(self._alone(change))
        self._tasks.add(task)
        task.add_done_callback(self._settled)
        return await asyncio.shield(task)

    async def _alone(self, change: Awaitable[T]) -> T:
        async with self._change:
            return await change

    def _settled(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():  # reading it here: nobody may be left to do so
            log.debug("store_change_failed", error=str(task.exception()))

    @property
    def total_bytes(self) -> int:
        """Bytes of all published snapshots."""
        return self._index.total_bytes

    @property
    def budget(self) -> int:
        """Bytes that snapshots and their temporary copies may take together."""
        return self._index.budget

    def all(self) -> list[Snapshot]:
        """Every snapshot, the most recently used first."""
        return sorted(self._index.all(), key=lambda s: -s.last_used)

    def rows(self) -> list[Row]:
        """Every snapshot as a row of state.db."""
        return [self._row(snapshot) for snapshot in self._index.all()]

    def candidates(self, tenant: str, fingerprint: str) -> list[Snapshot]:
        """What this tenant may restore into an engine of this fingerprint, the longest first; no fingerprint,
        nothing.
        """
        return self._index.candidates(tenant, fingerprint) if fingerprint else []

    def get(self, prefix: str) -> Snapshot | None:
        """The only snapshot whose id begins with `prefix`; None when none or several do."""
        try:
            return self._index.find(prefix)
        except StoreError:
            return None

    def tokens(self, snapshot: Snapshot) -> bytes:
        """Its packed tokens, from a 32 MiB cache or the file's header; empty when the file is bad (it is dropped
        then).
        """
        tokens = self._index.cached(snapshot.id)
        if tokens is None and self._is_good(snapshot):
            tokens = self._index.cached(snapshot.id)
        return tokens or b""

    async def verify(self, snapshot: Snapshot) -> bool:
        """Whether it may be restored: known, and its file has the size, tokens and checksum that were recorded. Else it
        goes. The checksum is computed once per file, and again when the file has changed since."""
        if not self._is_good(snapshot):
            return False
        current, signature = self._index.get(snapshot.id), store_files.signature(snapshot.path)
        if current is None or signature is None:
            return False
        if self._index.signatures.get(current.id) == signature:
            return True
        try:
            found = await asyncio.to_thread(store_files.checksum, current.path)
        except OSError as err:
            log.warning("snapshot_unreadable", id=current.id, error=str(err))
            return False
        return self._is_checked(current, found, signature)

    def _is_checked(self, snapshot: Snapshot, checksum: str, signature: store_files.Signature) -> bool:
        if self._index.get(snapshot.id) is not snapshot:  # replaced or removed meanwhile
            return False
        if snapshot.checksum and snapshot.checksum != checksum:
            self._drop_bad(snapshot)
            return False
        if not snapshot.checksum and (changed := self._index.change(snapshot.id, checksum=checksum)) is not None:
            row = self._row(changed)
            self._spawn(self._record(lambda db: db.put_snapshots([row])))
        self._index.signatures[snapshot.id] = signature
        return True

    def _is_good(self, snapshot: Snapshot) -> bool:
        # 4 bytes a token read on the loop, not behind a file that is being synced: a restore stops the engine for
        # longer
        current = self._index.get(snapshot.id)
        if current is None:
            return False
        try:
            header = store_files.check_snapshot(current)
        except Unreadable as err:
            log.warning("snapshot_unreadable", id=current.id, error=str(err))
            return False
        if header is None:
            self._drop_bad(current)
            return False
        self._index.cache(current.id, header.tokens)
        return True

    def _drop_bad(self, snapshot: Snapshot) -> None:
        log.warning(
            "snapshot_dropped", id=snapshot.id, file=snapshot.file, why="missing, cut off, changed, or of other tokens"
        )
        self.counters["dropped"] += 1
        self._index.drop(snapshot.id)
        self._spawn(self._delete_unless_known([snapshot]))

    def _spawn(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._alone(change))
        self._tasks.add(task)
        task.add_done_callback(self._settled)

    async def _delete_unless_known(self, snapshots: Iterable[Snapshot]) -> None:
        # published again under the same name meanwhile: the file there is the new one
        await self._delete([s for s in snapshots if s.id not in self._index])

    @contextmanager
    def holding(self, snapshot: Snapshot) -> Iterator[None]:
        """While the engine reads its file: neither evicted nor superseded."""
        self._index.holds[snapshot.id] += 1
        try:
            yield
        finally:
            self._index.holds[snapshot.id] -= 1
            if not self._index.holds[snapshot.id]:
                del self._index.holds[snapshot.id]

    async def _delete(self, snapshots: Collection[Snapshot]) -> set[str]:
        if not snapshots:
            return set()
        gone = await self._writer.run(lambda _: {s.id for s in snapshots if store_files.delete(s.path)})
        await self._record(lambda db: db.delete_snapshots(gone))
        return gone

    async def _record(self, write: Callable[[StateDb], Any]) -> None:
        """A record that may fail: the files are the truth, the next scan finds it out. (A full disk refuses deletes
        too.)
        """
        try:
            await self._writer.run(write)
        except StoreError as err:
            self._writer.note_failure(err)

    def _row(self, snapshot: Snapshot) -> Row:
        return to_row(snapshot, self.state_dir)
