"""Engines of a run that is over are ended; everybody else's processes are left alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamacpp.engines import leftovers


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    popen = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
    assert popen.stdout is not None
    popen.stdout.readline()
    yield popen
    popen.kill()
    popen.wait()
    popen.stdout.close()


def facts(pid: int, **changes: object) -> str:
    """A pid file whose owner is gone."""
    values = {"pid": pid, "started": leftovers.start_time(pid), "owner": 2**22 + 1, "owner_started": "long ago"}
    return json.dumps(values | changes)


def test_a_left_over_engine_is_ended(sleeper: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    (tmp_path / "engine-8000.json").write_text(facts(sleeper.pid))
    assert leftovers.end_leftovers(tmp_path) == [sleeper.pid]
    assert sleeper.wait() == -9
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_was_used_again_is_not_touched(sleeper: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    (tmp_path / "engine-8000.json").write_text(facts(sleeper.pid, started="an earlier process"))
    assert leftovers.end_leftovers(tmp_path) == []
    assert sleeper.poll() is None
    assert list(tmp_path.iterdir()) == []


def test_the_engine_of_a_living_owner_is_left_alone(sleeper: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    path = leftovers.record(tmp_path, sleeper.pid, 8000)
    assert leftovers.end_leftovers(tmp_path) == []
    assert sleeper.poll() is None
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "owner": 1}', '{"pid": 1, "owner": null}'])
def test_a_broken_pid_file_is_removed(text: str, tmp_path: Path) -> None:
    (tmp_path / "engine-8000.json").write_text(text)
    assert leftovers.end_leftovers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_start_times_tell_processes_apart(sleeper: "subprocess.Popen[bytes]") -> None:
    mine = leftovers.start_time(os.getpid())
    assert mine is not None
    assert mine == leftovers.start_time(os.getpid()) != leftovers.start_time(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert leftovers.start_time(sleeper.pid) is None


def test_a_directory_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    leftovers.record(tmp_path / "file" / "state", os.getpid(), 8000)
    assert leftovers.end_leftovers(tmp_path / "file" / "state") == []
