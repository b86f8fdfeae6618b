"""Programs from Debian's packages that tests run; missing ones skip a test by hand and fail it in the gate."""

import os
import shutil
import subprocess

import pytest

REQUIRED = os.environ.get("SLOTKEEPER_TEST_TOOLS") == "required"  # set by .ci/run, which installs them


def need(program: str, package: str) -> str:
    """The program's path; skips the test where it is missing, or fails it in the gate."""
    found = shutil.which(program)
    if found is None:
        missing = f"{program} is missing: apt-get install {package} (.ci/run does)"
        if REQUIRED:
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A program's answer, both outputs as text."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)  # type: ignore[call-overload]
