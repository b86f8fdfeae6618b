"""The header of a GGUF file, read by hand: facts about a model without loading it.

Format: docs/gguf.md of ggml; versions 2 and 3, little-endian (llama.cpp reads no others here). Long arrays, such as a
vocabulary, are skipped while the header is read and can be had one by one afterwards.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llamacpp.errors import EngineSetupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SHORT_ARRAY = 1024
"""Arrays up to this many numbers (per-layer settings) are kept with the header, longer ones only located."""
MAX_KEYS = 65_536
"""gguf.cpp has no limit; files in the wild have 20 to 60 keys. More than this is damage."""
STRING, ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""gguf_type numbers (gguf.h) and their `struct` letters."""

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class NotGGUF(EngineSetupError):
    """A file that is no readable GGUF; the message names it and says what to do."""

    def __init__(self, path: Path | str, what: str) -> None:
        super().__init__(f"{path} {what}; give a complete GGUF file of version 2 or 3.")
        self.path = Path(path)


@dataclass(frozen=True)
class ArrayPlace:
    """Where a long array lies: element type (gguf_type), number of elements, offset of the first in bytes."""

    type: int
    count: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """What the header says: key-value metadata, long arrays located only, number of tensors, size of the file in
    bytes.
    """

    path: Path
    version: int
    n_tensors: int
    size_bytes: int
    metadata: Mapping[str, Value]
    arrays: Mapping[str, ArrayPlace] = field(default_factory=dict)

    def array(self, key: str) -> list[int] | list[float] | list[bool] | list[str]:
        """All elements of the array `key`, read from the file now. Raises KeyError when there is none, NotGGUF."""
        kept = self.metadata.get(key)
        if isinstance(kept, list):
            return kept
        place = self.arrays[key]
        with _Mapped(self.path) as data:
            return data.array(place)

    def text(self, key: str) -> str | None:
        """The string under `key`, or None."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """The whole number under `key`, or None."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_header(path: Path | str) -> GGUFHeader:
    """Read the metadata of a GGUF file, a quarter of a second for a vocabulary of 250,000 tokens.

    Raises NotGGUF: missing, unreadable, not GGUF, of another version or byte order, or cut off inside the header.
    """
    path = Path(path)
    with _Mapped(path) as data:
        return data.header()


class _Mapped:
    """A GGUF file in memory-mapped form; every read is checked against its end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> _Mapped:
        try:
            with open(self.path, "rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise NotGGUF(self.path, f"cannot be read ({error.strerror or error})") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise NotGGUF(self.path, "is empty") from error
        self.size = len(self.data)
        return self

    def __exit__(self, *_: object) -> None:
        self.data.close()

    def header(self) -> GGUFHeader:
        version, n_tensors, n_keys = self._start()
        metadata: dict[str, Value] = {}
        arrays: dict[str, ArrayPlace] = {}
        at = 24
        for _ in range(n_keys):
            key, at = self._string(at)
            kind, at = self._u32(at), at + 4
            if kind == ARRAY:
                place = self._place(at)
                if place.count <= SHORT_ARRAY and place.type != STRING:
                    metadata[key] = self.array(place)
                else:
                    arrays[key] = place
                at = self._behind(place)
            elif kind == STRING:
                metadata[key], at = self._string(at)
            else:
                metadata[key], at = self._number(kind, at)
        return GGUFHeader(self.path, version, n_tensors, self.size, metadata, arrays)

    def array(self, place: ArrayPlace) -> list[int] | list[float] | list[bool] | list[str]:
        if place.type != STRING:
            end = self._behind(place)
            return list(struct.unpack(f"<{place.count}{_NUMBERS[place.type]}", self.data[place.offset : end]))
        strings, at = [], place.offset
        for _ in range(place.count):
            string, at = self._string(at)
            strings.append(string)
        return strings

    def _start(self) -> tuple[int, int, int]:
        if self.size < len(MAGIC) or self.data[:4] != MAGIC:
            raise NotGGUF(self.path, "is not a GGUF file")
        version = self._u32(4)
        if version not in VERSIONS:
            order = " (big-endian)" if version.to_bytes(4, "big")[0] in VERSIONS else ""
            raise NotGGUF(self.path, f"is GGUF of version {version}{order}, which is not supported")
        n_tensors, n_keys = self._u64(8), self._u64(16)
        if n_keys > MAX_KEYS:
            raise self._damaged()
        return version, n_tensors, n_keys

    def _place(self, at: int) -> ArrayPlace:
        kind, count = self._u32(at), self._u64(at + 4)
        if (kind != STRING and kind not in _NUMBERS) or count > self.size:
            raise self._damaged()
        return ArrayPlace(kind, count, at + 12)

    def _behind(self, place: ArrayPlace) -> int:
        """Offset behind an array. For strings every length has to be walked: the only slow part of a header."""
        at = place.offset
        if place.type != STRING:
            at += place.count * struct.calcsize(_NUMBERS[place.type])
        else:
            unpack, data = _U64.unpack_from, self.data
            try:
                for _ in range(place.count):
                    at += 8 + unpack(data, at)[0]
            except (struct.error, OverflowError) as error:
                raise self._damaged() from error
        if at > self.size:
            raise self._damaged()
        return at

    def _string(self, at: int) -> tuple[str, int]:
        start = at + 8
        end = start + self._u64(at)
        if end > self.size:
            raise self._damaged()
        return self.data[start:end].decode("utf-8", "surrogateescape"), end

    def _number(self, kind: int, at: int) -> tuple[int | float | bool, int]:
        letter = _NUMBERS.get(kind)
        if letter is None or at + struct.calcsize(letter) > self.size:
            raise self._damaged()
        value: int | float | bool = struct.unpack_from(f"<{letter}", self.data, at)[0]
        return value, at + struct.calcsize(letter)

    def _u32(self, at: int) -> int:
        return self._field(_U32, at)

    def _u64(self, at: int) -> int:
        return self._field(_U64, at)

    def _field(self, form: struct.Struct, at: int) -> int:
        if at + form.size > self.size:
            raise self._damaged()
        value: int = form.unpack_from(self.data, at)[0]
        return value

    def _damaged(self) -> NotGGUF:
        return NotGGUF(self.path, "is cut off or damaged inside its header")
