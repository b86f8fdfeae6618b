"""Snapshots by token hash, ledgers and recent requests: what of Slotkeeper survives a restart.

Decisions and reads are plain def on the event loop, from memory. What touches SQLite or slot files runs in one writer
thread, one change at a time, and is carried through even when the request that asked for it goes away.

Order on disk (design rule 5): a new file is checked, renamed, then recorded; an old one is deleted, then its record.
A process killed anywhere in between leaves a file without a record, which is adopted or deleted, or a record without
a file, which is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from secrets import token_hex
from typing import Any

import orjson
import structlog

from proxy import store_files
from proxy.errors import StoreError
from proxy.state_dir import StateDirLock, ensure_private_dir
from proxy.store_db import COMPANIONS, Batch, Corrupt, StateDb, delete_moved_aside
from proxy.store_index import SnapshotIndex
from proxy.store_snapshots import PruneReport, SnapshotStore
from proxy.store_types import LedgerRecord, Row, Snapshot, from_row
from proxy.store_writer import MAX_REQUESTS, Writer

__all__ = ["LedgerRecord", "PruneReport", "Snapshot", "Store", "StoreError"]

log = structlog.get_logger(__name__)


class Store(SnapshotStore):
    """Use `await Store.open(...)`, from one event loop. Methods raise StoreError, a sentence, when the disk refuses."""

    _requests: dict[str, dict[str, Any]]

    @classmethod
    async def open(
        cls,
        state_dir: Path,
        *,
        budget: int,
        max_lines: int,
        persist: bool = True,
        adopt_for: Collection[str] | None = None,
        lock: StateDirLock | None = None,
        now: Callable[[], float] = time.time,
    ) -> Store:
        """Open the state directory (created as 0700) and read its index.

        `budget` bytes for slot files. `max_lines` ledgers kept. `persist` False deletes what is stored and keeps
        nothing from now on. `adopt_for`: tenants that whole files without a record may be given to (their hash says
        whose they are), all other such files are deleted; None: they are left alone. `lock`: a held StateDirLock of
        `state_dir`; without it one is taken and released at close. Raises StoreError: locked, read-only, full, or of
        a newer version.
        """
        state_dir = ensure_private_dir(Path(state_dir))
        own_lock = None if lock and lock.is_held else StateDirLock(state_dir).acquire()
        path = state_dir / "state.db"
        try:
            if not persist:
                await asyncio.to_thread(_delete_everything, state_dir, path)
            writer = Writer(path if persist else None, max_lines=max_lines)
            store = cls(state_dir, writer, SnapshotIndex(budget), adopt_for=adopt_for if persist else (), now=now)
            await store._load(persist, own_lock)
        except BaseException:
            if own_lock:
                own_lock.release()
            raise
        return store

    async def _load(self, persist: bool, own_lock: StateDirLock | None) -> None:
        self.persist, self._requests = persist, {}
        try:
            for row in await self._writer.run(lambda db: db.snapshot_rows()):
                self._load_row(row)
            self._writer.recorded = self.rows  # from here on damage costs no snapshot
            requests = await self._writer.run(lambda db: db.requests())
        except BaseException:
            await self._writer.close()
            raise
        self._locks += [own_lock] if own_lock else []
        for id_, record in requests:
            try:
                self._requests[id_] = orjson.loads(record)
            except orjson.JSONDecodeError:
                self.counters["bad_records"] += 1

    def _load_row(self, row: Row) -> None:
        snapshot = from_row(row, self.state_dir)
        if snapshot is None:
            self.counters["bad_records"] += 1
        else:
            self._index.put(snapshot)

    async def close(self) -> None:
        """Finish running changes, write what was put, let go of the locks. May be called twice."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.shield(asyncio.ensure_future(self._writer.close()))
        while self._locks:
            self._locks.pop().release()

    @property
    def write_errors(self) -> int:
        """Background writes that failed (kept in memory and tried again with the next one)."""
        return self._writer.n_write_errors

    @property
    def damaged_databases(self) -> int:
        """How often a damaged state.db was moved aside since open."""
        return self._writer.n_corrupt

    async def purge(self) -> PruneReport:
        """Delete every snapshot (pinned too), ledger and request. Raises StoreError when a file cannot be deleted."""
        return await self._carry_out(self._purge())

    async def _purge(self) -> PruneReport:
        everything, n_bytes, orphans = self._index.all(), self._index.total_bytes, 0
        self._index.temps.clear()  # a save that is under way must not bring back what was purged
        self._requests.clear()
        await self._writer.run(lambda _: self._writer.forget_pending())
        gone = await self._remove([s.id for s in everything])
        for path in list(self._index.active):
            orphans += (await self._rescan(path, adopt=False)).n_orphans
        store_files.require_gone(everything, gone)
        await self._writer.run(lambda db: db.clear())
        await self._writer.run(lambda _: delete_moved_aside(self.state_dir / "state.db"))
        return PruneReport(len(everything), orphans, n_bytes)

    def put_ledger(self, record: LedgerRecord) -> None:
        """Keep a line's ledger; written behind, the newest of a line wins, the least recently put beyond `max_lines`
        go.
        """
        try:
            blob = record.to_blob()
        except TypeError as err:
            self._not_json("ledger", err)
            return
        self._writer.put(lambda batch: _put_last(batch.ledgers, record.line, blob))

    def put_texts(self, line: str, start: int, messages: list[bytes]) -> None:
        """Keep the messages of a line's ledger from position `start` on; written behind."""
        self._writer.put(lambda batch: batch.put_texts(line, start, messages))

    async def load_texts(self, line: str) -> list[bytes]:
        """The messages of a line's ledger, as they were put."""
        await self._writer.flush()
        return await self._writer.run(lambda db: db.texts(line))

    def put_layout(self, tenant: str, blob: bytes) -> None:
        """Keep what was learned of a tenant's bases; written behind."""
        self._writer.put(lambda batch: _put_last(batch.layouts, tenant, blob))

    async def load_layouts(self) -> list[tuple[str, bytes]]:
        """(tenant, what was learned of its bases)."""
        return await self._writer.run(lambda db: db.layouts())

    async def load_ledgers(self) -> list[LedgerRecord]:
        """All ledgers, the most recently put last."""
        await self._writer.flush()
        records = []
        for _, blob in await self._writer.run(lambda db: db.ledgers()):
            try:
                records.append(LedgerRecord.from_blob(blob))
            except ValueError:
                self.counters["bad_records"] += 1
        return records

    async def forget_line(self, line: str) -> None:
        """Delete a line's ledger and snapshots, pinned too. Raises StoreError when a file cannot be deleted."""
        await self._carry_out(self._forget_line(line))

    async def _forget_line(self, line: str) -> None:
        await self._writer.run(lambda _: self._writer.forget_pending(line))
        snapshots = [s for s in self._index.all() if s.line == line]
        gone = await self._remove([s.id for s in snapshots])
        nothing: Batch = Batch(ledgers={line: None})
        await self._writer.run(lambda db: db.write(nothing, max_lines=-1, max_requests=-1))
        await self._writer.run(lambda db: db.scrub())
        store_files.require_gone(snapshots, gone)

    def put_request(self, request: dict[str, Any]) -> None:
        """Keep a request's report (its `id` is the key); written behind, the newest 1,000 stay."""
        id_ = str(request.get("id") or token_hex(8))
        try:
            blob = orjson.dumps(request, default=str, option=orjson.OPT_NON_STR_KEYS)
        except TypeError as err:
            self._not_json("request", err)
            return
        _put_last(self._requests, id_, request, MAX_REQUESTS)
        self._writer.put(lambda batch: _put_last(batch.requests, id_, blob, MAX_REQUESTS))

    def load_requests(self, n: int = MAX_REQUESTS) -> list[dict[str, Any]]:
        """The last `n` requests, the oldest of them first."""
        return list(deque(self._requests.values(), maxlen=max(n, 0)))

    def request(self, id_: str) -> dict[str, Any] | None:
        """One recent request by its id."""
        return self._requests.get(id_)

    def _not_json(self, what: str, err: TypeError) -> None:
        self.counters["bad_records"] += 1
        log.error("store_record_not_json", what=what, error=str(err))


