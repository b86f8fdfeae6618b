"""Token ids as they are kept and compared: little-endian int32, as llama.cpp writes them to slot files."""

from __future__ import annotations

import array
import sys


def pack(tokens: list[int]) -> bytes:
    """Token ids to packed tokens (little-endian int32). Raises TypeError or OverflowError for what is no token id."""
    packed = array.array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> list[int]:
    """Packed tokens to token ids."""
    tokens = array.array("i")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()
