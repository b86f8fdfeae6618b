"""Publishing, ids, scanning: on real files and a real state.db."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from proxy.errors import StoreError
from proxy.store_types import snapshot_name
from tests.fakes.slot_bytes import attention_state, packed_words, slot_file
from tests.fakes.store import FP, TENANT, files, open_store, packed, publish, publish_temp, save

SIZE = len(slot_file(packed(1, 2, 3)))


async def test_a_published_snapshot_is_private_named_by_its_hash_and_found_again(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "s")
    snapshot = await publish(store, 1, 2, 3)
    await store.close()
    store = await open_store(tmp_path / "s")
    assert store.candidates(TENANT, FP) == [snapshot]
    assert snapshot.file == snapshot_name(FP, TENANT, packed(1, 2, 3))
    assert store.tokens(snapshot) == packed(1, 2, 3)
    assert await store.verify(snapshot)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [store.slots_dir, *store.state_dir.rglob("*")]}
    assert {oct(m) for path, m in modes.items() if path.is_dir()} == {"0o700"}
    assert {oct(m) for path, m in modes.items() if not path.is_dir()} == {"0o600"}
    assert {"state.db", "state.db-wal"} <= {path.name for path in modes}
    await store.close()


async def test_nobody_sees_another_tenants_or_another_fingerprints_snapshots(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    mine = await publish(store, 1, 2, tenant="a")
    theirs = await publish(store, 1, 2, tenant="b")
    other_engine = await publish(store, 1, 2, tenant="a", fingerprint="beef0000")
    assert len({mine.file, theirs.file, other_engine.file}) == 3
    assert store.candidates("a", FP) == [mine]
    assert store.candidates("b", FP) == [theirs]
    assert store.candidates("", FP) == store.candidates("a", "") == store.candidates("c", FP) == []
    await store.close()


async def test_candidates_come_longest_first(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    for n in (2, 5, 3):
        await publish(store, *range(n))
    assert [s.n_tokens for s in store.candidates(TENANT, FP)] == [5, 3, 2]
    await store.close()


async def test_a_file_cut_off_at_any_length_is_not_published(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    for n_bytes in range(SIZE):
        temp = save(store, b"", data=slot_file(packed(1, 2, 3))[:n_bytes])
        with pytest.raises(StoreError):
            await publish_temp(store, temp, expect_bytes=SIZE)
        assert (files(store), store.total_bytes, store.all()) == (set(), 0, [])
    await store.close()


async def test_a_published_file_cut_off_at_any_length_is_not_restored(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    good = await publish(store, 1, 2, 3, 4)
    for n_bytes in range(SIZE):
        bad = await publish(store, 1, 2, 3)
        os.truncate(bad.path, n_bytes)
        assert not await store.verify(bad)
        assert store.candidates(TENANT, FP) == [good] and store.total_bytes == good.bytes
    assert store.counters["dropped"] == SIZE
    await store.close()
    assert files(store) == {good.file}


async def test_files_cut_off_between_two_runs_are_dropped_at_the_start(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    good = await publish(store, 1, 2, 3)
    for n_bytes in range(SIZE):
        bad = await publish(store, 4, 5, n_bytes)
        os.truncate(bad.path, n_bytes)
    await store.close()
    store = await open_store(tmp_path, adopt_for=[TENANT])
    assert store.candidates(TENANT, FP) == [good] and files(store) == {good.file}
    assert store.counters["dropped"] == SIZE and store.counters["adopted"] == 0
    await store.close()


async def test_a_file_with_foreign_tokens_is_dropped(tmp_path: Path) -> None:
    """Same size, right format, other tokens: the name's hash finds it out."""
    store = await open_store(tmp_path)
    one, two = await publish(store, 1, 2, 3), await publish(store, 4, 5, 6)
    one.path.write_bytes(slot_file(packed(7, 8, 9)))
    assert not await store.verify(one)
    two.path.write_bytes(slot_file(packed(7, 8, 9)))
    await store.close()
    store = await open_store(tmp_path)
    assert store.all() == [] and files(store) == set()
    await store.close()


