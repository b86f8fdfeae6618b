"""Where the tensors lie in the KV state of a slot file, and whether two such states are close.

Layouts (little-endian) from llama.cpp 0c1e57098: `llama_kv_cache::state_write` (one per attention cache; SWA models
have two, hybrid ones an attention and a recurrent part) and `llama_memory_recurrent::state_write`. The file does not
say which parts it has, so each known form is tried and the first that ends exactly at the end of the data is taken.
Found by looking at files of b11549 (version 4): 8 more bytes before the tensors of an attention cache, and, for SWA and
recurrent memory, a section of checkpoints behind the state.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

TOLERANCE = 1e-2
"""Largest difference, relative to the value or to its tensor's root mean square, of equal computations (design.md)."""
F32, F16, BF16 = 0, 1, 30
"""ggml_type numbers (ggml.h)."""
MAX_TYPE, MAX_LAYERS, MAX_CELLS = 64, 4096, 1 << 27
"""Bounds of the believable: beyond them the bytes are something else."""


@dataclass(frozen=True)
class Tensor:
    """One block of values: ggml type, offset and size in bytes, and how many bytes of each cell lie together in it.

    Rows have all of a cell together; a transposed V has one value of every cell, then the next value of every cell.
    """

    type: int
    offset: int
    n_bytes: int
    cell_bytes: int


@dataclass(frozen=True)
class Cells:
    """The cells of one stream of an attention cache: offset, number, bytes each, and the tensors that hold them."""

    offset: int
    count: int
    size: int
    tensors: list[Tensor] = field(default_factory=list)


@dataclass
class Layout:
    """Tensors in file order, attention cells, where the state ends and what lies behind it ends (offsets in bytes)."""

    tensors: list[Tensor] = field(default_factory=list)
    cells: list[Cells] = field(default_factory=list)
    state_end: int = 0
    end: int = 0


class _NotThis(Exception):
    """The bytes are not of the form that was tried."""


@dataclass(frozen=True)
class _Form:
    """One guess: recurrent part or attention cache; M-RoPE cells carry 8 more bytes (`llama_kv_cell_ext`); version 4
    has 8 more before the tensors; MLA caches have no V."""

    recurrent: bool = False
    cell_extra: int = 0
    head_extra: int = 0
    has_v: bool = True


FORMS = (
    *(_Form(cell_extra=c, head_extra=h, has_v=v) for c in (0, 8) for h in (0, 8) for v in (True, False)),
    _Form(recurrent=True),
)
CHECKPOINTS = b"SCKP"


def layout_of(file: BinaryIO, start: int, end: int) -> Layout | None:
    """Walk the state between two offsets (bytes) of a slot file; None when no known form fits all of it."""
    return _walk(_Reader(file, end), start, Layout(end=start), depth=0)


def canonical(data: bytes, start: int) -> bytes:
    """What was computed and nothing else; unchanged when the layout is unknown.

    Sequence numbers (the slot's number) become 0, cells stand in the order of their positions (in a pool that is nearly
    full they may wrap around), checkpoints are left off: how many there are depends on `-ub` and other settings.
    """
    found = layout_of(io.BytesIO(data), start, len(data))
    if found is None:
        return data
    copy = bytearray(data[: found.state_end])
    for cells in found.cells:
        for offset in range(cells.offset, cells.offset + cells.count * cells.size, cells.size):
            copy[offset + cells.size - 4 : offset + cells.size] = b"\0\0\0\0"
        _sort(copy, cells)
    return bytes(copy)


def _sort(data: bytearray, cells: Cells) -> None:
    at = range(cells.offset, cells.offset + cells.count * cells.size, cells.size)
    positions = [int.from_bytes(data[offset : offset + 4], "little", signed=True) for offset in at]
    order = sorted(range(cells.count), key=positions.__getitem__)
    if positions == sorted(positions):
        return
    _permute(data, cells.offset, cells.size, order)
    for tensor in filter(lambda tensor: tensor.n_bytes, cells.tensors):
        for stripe in range(tensor.offset, tensor.offset + tensor.n_bytes, tensor.cell_bytes * cells.count):
            _permute(data, stripe, tensor.cell_bytes, order)


def _permute(data: bytearray, offset: int, size: int, order: list[int]) -> None:
    old = bytes(data[offset : offset + size * len(order)])
    data[offset : offset + len(old)] = b"".join(old[i * size : (i + 1) * size] for i in order)


def values_close(a: bytes, b: bytes, start: int) -> bool:
    """Whether two canonical files of equal length have one layout, equal bytes outside and close values in the
    tensors.
    """
    one, two = layout_of(io.BytesIO(a), start, len(a)), layout_of(io.BytesIO(b), start, len(b))
    if one is None or two is None or one.tensors != two.tensors:
        return False
    at = 0
    for tensor in one.tensors:
        stop = tensor.offset + tensor.n_bytes
        if a[at : tensor.offset] != b[at : tensor.offset]:
            return False
        if not _close(tensor.type, a[tensor.offset : stop], b[tensor.offset : stop]):
            return False
        at = stop
    return a[at:] == b[at:]


