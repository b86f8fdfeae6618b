"""Starts an engine so that it cannot outlive us, then becomes it. Run as a script, standard library only.

    python -I -S guard.py PARENT_PID signal|pipe FD -- PROGRAM ARGUMENT ...

`signal` (Linux): the kernel sends SIGKILL when the thread that started us ends (PR_SET_PDEATHSIG survives exec).
`pipe` (elsewhere): a small watcher process holds the reading end FD of a pipe of which the parent holds the only
writing end. End of file means that the parent is gone, however it went, and the watcher kills the engine.
"""

import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def command(program: list[str], *, parent: int, mode: str, fd: int, python: str) -> list[str]:
    """The command line that runs `program` under this guard."""
    return [python, "-I", "-S", os.path.abspath(__file__), str(parent), mode, str(fd), "--", *program]


def die_with_thread(parent: int) -> None:
    """Ask the kernel to end us with our parent; leave at once when it has already gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)


def watch_pipe(engine: int, fd: int) -> None:
    """Wait until the pipe ends (kill the engine) or the engine has gone (nothing to do)."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)  # or we would hold the engine's log open after it has gone
    while True:
        # Our parent is the engine: when it ends we are handed to somebody else, and its number may be used again.
        if os.getppid() != engine:
            return
        if select.select([fd], [], [], 1.0)[0] and os.read(fd, 1) == b"":
            if os.getppid() == engine:
                os.kill(engine, signal.SIGKILL)
            return


def main(argv: list[str]) -> None:
    parent, mode, fd, program = int(argv[0]), argv[1], int(argv[2]), argv[4:]
    if mode == "signal":
        die_with_thread(parent)
    else:
        engine = os.getpid()
        if os.fork() == 0:
            watch_pipe(engine, fd)
            os._exit(0)
        os.close(fd)
    os.umask(0o077)  # slot files are transcripts: nobody else may read them, not even while they are written
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"cannot run {program[0]}: {error.strerror}", flush=True)
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
