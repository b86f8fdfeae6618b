"""The store's work on slot files: check, publish, scan, delete. Used by its writer thread; no state of its own."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from llamacpp import slot_files
from llamacpp.slot_files import BadSlotFile, SlotFileHeader
from proxy.errors import StoreError
from proxy.state_dir import PRIVATE_FILE, explain_os_error
from proxy.store_types import SNAPSHOT_NAME, TEMP_NAME, Snapshot, snapshot_id, snapshot_name


@dataclass
class Scan:
    """What a slots directory holds: snapshots with their packed tokens, records without a good file, and others."""

    kept: dict[str, bytes] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    adopted: list[tuple[Snapshot, bytes]] = field(default_factory=list)
    n_orphans: int = 0


@dataclass(frozen=True)
class Expected:
    """What a freshly written file must hold; None: not known."""

    tokens: bytes | None = None
    n_bytes: int | None = None


class Unreadable(StoreError):
    """A file that could not be looked at now (no permission, no file handles left): says nothing about its content."""


def check_snapshot(snapshot: Snapshot) -> SlotFileHeader | None:
    """The header of a recorded file if it is still what was published, else None.

    Looks at its presence, its size and its tokens; a change inside the KV bytes is not seen. Raises Unreadable.
    """
    try:
        if not stat.S_ISREG(snapshot.path.lstat().st_mode):
            return None
        header = slot_files.read_header(snapshot.path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as err:
        raise Unreadable(f"Cannot read the snapshot {explain_os_error(err, snapshot.path)}.") from err
    except BadSlotFile as err:
        if isinstance(err.__cause__, OSError) and not isinstance(err.__cause__, FileNotFoundError):
            raise Unreadable(str(err)) from err
        return None
    same_size = header.size_bytes == snapshot.bytes
    same_tokens = snapshot_name(snapshot.fingerprint, snapshot.tenant, header.tokens) == snapshot.file
    return header if same_size and same_tokens else None


Signature = tuple[int, int, int, int]
"""What changes with a file's content: inode, bytes, times of change of content and of attributes."""


def signature(path: Path) -> Signature | None:
    """None when there is no such file, or it cannot be looked at."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def checksum(path: Path) -> str:
    """xxh3-64 of a whole file, 16 hex digits; some gigabytes a second from the page cache. Raises OSError."""
    state = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return state.hexdigest()


_BLOCK = 4 << 20


def check_temp(path: Path, expected: Expected) -> SlotFileHeader:
    """The header of a file that the engine has just written. Raises StoreError when it is not worth publishing."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise StoreError(
                f"{path} is not a regular file, so it was not published: check who writes to that directory."
            )
        header = slot_files.read_header(path)
    except OSError as err:
        raise StoreError(f"The slot file just saved is not there: {explain_os_error(err, path)}.") from err
    except BadSlotFile as err:
        raise StoreError(str(err)) from err
    problem = _problem(header, expected)
    if problem:
        raise StoreError(f"The slot file {path} {problem}; it was deleted, the prompt will be processed again.")
    return header


def _problem(header: SlotFileHeader, expected: Expected) -> str | None:
    if header.n_tokens == 0:
        return "holds no tokens (the slot was empty)"
    if header.has_media:
        return "holds images or audio, which tokens alone do not name"
    if expected.n_bytes is not None and header.size_bytes != expected.n_bytes:
        return f"has {header.size_bytes} bytes where the engine reported {expected.n_bytes}"
    if expected.tokens is not None and header.tokens != expected.tokens:
        return f"holds {header.n_tokens} tokens that are not the {len(expected.tokens) // 4} expected ones"
    return None


