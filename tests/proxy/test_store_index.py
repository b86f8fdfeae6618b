"""The index in memory: its sums, and a token cache that stays within its bytes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from proxy.store_index import SnapshotIndex
from proxy.store_types import Snapshot

CACHE_BYTES = 40


def snapshot(id_: str, n_bytes: int = 1, tenant: str = "t") -> Snapshot:
    return Snapshot(id_, "f", Path("/d"), "fp", tenant, "m", "line", None, 1, n_bytes, 0.0, 0.0)


operation = st.tuples(
    st.sampled_from(["put", "drop", "cache", "read", "change"]), st.sampled_from("abcd"), st.binary(max_size=50)
)


@given(st.lists(operation, max_size=40))
def test_sums_and_cache_agree_with_what_is_there(operations: list[tuple[str, str, bytes]]) -> None:
    index = SnapshotIndex(100, cache_bytes=CACHE_BYTES)
    sizes: dict[str, int] = {}
    last_cached: dict[str, bytes] = {}
    for what, id_, data in operations:
        if what == "put":
            index.put(snapshot(id_, len(data), tenant=id_), data)
            sizes[id_], last_cached[id_] = len(data), data
        elif what == "drop":
            assert (index.drop(id_) is None) == (id_ not in sizes)
            sizes.pop(id_, None), last_cached.pop(id_, None)
        elif what == "cache" and id_ in sizes:
            index.cache(id_, data)
            last_cached[id_] = data
        elif what == "change":
            assert (index.change(id_, last_used=9.0) is None) == (id_ not in sizes)
        assert index.cached(id_) in (None, last_cached.get(id_))
    assert index.total_bytes == sum(sizes.values())
    assert {s.id for s in index.all()} == sizes.keys() and len(index) == len(sizes)
    index.active.add(Path("/d"))
    assert all([s.id for s in index.candidates(id_, "fp")] == [id_] for id_ in sizes)
    kept = [cached for id_ in "abcd" if (cached := index.cached(id_)) is not None]
    assert sum(map(len, kept)) <= CACHE_BYTES


def test_the_least_recently_read_tokens_leave_the_cache() -> None:
    index = SnapshotIndex(100, cache_bytes=20)
    for id_ in "ab":
        index.put(snapshot(id_), b"x" * 10)
    assert index.cached("a")
    index.put(snapshot("c"), b"x" * 10)
    assert index.cached("b") is None and index.cached("a") and index.cached("c")
