"""Room for slot files: budget, eviction, pins, copies under way."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.slot_bytes import slot_file
from tests.fakes.store import FP, files, open_store, packed, publish

SIZE = len(slot_file(packed(1, 2, 3)))


async def test_least_recently_used_goes_first_and_pins_stay(tmp_path: Path) -> None:
    store = await open_store(tmp_path, budget=4 * SIZE)
    a, b, c, d = [await publish(store, 1, 2, n) for n in range(4)]
    await store.pin(a.id)
    await store.touch(b.id)
    assert await store.make_room(2 * SIZE)
    assert {s.id for s in store.all()} == {a.id, b.id}
    assert not c.path.exists() and not d.path.exists()
    assert not await store.make_room(3 * SIZE + 1)
    assert {s.id for s in store.all()} == {a.id, b.id}
    await store.unpin(a.id)
    assert await store.make_room(4 * SIZE)
    assert store.all() == [] and store.counters["evicted"] == 4
    await store.close()


async def test_proven_useless_ones_go_before_all_others(tmp_path: Path) -> None:
    store = await open_store(tmp_path, budget=2 * SIZE)
    old, useless = await publish(store, 1, 2, 3), await publish(store, 4, 5, 6)
    store.mark_effective(useless.id, False)
    assert await store.make_room(1)
    assert [s.id for s in store.all()] == [old.id]
    await store.close()


async def test_reserved_bytes_of_saves_under_way_count(tmp_path: Path) -> None:
    """Two saves that each fit alone do not both get the last room; a discarded one gives it back."""
    store = await open_store(tmp_path, budget=3 * SIZE)
    kept = await publish(store, 1, 2, 3)
    await store.pin(kept.id)
    one, two = store.temp_name(FP), store.temp_name(FP)
    assert await store.make_room(2 * SIZE, temp=one)
    assert not await store.make_room(SIZE, temp=two)
    assert await store.make_room(2 * SIZE, temp=one)  # asked again: not counted twice
    await store.discard(one)
    assert await store.make_room(SIZE, temp=two)
    await store.close()


async def test_replacing_a_snapshot_needs_room_for_both_copies(tmp_path: Path) -> None:
    store = await open_store(tmp_path, budget=2 * SIZE - 1)
    await store.pin((await publish(store, 1, 2, 3)).id)
    assert not await store.make_room(SIZE)
    await store.close()


async def test_a_save_larger_than_it_was_asked_for_still_ends_within_the_budget(tmp_path: Path) -> None:
    store = await open_store(tmp_path, budget=2 * SIZE)
    await publish(store, 1, 2, 3), await publish(store, 4, 5, 6)
    big = await publish(store, 7, 8, 9)
    assert big in store.all() and store.total_bytes <= store.budget and len(files(store)) == 2
    await store.close()


async def test_a_smaller_budget_at_the_next_start_evicts(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await publish(store, 1, 2, 3)
    new = await publish(store, 4, 5, 6)
    await store.close()
    store = await open_store(tmp_path, budget=SIZE)
    assert [s.id for s in store.all()] == [new.id] and files(store) == {new.file}
    await store.close()
