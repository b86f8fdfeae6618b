"""The one thread that touches SQLite and slot files, with a write-behind batch in front of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from proxy.errors import StoreError
from proxy.store_db import Batch, Corrupt, StateDb, move_aside
from proxy.store_types import Row

T = TypeVar("T")
COLLECT_SECONDS = 0.1
"""Puts wait so long for others: a request puts twice, and a transaction costs as much as relaying twenty events. What
a kill -9 meanwhile loses is a ledger's last turn, which costs nothing but a prefill."""
MAX_REQUESTS = 1000  # INTERFACES of issue 2: recent requests kept for /slotkeeper/requests

log = structlog.get_logger(__name__)

OLD_PLACEHOLDERS = (
    "an earlier version wrote [[date]] where this one writes [[env:date]]: each conversation's next prompt is "
    "processed once from its beginning"
)


class Writer:
    """Runs jobs one after another in its thread. Puts are collected for a moment and written in one transaction, ahead
    of the next job at the latest."""

    def __init__(self, path: Path | None, *, max_lines: int) -> None:
        """`path` of state.db, None: in memory. `recorded` gives the rows to record anew when the file is found
        damaged.
        """
        self.path, self._max_lines = path, max_lines
        self.recorded: Callable[[], list[Row]] = list
        self.n_write_errors = self.n_corrupt = 0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slotkeeper-store")
        self._guard = threading.Lock()
        self._hurry = threading.Event()
        """Set when a job stands behind the puts that are being collected."""
        self._batch = Batch()
        self._flush_queued = self._closed = self._failing = False
        self._db: StateDb | None = None

    async def run(self, job: Callable[[StateDb], T]) -> T:
        """Run `job` with the database in the thread. Raises what it raises; damage is repaired and the job run
        again.
        """
        if self._closed:
            raise StoreError("The store is closed, because Slotkeeper is stopping: ask again when it runs.")
        self._hurry.set()
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.here, job)

    def put(self, change: Callable[[Batch], None]) -> None:
        """Add to the batch (from any thread); written within COLLECT_SECONDS if the thread is free. Nothing after
        close().
        """
        with self._guard:
            if self._closed:
                return
            change(self._batch)
            if not self._flush_queued:
                self._flush_queued = True
                self._hurry.clear()  # what jobs before this one had set
                self._pool.submit(self._flush_soon)

    def forget_pending(self, line: str | None = None) -> None:
        """Take puts of one line, or all puts, out of the batch."""
        with self._guard:
            if line is None:
                self._batch = Batch()
            else:
                self._batch.ledgers.pop(line, None)
                self._batch.texts.pop(line, None)

    async def flush(self) -> None:
        """Wait until everything that was put is written, or has failed and waits for the next try."""
        self._hurry.set()
        await asyncio.get_running_loop().run_in_executor(self._pool, self._flush)

    async def close(self) -> None:
        """Write what is left, close the database, end the thread. May be called twice."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._hurry.set()
        await asyncio.get_running_loop().run_in_executor(self._pool, self._finish)
        self._pool.shutdown(wait=True)

    def note_failure(self, err: StoreError) -> None:
        """Count a write that did not happen and went unreported; logged when writing begins to fail, not each time."""
        self.n_write_errors += 1
        was_failing, self._failing = self._failing, True
        if not was_failing:
            log.warning("store_write_failed", error=str(err), kept_in_memory=True)

    def here(self, job: Callable[[StateDb], T]) -> T:
        """Run `job` at once, for what runs in the thread already. Damage is repaired and the job run again."""
        try:
            return job(self._open_db())
        except Corrupt as err:
            self._start_anew(err)
            return job(self._open_db())

    def _open_db(self) -> StateDb:
        if self._db is None:
            self._db = StateDb(self.path)
            if n := self._db.n_dropped:
                log.info("ledgers_dropped", ledgers=n, why=OLD_PLACEHOLDERS)
        return self._db

    def _start_anew(self, err: Corrupt) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self.path is None:
            raise err
        aside = move_aside(self.path)
        self.n_corrupt += 1
        log.warning("state_db_damaged", error=str(err), moved_to=str(aside), lost="ledgers and recent requests")
        self._open_db().put_snapshots(self.recorded())

    def _flush_soon(self) -> None:
        self._hurry.wait(COLLECT_SECONDS)
        self._hurry.clear()
        self._flush()

    def _flush(self) -> None:
        with self._guard:
            batch, self._batch, self._flush_queued = self._batch, Batch(), False
        if not batch:
            return
        try:
            self.here(lambda db: db.write(batch, max_lines=self._max_lines, max_requests=MAX_REQUESTS))
            self._failing = False
        except StoreError as err:
            with self._guard:
                self._batch.put_back(batch, max_lines=self._max_lines, max_requests=MAX_REQUESTS)
            self.note_failure(err)

    def _finish(self) -> None:
        self._flush()
        if self._batch:
            log.error("store_close_lost_writes", ledgers=len(self._batch.ledgers), requests=len(self._batch.requests))
        if self._db is not None:
            self._db.close()
            self._db = None
