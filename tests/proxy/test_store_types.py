"""Names that tell whose a file is, and records that come back as they went."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.store_types import SNAPSHOT_NAME, LedgerRecord, Snapshot, from_row, snapshot_id, snapshot_name, to_row

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
record = st.builds(
    LedgerRecord,
    line=text,
    tenant=text,
    session=text,
    agent=text,
    base=st.binary(max_size=20),
    chain=st.lists(st.binary(max_size=20), max_size=5).map(tuple),
    n_tokens=st.integers(0, 2**40),
    updated=st.floats(0, 2e9),
    parent=st.none() | text,
    tokens=st.binary(max_size=20),
    extra=st.dictionaries(text, st.none() | st.integers(-9, 9) | text | st.lists(st.booleans())),
)


@given(record)
def test_a_ledger_comes_back_as_it_went(one: LedgerRecord) -> None:
    assert LedgerRecord.from_blob(one.to_blob()) == one


@given(record, st.data())
def test_a_cut_ledger_is_refused(one: LedgerRecord, data: st.DataObject) -> None:
    blob = one.to_blob()
    with pytest.raises(ValueError, match="not a ledger record"):
        LedgerRecord.from_blob(blob[: data.draw(st.integers(0, len(blob) - 1))])


@given(st.binary(max_size=60))
def test_bytes_of_something_else_are_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match="not a ledger record"):
        LedgerRecord.from_blob(blob)


@given(text, text, st.binary(max_size=12), st.binary(max_size=12))
@example("x\0y", "x", b"", b"y\0")
def test_only_the_same_tenant_with_the_same_tokens_gets_the_same_name(a: str, b: str, one: bytes, two: bytes) -> None:
    names = (snapshot_name("abcd", a, one), snapshot_name("abcd", b, two))
    assert (names[0] == names[1]) == ((a, one) == (b, two))
    assert all(SNAPSHOT_NAME.fullmatch(name) for name in names)


def test_a_row_inside_the_state_directory_is_relative() -> None:
    name = snapshot_name("abcd", "t", b"1234")
    for directory, stored in ((Path("/state/slots"), "slots"), (Path("/engine"), "/engine")):
        id_ = snapshot_id(stored, name)
        one = Snapshot(id_, name, directory, "abcd", "t", "m", "base", "L", 1, 9, 1.0, 2.0, True, False, "idle")
        row = to_row(one, Path("/state"))
        assert row[2] == stored
        assert from_row(row, Path("/state")) == one
