"""Texts of ledgers and layouts of tenants in state.db."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

from structlog.testing import capture_logs

from proxy import store_db
from proxy.store import Store
from proxy.store_types import LedgerRecord


def record(line: str) -> LedgerRecord:
    return LedgerRecord(line, "local", "", "", b"base", (b"c",), 1, 0.0)


async def opened(path: Path, max_lines: int = 10, persist: bool = True) -> Store:
    return await Store.open(path, budget=0, max_lines=max_lines, persist=persist)


async def test_texts_and_layouts_survive(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    store.put_ledger(record("a"))
    store.put_texts("a", 0, [b"0", b"1", b"2"])
    store.put_texts("a", 2, [b"two", b"3"])
    await store.load_texts("a")
    store.put_texts("a", 3, [b"three"])
    store.put_layout("local", b"old")
    store.put_layout("local", b"new")
    await store.close()
    store = await opened(tmp_path)
    assert await store.load_texts("a") == [b"0", b"1", b"two", b"three"]
    assert await store.load_layouts() == [("local", b"new")]
    await store.close()


async def test_texts_go_with_their_line(tmp_path: Path) -> None:
    store = await opened(tmp_path, max_lines=1)
    for line in ("a", "b"):
        store.put_ledger(record(line))
        store.put_texts(line, 0, [line.encode()])
        await store.load_texts(line)
    assert (await store.load_texts("a"), await store.load_texts("b")) == ([], [b"b"])
    await store.forget_line("b")
    assert await store.load_texts("b") == []
    await store.close()


async def test_a_gap_is_not_read(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    store.put_ledger(record("a"))
    store.put_texts("a", 0, [b"0"])
    await store.load_texts("a")
    store.put_texts("a", 2, [b"2"])
    assert await store.load_texts("a") == [b"0"]
    await store.close()


async def test_purge_and_no_persist_leave_no_text(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    store.put_ledger(record("a"))
    store.put_texts("a", 0, [b"SECRET"])
    store.put_layout("local", b"SECRET")
    await store.purge()
    assert (await store.load_texts("a"), await store.load_layouts()) == ([], [])
    store.put_texts("a", 0, [b"SECRET"])
    await store.close()
    await (await opened(tmp_path, persist=False)).close()
    assert not any(b"SECRET" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


async def test_an_older_state_db_gets_the_tables(tmp_path: Path) -> None:
    await (await opened(tmp_path)).close()
    with sqlite3.connect(tmp_path / "state.db") as db:
        db.executescript("DROP TABLE texts; DROP TABLE layouts; DROP TABLE prompts; PRAGMA user_version=1;")
        db.execute("ALTER TABLE snapshots DROP COLUMN checksum")
    db.close()
    store = await opened(tmp_path)
    store.put_ledger(record("a"))
    store.put_texts("a", 0, [b"0"])
    assert await store.load_texts("a") == [b"0"]
    await store.close()


async def test_a_record_with_another_byte_is_none(tmp_path: Path) -> None:
    """SQLite does not notice it: what was sent, or learned, would be remembered otherwise."""
    store = await opened(tmp_path)
    store.put_ledger(replace(record("a"), extra={"told": "Sunday"}))
    store.put_layout("local", b'{"learned": "Sunday"}')
    await store.close()
    database = tmp_path / "state.db"
    damaged = database.read_bytes()
    assert damaged.count(b"Sunday") == 2
    database.write_bytes(damaged.replace(b"Sunday", b"Monday"))
    store = await opened(tmp_path)
    assert await store.load_ledgers() == [] and store.counters["bad_records"] == 1
    assert await store.load_layouts() == [("local", b"")]
    await store.close()


async def test_records_of_an_earlier_version_are_sealed(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    store.put_request({"id": "a"})
    await store.close()
    with sqlite3.connect(tmp_path / "state.db") as db:
        db.execute("UPDATE requests SET record = substr(record, 9)")
        db.execute("PRAGMA user_version=4")
    db.close()
    store = await opened(tmp_path)
    assert (store.load_requests(), store.counters["bad_records"]) == ([{"id": "a"}], 0)
    await store.close()


async def test_what_held_placeholders_of_another_spelling_is_dropped(tmp_path: Path) -> None:
    """`state-5.sql` was written by the last version that said [[date]]: a ledger with its texts, what was learned of
    bases, a pinned snapshot with its prompt, and a request."""
    database = tmp_path / "state.db"
    with sqlite3.connect(database) as db:
        db.executescript((Path(__file__).parent.parent / "data" / "state-5.sql").read_text())
    db.close()
    assert n_rows(database) == {"snapshots": 1, "ledgers": 1, "requests": 1, "texts": 2, "layouts": 1, "prompts": 1}
    with capture_logs() as logs:
        store = await opened(tmp_path)
    assert [entry["ledgers"] for entry in logs if entry["event"] == "ledgers_dropped"] == [1]
    assert [request["id"] for request in store.load_requests()] == ["r-1"]
    await store.close()
    assert n_rows(database) == {"snapshots": 1, "ledgers": 0, "requests": 1, "texts": 0, "layouts": 0, "prompts": 0}
    with capture_logs() as logs:
        await (await opened(tmp_path)).close()
    assert all(entry["event"] != "ledgers_dropped" for entry in logs)


def n_rows(database: Path) -> dict[str, int]:
    with sqlite3.connect(database) as db:
        found = {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in store_db.TABLES}
    db.close()
    return found


async def test_the_oldest_lose_their_texts_beyond_the_bound(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(store_db, "MOST_TEXT_BYTES", 400_000)
    store = await opened(tmp_path)
    for i in range(8):
        store.put_ledger(record(str(i)))
        store.put_texts(str(i), 0, [bytes(100_000)])
        await store.load_texts(str(i))
    kept = [i for i in range(8) if await store.load_texts(str(i))]
    assert kept == list(range(kept[0], 8))
    assert 0 < len(kept) < 8
    await store.close()
