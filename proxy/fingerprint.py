"""What makes KV bytes valid, computed by the engine itself (design.md, "fingerprint").

Nothing in a slot file says how its KV was computed, so each engine writes the file of one fixed prompt; equal files
mean that snapshots can be exchanged. Known ones lie in the state directory, one file each, named by their short hash.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog
import xxhash

from llamacpp import slot_files
from llamacpp.client import LlamaClient
from proxy.store import Store

log = structlog.get_logger(__name__)

N_TOKENS = 48
"""Length of the fixed prompt (design.md)."""
TEXT = (
    "The quick brown fox jumps over the lazy dog, reads a file, writes 12345 lines of code and waits for an answer. "
    * 3
)


async def take(client: LlamaClient, slot: int, slot_dir: Path, store: Store, known_dir: Path) -> str:
    """The fingerprint of an engine, made in an empty slot that nobody uses; the slot is empty again afterwards.

    16 hex digits. Raises EngineError when the engine cannot save, OSError when its file cannot be seen in `slot_dir`.
    """
    tokens = (await client.tokenize(TEXT))[: 4 * N_TOKENS]
    temp = store.temp_name("0000")
    try:
        await client.prime(slot, tokens)
        await client.save_slot(slot, temp)
        return await asyncio.to_thread(_identify, slot_dir / temp, known_dir)
    finally:
        await store.discard(temp)
        await client.erase_slot(slot)


def _identify(file: Path, known_dir: Path) -> str:
    """The name of the known fingerprint that a file equals, else a new one."""
    data = file.read_bytes()
    canonical = slot_files.fingerprint_bytes(data)
    name = xxhash.xxh3_64_hexdigest(canonical)
    known_dir.mkdir(mode=0o700, exist_ok=True)
    path = known_dir / f"{name}.bin"
    if path.exists():
        return name
    for other in sorted(known_dir.glob("*.bin")):
        if other.stat().st_size == len(data) and slot_files.compare(other.read_bytes(), data):
            return other.stem
    temporary = path.with_suffix(".tmp")
    temporary.touch(mode=0o600)
    temporary.write_bytes(data)
    temporary.replace(path)
    return name
