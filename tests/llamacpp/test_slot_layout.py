"""Layouts of the KV state: every form is walked to its end, and values decide, not where they lie."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.slot_files import compare, fingerprint_bytes, is_whole
from llamacpp.slot_layout import layout_of
from tests.fakes.slot_bytes import attention_state, checkpoints, slot_file

TOKENS = [7, 0, 151643, 2]


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "slot.bin"
    path.write_bytes(data)
    return path


def part(n_cells: int, *, extra: int = 0, head: int = 0, n_layers: int = 2, values: bool = True) -> bytes:
    """An attention cache: `extra` bytes a cell (M-RoPE), `head` more bytes (version 4), with or without V (MLA)."""
    cells = b"".join(struct.pack("<iI", n, 1) + b"\7" * extra + struct.pack("<i", 3) for n in range(n_cells))
    tensor = struct.pack("<iQ", 1, 4) + b"\0\x3c" * 2 * n_cells
    tensors = tensor * n_layers * (2 if values else 1)
    return struct.pack("<II", 1, n_cells) + cells + struct.pack("<II", 0, n_layers) + bytes(head) + tensors


def recurrent(n_rows: int) -> bytes:
    """One cell; R and S rows of the layers that have any (float32)."""
    rows = (struct.pack("<iQ", 0, 8) + bytes(8)) * n_rows
    return struct.pack("<IiIII", 1, 40, 0, 0, 8) + rows


@pytest.mark.parametrize(
    ("state", "n_tensors", "n_cells"),
    [
        (part(5), 4, [5]),
        (part(5, head=8), 4, [5]),
        (part(5, extra=8), 4, [5]),
        (part(5, extra=8, head=8), 4, [5]),
        (part(5, values=False), 2, [5]),
        (part(5) + part(3), 8, [5, 3]),  # SWA: full layers, then local ones
        (part(5, n_layers=0) + part(3), 4, [5, 3]),  # all layers local
        (part(5, n_layers=0, head=8) + part(3, head=8) + checkpoints(b"xyz"), 4, [5, 3]),
        (part(5, head=8) + recurrent(4) + checkpoints(b""), 8, [5]),
        (recurrent(4), 4, []),
    ],
)
def test_every_form_is_walked_to_its_end(state: bytes, n_tensors: int, n_cells: list[int]) -> None:
    found = layout_of(io.BytesIO(state), 0, len(state))
    assert found is not None
    assert (len(found.tensors), [cells.count for cells in found.cells], found.end) == (n_tensors, n_cells, len(state))


@given(st.binary(max_size=300))
def test_other_bytes_have_no_layout_or_one_inside_them(data: bytes) -> None:
    found = layout_of(io.BytesIO(data), 0, len(data))
    if found is not None:
        assert found.state_end <= found.end == len(data)
        assert all(t.offset + t.n_bytes <= len(data) for t in found.tensors)


def test_order_of_the_cells_does_not_count() -> None:
    """A slot that was filled where the pool wraps around has its last positions first."""
    plain = attention_state(4, rows=(b"aabbccdd", b"AABBCCDD"))
    wrapped = attention_state(4, rows=(b"ccddaabb", b"CCDDAABB"), positions=[2, 3, 0, 1])
    assert compare(slot_file(TOKENS, state=plain), slot_file(TOKENS, state=wrapped))
    moved = attention_state(4, rows=(b"ccddaabb", b"AABBCCDD"), positions=[2, 3, 0, 1])
    assert not compare(slot_file(TOKENS, state=plain), slot_file(TOKENS, state=moved))


def test_order_of_the_cells_does_not_count_in_a_transposed_v() -> None:
    """Two values of each of four cells: a1 b1 c1 d1, a2 b2 c2 d2."""
    keys = bytes(8)
    plain = attention_state(4, rows=(keys, b"a1b1c1d1a2b2c2d2"), transposed=True)
    wrapped = attention_state(4, rows=(keys, b"d1a1b1c1d2a2b2c2"), positions=[3, 0, 1, 2], transposed=True)
    assert fingerprint_bytes(slot_file(TOKENS, state=wrapped)) == slot_file(TOKENS, state=plain)


def test_checkpoints_do_not_count_but_must_be_whole(tmp_path: Path) -> None:
    """How many there are depends on `-ub`, not on how values are computed."""
    plain = slot_file(TOKENS)
    one, two = plain + checkpoints(b"state"), plain + checkpoints(b"state", b"another")
    assert compare(one, two)
    assert fingerprint_bytes(two) == plain
    assert is_whole(write(tmp_path, two))
    assert not any(is_whole(write(tmp_path, two[:cut])) for cut in range(len(plain) + 1, len(two)))


def halves(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ((1.0, -2.0, 0.001, 4.0), True),
        ((1.005, -2.0, 0.001, 4.0), True),  # half a percent
        ((1.0, -2.0, 0.004, 4.0), True),  # small beside its tensor
        ((1.1, -2.0, 0.001, 4.0), False),
        ((1.0, 2.0, 0.001, 4.0), False),
        ((1.0, float("nan"), 0.001, 4.0), False),
    ],
)
def test_values_within_one_percent_are_the_same(values: tuple[float, ...], same: bool) -> None:
    v = halves(1.0, 1.0, 1.0, 1.0)
    one = slot_file(TOKENS, state=attention_state(4, rows=(halves(1.0, -2.0, 0.001, 4.0), v)))
    other = slot_file(TOKENS, state=attention_state(4, rows=(halves(*values), v)))
    assert compare(one, other) is same


@pytest.mark.parametrize(("kind", "letter"), [(0, "f"), (30, "H")])
def test_float32_and_bfloat16_are_compared_by_value(kind: int, letter: str) -> None:
    def state(high: int) -> bytes:
        bits = [0x3F80 + high, 0x4000, 0x4040, 0x4080]  # about 1, 2, 3, 4 as bfloat16
        data = struct.pack("<4H", *bits) if letter == "H" else struct.pack("<4I", *(b << 16 for b in bits))
        return attention_state(4, rows=(data, data), kind=kind)

    same, near, far = (slot_file(TOKENS, state=state(high)) for high in (0, 1, 16))
    assert compare(same, near)
    assert not compare(same, far)


def test_quantised_values_must_be_equal() -> None:
    one, other = (slot_file(TOKENS, state=attention_state(4, rows=(bytes([n] * 8), bytes(8)), kind=8)) for n in (1, 2))
    assert compare(one, one)
    assert not compare(one, other)
