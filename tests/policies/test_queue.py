"""Who is served next: tenants take turns, nobody starves."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from policies.queue import MAX_BYPASSED, Waiting, order

TENANTS = ["a", "b", "c"]
LINES = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, MAX_BYPASSED - 1)), max_size=12).map(
    lambda found: tuple(Waiting(key, tenant, bypassed) for key, (tenant, bypassed) in enumerate(found))
)
SERVED = st.dictionaries(st.sampled_from(TENANTS), st.integers(0, 100))


@given(LINES, SERVED)
def test_everybody_may_be_tried_once(line: tuple[Waiting, ...], served: dict[str, int]) -> None:
    assert sorted(order(line, served)) == [w.key for w in line]


@given(LINES, SERVED)
def test_within_a_tenant_the_oldest_comes_first(line: tuple[Waiting, ...], served: dict[str, int]) -> None:
    tried = order(line, served)
    for tenant in TENANTS:
        own = [key for key in tried if line[key].tenant == tenant]
        assert own == sorted(own)


@given(LINES, SERVED)
def test_no_tenant_gets_a_second_turn_before_others_had_one(line: tuple[Waiting, ...], served: dict[str, int]) -> None:
    """At any point of the order, tenants that still wait have had as many turns as any other, or one fewer."""
    left, had = Counter(w.tenant for w in line), Counter[str]()
    for key in order(line, served):
        tenant = line[key].tenant
        assert had[tenant] == min(had[t] for t in left if had[t] < left[t])
        had[tenant] += 1


@given(LINES, SERVED)
def test_the_tenant_served_longest_ago_goes_first(line: tuple[Waiting, ...], served: dict[str, int]) -> None:
    tried = order(line, served)
    if tried:
        assert served.get(line[tried[0]].tenant, -1) == min(served.get(w.tenant, -1) for w in line)


@given(LINES.filter(bool), SERVED, st.data())
def test_one_that_was_bypassed_often_enough_stops_the_line(
    line: tuple[Waiting, ...], served: dict[str, int], data: st.DataObject
) -> None:
    starved = data.draw(st.sets(st.sampled_from(range(len(line))), min_size=1))
    line = tuple(Waiting(w.key, w.tenant, MAX_BYPASSED if w.key in starved else w.bypassed) for w in line)
    assert order(line, served) == [min(starved)]


def test_nobody_waits() -> None:
    assert order((), {}) == []


def test_one_tenant_with_many_requests_does_not_hold_up_another() -> None:
    """Agent a asked five times before b asked once; a was served last, so b is next and a's oldest follows."""
    line = (*(Waiting(key, "a") for key in range(5)), Waiting(5, "b"))
    assert order(line, {"a": 1}) == [5, 0, 1, 2, 3, 4]
    assert order(line, {"b": 1}) == [0, 5, 1, 2, 3, 4]
