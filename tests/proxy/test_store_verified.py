"""A slot file that is not what was saved is never restored, wherever it was changed."""

from __future__ import annotations

import os
import random
import sqlite3
from pathlib import Path

import pytest

from proxy import store_files
from proxy.store import Snapshot, Store
from tests.fakes.store import open_store, publish


def damage(path: Path, luck: random.Random) -> None:
    """One bit is another, or the end is missing; its times are what they were, as after a bad sector."""
    data, times = bytearray(path.read_bytes()), path.stat()
    if luck.random() < 0.25:
        del data[luck.randrange(len(data)) :]
    else:
        data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


async def test_200_random_damages(tmp_path: Path) -> None:
    """Found while the store runs, and the record goes with the file."""
    store, luck = await open_store(tmp_path), random.Random(200)
    for number in range(200):
        snapshot = await publish(store, 7, 8, 9, number)
        assert await store.verify(snapshot)
        damage(snapshot.path, luck)
        assert not await store.verify(snapshot), f"damage {number}"
        assert store.get(snapshot.id) is None
    await store.close()


async def test_damage_while_stopped(tmp_path: Path) -> None:
    """And the sound file beside it is served."""
    store = await open_store(tmp_path)
    bad, good = await publish(store, 1, 2, 3), await publish(store, 1, 2, 4)
    await store.close()
    data = bytearray(bad.path.read_bytes())
    data[-1] ^= 1
    bad.path.write_bytes(data)
    again = await open_store(tmp_path)
    assert [await again.verify(s) for s in (bad, good)] == [False, True]
    await again.close()


async def test_a_checksum_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is saved; after a restart once more, before it is restored for the first time."""
    read: list[Path] = []
    compute = store_files.checksum

    def counted(path: Path) -> str:
        read.append(path)
        return compute(path)

    monkeypatch.setattr(store_files, "checksum", counted)
    store = await open_store(tmp_path)
    snapshot = await publish(store, 1, 2, 3)
    assert await store.verify(snapshot) and await store.verify(snapshot)
    assert len(read) == 1
    await store.close()
    again = await open_store(tmp_path)
    assert await again.verify(snapshot) and await again.verify(snapshot)
    assert len(read) == 2
    await again.close()


async def test_a_record_of_an_earlier_version(tmp_path: Path) -> None:
    """Has no checksum; it gets one when it is needed first."""
    store = await open_store(tmp_path)
    snapshot = await publish(store, 1, 2, 3)
    await store.close()
    with sqlite3.connect(tmp_path / "state.db") as database:
        database.execute("ALTER TABLE snapshots DROP COLUMN checksum")
        database.execute("PRAGMA user_version = 3")
    database.close()
    again = await open_store(tmp_path)
    (old,) = again.all()
    assert (old.checksum, await again.verify(old)) == ("", True)
    assert recorded(again, old) == snapshot.checksum
    await again.close()
    third = await open_store(tmp_path)
    assert recorded(third, old) == snapshot.checksum, "it was not written down"
    await third.close()


def recorded(store: Store, snapshot: Snapshot) -> str:
    """The checksum in its record."""
    found = store.get(snapshot.id)
    return found.checksum if found else ""
