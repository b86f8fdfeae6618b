"""Ledgers, requests, purge, and a state.db that is damaged, newer, full or read-only."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import StoreError
from proxy.store import LedgerRecord, Store
from proxy.store_db import Batch, StateDb
from tests.fakes.slot_bytes import slot_file
from tests.fakes.store import FP, TENANT, files, open_store, packed, publish, publish_temp, save


def ledger(line: str, n: int = 0, **more: Any) -> LedgerRecord:
    values: dict[str, Any] = {"tenant": TENANT, "session": "s", "agent": "a", "base": b"\0b", "chain": (b"h1", b"h2")}
    return LedgerRecord(line=line, n_tokens=n, updated=float(n), **values | more)


async def test_the_last_ledger_of_a_line_survives_in_the_order_of_puts(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    for n, line in enumerate("abcab"):
        store.put_ledger(ledger(line, n, extra={"sizes": [n]}, tokens=packed(n), parent="p"))
    expected = await store.load_ledgers()
    await store.close()
    store = await open_store(tmp_path)
    assert await store.load_ledgers() == expected
    assert [(r.line, r.n_tokens, r.tokens, r.extra) for r in expected] == [
        ("c", 2, packed(2), {"sizes": [2]}),
        ("a", 3, packed(3), {"sizes": [3]}),
        ("b", 4, packed(4), {"sizes": [4]}),
    ]
    await store.close()


async def test_ledgers_beyond_the_bound_go_oldest_first(tmp_path: Path) -> None:
    store = await open_store(tmp_path, max_lines=3)
    for line in "abcda":
        store.put_ledger(ledger(line))
    assert [r.line for r in await store.load_ledgers()] == ["c", "d", "a"]
    await store.close()


async def test_puts_of_one_moment_are_one_transaction_that_needs_no_flush(tmp_path: Path, monkeypatch: Any) -> None:
    batches: list[Batch] = []
    write, written = StateDb.write, threading.Event()

    def noted(db: StateDb, batch: Batch, **bounds: int) -> None:
        batches.append(batch)
        write(db, batch, **bounds)
        written.set()

    monkeypatch.setattr(StateDb, "write", noted)
    store = await open_store(tmp_path)
    store.put_ledger(ledger("a"))
    await asyncio.sleep(0)
    store.put_request({"id": "r"})
    assert await asyncio.to_thread(written.wait, 30)
    assert [(list(b.ledgers), list(b.requests)) for b in batches] == [(["a"], ["r"])]
    store.put_ledger(ledger("b"))
    assert [r.line for r in await store.load_ledgers()] == ["a", "b"]  # what is being collected is not missed
    await store.close()


async def test_puts_just_before_close_are_not_lost(tmp_path: Path) -> None:
    """Write-behind: close() without a turn of the loop in between."""
    store = await open_store(tmp_path, max_lines=100)
    snapshot = await publish(store, 1)
    for n in range(50):
        store.put_ledger(ledger(f"line {n}", n))
        store.put_request({"id": f"r{n}", "cache_n": n})
    store.mark_effective(snapshot.id, True)
    await store.touch(snapshot.id)
    used = store.all()[0].last_used
    await store.close()
    await store.close()
    store = await open_store(tmp_path, max_lines=100)
    assert [r.n_tokens for r in await store.load_ledgers()] == list(range(50))
    assert store.load_requests() == [{"id": f"r{n}", "cache_n": n} for n in range(50)]
    assert (store.all()[0].effective, store.all()[0].last_used) == (True, used)
    await store.close()


async def test_requests_are_bounded_newest_last_and_found_by_id(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    for n in range(1005):
        store.put_request({"id": f"r{n}", "n": n})
    store.put_request({"id": "r900", "n": "again"})
    await store.close()
    store = await open_store(tmp_path)
    assert len(store.load_requests()) == 1000
    assert store.load_requests(2) == [{"id": "r1004", "n": 1004}, {"id": "r900", "n": "again"}]
    assert store.load_requests(0) == []
    assert store.request("r5") == {"id": "r5", "n": 5}
    assert store.request("r4") is None
    await store.close()


async def test_what_json_cannot_say_is_counted_and_harms_nothing(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    store.put_request({"id": "bad", "text": "\ud800"})
    store.put_ledger(ledger("bad", extra={"x": object()}))
    store.put_ledger(ledger("good"))
    assert [r.line for r in await store.load_ledgers()] == ["good"]
    assert store.counters["bad_records"] == 2
    await store.close()


async def test_a_damaged_record_is_skipped(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    store.put_ledger(ledger("good"))
    store.put_request({"id": "good"})
    await publish(store, 1)
    await store.close()
    with sqlite3.connect(tmp_path / "state.db") as db:
        for n, blob in enumerate([b"", b"\xff" * 9, b"\2\0\0\0{}", ledger("x").to_blob()[:-1]]):
            db.execute("INSERT INTO ledgers (line, record) VALUES (?, ?)", (f"bad{n}", blob))
        db.execute("INSERT INTO requests (id, record) VALUES ('bad', 'nonsense')")
        rest = "fingerprint, tenant, model, kind, line, n_tokens, bytes, created, last_used, pinned, effective, reason"
        rest += ", checksum"
        for id_, file, directory in (("x", "'../../victim'", "dir"), ("y", "file", "'/etc'")):
            db.execute(
                f"INSERT INTO snapshots SELECT '{id_}', {file}, {directory}, {rest} FROM snapshots WHERE length(id) > 1"
            )
    db.close()
    store = await open_store(tmp_path)
    assert [r.line for r in await store.load_ledgers()] == ["good"]
    assert store.load_requests() == [{"id": "good"}]
    assert len(store.all()) == 1 and store.counters["bad_records"] == 7
    await store.close()


async def test_a_forgotten_line_is_gone_from_every_byte(tmp_path: Path) -> None:
    """Ledger and snapshots, pinned ones too, also out of the database's free pages and its log."""
    store = await open_store(tmp_path)
    mark = b"SECRET-OF-THE-LINE"
    store.put_ledger(ledger("L", base=mark * 50))
    store.put_ledger(ledger("M"))
    await store.load_ledgers()
    pinned = await publish(store, 1, 2)
    await store.pin(pinned.id)
    other = await publish(store, 1, 2, 3, line="M")
    store.put_ledger(ledger("L", base=mark * 60))
    await store.forget_line("L")
    assert [r.line for r in await store.load_ledgers()] == ["M"]
    assert store.all() == [other] and files(store) == {other.file}
    assert not any(mark in path.read_bytes() for path in tmp_path.glob("state.db*"))
    await store.close()


