"""Where downloads and builds are kept: outside any clone, shared by all of this user's."""

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from llamacpp.errors import EngineSetupError


def cache_dir() -> Path:
    """SLOTKEEPER_CACHE_DIR, else `slotkeeper` in the platform's user cache folder (as platformdirs names it)."""
    if own := os.environ.get("SLOTKEEPER_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "slotkeeper"
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "slotkeeper"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; waits while another process of ours holds it.

    Raises EngineSetupError when the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise EngineSetupError(
            f"The cache directory {path.parent} cannot be written: {error.strerror}. "
            "Set SLOTKEEPER_CACHE_DIR to a directory that can."
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
