"""A disk that is full, limited or read-only: a sentence, nothing lost, and it goes on when there is room again."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from proxy.errors import StoreError
from tests.fakes.slot_bytes import slot_file
from tests.fakes.store import FP, TENANT, files, open_store, packed, publish, publish_temp, save
from tests.proxy.test_store import ledger

MIB = 2**20


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """Every write beyond `n_bytes` of a file fails, in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        with capture_logs():  # pytest's own capture is a file as well
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def remount(path: Path, how: str) -> None:
    """Make the file system read-only ("ro") or writable ("rw")."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(path)], check=True)


def fill(path: Path) -> Path:
    """Write until the disk refuses."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return filler


async def test_when_the_record_cannot_be_written_the_file_goes_and_the_store_goes_on(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    kept = await publish(store, 1, 2)
    temp = save(store, packed(3, 4))
    with file_size_limit(0):
        with pytest.raises(StoreError, match=r"state\.db"):
            await publish_temp(store, temp)
        assert files(store) == {kept.file} and store.all() == [kept]
        store.put_ledger(ledger("L"))
        store.put_request({"id": "r"})
        await store.touch(kept.id)
        assert await store.load_ledgers() == []
        assert await store.verify(kept)
    assert store.write_errors > 0
    assert [r.line for r in await store.load_ledgers()] == ["L"]
    again = await publish(store, 3, 4)
    await store.close()
    store = await open_store(tmp_path)
    assert {s.id for s in store.candidates(TENANT, FP)} == {kept.id, again.id}
    assert store.load_requests() == [{"id": "r"}] and [r.line for r in await store.load_ledgers()] == ["L"]
    await store.close()


async def test_eviction_works_when_nothing_can_be_written(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    old = await publish(store, 1, 2)
    with file_size_limit(0):
        assert await store.make_room(store.budget)
        assert files(store) == set() and store.all() == [] and store.write_errors == 1
        assert store.get(old.id) is None
    await store.close()
    store = await open_store(tmp_path)
    assert store.all() == [] and store.counters["dropped"] == 1  # the record outlived its file, harmlessly
    await store.close()


async def test_puts_while_nothing_can_be_written_stay_bounded(tmp_path: Path) -> None:
    store = await open_store(tmp_path, max_lines=3)
    with file_size_limit(0):
        for n in range(20):
            store.put_ledger(ledger(f"L{n}"))
            await store.load_ledgers()
        batch = store._writer._batch
        assert list(batch.ledgers) == ["L17", "L18", "L19"]
    await store.close()
    store = await open_store(tmp_path, max_lines=3)
    assert [r.line for r in await store.load_ledgers()] == ["L17", "L18", "L19"]
    await store.close()


async def test_a_line_forgotten_while_its_ledger_waits_to_be_written_stays_forgotten(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    with file_size_limit(0):
        store.put_ledger(ledger("L"))
        store.put_ledger(ledger("M"))
        await store.load_ledgers()
    await store.forget_line("L")
    assert [r.line for r in await store.load_ledgers()] == ["M"]
    await store.close()


async def test_a_full_disk_at_the_start_is_a_sentence(tmp_path: Path) -> None:
    with file_size_limit(0), pytest.raises(StoreError, match=r"state\.db.*free"):
        await open_store(tmp_path)
    await (await open_store(tmp_path)).close()


async def test_a_really_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC from the kernel: at the start, while publishing, and room made by deleting."""
    filler = fill(small_disk)
    with pytest.raises(StoreError, match="free"):
        await open_store(small_disk / "state")
    filler.unlink()
    monkeypatch.setattr("proxy.store_snapshots.DISK_RESERVE", 64 * 1024)
    store = await open_store(small_disk / "state", budget=8 * MIB)
    big = slot_file(packed(*range(16_000)))  # 0.4 MB: two fit beside state.db, three do not
    snapshots = []
    for n in range(2):
        temp = store.temp_name(FP)
        assert await store.make_room(len(big), temp=temp)
        (store.slots_dir / temp).write_bytes(slot_file(packed(*range(n, 16_000 + n))))
        snapshots.append(await publish_temp(store, temp))
    assert await store.make_room(len(big))  # the budget would hold it, the disk does not
    assert [s.id for s in store.all()] == [snapshots[1].id]
    filler = fill(small_disk)
    for n in range(100):  # until the log's own pages are used up
        store.put_ledger(ledger(f"L{n}", base=bytes(4000)))
    await store.load_ledgers()
    assert store.write_errors > 0
    assert await store.verify(snapshots[1])
    filler.unlink()
    assert [r.line for r in await store.load_ledgers()] == [f"L{n}" for n in range(95, 100)]
    await store.close()


async def test_the_disk_reserve_is_left_alone(small_disk: Path) -> None:
    """A disk with less than the reserve takes no snapshot, and none is thrown away for it."""
    store = await open_store(small_disk)
    kept = await publish(store, 1)
    assert not await store.make_room(1)
    assert store.all() == [kept]
    await store.close()


async def test_a_read_only_file_system(small_disk: Path) -> None:
    store = await open_store(small_disk)
    kept = await publish(store, 1, 2)
    await store.close()
    remount(small_disk, "ro")
    with pytest.raises(StoreError, match=r"read-only.*--state-dir"):
        await open_store(small_disk)
    with pytest.raises(StoreError, match=r"read-only.*--state-dir"):
        await open_store(small_disk / "new")
    remount(small_disk, "rw")
    store = await open_store(small_disk)
    assert [s.id for s in store.all()] == [kept.id]
    await store.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_directory_without_permission(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "s")
    await publish(store, 1)
    await store.close()
    (tmp_path / "s").chmod(0o500)
    with pytest.raises(StoreError, match="permission denied"):
        await open_store(tmp_path / "s")
    (tmp_path / "s").chmod(0o700)


async def test_a_file_that_cannot_be_deleted_stays_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await open_store(tmp_path)
    snapshot = await publish(store, 1, 2)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for change in (store.remove(snapshot.id), store.purge(), store.forget_line("L")):
            with pytest.raises(StoreError, match="Cannot delete"):
                await change
        assert not await store.make_room(store.budget)
    assert store.all() == [snapshot] and store.total_bytes == snapshot.bytes and await store.verify(snapshot)
    await store.remove(snapshot.id)
    await store.close()
