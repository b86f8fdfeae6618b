"""The state directory: private to its owner, and used by one proxy at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from proxy.errors import StoreError

PRIVATE_DIR = 0o700  # contract.md "State directory": snapshots are transcripts
PRIVATE_FILE = 0o600
OUR_ENTRIES = {
    "state.db",
    "state.db-wal",
    "state.db-shm",
    "slots",
    "control.sock",
    "models",
    "logs",
    "lock",
    "template.jinja",
    "disk_budget",
    "engines",
}


def explain_os_error(err: OSError, path: Path) -> str:
    """A sentence for people: what the system said about `path`, and what to do about it."""
    advice = {
        errno.ENOSPC: "the disk is full: free some space, or lower --disk-budget",
        errno.EDQUOT: "the disk quota is used up: free some space, or lower --disk-budget",
        errno.EROFS: "the file system is read-only: choose another --state-dir",
        errno.EACCES: "permission denied: make it writable for this user, or choose another --state-dir",
        errno.EPERM: "not permitted: make it writable for this user, or choose another --state-dir",
        errno.ENOTDIR: "a part of the path is a file: choose another --state-dir",
        errno.EISDIR: "a directory is where a file belongs: move it away, or choose another --state-dir",
        errno.EEXIST: "it exists and is not a directory: choose another --state-dir",
        errno.EFBIG: "the file would pass the allowed file size: raise it (ulimit -f), or lower --disk-budget",
    }.get(err.errno or 0, f"{err.strerror or err}: check the disk, or choose another --state-dir")
    return f"{path}: {advice}"


def ensure_private_dir(path: Path, *, ours: bool = False) -> Path:
    """Create `path` (with parents) as a directory of mode 0700, or make an existing one of ours private.

    `ours`: it lies in a state directory, whatever it holds. Returns the resolved path. Raises StoreError when it
    cannot be created, or when it exists, is open to others and holds other things: narrowing such a directory
    (`/tmp`, a home) would lock its other users out.
    """
    try:
        path.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        path = path.resolve(strict=True)
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            if not ours:
                _refuse_foreign(path)
            path.chmod(PRIVATE_DIR)
    except OSError as err:
        raise StoreError(f"Cannot use the directory {explain_os_error(err, path)}.") from err
    return path


def _refuse_foreign(path: Path) -> None:
    names = {entry.name for entry in os.scandir(path)}
    if "state.db" in names or all(name in OUR_ENTRIES or name.startswith("engine-") for name in names):
        return
    raise StoreError(
        f"{path} holds other files and is open to other users, so it was not made private: "
        "give --state-dir a new or empty directory."
    )


def remember_budget(state_dir: Path, n_bytes: int) -> None:
    """Keep the server's disk budget for `slotkeeper snapshots` without a server, which is told no flags."""
    with suppress(OSError):  # a full disk: whoever is told another budget sees it in the last line of `ls`
        path = state_dir / "disk_budget"
        path.touch(0o600)
        path.write_text(f"{n_bytes}\n", "ascii")


def remembered_budget(state_dir: Path) -> int | None:
    """The disk budget of the last server on this directory, in bytes; None when that is not known."""
    try:
        return int((state_dir / "disk_budget").read_text("ascii"))
    except (OSError, ValueError):
        return None


class StateDirLock:
    """One process per directory, by flock on the file `lock` in it: the kernel lets go of it however we die.

    The file stays; it holds the owner's process id, only for the error's sentence.
    """

    def __init__(self, directory: Path, name: str = "lock") -> None:
        self.path = directory / name
        self._fd: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd is not None

    def acquire(self) -> StateDirLock:
        """Take the lock or raise StoreError (held by another process, or the directory cannot be written)."""
        if self._fd is not None:
            return self
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)
        except OSError as err:
            raise StoreError(f"Cannot lock the directory: {explain_os_error(err, self.path)}.") from err
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            message = self._refusal(err, fd)
            os.close(fd)
            raise StoreError(message) from err
        self._fd = fd
        self._write_pid(fd)
        return self

    def _refusal(self, err: OSError, fd: int) -> str:
        if err.errno not in (errno.EAGAIN, errno.EACCES):
            return f"Cannot lock {explain_os_error(err, self.path)}."
        owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        return (
            f"{self.path.parent} is in use by another Slotkeeper (process {owner or 'unknown'}): "
            "stop that one, or choose another directory (--state-dir)."
        )

    @staticmethod
    def _write_pid(fd: int) -> None:
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            return  # a full disk: the lock itself holds, only the sentence of the next one knows less

    def release(self) -> None:
        """Let go; may be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> StateDirLock:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
