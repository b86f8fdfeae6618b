"""llama-server's slot files: which tokens one holds, and whether two say the same.

Layout (little-endian), from llama.cpp 0c1e57098, checked against files of that build and of b11549:
`llama_context::state_seq_save_file` writes magic, version, a count of 32-bit words and the words, then the memory's
state. The words are `server_tokens::serialize`: -1 (LLAMA_TOKEN_NULL), version 1, n, n tokens, m, m media positions
and chunks. Builds before that form wrote the tokens themselves. A media token stands as -1 among the tokens.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llamacpp.slot_layout import canonical, layout_of, values_close

MAGIC = b"qsgg"
"""LLAMA_FILE_MAGIC_GGSQ (llama.h) as it lies in the file."""
OLDEST_VERSION, NEWEST_VERSION = 2, 99
"""LLAMA_STATE_SEQ_VERSION (llama.h): 3 in llama.cpp 0c1e57098, 4 in b11549. The part read here is the same since 2; a
later version is taken too: a wrong reading shows when the tokens are compared with those that were saved."""
PACKED_VERSION = 1
"""SERVER_TOKENS_STATE_VERSION (tools/server/server-common.cpp)."""
MAX_TOKENS = 1 << 27
"""A count beyond this is damage, not a prompt: 128 Mi tokens are a hundred times the longest context that is served."""

_FIXED = struct.Struct("<4sII")
_NULL_TOKEN = b"\xff\xff\xff\xff"


class BadSlotFile(Exception):
    """A slot file that must not be restored; the message says which file, what is wrong and what to do."""

    def __init__(self, path: Path | str, what: str) -> None:
        super().__init__(f"Slot file {path} {what}; delete it, its prompt will be processed again.")
        self.path = Path(path)


@dataclass(frozen=True)
class SlotFileHeader:
    """What a slot file says about itself.

    tokens: packed little-endian int32, 4 bytes a token; with images, media positions are -1.
    n_tokens: their number. size_bytes: the file's size now. header_bytes: where the KV state starts.
    has_media: the prompt held images or audio, so the tokens alone do not say what was processed.
    """

    tokens: bytes
    n_tokens: int
    size_bytes: int
    header_bytes: int
    has_media: bool = False


def read_header(path: Path | str) -> SlotFileHeader:
    """Read the tokens of a slot file; reads 4 bytes a token and nothing of the KV state.

    Raises BadSlotFile: missing, unreadable, of another kind or version, or shorter than its own header.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _header(file, size, path)
    except OSError as error:
        raise BadSlotFile(path, f"cannot be read ({error.strerror or error})") from error


def is_whole(path: Path | str) -> bool:
    """Whether the KV state ends exactly where the file ends, in a layout that we know.

    False means cut off, or a layout of a model kind that we do not know. True is not sure at one length: a file cut
    right behind its keys looks like one of an MLA cache, which has no values; so compare sizes as well. Reads about 12
    bytes a token and seeks over the tensors. Raises BadSlotFile as `read_header` does.
    """
    header = read_header(path)
    try:
        with open(path, "rb") as file:
            return layout_of(file, header.header_bytes, header.size_bytes) is not None
    except OSError as error:
        raise BadSlotFile(path, f"cannot be read ({error.strerror or error})") from error


def compare(a: bytes, b: bytes) -> bool:
    """Whether two whole slot files of one prompt were computed the same way (design.md, "fingerprint").

    True when their `fingerprint_bytes` are equal, or are of one layout with float16, bfloat16 and float32 values within
    1e-2. Everything else, quantised caches that differ included, is False. Costs about a second for 6 MB that differ:
    call it off the event loop.
    """
    start = _state_start(a)
    one, two = fingerprint_bytes(a), fingerprint_bytes(b)
    if one == two:
        return True
    return start is not None and len(one) == len(two) and values_close(one, two, start)


def fingerprint_bytes(data: bytes) -> bytes:
    """The bytes of a whole slot file without the slot's number, the order of its cells in the pool and checkpoints.

    Equal for every slot of equal engines; unchanged when the layout is one that we do not know.
    """
    start = _state_start(data)
    return data if start is None else canonical(data, start)


def _state_start(data: bytes) -> int | None:
    if len(data) < _FIXED.size:
        return None
    magic, version, n_words = _FIXED.unpack_from(data)
    start = _FIXED.size + 4 * n_words
    known = magic == MAGIC and OLDEST_VERSION <= version <= NEWEST_VERSION
    return start if known and start <= len(data) else None


def _header(file: BinaryIO, size: int, path: Path | str) -> SlotFileHeader:
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size:
        raise BadSlotFile(path, f"is only {size} bytes long")
    magic, version, n_words = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise BadSlotFile(path, "is not a llama-server slot file")
    if not OLDEST_VERSION <= version <= NEWEST_VERSION:
        raise BadSlotFile(path, f"has version {version}, which no supported llama-server writes")
    header_bytes = _FIXED.size + 4 * n_words
    if n_words > MAX_TOKENS or header_bytes > size:
        raise BadSlotFile(path, f"is cut off: it names {n_words} words of prompt and is {size} bytes long")
    words = file.read(4 * n_words)
    if len(words) != 4 * n_words:
        raise BadSlotFile(path, "became shorter while it was read")
    tokens, has_media = _unpack(words, path)
    return SlotFileHeader(tokens, len(tokens) // 4, size, header_bytes, has_media)


def _unpack(words: bytes, path: Path | str) -> tuple[bytes, bool]:
    """The tokens inside `server_tokens::serialize`'s form, or the plain list of older builds."""
    if not words.startswith(_NULL_TOKEN):
        return words, False
    if len(words) < 16:
        raise BadSlotFile(path, "has a damaged token list")
    version, n_tokens = struct.unpack_from("<II", words, 4)
    end = 12 + 4 * n_tokens
    if version != PACKED_VERSION:
        raise BadSlotFile(path, f"has a token list of version {version}, which no supported llama-server writes")
    if end + 4 > len(words):
        raise BadSlotFile(path, "has a damaged token list")
    (n_media,) = struct.unpack_from("<I", words, end)
    if n_media == 0 and end + 4 != len(words):
        raise BadSlotFile(path, "has a damaged token list")
    return words[12:end], n_media > 0