async def test_purge_leaves_nothing(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    mark = b"SECRET-OF-THE-LINE"
    await store.pin((await publish(store, 1, 2)).id)
    total = (await publish(store, 3)).bytes + store.all()[1].bytes
    temp = save(store, packed(1, 2, 3))
    (store.slots_dir / f"{FP}-{'0' * 32}.bin").write_bytes(b"orphan")
    (tmp_path / "state.db.corrupt-20260101T000000").write_bytes(mark)
    store.put_ledger(ledger("L", base=mark * 50_000))
    store.put_request({"id": "r", "text": mark.decode()})
    report = await store.purge()
    assert (report.snapshots, report.orphans, report.bytes) == (2, 2, total)
    assert files(store) == set() and store.total_bytes == 0
    with pytest.raises(StoreError, match="cancelled"):  # the save that was under way
        await publish_temp(store, temp)
    assert store.load_requests() == [] and await store.load_ledgers() == []
    assert not any(mark in path.read_bytes() for path in tmp_path.glob("state.db*"))
    assert sum(path.stat().st_size for path in tmp_path.glob("state.db*")) < len(mark * 50_000) / 2
    await publish(store, 9)
    await store.close()
    store = await open_store(tmp_path)
    assert [s.n_tokens for s in store.all()] == [1]
    await store.close()


async def test_without_persistence_what_was_stored_goes_and_nothing_new_is_kept(tmp_path: Path) -> None:
    theirs = tmp_path / "engine"
    theirs.mkdir()
    store = await open_store(tmp_path / "s")
    await store.add_dir(theirs)
    await publish(store, 1)
    temp = store.temp_name(FP)
    (theirs / temp).write_bytes(slot_file(packed(1)))
    await publish_temp(store, temp, dir=theirs)
    (theirs / "own.bin").write_bytes(b"")
    (store.slots_dir / f"{FP}-{'0' * 32}.bin").write_bytes(b"orphan")
    store.put_ledger(ledger("L"))
    await store.close()
    store = await open_store(tmp_path / "s", persist=False, add_dir=False)
    assert files(store) == set()
    assert {p.name for p in theirs.iterdir()} == {"own.bin", ".slotkeeper.lock"}
    assert not await store.make_room(1)
    temp = save(store, packed(1))
    with pytest.raises(StoreError):
        await publish_temp(store, temp)
    store.put_ledger(ledger("M"))
    store.put_request({"id": "r"})
    assert [r.line for r in await store.load_ledgers()] == ["M"] and store.load_requests() == [{"id": "r"}]
    await store.close()
    assert {p.name for p in (tmp_path / "s").iterdir()} == {"lock", "slots"} and files(store) == set()


async def filled(path: Path) -> Store:
    store = await open_store(path)
    for n in range(40):
        store.put_ledger(ledger(f"L{n}", base=bytes(4000)))
    await publish(store, 1, 2, 3)
    return store


DAMAGE = {
    "not a database": lambda data: b"nonsense" * 1000,
    "header": lambda data: b"\0" * 16 + data[16:],
    "cut in half": lambda data: data[: len(data) // 2],
    "cut in mid-page": lambda data: data[:5000],
    "middle overwritten": lambda data: data[:4096] + b"\xff" * (len(data) - 8192) + data[-4096:],
}


@pytest.mark.parametrize("kind", DAMAGE)
async def test_a_damaged_database_is_moved_aside_and_its_files_are_adopted(tmp_path: Path, kind: str) -> None:
    await (await filled(tmp_path)).close()
    path = tmp_path / "state.db"
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    store = await open_store(tmp_path, adopt_for=[TENANT])
    assert store.damaged_databases == 1
    assert [store.tokens(s) for s in store.candidates(TENANT, FP)] == [packed(1, 2, 3)]
    (aside,) = tmp_path.glob("state.db.corrupt-*")
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    store.put_ledger(ledger("new"))
    await store.close()
    store = await open_store(tmp_path)
    assert [r.line for r in await store.load_ledgers()] == ["new"] and len(store.all()) == 1
    await store.close()


async def test_damage_outside_the_index_costs_no_pin(tmp_path: Path) -> None:
    """A page of ledgers is unreadable: the snapshots' records were read before and are written anew."""
    store = await filled(tmp_path)
    await store.pin(store.all()[0].id)
    expected = store.all()
    await store.close()
    with sqlite3.connect(tmp_path / "state.db") as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name='ledgers'").fetchone()
    db.close()
    with (tmp_path / "state.db").open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)
    store = await open_store(tmp_path)
    assert await store.load_ledgers() == [] and store.damaged_databases == 1
    await store.close()
    store = await open_store(tmp_path)
    assert store.all() == expected and store.all()[0].pinned
    await store.close()


async def test_an_empty_database_file_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"")
    store = await open_store(tmp_path)
    assert store.damaged_databases == 0 and store.all() == []
    await store.close()


