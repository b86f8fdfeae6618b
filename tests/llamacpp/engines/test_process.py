"""One child process: its log, its end, its being stopped. Real processes, no engine."""

import asyncio
import os
import stat
import sys
from pathlib import Path

import pytest

from llamacpp.engines import process
from llamacpp.engines.process import LogFile, Process, signal_name, spawn


def python(code: str, **options: object) -> Process:
    settings: dict[str, object] = {"environment": dict(os.environ), "stdin": None, "log_file": None} | options
    return spawn([sys.executable, "-u", "-c", code], **settings)  # type: ignore[arg-type]


async def test_exit_code_and_last_lines_are_there_at_the_end(tmp_path: Path) -> None:
    run = python("import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)", log_file=tmp_path / "a.log")
    assert await run.wait() == 3
    assert (run.exit_code, run.tail()) == (3, "one\ntwo")
    assert (tmp_path / "a.log").read_text() == "one\ntwo\n"


async def test_the_tail_is_bounded_and_lines_reach_the_listener() -> None:
    seen: list[str] = []
    run = python("for i in range(100): print(i)", on_line=seen.append)
    await run.wait()
    assert run.tail().splitlines() == [str(i) for i in range(60, 100)]
    assert seen == [str(i) for i in range(100)]


async def test_input_and_environment_arrive() -> None:
    environment = {"PATH": os.environ["PATH"], "SECRET": "s3"}
    data = b"x" * 300_000  # more than a pipe holds
    run = python(
        "import os, sys; print(len(sys.stdin.read()), os.environ['SECRET'])", environment=environment, stdin=data
    )
    assert await run.wait() == 0
    assert run.tail() == "300000 s3"


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    up = asyncio.Event()
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
    run = python(code, on_line=lambda _: up.set())
    await up.wait()
    assert await run.stop(0.05) == -9
    assert await run.stop(0.05) == -9  # once more does nothing


async def test_what_the_child_writes_is_for_its_user_alone(tmp_path: Path) -> None:
    run = python(f"open({str(tmp_path / 'made')!r}, 'w')")
    assert await run.wait() == 0
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o600


async def test_a_log_that_cannot_be_written_does_not_stop_the_child(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = python("print('fine')", log_file=tmp_path / "file" / "a.log")
    assert await run.wait() == 0
    assert run.tail() == "fine"


def test_the_log_has_two_bounded_generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_BYTES", 100)
    log = LogFile(tmp_path / "a.log")
    for i in range(100):
        log.write(b"%09d\n" % i)
    log.close()
    kept = [(tmp_path / name).read_bytes() for name in ("a.log.1", "a.log")]
    assert all(len(text) <= 110 for text in kept)
    assert b"".join(kept).endswith(b"000000098\n000000099\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1"]


def test_signals_have_names() -> None:
    assert (signal_name(1), signal_name(-9), signal_name(-123)) == ("exit code 1", "SIGKILL", "signal 123")
