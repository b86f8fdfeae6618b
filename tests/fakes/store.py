"""A store with small slot files, as an engine would have saved them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxy.store import Snapshot, Store
from tests.fakes.slot_bytes import slot_file

FP = "abcd1234"
TENANT = "local"


def packed(*ids: int) -> bytes:
    """Packed tokens."""
    return array("i", ids).tobytes()


class Ticks:
    """A clock that moves by one second whenever it is read."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


async def open_store(directory: Path, *, add_dir: bool = True, **options: Any) -> Store:
    """A store in `directory`, its own slots directory in use."""
    now: Callable[[], float] = options.pop("now", None) or Ticks()
    store = await Store.open(directory, now=now, **{"budget": 1 << 20, "max_lines": 5} | options)
    if add_dir:
        await store.add_dir(store.slots_dir)
    return store


def save(store: Store, tokens: bytes, *, fingerprint: str = FP, data: bytes | None = None) -> str:
    """What the engine does: a file under a temporary name."""
    temp = store.temp_name(fingerprint)
    (store.slots_dir / temp).write_bytes(slot_file(tokens) if data is None else data)
    return temp


async def publish(store: Store, *ids: int, **options: Any) -> Snapshot:
    """Save and publish these token ids."""
    temp = save(store, packed(*ids), fingerprint=options.get("fingerprint", FP))
    return await publish_temp(store, temp, **options)


async def publish_temp(store: Store, temp: str, **options: Any) -> Snapshot:
    """Publish a saved file as a line's snapshot, unless options say otherwise."""
    usual = {"dir": store.slots_dir, "fingerprint": FP, "tenant": TENANT, "model": "m", "kind": "line", "line": "L"}
    return await store.publish(temp, **usual | {"reason": "idle"} | options)


def files(store: Store) -> set[str]:
    """Names in its slots directory."""
    return {path.name for path in store.slots_dir.iterdir()}
