"""Engines of an earlier run of ours that are still there: found by their pid files, and ended.

A pid alone may belong to somebody else by now; pid and start time together do not.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

_PATTERN = "engine-*.json"
# How long a killed process may stay visible before we go on without it. Seconds.
_PATIENCE = 5.0


def start_time(pid: int) -> str | None:
    """What distinguishes this process from a later one of the same number; None when there is no such process."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        # man 5 proc: field 3 is the state (Z: dead, not yet reaped), field 22 the start in ticks since boot.
        return None if fields[0] == b"Z" else f"{_boot_id()}:{int(fields[19])}"
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def record(state_dir: Path, pid: int, port: int) -> Path:
    """Write the pid file of a new engine; returns its path. An unwritable directory is not a reason not to start."""
    path = state_dir / f"engine-{port}.json"
    facts = {"pid": pid, "started": start_time(pid), "owner": os.getpid(), "owner_started": start_time(os.getpid())}
    temporary = path.with_suffix(".tmp")
    with contextlib.suppress(OSError):
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_text(json.dumps(facts))
        temporary.replace(path)
    return path


def end_leftovers(state_dir: Path) -> list[int]:
    """Kill every recorded engine whose owner is gone, remove its pid file; returns the pids that were killed.

    Engines of a living owner (ourselves, while we restart one of several) are left alone.
    """
    ended: list[int] = []
    for path in sorted(state_dir.glob(_PATTERN)):
        facts = _read(path)
        if facts is not None and _is_alive(facts, "owner"):
            continue
        if facts is not None and _is_alive(facts, "pid") and _kill(facts["pid"]):
            ended.append(facts["pid"])
        path.unlink(missing_ok=True)
    return ended


def _read(path: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads(path.read_text())
        return facts if isinstance(facts["pid"], int) and isinstance(facts["owner"], int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_alive(facts: dict[str, Any], who: str) -> bool:
    started = facts.get("started" if who == "pid" else "owner_started")
    return started is not None and start_time(facts[who]) == started


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    # It is nobody's child here, so there is no wait(): look until it has gone and its port with it.
    deadline = time.monotonic() + _PATIENCE
    while start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return True
