"""A llama-server on disk: finding one that has the flags we need, and asking it what it is."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llamacpp.engines.flags import missing_flags, parse_help
from llamacpp.errors import EngineSetupError

PROGRAM = "llama-server"
# A CUDA build looks for its devices before it prints its help; a cold disk adds to that. Seconds.
HELP_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Binary:
    """A usable llama-server: where it is, its `--help` text, and its version line."""

    path: Path
    help_text: str
    version: str


def find(path: Path | None = None, *, also: Iterable[Path] = ()) -> Binary | None:
    """The llama-server at `path`; without one, the first usable of PATH and then of `also`; None when there is none.

    Raises EngineSetupError when `path` was given and cannot be used.
    """
    if path is not None:
        return inspect(path)
    found = shutil.which(PROGRAM)
    for candidate in ([Path(found)] if found else []) + list(also):
        try:
            return inspect(candidate)
        except EngineSetupError:
            continue
    return None


def inspect(path: Path) -> Binary:
    """Ask the program for its help and version. Raises EngineSetupError when it is no llama-server that we can use."""
    if not path.is_file():
        raise EngineSetupError(f"No llama-server at {path}. Give the path of the program with --llama-server.")
    if not os.access(path, os.X_OK):
        raise EngineSetupError(f"{path} is not executable. Run `chmod +x {path}`, or give another --llama-server.")
    help_text = _output(path, "--help")
    missing = missing_flags(parse_help(help_text))
    if missing:
        raise EngineSetupError(
            f"{path} does not know the flags {' '.join(missing)}, so it is too old or not a llama-server. Give a newer "
            "one with --llama-server, or build one with `slotkeeper build-server --backend cpu`."
        )
    return Binary(path, help_text, _version(_output(path, "--version")))


def _version(text: str) -> str:
    match = re.search(r"version: *(.+)", text)
    return match.group(1).strip() if match else "unknown"


def _output(path: Path, flag: str) -> str:
    command = [str(path.absolute()), flag]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=HELP_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer to {flag} in {HELP_TIMEOUT:.0f} s"
        raise EngineSetupError(f"{path} does not run: {reason}. Give another --llama-server.") from error
    return (done.stdout + b"\n" + done.stderr).decode(errors="replace")
