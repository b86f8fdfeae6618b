"""One child process: started under the guard, its output pumped into a bounded log, its end noticed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from llamacpp.engines import guard
from llamacpp.errors import EngineSetupError

OnLine = Callable[[str], None]

TAIL_LINES = 40
# Two generations of the log, bytes each: with --verbose llama-server writes whole prompts.
LOG_BYTES = 8 << 20
LINE_BYTES = 16 << 10


class LogFile:
    """An append-only file of at most LOG_BYTES and one older generation (`.1`); 0600, as logs may hold prompts.

    Failing to write is not a reason to stop an engine: the log is dropped then, the tail in memory stays.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._size = 0
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", buffering=0)
            self._size = os.fstat(self._file.fileno()).st_size

    def write(self, line: bytes) -> None:
        if self._file is None or self._path is None:
            return
        if self._size > LOG_BYTES:
            self.close()
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open(self._path)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._size += self._file.write(line) or 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Process:
    """A running child. Two daemon threads serve it: one reads its output, one waits for its end.

    Threads instead of asyncio's child watcher: the same under uvloop, and an engine that logs while the event loop is
    busy never blocks on a full pipe.
    """

    def __init__(self, popen: "subprocess.Popen[bytes]", log: LogFile, keep_open: int | None, on_line: OnLine | None):
        self._popen = popen
        self._log = log
        self._pipe = keep_open
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.exit_code: int | None = None
        self._pump = threading.Thread(target=self._read, name=f"engine-log-{popen.pid}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"engine-wait-{popen.pid}", daemon=True)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def tail(self) -> str:
        return "\n".join(self._tail.copy())

    def start_threads(self, stdin: bytes | None) -> None:
        self._pump.start()
        self._waiter.start()
        if stdin is not None and self._popen.stdin is not None:
            threading.Thread(target=self._feed, args=(stdin,), daemon=True).start()

    def _feed(self, data: bytes) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it died: the waiter says so
            self._popen.stdin.write(data)
            self._popen.stdin.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        while line := self._popen.stdout.readline(LINE_BYTES):
            self._log.write(line)
            text = line.decode(errors="replace").rstrip("\r\n")
            self._tail.append(text)
            if self._on_line is not None:
                self._tell(self._on_line, text)
        self._popen.stdout.close()
        self._log.close()

    def _wait(self) -> None:
        code = self._popen.wait()
        self._pump.join(2.0)  # the last words, unless somebody else holds the pipe open
        if self._pipe is not None:
            os.close(self._pipe)
        self.exit_code = code
        self._tell(self._ended.set)

    def _tell(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(call, *arguments)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.exit_code is not None
        return self.exit_code

    async def stop(self, seconds: float) -> int:
        """SIGTERM, after `seconds` SIGKILL; returns the exit code (negative: the signal)."""
        self._popen.terminate()
        try:
            async with asyncio.timeout(seconds):
                return await self.wait()
        except TimeoutError:
            self._popen.kill()
            return await self.wait()


def guard_mode() -> str:
    """`signal` where the kernel can end a child with its parent, else `pipe`."""
    return "signal" if sys.platform == "linux" else "pipe"


def spawn(
    program: list[str],
    *,
    environment: dict[str, str],
    stdin: bytes | None,
    log_file: Path | None,
    on_line: OnLine | None = None,
    mode: str | None = None,
) -> Process:
    """Start `program` in its own session, so that Ctrl-C reaches us and not it; call in the event loop's thread.

    On Linux the child dies with the calling *thread*. Raises EngineSetupError when the process cannot be started.
    """
    mode = mode or guard_mode()
    read_end, write_end = os.pipe() if mode == "pipe" else (-1, -1)
    command = guard.command(program, parent=os.getpid(), mode=mode, fd=read_end, python=sys.executable)
    try:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            pass_fds=(read_end,) if mode == "pipe" else (),
        )
    except OSError as error:
        if mode == "pipe":
            os.close(write_end)
        raise EngineSetupError(f"The engine {program[0]} cannot be started: {error.strerror}.") from error
    finally:
        if mode == "pipe":
            os.close(read_end)
    process = Process(popen, LogFile(log_file), write_end if mode == "pipe" else None, on_line)
    process.start_threads(stdin)
    return process


def signal_name(code: int) -> str:
    """`exit code 1` or `SIGKILL` for a code as subprocess gives it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
