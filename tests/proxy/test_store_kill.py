"""kill -9 before every single file and database call of a change: what is left is always whole, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

A, LONGER, OTHER = [1, 2], [1, 2, 3], [7, 8, 9]

# what a fresh run may find, in the order in which a change passes through these states
STATES: dict[str, list[list[list[int]]]] = {
    "publish_longer": [[A, OTHER], [A, LONGER, OTHER], [LONGER, OTHER]],
    "replace_same": [[A, OTHER]],
    "make_room": [[A, OTHER], [OTHER]],
    "purge": [[A, OTHER], [OTHER], []],
}


@pytest.mark.parametrize("story", STATES)
def test_killed_at_every_step(tmp_path: Path, story: str) -> None:
    command = [sys.executable, "-m", "tests.fakes.kill_points", str(tmp_path), story]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    reports: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(reports) > 5 and [r["killed"] for r in reports] == [True] * (len(reports) - 1) + [False]
    for report in reports:
        assert report["all_good"] and report["only_recorded_files"] and report["sums"] and report["damaged"] == 0
    passed = [report["tokens"] for report in reports]
    assert [state for n, state in enumerate(passed) if n == 0 or state != passed[n - 1]] == STATES[story]