def publish(temp: Path, final: Path) -> None:
    """Make a checked file private and durable, then give it its name. Raises StoreError; then `temp` is still there.

    It is synced first: after a power cut a published name must not stand for a file with holes, whose size and header
    look right. Costs the disk's writing time, in the writer thread.
    """
    try:
        fd = os.open(temp, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fchmod(fd, PRIVATE_FILE)
            os.fsync(fd)
        finally:
            os.close(fd)
        temp.rename(final)
        sync_dir(final.parent)
    except OSError as err:
        raise StoreError(f"Cannot publish a snapshot: {explain_os_error(err, temp)}.") from err


def sync_dir(path: Path) -> None:
    """Make renames in `path` durable; a file system that cannot is left alone."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def delete(path: Path) -> bool:
    """Delete a file; True when it is gone (also when it was not there)."""
    try:
        path.unlink(missing_ok=True)
    except NotADirectoryError:
        return True
    except OSError:
        return False
    return True


def scan(
    path: Path, stored_dir: str, recorded: Iterable[Snapshot], tenants: Collection[str] | None, in_use: Collection[str]
) -> Scan:
    """Compare a slots directory with its records; delete what is nobody's.

    `recorded`: the records of this directory. `tenants`: whom a file without a record may be given to: it is theirs
    if its name is the hash of tenant and tokens; None: such files are left alone. `in_use`: temporary names that are
    being written. Files of other shapes of name are not ours and stay. Raises StoreError when the directory cannot be
    read or written.
    """
    result = Scan()
    by_file = {snapshot.file: snapshot for snapshot in recorded}
    for snapshot in by_file.values():
        with suppress(Unreadable):  # stays recorded; `verify` looks again before it is used
            header = check_snapshot(snapshot)
            if header is not None:
                result.kept[snapshot.id] = header.tokens
            elif delete(snapshot.path):
                result.dropped.append(snapshot.id)
    for name in _names(path):
        if name in by_file or name in in_use:
            continue
        if TEMP_NAME.fullmatch(name):
            result.n_orphans += delete(path / name)
        elif tenants is not None and SNAPSHOT_NAME.fullmatch(name):
            _adopt_or_delete(path / name, stored_dir, tenants, result)
    return result


def _names(path: Path) -> list[str]:
    try:
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
        return [entry.name for entry in os.scandir(path) if not entry.is_dir(follow_symlinks=False)]
    except OSError as err:
        raise StoreError(f"Cannot keep snapshots in {explain_os_error(err, path)}.") from err


def _adopt_or_delete(path: Path, stored_dir: str, tenants: Collection[str], result: Scan) -> None:
    adopted = _adopt(path, stored_dir, tenants)
    if adopted is None:
        result.n_orphans += delete(path)
    else:
        result.adopted.append(adopted)


def _adopt(path: Path, stored_dir: str, tenants: Collection[str]) -> tuple[Snapshot, bytes] | None:
    """A whole file that was renamed but not recorded (killed in between, or state.db lost), for the tenant in its
    hash.
    """
    try:
        if not (stat.S_ISREG(path.lstat().st_mode) and tenants and slot_files.is_whole(path)):
            return None
        header = slot_files.read_header(path)
        path.chmod(PRIVATE_FILE)
        fingerprint = path.name.partition("-")[0]
        for tenant in tenants:
            if snapshot_name(fingerprint, tenant, header.tokens) == path.name:
                return _adopted(path, stored_dir, tenant, header), header.tokens
    except (OSError, BadSlotFile):
        return None
    return None


def _adopted(path: Path, stored_dir: str, tenant: str, header: SlotFileHeader) -> Snapshot:
    mtime = path.stat().st_mtime
    return Snapshot(
        id=snapshot_id(stored_dir, path.name),
        file=path.name,
        dir=path.parent,
        fingerprint=path.name.partition("-")[0],
        tenant=tenant,
        model="",
        kind="line",
        line=None,
        n_tokens=header.n_tokens,
        bytes=header.size_bytes,
        created=mtime,
        last_used=mtime,
        reason="adopted",
        checksum=checksum(path),
    )


def require_gone(snapshots: Collection[Snapshot], gone: set[str]) -> None:
    """Raise StoreError when the files of some snapshots (ids not in `gone`) could not be deleted."""
    left = [str(s.path) for s in snapshots if s.id not in gone]
    if left:
        raise StoreError(f"Cannot delete {', '.join(left)}: make the directory writable, or delete them by hand.")
