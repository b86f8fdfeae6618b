"""Slot files of the real format without an engine: one attention cache, as llama.cpp writes it (version 3)."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence


def packed_words(tokens: bytes, media: Sequence[int] = ()) -> bytes:
    """`server_tokens::serialize`: -1, version 1, n, tokens, m, media positions (their chunks left out)."""
    return struct.pack("<iII", -1, 1, len(tokens) // 4) + tokens + struct.pack(f"<I{len(media)}I", len(media), *media)


def attention_state(
    n_cells: int,
    *,
    slot: int = 0,
    rows: Sequence[bytes] | None = None,
    kind: int = 1,
    positions: Sequence[int] | None = None,
    transposed: bool = False,
) -> bytes:
    """One stream of n_cells cells and one layer; `rows`: the bytes of K and V; `transposed`: V value by value."""
    if n_cells == 0:
        return struct.pack("<II", 1, 0)
    cells = b"".join(struct.pack("<iIi", position, 1, slot) for position in positions or range(n_cells))
    k, v = rows or (b"\x00\x3c" * 2 * n_cells, b"\x00\x38" * 2 * n_cells)
    keys = struct.pack("<iQ", kind, len(k) // n_cells) + k
    shape = (
        struct.pack("<iII", kind, 2, len(v) // n_cells // 2)
        if transposed
        else struct.pack("<iQ", kind, len(v) // n_cells)
    )
    return struct.pack("<II", 1, n_cells) + cells + struct.pack("<II", transposed, 1) + keys + shape + v


def checkpoints(*states: bytes) -> bytes:
    """What b11549 writes behind SWA and recurrent states."""
    each = (struct.pack("<qiiQ", 44, 0, 43, len(state)) + state + bytes(16) for state in states)
    return struct.pack("<4sII", b"SCKP", 1, len(states)) + b"".join(each)


def slot_file(tokens: Sequence[int] | bytes, *, slot: int = 0, state: bytes | None = None, version: int = 3) -> bytes:
    """A whole slot file that holds these tokens (ids or packed)."""
    packed = tokens if isinstance(tokens, bytes) else array("i", tokens).tobytes()
    words = packed_words(packed)
    body = attention_state(len(packed) // 4, slot=slot) if state is None else state
    return struct.pack("<4sII", b"qsgg", version, len(words) // 4) + words + body
