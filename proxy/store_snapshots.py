"""Changes to snapshots: scanning, room, publication, eviction. `proxy/store.py` adds ledgers, requests and its life."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex

from policies.retention import superseded
from proxy import store_files
from proxy.errors import StoreError
from proxy.state_dir import StateDirLock, ensure_private_dir, explain_os_error
from proxy.store_base import StoreBase
from proxy.store_files import Expected, Scan
from proxy.store_index import line_item
from proxy.store_types import (
    FINGERPRINT,
    TEMP_NAME,
    Kind,
    Snapshot,
    snapshot_id,
    snapshot_name,
    stored_dir,
)

DISK_RESERVE = 16 * 2**20  # bytes of a disk that snapshots leave to state.db and the logs
MOST_PROMPT_BYTES = 16 * 2**20  # a body that is kept beside its snapshot; agents' are 0.05 to 2 MB
LOCK_NAME = ".slotkeeper.lock"  # in an attached engine's slot directory: two proxies would delete each other's files


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What prune or purge deleted: snapshots, files that no record named, and the recorded bytes that freed."""

    snapshots: int
    orphans: int
    bytes: int


class SnapshotStore(StoreBase):
    """Every change to the snapshots. Decides in plain def, carries out in the writer's thread."""

    async def add_dir(self, path: Path, *, evict: bool = True) -> Path:
        """Begin to use a slots directory: match its files with the records, adopt or delete what no record names.

        `evict`: then bring the files within the budget.

        Our own lies in the state directory and is made private. Another one (an attached engine's) keeps its mode and
        its other files, and is locked. Returns the path as snapshots carry it in `dir`, without symbolic links.
        Raises StoreError: missing, not writable, or used by another Slotkeeper.
        """
        path = path.resolve()  # noqa: ASYNC240 - once per engine, at start
        if path.is_relative_to(self.state_dir):
            ensure_private_dir(path, ours=True)
        elif all(lock.path.parent != path for lock in self._locks):
            self._locks.append(StateDirLock(path, LOCK_NAME).acquire())
        await self._carry_out(self._add_dir(path, evict))
        return path

    async def _add_dir(self, path: Path, evict: bool) -> None:
        await self._rescan(path)
        if evict:
            await self._evict(self._index.room(0).evict)  # the budget may be smaller than in the last run

    async def _rescan(self, path: Path, *, adopt: bool = True) -> Scan:
        recorded = [s for s in self._index.all() if s.dir == path]
        tenants, temps = (self._adopt_for if adopt else ()), set(self._index.temps)
        scan = await self._writer.run(
            lambda _: store_files.scan(path, stored_dir(path, self.state_dir), recorded, tenants, temps)
        )
        adopted = [snapshot for snapshot, _ in scan.adopted]
        await self._record(lambda db: db.delete_snapshots(scan.dropped))
        await self._record(lambda db: db.put_snapshots(map(self._row, adopted)))
        for id_ in scan.dropped:
            self._index.drop(id_)
        for snapshot, tokens in scan.adopted:
            self._index.put(snapshot, tokens)
        for id_, tokens in scan.kept.items():
            self._index.cache(id_, tokens)
        self._index.active.add(path)
        for name, count in (("dropped", len(scan.dropped)), ("adopted", len(adopted)), ("orphans", scan.n_orphans)):
            self.counters[name] += count
        return scan

    def temp_name(self, fingerprint: str) -> str:
        """A name for the engine to save under; ends with `publish` or `discard`. Use `0000` before a fingerprint is
        known.
        """
        if not FINGERPRINT.fullmatch(fingerprint):
            raise ValueError(f"fingerprint {fingerprint!r} is not 4 to 64 hex digits")
        name = f"{fingerprint}-{token_hex(8)}.tmp"
        self._index.temps[name] = 0
        return name

    async def make_room(self, n_bytes: int, *, temp: str | None = None, dir: Path | None = None) -> bool:
        """Evict the least recently used until `n_bytes` more fit the budget and the disk of `dir`; False: they cannot.

        With `temp` (from `temp_name`) the bytes stay reserved for it until it is published or discarded, so that two
        saves at once do not both take the same room. Evicts nothing when it cannot make room.
        """
        if not self.persist:
            return False
        return await self._carry_out(self._make_room(n_bytes, temp, self._resolved(dir or self.slots_dir)))

    async def _make_room(self, n_bytes: int, temp: str | None, path: Path) -> bool:
        if temp in self._index.temps:
            self._index.temps[temp] = 0
        free = await self._writer.run(lambda _: _free_bytes(path))
        room = self._index.room(n_bytes, free=free, disk_of=path)
        if not room.possible or not await self._evict(room.evict):
            return False
        if temp in self._index.temps:
            self._index.temps[temp] = n_bytes
        return True

    async def publish(
        self,
        temp: str,
        *,
        dir: Path,
        fingerprint: str,
        tenant: str,
        model: str,
        kind: Kind,
        line: str | None,
        reason: str,
        expect_tokens: bytes | None = None,
        expect_bytes: int | None = None,
        supersede: bool = False,
    ) -> Snapshot:
        """Check a file that the engine saved as `temp` in `dir`, name it, record it.

        `expect_tokens` (packed) and `expect_bytes` (what the engine reported) are compared when given. The same
        tokens again replace the earlier snapshot, which stays pinned if it was. `supersede` (only where memory can be
        rewound): shorter snapshots of this line that it begins with go. Raises StoreError: the file is not what was
        expected, the disk is full, `temp` is unknown or was cancelled by purge; the temporary file is deleted then.
        """
        path, now = self._resolved(dir), self._now()
        draft = Snapshot("", "", path, fingerprint, tenant, model, kind, line, 0, 0, now, now, reason=reason)
        return await self._carry_out(self._publish(temp, draft, Expected(expect_tokens, expect_bytes), supersede))

    async def _publish(self, temp: str, draft: Snapshot, expected: Expected, supersede: bool) -> Snapshot:
        try:
            if temp not in self._index.temps or not self.persist:
                raise StoreError(f"The slot file {temp} was not asked for, or was cancelled meanwhile; it was deleted.")
            if draft.dir not in self._index.active:
                raise StoreError(f"{draft.dir} is not a directory in use for snapshots: add it first.")
            published = await self._writer.run(lambda _: self._put_file(draft.dir / temp, draft, expected))
        except BaseException:
            await self._writer.run(lambda _: _is_temp(temp) and store_files.delete(draft.dir / temp))
            raise
        finally:
            self._index.temps.pop(temp, None)
        snapshot, tokens, signature = published
        self._index.put(snapshot, tokens)
        if signature is not None:
            self._index.signatures[snapshot.id] = signature
        self.counters["published"] += 1
        if supersede:
            await self._supersede(snapshot, tokens)
        await self._evict(self._index.room(0, keep=snapshot.id).evict)
        return snapshot

    def _put_file(
        self, temp: Path, draft: Snapshot, expected: Expected
    ) -> tuple[Snapshot, bytes, store_files.Signature | None]:
        header = store_files.check_temp(temp, expected)
        file = snapshot_name(draft.fingerprint, draft.tenant, header.tokens)
        id_ = snapshot_id(stored_dir(draft.dir, self.state_dir), file)
        snapshot = replace(draft, id=id_, file=file, n_tokens=header.n_tokens, bytes=header.size_bytes)
        snapshot = replace(snapshot, checksum=_checksum(temp))
        old = self._index.get(id_)
        if old:  # the same tokens in the same place: what people and restores said of it still holds
            kind: Kind = "base" if "base" in (old.kind, draft.kind) else "line"
            snapshot = replace(snapshot, pinned=old.pinned, effective=old.effective, kind=kind)
        store_files.publish(temp, snapshot.path)
        try:
            self._writer.here(lambda db: db.put_snapshots([self._row(snapshot)]))
        except StoreError:
            if not old or old.bytes != snapshot.bytes:  # else the old record is still true of the new file
                store_files.delete(snapshot.path)
            raise
        return snapshot, header.tokens, store_files.signature(snapshot.path)

    async def _supersede(self, new: Snapshot, tokens: bytes) -> None:
        others = [line_item(s, self.tokens(s)) for s in self._index.shorter_of_line(new)]
        gone = superseded(line_item(new, tokens), [item for item in others if item.tokens])
        self.counters["superseded"] += len(await self._remove(gone))

    async def discard(self, temp: str) -> None:
        """Give up a temporary name: its reservation and, if the engine left one, its file."""
        await self._carry_out(self._discard(temp))

    async def _discard(self, temp: str) -> None:
        self._index.temps.pop(temp, None)
        paths = [path / temp for path in self._index.active] if _is_temp(temp) else []
        await self._writer.run(lambda _: [store_files.delete(path) for path in paths])

    async def touch(self, id_: str) -> None:
        """It was used now."""
        now = self._now()
        if self._index.change(id_, last_used=now):
            self._writer.put(lambda batch: batch.last_used.update({id_: now}))

    def mark_effective(self, id_: str, effective: bool) -> None:
        """What a restore of it was seen to be worth: the next `cache_n` proved it, or did not."""
        if self._index.change(id_, effective=effective):
            self._writer.put(lambda batch: batch.effective.update({id_: effective}))

    async def put_prompt(self, id_: str, body: bytes) -> None:
        """Keep the chat body (JSON) that a snapshot was made of, compressed, for as long as its record: an engine
        whose KV is another can process it again. Raises StoreError."""
        if len(body) <= MOST_PROMPT_BYTES:
            await self._writer.run(lambda db: db.put_prompt(id_, zlib.compress(body, 1)))

    async def load_prompt(self, id_: str) -> bytes | None:
        """The chat body that a snapshot was made of; None when none was kept. Raises StoreError."""
        found = await self._writer.run(lambda db: db.prompt(id_))
        try:
            return None if found is None else zlib.decompress(found)
        except zlib.error:
            return None

    async def pin(self, prefix: str) -> Snapshot:
        """Never evict or supersede it. Raises StoreError: unknown id."""
        return await self._carry_out(self._set_pinned(prefix, True))

    async def unpin(self, prefix: str) -> Snapshot:
        """Treat it like any other again. Raises StoreError: unknown id."""
        return await self._carry_out(self._set_pinned(prefix, False))

    async def _set_pinned(self, prefix: str, pinned: bool) -> Snapshot:
        snapshot = self._index.find(prefix)
        await self._writer.run(lambda db: db.set_pinned(snapshot.id, pinned))
        return self._index.change(snapshot.id, pinned=pinned) or snapshot

    async def remove(self, prefix: str) -> Snapshot:
        """Delete one snapshot, pinned or not. Raises StoreError: unknown id, or its file cannot be deleted."""
        return await self._carry_out(self._remove_one(prefix))

    async def _remove_one(self, prefix: str) -> Snapshot:
        snapshot = self._index.find(prefix)
        store_files.require_gone([snapshot], await self._remove([snapshot.id]))
        return snapshot

    async def prune(self) -> PruneReport:
        """Delete orphans, drop records without a good file, evict down to the budget."""
        return await self._carry_out(self._prune())

    async def _prune(self) -> PruneReport:
        before, n_before, orphans = self._index.total_bytes, len(self._index), 0
        for path in list(self._index.active):
            orphans += (await self._rescan(path)).n_orphans
        await self._evict(self._index.room(0).evict)
        return PruneReport(n_before - len(self._index), orphans, before - self._index.total_bytes)

    async def _evict(self, ids: Collection[str]) -> bool:
        gone = await self._remove(ids)
        self.counters["evicted"] += len(gone)
        return len(gone) == len(ids)

    async def _remove(self, ids: Collection[str]) -> set[str]:
        """Delete files, then records; the ids whose files are gone."""
        snapshots = [s for id_ in ids if (s := self._index.get(id_))]
        gone = await self._delete(snapshots)
        for id_ in gone:
            self._index.drop(id_)
        return gone

    def _resolved(self, path: Path) -> Path:
        return path if path in self._index.active else path.resolve()


def _checksum(path: Path) -> str:
    try:
        return store_files.checksum(path)
    except OSError as err:
        raise StoreError(f"Cannot read the slot file just saved: {explain_os_error(err, path)}.") from err


def _is_temp(name: str) -> bool:
    return TEMP_NAME.fullmatch(name) is not None


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free - DISK_RESERVE
    except OSError:
        return None