class _Reader:
    """Little-endian fields at given offsets, never beyond the end."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self.file, self.end = file, end

    def fields(self, at: int, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.take(at, struct.calcsize(form)))

    def take(self, at: int, n_bytes: int) -> bytes:
        if n_bytes < 0 or at + n_bytes > self.end:
            raise _NotThis
        self.file.seek(at)
        data = self.file.read(n_bytes)
        if len(data) != n_bytes:
            raise _NotThis
        return data


def _walk(reader: _Reader, at: int, so_far: Layout, depth: int) -> Layout | None:
    if at == reader.end:
        return so_far if depth else None
    if depth and reader.end - at >= 12 and reader.take(at, 4) == CHECKPOINTS:
        return so_far if _checkpoints_end(reader, at) == reader.end else None
    if depth == 4:  # base and SWA attention, recurrent, one to spare
        return None
    for form in FORMS:
        part = Layout()
        try:
            stop = _recurrent(reader, at, part) if form.recurrent else _attention(reader, at, part, form)
        except _NotThis:
            continue
        joined = Layout(so_far.tensors + part.tensors, so_far.cells + part.cells, stop, reader.end)
        if (found := _walk(reader, stop, joined, depth + 1)) is not None:
            return found
    return None


def _checkpoints_end(reader: _Reader, at: int) -> int | None:
    """Version 1, count, then for each: n_tokens (8 bytes), pos_min, pos_max and three sized blocks."""
    try:
        _, count = reader.fields(at + 4, "<II")
        at += 12
        for _ in range(count):
            at += 16
            for _ in range(3):
                at += 8 + reader.fields(at, "<Q")[0]
    except _NotThis:
        return None
    return at


def _attention(reader: _Reader, at: int, part: Layout, form: _Form) -> int:
    (n_streams,) = reader.fields(at, "<I")
    if not 1 <= n_streams <= 256:
        raise _NotThis
    at += 4
    for _ in range(n_streams):
        (n_cells,) = reader.fields(at, "<I")
        at += 4
        if n_cells:
            at = _cells(reader, at, n_cells, part, form)
            at = _keys_and_values(reader, at, n_cells, part, form)
    return at


def _cells(reader: _Reader, at: int, n_cells: int, part: Layout, form: _Form) -> int:
    """pos, n_seq_id (1: a slot file is of one sequence), [M-RoPE x and y], sequence number."""
    size = 12 + form.cell_extra
    if n_cells > MAX_CELLS:
        raise _NotThis
    block = reader.take(at, size * n_cells)
    for offset in range(0, len(block), size):
        if block[offset + 4 : offset + 8] != b"\1\0\0\0":
            raise _NotThis
    part.cells.append(Cells(at, n_cells, size))
    return at + len(block)


def _keys_and_values(reader: _Reader, at: int, n_cells: int, part: Layout, form: _Form) -> int:
    transposed, n_layers = reader.fields(at, "<II")
    if transposed > 1 or not 0 <= n_layers <= MAX_LAYERS:
        raise _NotThis
    at += 8 + form.head_extra
    first = len(part.tensors)
    for _ in range(n_layers):
        at = _rows(reader, at, n_cells, part)
    if form.has_v:
        for _ in range(n_layers):
            at = _columns(reader, at, n_cells, part) if transposed else _rows(reader, at, n_cells, part)
    part.cells[-1].tensors.extend(part.tensors[first:])
    return at


def _recurrent(reader: _Reader, at: int, part: Layout) -> int:
    """Layers without state are left out and not counted, so rows are read until they end."""
    (n_cells,) = reader.fields(at, "<I")
    if not 1 <= n_cells <= 256:
        raise _NotThis
    for cell in range(n_cells):
        if reader.fields(at + 4 + 8 * cell, "<iI")[1] != 0:
            raise _NotThis
    at += 4 + 8 * n_cells
    transposed, n_layers = reader.fields(at, "<II")
    if transposed or not 0 <= n_layers <= MAX_LAYERS:
        raise _NotThis
    at += 8
    for _ in range(2 * n_layers):
        if at == reader.end or reader.take(at, 4) == CHECKPOINTS:
            break
        at = _rows(reader, at, n_cells, part)
    return at


def _rows(reader: _Reader, at: int, n_cells: int, part: Layout) -> int:
    kind, row = reader.fields(at, "<iQ")
    return _tensor(reader, at + 12, Tensor(kind, at + 12, row * n_cells, row), part)


def _columns(reader: _Reader, at: int, n_cells: int, part: Layout) -> int:
    kind, size, n_rows = reader.fields(at, "<iII")
    return _tensor(reader, at + 12, Tensor(kind, at + 12, size * n_rows * n_cells, size), part)


def _tensor(reader: _Reader, at: int, tensor: Tensor, part: Layout) -> int:
    if not 0 <= tensor.type < MAX_TYPE or at + tensor.n_bytes > reader.end:
        raise _NotThis
    part.tensors.append(tensor)
    return at + tensor.n_bytes


def _close(kind: int, a: bytes, b: bytes) -> bool:
    if a == b:
        return True
    if kind not in (F32, F16, BF16):
        return False
    one, two = list(_values(kind, a)), list(_values(kind, b))
    floor = min(_root_mean_square(one), _root_mean_square(two))
    return all(abs(x - y) <= TOLERANCE * max(abs(x), abs(y), floor) for x, y in zip(one, two, strict=True))


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(x * x for x in values) / len(values))


def _values(kind: int, data: bytes) -> Iterator[float]:
    if kind == BF16:  # the upper half of a float32
        wide = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        return iter(struct.unpack(f"<{len(data) // 2}f", wide))
    width, letter = (4, "f") if kind == F32 else (2, "e")
    return iter(struct.unpack(f"<{len(data) // width}{letter}", data))
