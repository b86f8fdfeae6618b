"""state.db: the snapshot index, the ledgers and the recent requests in SQLite. Used by the store's writer thread
only.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

import xxhash

from proxy.errors import StoreError
from proxy.state_dir import PRIVATE_FILE, explain_os_error
from proxy.store_types import Row, Snapshot

SCHEMA_VERSION = 6
COMPANIONS = ("", "-wal", "-shm")  # the files that SQLite keeps beside a database in WAL mode
BUSY_TIMEOUT_SECONDS = 2.0  # a person's `sqlite3 state.db` may read beside us; the flock keeps other proxies out

SNAPSHOT_COLUMNS = tuple(column.name for column in fields(Snapshot))
_SCHEMA = """
CREATE TABLE snapshots (
    id TEXT PRIMARY KEY, file TEXT NOT NULL, dir TEXT NOT NULL, fingerprint TEXT NOT NULL, tenant TEXT NOT NULL,
    model TEXT NOT NULL, kind TEXT NOT NULL, line TEXT, n_tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
    created REAL NOT NULL, last_used REAL NOT NULL, pinned INTEGER NOT NULL, effective INTEGER, reason TEXT NOT NULL
);
CREATE TABLE ledgers (seq INTEGER PRIMARY KEY AUTOINCREMENT, line TEXT NOT NULL UNIQUE, record BLOB NOT NULL);
CREATE TABLE requests (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, record BLOB NOT NULL);
"""
_SCHEMA_2 = """
CREATE TABLE texts (line TEXT NOT NULL, position INTEGER NOT NULL, message BLOB NOT NULL, PRIMARY KEY (line, position))
    WITHOUT ROWID;