async def test_a_symlink_in_place_of_a_snapshot_is_not_followed(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "s")
    snapshot = await publish(store, 1, 2, 3)
    (tmp_path / "elsewhere").write_bytes(snapshot.path.read_bytes())
    snapshot.path.unlink()
    snapshot.path.symlink_to(tmp_path / "elsewhere")
    assert not await store.verify(snapshot)
    temp = store.temp_name(FP)
    (store.slots_dir / temp).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="regular file"):
        await publish_temp(store, temp)
    await store.close()
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "0 bytes long"),
        (b"not a slot file at all", "not a llama-server slot file"),
        (slot_file(b""), "holds no tokens"),
        (b"qsgg" + (3).to_bytes(4, "little") + (6).to_bytes(4, "little") + packed_words(packed(5), [0]), "images"),
        (slot_file(packed(1, 2, 4)), "not the 3 expected"),
        (slot_file(packed(1, 2)), "not the 3 expected"),
    ],
    ids=["nothing", "foreign", "empty slot", "images", "other tokens", "too few"],
)
async def test_a_file_that_is_not_what_was_asked_for_is_deleted(tmp_path: Path, data: bytes, says: str) -> None:
    store = await open_store(tmp_path)
    temp = save(store, b"", data=data)
    with pytest.raises(StoreError, match=says):
        await publish_temp(store, temp, expect_tokens=packed(1, 2, 3))
    assert files(store) == set()
    await store.close()


async def test_a_missing_file_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    with pytest.raises(StoreError, match="not there"):
        await publish_temp(store, store.temp_name(FP))
    victim = await publish(store, 1)
    with pytest.raises(StoreError, match="not asked for"):
        await publish_temp(store, victim.file)
    assert victim.path.exists()
    with pytest.raises(StoreError, match="add it first"):
        await publish_temp(store, store.temp_name(FP), dir=tmp_path)
    with pytest.raises(ValueError):
        store.temp_name("../../etc")
    await store.close()