def _put_last(values: dict[str, Any], key: str, value: Any, limit: int | None = None) -> None:
    values.pop(key, None)
    values[key] = value
    while limit is not None and len(values) > limit:
        del values[next(iter(values))]


def _delete_everything(state_dir: Path, db_path: Path) -> None:
    """`--no-persist`: what an earlier run stored goes, the database last, since it names the files."""
    if db_path.exists():
        snapshots = _recorded_in(db_path, state_dir)
        store_files.require_gone(snapshots, {s.id for s in snapshots if store_files.delete(s.path)})
        if snapshots:
            total = sum(snapshot.bytes for snapshot in snapshots)
            log.info("snapshots_deleted", snapshots=len(snapshots), bytes=total, why="--no-persist keeps none")
    if (state_dir / "slots").is_dir():
        store_files.scan(state_dir / "slots", "slots", recorded=(), tenants=(), in_use=())
    for suffix in COMPANIONS:
        store_files.delete(db_path.with_name(db_path.name + suffix))
    delete_moved_aside(db_path)


def _recorded_in(db_path: Path, state_dir: Path) -> list[Snapshot]:
    try:
        db = StateDb(db_path)
    except Corrupt:
        return []  # our own directory's files go as orphans, an attached engine's when it is added
    try:
        return [s for row in db.snapshot_rows() if (s := from_row(row, state_dir))]
    finally:
        db.close()
