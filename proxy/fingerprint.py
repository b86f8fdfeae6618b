"""What makes KV bytes valid, computed by the engine itself (design.md, "fingerprint").

Nothing in a slot file says how its KV was computed, so each engine writes the file of one fixed prompt; equal files
mean that snapshots can be exchanged. Known ones lie in the state directory, named by their short hash.

An engine that was seen before need not process the whole prompt again: it loads the known file, goes back to KEPT
tokens, processes the others on top, and saves. Those rows come from every layer, so an engine that computes differently
(weights, RoPE, attention, cache types) writes others.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import structlog
import xxhash

from llamacpp import slot_files
from llamacpp.client import LlamaClient
from llamacpp.errors import EngineError
from proxy.store import Store

log = structlog.get_logger(__name__)

DIRECTORY = "fingerprints"
"""Where known ones lie in the state directory."""
N_TOKENS = 48
"""Length of the fixed prompt (design.md)."""
KEPT = 40
"""Tokens that are not processed again by an engine that a known file is tried on."""
TEXT = "The quick brown fox jumps over the lazy dog, reads a file, writes 12345 lines and waits for an answer. " * 3
TOKEN_BYTES = 4


class WrongDir(Exception):
    """The engine writes its slot files elsewhere, or where they cannot be read. The message is one sentence."""


async def check_dir(client: LlamaClient, slot: int, slot_dir: Path) -> None:
    """Raises WrongDir when the engine's slot files are not seen in `slot_dir`: one small save into an empty slot tells.

    The file's name is always the same: in a wrong directory it stays, but only one of it, ever. (In a right one any
    later scan of the store takes such a name for a left-over of its own and deletes it.) Raises EngineError.
    """
    path = slot_dir / f"0000-{xxhash.xxh3_64_hexdigest(client.identity.encode())}.tmp"
    try:
        path.unlink(missing_ok=True)
        await client.prime(slot, (await client.tokenize(TEXT))[: 4 * TOKEN_BYTES])
        await client.save_slot(slot, path.name)
        if not path.is_file():
            raise WrongDir(
                f"slots={slot_dir} is not the --slot-save-path of {client.base_url}: the file that it has just saved "
                "is not there, so nothing is kept across its restarts. Name its own directory as it is seen from here."
            )
        with path.open("rb"):
            path.unlink()
    except OSError as error:
        raise WrongDir(
            f"The slot files of {client.base_url} in {slot_dir} cannot be used ({error.strerror or error}), so nothing "
            "is kept across its restarts. Run Slotkeeper as a user who may read and write them."
        ) from None
    finally:
        await client.erase_slot(slot)


async def take(client: LlamaClient, slot: int, slot_dir: Path, store: Store, known_dir: Path) -> str:
    """The fingerprint of an engine, made in an empty slot that nobody uses; the slot is empty again afterwards.

    16 hex digits. Raises EngineError when the engine cannot save, OSError when its file cannot be seen in `slot_dir`.
    """
    tokens = (await client.tokenize(TEXT))[: N_TOKENS * TOKEN_BYTES]
    try:
        newest = await asyncio.to_thread(_newest, known_dir)
        if newest is not None and await _try_known(client, slot, slot_dir, store, newest, tokens):
            return newest.stem
        data = await _saved(client, slot, slot_dir, store, tokens)
        return await asyncio.to_thread(_identify, data, known_dir)
    finally:
        await client.erase_slot(slot)


async def is_unchanged(client: LlamaClient, slot: int, slot_dir: Path | None, store: Store, known: str | None) -> bool:
    """Whether an engine still computes the whole prompt as it did when its fingerprint was taken, in an empty slot that
    is nobody's; the slot is empty again afterwards. True where there is nothing to compare with.

    Raises EngineError, OSError.
    """
    path = store.state_dir / DIRECTORY / f"{known}.bin"
    if known is None or slot_dir is None or not path.is_file():
        return True
    try:
        tokens = (await client.tokenize(TEXT))[: N_TOKENS * TOKEN_BYTES]
        data = await _saved(client, slot, slot_dir, store, tokens)
        return await asyncio.to_thread(_is_same, path, data)
    finally:
        await client.erase_slot(slot)


async def _try_known(client: LlamaClient, slot: int, slot_dir: Path, store: Store, known: Path, tokens: bytes) -> bool:
    """Whether the engine, put on top of a known file's first tokens, writes the rest of that file."""
    copy = store.temp_name("0000")
    try:
        await asyncio.to_thread(shutil.copyfile, known, slot_dir / copy)
        await client.restore_slot(slot, copy)
        await client.prime(slot, tokens[: KEPT * TOKEN_BYTES])
        data = await _saved(client, slot, slot_dir, store, tokens)
        return await asyncio.to_thread(_is_same, known, data)
    except EngineError as error:
        log.info("fingerprint_differs", known=known.stem, error=str(error))
        return False
    finally:
        await store.discard(copy)


async def _saved(client: LlamaClient, slot: int, slot_dir: Path, store: Store, tokens: bytes) -> bytes:
    """The slot file of exactly `tokens`, processed in `slot`."""
    temp = store.temp_name("0000")
    try:
        await client.prime(slot, tokens)
        await client.save_slot(slot, temp)
        return await asyncio.to_thread((slot_dir / temp).read_bytes)
    finally:
        await store.discard(temp)


def _newest(known_dir: Path) -> Path | None:
    """The fingerprint that was used last."""
    known_dir.mkdir(mode=0o700, exist_ok=True)
    return max(known_dir.glob("*.bin"), key=lambda p: p.stat().st_mtime, default=None)


def _is_same(known: Path, data: bytes) -> bool:
    if not slot_files.compare(known.read_bytes(), data):
        return False
    known.touch()
    return True


def _identify(data: bytes, known_dir: Path) -> str:
    """The name of the known fingerprint that a file equals, else a new one."""
    name = xxhash.xxh3_64_hexdigest(slot_files.fingerprint_bytes(data))
    for other in sorted(known_dir.glob("*.bin")):
        if other.stem == name or (other.stat().st_size == len(data) and _is_same(other, data)):
            return other.stem
    temporary = known_dir / f"{name}.tmp"
    temporary.touch(mode=0o600)
    temporary.write_bytes(data)
    temporary.replace(known_dir / f"{name}.bin")
    return name
