"""The state directory: private, and one proxy's at a time."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.errors import StoreError
from proxy.state_dir import StateDirLock, ensure_private_dir
from tests.fakes.store import files, open_store, publish

HOLDER = """
import sys
from pathlib import Path
from proxy.state_dir import StateDirLock
StateDirLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock of tmp_path until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_new_directory_is_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = ensure_private_dir(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    assert mode(path) == 0o700


@pytest.mark.parametrize("name", ["state.db", "engine-0.json", "models"])
def test_a_directory_of_ours_is_made_private(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    tmp_path.chmod(0o755)
    assert mode(ensure_private_dir(tmp_path)) == 0o700


def test_somebody_elses_open_directory_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """`--state-dir /tmp` must not lock everybody else out of /tmp."""
    (tmp_path / "thesis.tex").write_bytes(b"")
    tmp_path.chmod(0o1777)
    with pytest.raises(StoreError, match="new or empty directory"):
        ensure_private_dir(tmp_path)
    assert mode(tmp_path) == 0o1777
    tmp_path.chmod(0o700)
    assert ensure_private_dir(tmp_path) == tmp_path


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"choose another --state-dir"):
            ensure_private_dir(path)


def test_a_directory_that_nobody_may_write_is_refused() -> None:
    """/proc refuses root as well."""
    with pytest.raises(StoreError, match="Cannot use the directory /proc/slotkeeper"):
        ensure_private_dir(Path("/proc/slotkeeper"))


def test_a_second_lock_is_refused_and_names_the_owner(tmp_path: Path) -> None:
    with StateDirLock(tmp_path) as lock:
        assert lock.is_held and mode(lock.path) == 0o600
        with pytest.raises(StoreError, match=f"process {os.getpid()}"):
            StateDirLock(tmp_path).acquire()
    assert not lock.is_held
    with StateDirLock(tmp_path):
        pass


def test_the_lock_of_another_process_is_respected_and_ends_with_it(
    tmp_path: Path, holder: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(StoreError, match=f"in use by another Slotkeeper \\(process {holder.pid}\\)"):
        StateDirLock(tmp_path).acquire()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with StateDirLock(tmp_path) as lock:
        assert lock.is_held


async def test_a_store_in_use_refuses_a_second_one_and_keeps_working(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    with pytest.raises(StoreError, match="in use"):
        await open_store(tmp_path)
    await publish(store, 1, 2)
    await store.close()
    await (await open_store(tmp_path)).close()


async def test_a_lock_that_was_taken_before_is_used_and_left_held(tmp_path: Path) -> None:
    with StateDirLock(tmp_path) as lock:
        await (await open_store(tmp_path, lock=lock)).close()
        assert lock.is_held
        store = await open_store(tmp_path, lock=lock)
        assert files(store) == set()
        await store.close()


async def test_a_store_that_cannot_open_lets_go_of_its_lock(tmp_path: Path) -> None:
    (tmp_path / "state.db").mkdir()
    with pytest.raises(StoreError):
        await open_store(tmp_path)
    (tmp_path / "state.db").rmdir()
    await (await open_store(tmp_path)).close()


def test_a_symlink_named_lock_is_not_followed(tmp_path: Path) -> None:
    """An attached engine's directory may belong to somebody else."""
    (tmp_path / "precious").write_bytes(b"data")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StoreError, match="Cannot lock"):
        StateDirLock(tmp_path).acquire()
    assert (tmp_path / "precious").read_bytes() == b"data"
