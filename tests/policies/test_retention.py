"""Which snapshots go, against a brute-force reading of the rule."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from policies.retention import LineItem, StoredItem, eviction_order, make_room, superseded

sizes = st.integers(0, 100)
item = st.builds(
    StoredItem,
    id=st.text("abc", min_size=1, max_size=4),
    n_bytes=sizes,
    last_used=st.integers(0, 5).map(float),
    locked=st.booleans(),
    effective=st.sampled_from([None, True, False]),
    same_disk=st.booleans(),
)
items = st.lists(item, max_size=8, unique_by=lambda i: i.id)
budgets = st.integers(0, 400)


@given(items, budgets, sizes, sizes, st.none() | sizes)
def test_after_the_eviction_everything_fits(
    stored: list[StoredItem], budget: int, temporary: int, wanted: int, free: int | None
) -> None:
    room = make_room(stored, budget=budget, temporary=temporary, wanted=wanted, free=free)
    gone = {i.id: i for i in stored if i.id in room.evict}
    left = sum(i.n_bytes for i in stored) - sum(i.n_bytes for i in gone.values())
    assert room.freed == sum(i.n_bytes for i in gone.values())
    assert not any(i.locked for i in gone.values())
    fits = left + temporary + wanted <= budget
    fits_disk = free is None or free + sum(i.n_bytes for i in gone.values() if i.same_disk) >= wanted
    assert room.possible == (fits and fits_disk)
    if wanted and not room.possible:
        assert room.evict == ()


@given(items, budgets, sizes, sizes)
def test_the_victims_are_the_shortest_beginning_of_the_order(
    stored: list[StoredItem], budget: int, temporary: int, wanted: int
) -> None:
    room = make_room(stored, budget=budget, temporary=temporary, wanted=wanted)
    order = eviction_order(stored)
    assert list(room.evict) == [i.id for i in order[: len(room.evict)]]
    if room.possible and room.evict:
        without_last = sum(i.n_bytes for i in stored) - sum(i.n_bytes for i in order[: len(room.evict) - 1])
        assert without_last + temporary + wanted > budget


@given(items, sizes, sizes)
def test_a_full_disk_evicts_only_what_frees_that_disk(stored: list[StoredItem], wanted: int, free: int) -> None:
    room = make_room(stored, budget=10_000, wanted=wanted, free=free)
    assert all(i.same_disk for i in stored if i.id in room.evict)
    evictable = sum(i.n_bytes for i in stored if i.same_disk and not i.locked)
    assert room.possible == (free + evictable >= wanted)


@given(items)
def test_order_is_useless_first_then_least_recently_used(stored: list[StoredItem]) -> None:
    order = eviction_order(stored)
    assert {i.id for i in order} == {i.id for i in stored if not i.locked}
    keys = [(i.effective is not False, i.last_used) for i in order]
    assert keys == sorted(keys)


def test_a_save_larger_than_the_budget_costs_nothing() -> None:
    """The budget can never hold it: what is stored stays."""
    room = make_room([StoredItem("a", 50, 1.0)], budget=100, temporary=30, wanted=71)
    assert (room.possible, room.evict, room.reason) == (False, (), "over_budget")


def test_pinned_and_restoring_ones_are_in_the_way() -> None:
    room = make_room([StoredItem("a", 60, 1.0, locked=True), StoredItem("b", 30, 2.0)], budget=100, wanted=50)
    assert (room.possible, room.evict, room.reason) == (False, (), "not_enough_evictable")


def test_a_temporary_copy_counts() -> None:
    """The same 40 bytes fit beside 60 stored ones, but not beside those and a copy of 10 being written."""
    stored = [StoredItem("a", 30, 1.0), StoredItem("b", 30, 2.0)]
    assert make_room(stored, budget=100, wanted=40).reason == "fits"
    assert make_room(stored, budget=100, wanted=40, temporary=10).evict == ("a",)


def test_a_lowered_budget_is_approached_as_far_as_pins_allow() -> None:
    stored = [StoredItem("a", 60, 1.0, locked=True), StoredItem("b", 30, 2.0)]
    room = make_room(stored, budget=50)
    assert (room.possible, room.evict, room.freed) == (False, ("b",), 30)


# --- supersede

tokens = st.lists(st.integers(0, 1), max_size=6).map(lambda t: array("i", t).tobytes())
line_item = st.builds(
    LineItem,
    id=st.text("ab", min_size=1, max_size=2),
    line=st.sampled_from([None, "L", "M"]),
    kind=st.sampled_from(["line", "base"]),
    namespace=st.sampled_from([("t",), ("u",)]),
    tokens=tokens,
    pinned=st.booleans(),
)


@given(line_item, st.lists(line_item, max_size=8))
def test_only_true_beginnings_of_the_same_line_are_superseded(new: LineItem, others: list[LineItem]) -> None:
    expected = [
        o.id
        for o in others
        if new.kind == o.kind == "line"
        and new.line is not None
        and (new.line, new.namespace) == (o.line, o.namespace)
        and not o.pinned
        and o.id != new.id
        and o.tokens != new.tokens
        and new.tokens[: len(o.tokens)] == o.tokens
    ]
    assert list(superseded(new, others)) == expected


def test_a_longer_snapshot_supersedes_its_beginning_but_no_fork() -> None:
    def of(id_: str, *ids: int) -> LineItem:
        return LineItem(id_, "L", "line", ("t",), array("i", ids).tobytes())

    assert superseded(of("new", 1, 2, 3), [of("old", 1, 2), of("fork", 1, 9), of("other", 2)]) == ("old",)