async def test_the_same_tokens_again_replace_the_file_and_keep_what_people_said(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    first = await publish(store, 1, 2, kind="base", line=None)
    await store.pin(first.id)
    store.mark_effective(first.id, False)
    temp = save(store, b"", data=slot_file(packed(1, 2), slot=3))
    again = await publish_temp(store, temp, reason="exit")
    assert again.id == first.id
    assert (again.pinned, again.effective, again.kind, again.reason) == (True, False, "base", "exit")
    assert again.path.read_bytes() == slot_file(packed(1, 2), slot=3)
    assert store.all() == [again] and store.total_bytes == again.bytes
    await store.close()


async def test_a_longer_snapshot_of_the_line_supersedes_shorter_ones(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    old = await publish(store, 1, 2)
    pinned = await publish(store, 1)
    await store.pin(pinned.id)
    kept = [
        await publish(store, 1, 9),
        await publish(store, 1, 2, line="M", tenant="t2"),
        await publish(store, 1, 2, 3, line="M"),
        await publish(store, 1, 2, 3, 4, 5, kind="base", line="L"),
    ]
    new = await publish(store, 1, 2, 3, 4, supersede=True)
    assert not old.path.exists()
    assert {s.id for s in store.all()} == {s.id for s in [pinned, new, *kept]}
    assert store.counters["superseded"] == 1
    await store.close()


async def test_what_is_being_restored_is_neither_evicted_nor_superseded(tmp_path: Path) -> None:
    store = await open_store(tmp_path, budget=2 * SIZE)
    held, other = await publish(store, 1, 2, 3), await publish(store, 4, 5, 6)
    with store.holding(held):
        assert await store.make_room(SIZE)
        assert [s.id for s in store.all()] == [held.id]
        assert not await store.make_room(SIZE + 1)
        longer = await publish(store, 1, 2, 3, 4, supersede=True)
        assert held.path.exists() and longer in store.all()
        await store.remove(longer.id)
    assert not other.path.exists()
    assert await store.make_room(SIZE + 1)
    assert store.all() == []
    await store.close()


async def test_discard_deletes_the_temporary_file_and_only_that(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    snapshot, temp = await publish(store, 1), save(store, packed(1, 2))
    await store.discard(temp)
    await store.discard(snapshot.file)
    await store.discard("../state.db")
    assert files(store) == {snapshot.file} and (tmp_path / "state.db").exists()
    await store.close()


async def test_ids_are_named_by_a_unique_beginning(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    snapshots = [await publish(store, n) for n in range(20)]
    one = snapshots[0]
    assert store.get(one.id) == store.get(one.id[:12]) == one
    assert store.get("") is None and store.get("zz") is None
    shared = next(s.id[0] for s in snapshots if sum(o.id[0] == s.id[0] for o in snapshots) > 1)
    assert store.get(shared) is None
    with pytest.raises(StoreError, match="give more characters"):
        await store.remove(shared)
    with pytest.raises(StoreError, match="snapshots ls"):
        await store.pin("zz")
    await store.remove(one.id[:12])
    assert not one.path.exists() and store.get(one.id) is None
    await store.close()


async def test_temporary_files_of_a_killed_run_are_deleted_and_other_files_stay(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    left = save(store, packed(1, 2))
    for name in ("notes.txt", "my-session.bin", f"{FP}-short.bin"):
        (store.slots_dir / name).write_text("somebody's")
    (store.slots_dir / f"{FP}-{'0' * 16}.tmp.d").mkdir()
    await store.close()
    store = await open_store(tmp_path)
    assert files(store) == {"notes.txt", "my-session.bin", f"{FP}-short.bin", f"{FP}-{'0' * 16}.tmp.d"}
    assert left not in files(store) and store.counters["orphans"] == 1
    await store.close()


async def test_prune_spares_the_file_that_is_being_written(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    temp, lost = save(store, packed(1, 2)), await publish(store, 7)
    lost.path.unlink()
    (store.slots_dir / f"{FP}-{'0' * 16}.tmp").write_bytes(b"left over")
    report = await store.prune()
    assert (report.snapshots, report.orphans, report.bytes) == (1, 1, lost.bytes)
    assert files(store) == {temp}
    assert (await publish_temp(store, temp)).n_tokens == 2
    await store.close()


async def test_a_file_without_a_record_goes_to_the_tenant_in_its_hash_or_away(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    mine, theirs = await publish(store, 1, 2, tenant="a"), await publish(store, 1, 2, tenant="b")
    cut = await publish(store, 1, 2, 3, tenant="a")
    os.truncate(cut.path, cut.bytes - 1)
    wrong = store.slots_dir / f"{FP}-{'0' * 32}.bin"
    wrong.write_bytes(slot_file(packed(5)))
    await store.close()
    (tmp_path / "state.db").unlink()
    store = await open_store(tmp_path)  # adopt_for None: nobody said whose files these may be
    assert store.all() == [] and {mine.file, theirs.file, cut.file} <= files(store)
    await store.close()
    store = await open_store(tmp_path, adopt_for=["c", "a"])
    assert [(s.id, s.tenant, s.n_tokens, s.reason) for s in store.all()] == [(mine.id, "a", 2, "adopted")]
    assert files(store) == {mine.file}
    assert store.counters["orphans"] == 3 and store.counters["adopted"] == 1
    await store.close()


async def test_the_state_directory_may_be_moved(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "old")
    await store.pin((await publish(store, 1, 2)).id)
    await store.close()
    (tmp_path / "old").rename(tmp_path / "new")
    store = await open_store(tmp_path / "new")
    assert [(s.n_tokens, s.pinned, s.dir) for s in store.all()] == [(2, True, tmp_path / "new" / "slots")]
    await store.close()


async def test_a_symbolic_link_names_the_same_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = await open_store(tmp_path / "link" / "s", add_dir=False)
    used = await store.add_dir(tmp_path / "link" / "s" / "slots")
    snapshot = await publish_temp(store, save(store, packed(1)), dir=tmp_path / "link" / "s" / "slots")
    assert snapshot.dir == used == tmp_path / "real" / "s" / "slots"
    assert store.candidates(TENANT, FP) == [snapshot]
    await store.close()


async def test_an_attached_engines_directory_keeps_its_mode_and_files_and_is_locked(tmp_path: Path) -> None:
    theirs = tmp_path / "engine"
    theirs.mkdir(mode=0o755)
    (theirs / "own.bin").write_bytes(b"x")
    store = await open_store(tmp_path / "one")
    await store.add_dir(theirs)
    await store.add_dir(theirs)
    temp = store.temp_name(FP)
    (theirs / temp).write_bytes(slot_file(packed(1)))
    snapshot = await publish_temp(store, temp, dir=theirs)
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o755 and (theirs / "own.bin").exists()
    assert stat.S_IMODE(snapshot.path.stat().st_mode) == 0o600
    other = await open_store(tmp_path / "two")
    with pytest.raises(StoreError, match="in use by another Slotkeeper"):
        await other.add_dir(theirs)
    await store.close()
    assert snapshot.path.exists()
    await other.close()
    store = await open_store(tmp_path / "one")
    assert store.candidates(TENANT, FP) == []  # its directory is not in use in this run
    await store.add_dir(theirs)
    assert store.candidates(TENANT, FP) == [snapshot]
    await store.close()


async def test_a_directory_that_is_not_there_or_not_a_directory_is_refused(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "s")
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(StoreError, match=str(path)):
            await store.add_dir(path)
    assert (await publish(store, 1)).n_tokens == 1
    await store.close()


async def test_a_caller_that_leaves_does_not_stop_a_publication(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    temp = save(store, packed(1, 2))
    caller = asyncio.ensure_future(publish_temp(store, temp))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await store.close()
    store = await open_store(tmp_path)
    assert [s.n_tokens for s in store.all()] == [2] and temp not in files(store)
    await store.close()


async def test_concurrent_changes_keep_the_sums(tmp_path: Path) -> None:
    store = await open_store(tmp_path, budget=5 * SIZE)

    async def one(n: int) -> None:
        temp = save(store, packed(1, 2, n))
        if await store.make_room(SIZE, temp=temp):
            await publish_temp(store, temp)
        else:
            await store.discard(temp)

    await asyncio.gather(*(one(n) for n in range(30)))
    on_disk = {path.name: path.stat().st_size for path in store.slots_dir.iterdir()}
    assert on_disk == {s.file: s.bytes for s in store.all()}
    assert sum(on_disk.values()) == store.total_bytes <= store.budget
    assert len(on_disk) == 5
    await store.close()


async def test_a_file_that_cannot_be_read_now_is_not_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file handles left says nothing about the file."""
    store = await open_store(tmp_path)
    snapshot = await publish(store, 1, 2)

    def no_handles(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("llamacpp.slot_files.open", no_handles, raising=False)
        assert not await store.verify(snapshot)
        await store.prune()
    assert await store.verify(snapshot) and store.counters["dropped"] == 0
    await store.close()


async def test_republished_while_the_bad_one_is_being_dropped(tmp_path: Path) -> None:
    """The deletion of the bad file must not take the new file of the same name."""
    store = await open_store(tmp_path)
    snapshot = await publish(store, 1, 2)
    os.truncate(snapshot.path, 3)
    temp = save(store, packed(1, 2))
    publication = asyncio.ensure_future(publish_temp(store, temp))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await store.verify(snapshot)
    again = await publication
    await store.close()
    store = await open_store(tmp_path)
    assert [s.id for s in store.all()] == [again.id] and await store.verify(again)
    await store.close()


def test_the_fake_file_is_whole() -> None:
    assert len(slot_file(packed(1, 2, 3), state=attention_state(3))) == SIZE
