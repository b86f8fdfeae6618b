"""GGUF headers without a model: just enough of a writer for tests and the header bench."""

from __future__ import annotations

import struct
from collections.abc import Mapping

Setting = int | float | bool | str | list[int] | list[bool] | list[str]


def gguf_file(metadata: Mapping[str, Setting], *, version: int = 3, n_tensors: int = 0) -> bytes:
    """A header with these keys: int as int32, float as float32, and lists of int32, bool or string."""
    head = struct.pack("<4sIQQ", b"GGUF", version, n_tensors, len(metadata))
    return head + b"".join(_string(key) + _setting(value) for key, value in metadata.items())


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _setting(value: Setting) -> bytes:
    if isinstance(value, list):
        kind = 8 if value and isinstance(value[0], str) else 7 if value and isinstance(value[0], bool) else 5
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_plain(item) for item in value)
    kind = {bool: 7, int: 5, float: 6, str: 8}[type(value)]
    return struct.pack("<I", kind) + _plain(value)


def _plain(value: int | float | bool | str) -> bytes:
    if isinstance(value, str):
        return _string(value)
    return struct.pack({bool: "<?", int: "<i", float: "<f"}[type(value)], value)
