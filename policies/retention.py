"""Which snapshots stay on disk: the byte budget, its least-recently-used order, and what a longer snapshot makes
useless.

Values in, one decision with its reason out; `proxy/store.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

RoomReason = Literal["fits", "evict", "over_budget", "not_enough_evictable"]


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One snapshot as retention sees it.

    `n_bytes` is its size on disk, `last_used` any ordered clock (seconds), `locked` means that it may not go now:
    pinned by a person, or being restored. `effective` is False once a restore of it has been seen to be useless.
    `same_disk` says whether deleting it frees space where the next file is to be written.
    """

    id: str
    n_bytes: int
    last_used: float
    locked: bool = False
    effective: bool | None = None
    same_disk: bool = True


@dataclass(frozen=True, slots=True)
class Room:
    """The decision of `make_room`: `possible`, the ids to evict in order, the bytes that frees, and why."""

    possible: bool
    evict: tuple[str, ...]
    freed: int
    reason: RoomReason


@dataclass(frozen=True, slots=True)
class LineItem:
    """A snapshot with what it holds: `tokens` packed little-endian int32, and the keys that must agree to compare
    it.
    """

    id: str
    line: str | None
    kind: str
    namespace: tuple[str, ...]
    tokens: bytes
    pinned: bool = False


def eviction_order(items: Iterable[StoredItem]) -> list[StoredItem]:
    """Everything that may go, first to go first: proven useless ones, then the least recently used; ids break ties."""
    evictable = [item for item in items if not item.locked]
    return sorted(evictable, key=lambda item: (item.effective is not False, item.last_used, item.id))


def make_room(
    items: Iterable[StoredItem],
    *,
    budget: int,
    temporary: int = 0,
    wanted: int = 0,
    free: int | None = None,
) -> Room:
    """Decide what to evict so that `wanted` more bytes fit.

    Args (all bytes): `budget` for everything stored; `temporary` for copies that are being written now and are not in
    `items` (a replaced snapshot exists twice until its rename, so both count); `free` the space left on the disk that
    the new file goes to, None when unknown. A save that cannot fit evicts nothing: it must not cost the
    snapshots that can serve. With `wanted` 0 the store is over its budget already, and whatever helps goes.
    """
    stored = list(items)
    if wanted and temporary + wanted > budget:
        return Room(False, (), 0, "over_budget")
    over_budget = sum(item.n_bytes for item in stored) + temporary + wanted - budget
    over_disk = 0 if free is None else wanted - free
    victims, possible = _victims(eviction_order(stored), over_budget, over_disk)
    if not possible and wanted:
        victims = []
    freed = sum(item.n_bytes for item in victims)
    reason: RoomReason = "not_enough_evictable" if not possible else "evict" if victims else "fits"
    return Room(possible, tuple(item.id for item in victims), freed, reason)


def _victims(order: list[StoredItem], over_budget: int, over_disk: int) -> tuple[list[StoredItem], bool]:
    """The first of `order` that cover both shortages, and whether they do. One that frees nothing needed is passed
    over.
    """
    victims: list[StoredItem] = []
    for item in order:
        if over_budget <= 0 and over_disk <= 0:
            break
        if over_budget <= 0 and not item.same_disk:
            continue
        victims.append(item)
        over_budget -= item.n_bytes
        over_disk -= item.n_bytes if item.same_disk else 0
    return victims, over_budget <= 0 and over_disk <= 0


def superseded(new: LineItem, others: Iterable[LineItem]) -> tuple[str, ...]:
    """Ids of the snapshots that `new` makes useless: shorter ones of its line whose tokens it begins with.

    Only where memory can be rewound to any position (the caller's knowledge: dense models), since only there does the
    longer file serve every prompt that the shorter one would have served. Bases and pinned ones are never superseded.
    """
    if new.kind != "line" or new.line is None:
        return ()
    return tuple(other.id for other in others if _is_superseded(new, other))


def _is_superseded(new: LineItem, old: LineItem) -> bool:
    return (
        old.id != new.id
        and old.kind == "line"
        and not old.pinned
        and old.line == new.line
        and old.namespace == new.namespace
        and len(old.tokens) < len(new.tokens)
        and new.tokens.startswith(old.tokens)
    )