async def test_damage_while_running_keeps_snapshots_and_goes_on(tmp_path: Path) -> None:
    """The index in memory is written into the new database."""
    store = await filled(tmp_path)
    await store.load_ledgers()
    with sqlite3.connect(tmp_path / "state.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    data = (tmp_path / "state.db").read_bytes()
    with (tmp_path / "state.db").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (len(data) - 4096))
    new = await publish(store, 4, 5)
    store.put_ledger(ledger("after"))
    assert store.damaged_databases == 1
    await store.close()
    store = await open_store(tmp_path)
    assert {s.n_tokens for s in store.all()} == {3, 2} and store.get(new.id) == new
    assert "after" in {r.line for r in await store.load_ledgers()}
    await store.close()


async def test_a_newer_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    await (await filled(tmp_path)).close()
    with sqlite3.connect(tmp_path / "state.db") as db:
        db.execute("PRAGMA user_version=7")
    db.close()
    before, names = (tmp_path / "state.db").read_bytes(), sorted(os.listdir(tmp_path / "slots"))
    for persist in (True, False):
        with pytest.raises(StoreError, match=r"newer Slotkeeper \(its version 7.*upgrade"):
            await open_store(tmp_path, persist=persist)
    assert (tmp_path / "state.db").read_bytes() == before
    assert sorted(os.listdir(tmp_path / "slots")) == names


async def test_another_programs_write_lock_is_an_error_with_a_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("proxy.store_db.BUSY_TIMEOUT_SECONDS", 0.01)
    store = await open_store(tmp_path)
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="end the program that has it open"):
        await publish(store, 1, 2)
    assert files(store) == set() and store.all() == []
    store.put_ledger(ledger("L"))
    assert await store.load_ledgers() == [] and store.write_errors > 0
    other.execute("ROLLBACK")
    other.close()
    assert [r.line for r in await store.load_ledgers()] == ["L"]
    await store.close()


async def test_after_close_changes_are_refused_and_puts_are_dropped(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    temp = save(store, packed(1))
    await store.close()
    with pytest.raises(StoreError, match="stopping"):
        await publish_temp(store, temp)
    store.put_ledger(ledger("late"))
    store = await open_store(tmp_path)
    assert await store.load_ledgers() == [] and files(store) == set()
    await store.close()


async def test_close_waits_for_what_is_running(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    publications = [asyncio.ensure_future(publish_temp(store, save(store, packed(n)))) for n in range(5)]
    await asyncio.sleep(0)
    await store.close()
    assert {(await p).n_tokens for p in publications} == {1}
    store = await open_store(tmp_path)
    assert len(store.all()) == 5
    await store.close()
