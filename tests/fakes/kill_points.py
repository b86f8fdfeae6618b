"""Kills a process with SIGKILL before each single file or database call of the store's thread, one process per call.

`python -m tests.fakes.kill_points DIRECTORY STORY` prints one JSON line per kill: what the directory held afterwards,
as a fresh process sees it. The last line is the run that nobody killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

from llamacpp import slot_files
from proxy.store import Store
from tests.fakes.store import TENANT, files, open_store, publish

KILLED_MODULES = {"posix", "_io", "io", "sqlite3", "_sqlite3"}


async def prepare(path: Path) -> None:
    """What every story starts from: two snapshots of one line, one of another."""
    store = await open_store(path)
    await publish(store, 1, 2)
    await publish(store, 7, 8, 9, line="M")
    await store.close()


async def publish_longer(store: Store) -> None:
    """Publishes a longer snapshot, which supersedes one."""
    await publish(store, 1, 2, 3, supersede=True)


async def replace_same(store: Store) -> None:
    """Publishes the same tokens again."""
    await publish(store, 1, 2)


async def make_room(store: Store) -> None:
    """Evicts one."""
    await store.make_room(store.budget - store.total_bytes + 1)


async def purge(store: Store) -> None:
    """Deletes everything."""
    await store.purge()


STORIES: dict[str, Callable[[Store], Awaitable[None]]] = {
    story.__name__: story for story in (publish_longer, replace_same, make_room, purge)
}


def kill_before(n: int) -> Callable[[FrameType, str, Any], None]:
    """A profile function that kills this process before its n-th call into a file or database function."""
    left = n

    def profile(_: FrameType, event: str, called: Any) -> None:
        nonlocal left
        if event == "c_call" and _touches_disk(called):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return profile


def _touches_disk(called: Any) -> bool:
    owner = getattr(called, "__self__", None)
    return called.__module__ in KILLED_MODULES or isinstance(owner, sqlite3.Connection | sqlite3.Cursor)


async def act(path: Path, story: str, n: int) -> None:
    """Open the store, then play the story under the knife. Only the writer's thread, which starts in open, is
    watched.
    """
    threading.setprofile(None)
    store = await open_store(path)
    armed = kill_before(n)
    await store._writer.run(lambda _: sys.setprofile(armed))
    await STORIES[story](store)
    await store._writer.run(lambda _: sys.setprofile(None))
    await store.close()


async def look(path: Path) -> dict[str, Any]:
    """What a fresh run finds."""
    store = await open_store(path, adopt_for=[TENANT])
    found = [s for s in store.all() if await store.verify(s) and slot_files.is_whole(s.path)]
    report = {
        "tokens": sorted(list(memoryview(store.tokens(s)).cast("i")) for s in found),
        "all_good": len(found) == len(store.all()),
        "only_recorded_files": files(store) == {s.file for s in found},
        "sums": store.total_bytes == sum(s.path.stat().st_size for s in found),
        "damaged": store.damaged_databases,
    }
    await store.close()
    return report


def forked(work: Callable[[], None]) -> int:
    """The wait status of a child that does `work`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"child failed: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main(root: Path, story: str) -> None:
    """One process per kill point, until one is left alone."""
    asyncio.run(prepare(root / "prepared"))
    n, status = 0, -1
    while status != 0:
        n += 1
        path = root / f"run-{n}"
        shutil.copytree(root / "prepared", path)
        status = forked(lambda path=path, n=n: asyncio.run(act(path, story, n)))  # type: ignore[misc]
        if status not in (0, signal.SIGKILL):
            raise SystemExit(f"kill point {n}: status {status}")
        print(json.dumps({"killed": status != 0} | asyncio.run(look(path))), flush=True)
        shutil.rmtree(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