CREATE TABLE layouts (seq INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL UNIQUE, record BLOB NOT NULL);
"""
_SCHEMA_3 = """
CREATE TABLE prompts (id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
"""
_SCHEMA_4 = "ALTER TABLE snapshots ADD COLUMN checksum TEXT NOT NULL DEFAULT '';"
_SCHEMA_5 = "".join(f"UPDATE {table} SET record = sealed(record);" for table in ("ledgers", "requests", "layouts"))
_SCHEMA_6 = "".join(f"DELETE FROM {table};" for table in ("ledgers", "texts", "layouts", "prompts"))
"""Until version 5 placeholders were `[[date]]`, which no prompt holds any more: it is `[[env:date]]` since. Snapshots
stay: they are found by their tokens, so an older base is found by nobody, and prompts of mode observe held none."""
_STEPS = (_SCHEMA, _SCHEMA_2, _SCHEMA_3, _SCHEMA_4, _SCHEMA_5, _SCHEMA_6)
"""From each version to the next."""
MOST_TEXT_BYTES = 1024**3
"""Messages of all ledgers; beyond it the lines used longest ago lose theirs (their prompts then come as sent)."""
MOST_TENANTS = 1000
TABLES = ("snapshots", "ledgers", "requests", "texts", "layouts", "prompts")

T = TypeVar("T")


@dataclass
class Batch:
    """Write-behind work: the newest value per key; `ledgers[line]` None deletes it. Keys in order of their last put.

    `texts[line]`: the messages of its ledger from a position on; what stands there in the database goes.
    """

    ledgers: dict[str, bytes | None] = field(default_factory=dict)
    requests: dict[str, bytes] = field(default_factory=dict)
    last_used: dict[str, float] = field(default_factory=dict)
    effective: dict[str, bool] = field(default_factory=dict)
    texts: dict[str, tuple[int, list[bytes]]] = field(default_factory=dict)
    layouts: dict[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.ledgers or self.requests or self.last_used or self.effective or self.texts or self.layouts)

    def put_texts(self, line: str, start: int, messages: list[bytes]) -> None:
        """Messages of a line from `start` on; earlier ones that wait here stay before them."""
        begin, waiting = self.texts.get(line, (start, []))
        if begin <= start <= begin + len(waiting):
            start, messages = begin, [*waiting[: start - begin], *messages]
        self.texts[line] = start, messages

    def put_back(self, older: Batch, *, max_lines: int, max_requests: int) -> None:
        """Merge a batch that could not be written under this newer one, within the bounds that the database has."""
        self.ledgers = _newest(older.ledgers, self.ledgers, max_lines)
        self.requests = _newest(older.requests, self.requests, max_requests)
        self.last_used = older.last_used | self.last_used
        self.effective = older.effective | self.effective
        self.layouts = older.layouts | self.layouts
        newer, self.texts = self.texts, dict(older.texts)
        for line, (start, messages) in newer.items():
            self.put_texts(line, start, messages)


def _newest(older: dict[str, T], newer: dict[str, T], limit: int) -> dict[str, T]:
    """Both, the keys of `newer` last, cut to the last `limit`."""
    merged = {key: value for key, value in older.items() if key not in newer} | newer
    return dict(list(merged.items())[-limit:])


class StateDb:
    """One open state.db. Every method raises StoreError (a sentence) or `Corrupt`, never sqlite3's own errors."""

    def __init__(self, path: Path | None) -> None:
        """Open or create `path`; None: in memory. Raises StoreError (newer version, unusable), Corrupt."""
        self.path, self.n_dropped = path, 0
        with self._explained():
            if path is not None:
                _make_private(path)
            self._db = sqlite3.connect(
                path or ":memory:", timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
            )
        try:
            with self._explained():
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} was written by a newer Slotkeeper (its version {version}, this one reads up to "
                f"{SCHEMA_VERSION}): upgrade Slotkeeper, or choose another --state-dir."
            )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")  # WAL: a power cut may lose the last commits, never the file
        self._db.create_function("sealed", 1, sealed, deterministic=True)
        self._db.execute("PRAGMA secure_delete=ON")  # what a person had deleted must not stay in free pages
        if version < SCHEMA_VERSION:
            if version:
                (self.n_dropped,) = self._db.execute("SELECT count(*) FROM ledgers").fetchone()
            self._create("".join(_STEPS[version:]))

    def _create(self, tables: str) -> None:
        # one transaction, so that a process killed in between leaves the old version and none of the tables
        self._db.executescript(f"BEGIN IMMEDIATE; {tables} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as err:
            raise StoreError(f"Cannot use {explain_os_error(err, self.path or Path('state.db'))}.") from err
        except sqlite3.Error as err:
            raise self._explanation(err) from err

    def _explanation(self, err: sqlite3.Error) -> StoreError:
        code = getattr(err, "sqlite_errorcode", None)
        primary = code & 0xFF if code is not None else None
        foreign_tables = "already exists" in str(err) or "no such" in str(err)
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or foreign_tables:
            return Corrupt(f"{self.path} is damaged ({err}).")
        advice = {
            sqlite3.SQLITE_FULL: "the disk is full: free some space",
            sqlite3.SQLITE_READONLY: "make it writable for this user, or choose another --state-dir",
            sqlite3.SQLITE_CANTOPEN: "make it writable for this user, or choose another --state-dir",
            sqlite3.SQLITE_BUSY: "another process holds it: end the program that has it open",
            sqlite3.SQLITE_IOERR: "reading or writing failed: check the disk and its free space",
        }.get(primary or 0, "check the disk, or choose another --state-dir")
        return StoreError(f"Cannot use {self.path or 'the database in memory'} ({err}); {advice}.")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def put_snapshots(self, rows: Iterable[Row]) -> None:
        """Record snapshots (rows in the order of SNAPSHOT_COLUMNS); one with a known id replaces it."""
        marks = ",".join("?" * len(SNAPSHOT_COLUMNS))
        with self._transaction() as db:
            db.executemany(f"INSERT OR REPLACE INTO snapshots ({','.join(SNAPSHOT_COLUMNS)}) VALUES ({marks})", rows)

    def snapshot_rows(self) -> list[Row]:
        """All recorded snapshots, in the order of SNAPSHOT_COLUMNS."""
        with self._explained():
            return self._db.execute(f"SELECT {','.join(SNAPSHOT_COLUMNS)} FROM snapshots").fetchall()

    def delete_snapshots(self, ids: Iterable[str]) -> None:
        """Forget records; unknown ids are ignored."""
        with self._transaction() as db:
            gone = [(id_,) for id_ in ids]
            db.executemany("DELETE FROM snapshots WHERE id=?", gone)
            db.executemany("DELETE FROM prompts WHERE id=?", gone)

    def put_prompt(self, id_: str, body: bytes) -> None:
        """What a snapshot was made of; nothing is kept for a record that is gone."""
        with self._transaction() as db:
            known = "SELECT id, ? FROM snapshots WHERE id=?"
            db.execute(f"INSERT OR REPLACE INTO prompts (id, body) {known}", (body, id_))

    def prompt(self, id_: str) -> bytes | None:
        """What a snapshot was made of, if that is known."""
        with self._explained():
            row = self._db.execute("SELECT body FROM prompts WHERE id=?", (id_,)).fetchone()
            return None if row is None else bytes(row[0])

    def set_pinned(self, id_: str, pinned: bool) -> None:
        """Pin or unpin one record."""
        with self._transaction() as db:
            db.execute("UPDATE snapshots SET pinned=? WHERE id=?", (pinned, id_))

    def write(self, batch: Batch, *, max_lines: int, max_requests: int) -> None:
        """One transaction for a whole batch; then the oldest ledgers and requests beyond the bounds go."""
        with self._transaction() as db:
            gone = _upsert(db, "ledgers", "line", batch.ledgers, max_lines)
            _upsert(db, "requests", "id", batch.requests, max_requests)
            _upsert(db, "layouts", "tenant", batch.layouts, MOST_TENANTS)
            _put_texts(db, batch.texts)
            db.executemany("DELETE FROM texts WHERE line=?", [(line,) for line in gone])
            if batch.texts:
                _bound_texts(db)
            db.executemany("UPDATE snapshots SET last_used=? WHERE id=?", [(v, k) for k, v in batch.last_used.items()])
            db.executemany("UPDATE snapshots SET effective=? WHERE id=?", [(v, k) for k, v in batch.effective.items()])

    def ledgers(self) -> list[tuple[str, bytes]]:
        """(line, record), the least recently put first."""
        with self._explained():
            return _unsealed(self._db.execute("SELECT line, record FROM ledgers ORDER BY seq"))

    def texts(self, line: str) -> list[bytes]:
        """The messages of a line's ledger, in order."""
        with self._explained():
            found = self._db.execute("SELECT position, message FROM texts WHERE line=? ORDER BY position", (line,))
            return [message for expected, (position, message) in enumerate(found) if position == expected]

    def layouts(self) -> list[tuple[str, bytes]]:
        """(tenant, record)."""
        with self._explained():
            return _unsealed(self._db.execute("SELECT tenant, record FROM layouts ORDER BY seq"))

    def requests(self) -> list[tuple[str, bytes]]:
        """(id, record), the oldest first."""
        with self._explained():
            return _unsealed(self._db.execute("SELECT id, record FROM requests ORDER BY seq"))

    def clear(self) -> None:
        """Delete everything, and leave nothing of it in free pages or the write-ahead log."""
        with self._transaction() as db:
            for table in TABLES:
                db.execute(f"DELETE FROM {table}")
        self.scrub()
        with self._explained():
            self._db.execute("VACUUM")
        self.scrub()

    def scrub(self) -> None:
        """Empty the write-ahead log, which still holds deleted rows until it is overwritten."""
        with self._explained():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        """Close; the last connection folds the write-ahead log into the database."""
        self._db.close()


class Corrupt(StoreError):
    """The database file is damaged: move it aside and start anew."""


def sealed(record: bytes | str) -> bytes:
    """A record behind its checksum: SQLite notices damage to its own structures, not to what is kept in them, and a
    ledger that remembers another word than was sent makes the model read that word."""
    blob = record.encode() if isinstance(record, str) else record
    return xxhash.xxh3_64_digest(blob) + blob


def _unsealed(rows: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """The records; of one that is not as it was written only b"", which is no record."""
    return [(key, blob[8:] if isinstance(blob, bytes) and sealed(blob[8:]) == blob else b"") for key, blob in rows]


def _upsert(db: sqlite3.Connection, table: str, key: str, values: Mapping[str, bytes | None], limit: int) -> list[str]:
    """Puts and deletes rows, then deletes the oldest beyond the limit. Returns the keys of all that were deleted."""
    gone = [k for k, v in values.items() if v is None]
    kept = [(k, v) for k, v in values.items() if v is not None]
    db.executemany(f"DELETE FROM {table} WHERE {key}=?", [(k,) for k in gone])
    # a replaced row takes a new seq: "oldest" means least recently put
    db.executemany(f"INSERT OR REPLACE INTO {table} ({key}, record) VALUES (?, sealed(?))", kept)
    if not kept:
        return gone
    beyond = f"SELECT seq FROM {table} ORDER BY seq DESC LIMIT -1 OFFSET ?"
    return gone + [k for (k,) in db.execute(f"DELETE FROM {table} WHERE seq IN ({beyond}) RETURNING {key}", (limit,))]


def _put_texts(db: sqlite3.Connection, texts: dict[str, tuple[int, list[bytes]]]) -> None:
    for line, (start, messages) in texts.items():
        db.execute("DELETE FROM texts WHERE line=? AND position>=?", (line, start))
        db.executemany("INSERT INTO texts VALUES (?, ?, ?)", [(line, start + i, m) for i, m in enumerate(messages)])


def _bound_texts(db: sqlite3.Connection) -> None:
    """Beyond the bound the lines used longest ago lose their texts."""
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    if (pages - free) * size > MOST_TEXT_BYTES:
        oldest = "SELECT line FROM ledgers ORDER BY seq LIMIT (SELECT count(*) / 4 + 1 FROM ledgers)"
        db.execute(f"DELETE FROM texts WHERE line IN ({oldest})")


def _make_private(path: Path) -> None:
    """SQLite creates its companions with the database's own mode, so the database must exist as 0600 first."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))
    for suffix in COMPANIONS:
        companion = path.with_name(path.name + suffix)
        if companion.exists():
            companion.chmod(PRIVATE_FILE)


def move_aside(path: Path) -> Path:
    """Rename a damaged database to `state.db.corrupt-<UTC time>`; earlier such copies are deleted (one is kept).

    Returns the new path. Raises StoreError when the directory cannot be written.
    """
    aside = path.with_name(f"{path.name}.corrupt-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
    try:
        delete_moved_aside(path)
        for suffix in COMPANIONS:
            source = path.with_name(path.name + suffix)
            if source.exists():
                source.chmod(PRIVATE_FILE)
                source.rename(aside.with_name(aside.name + suffix))
    except OSError as err:
        raise StoreError(f"Cannot move a damaged state.db aside: {explain_os_error(err, path)}.") from err
    return aside


def delete_moved_aside(path: Path) -> None:
    """Delete the damaged copies of `path`: they are transcripts as well."""
    for old in path.parent.glob(f"{path.name}.corrupt-*"):
        old.unlink(missing_ok=True)
