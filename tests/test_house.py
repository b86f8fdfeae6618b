"""House rules that can be counted: sizes of functions and files, and no registry's name in the tree."""

import ast
import subprocess
from pathlib import Path

import pytest

from tests.parsing import parsed

ROOT = Path(__file__).parent.parent
LONGEST_FUNCTION, LONGEST_FILE = 60, 400  # design.md, Style
SKIPPED = ("tests/data/", "tests/tiny_models.py", "tests/bench/prefill.py", "tests/bench/overhead.py")  # as received
# Package registries and model hubs; split so that this file does not hold them either.
HOSTS = ("py" + "pi.org", "python" + "hosted.org", "ana" + "conda.org", "hugging" + "face.co", "npm" + "js.org")


def tracked() -> list[str]:
    """The files of the repository: those git knows and new ones it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


PYTHON = [n for n in tracked() if n.endswith(".py") and not n.startswith(SKIPPED)]


@pytest.mark.parametrize("name", PYTHON)
def test_sizes(name: str) -> None:
    """Functions and files stay short enough to be read at once."""
    source = (ROOT / name).read_text()
    assert source.count("\n") <= LONGEST_FILE
    functions = (n for n in ast.walk(parsed(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno}
    assert {name: lines for name, lines in long.items() if lines > LONGEST_FUNCTION} == {}


def test_no_registry_is_named() -> None:
    """Packages come through the ordinary client's own configuration; no host is written down."""
    found = []
    for name in tracked():
        text = (ROOT / name).read_bytes().decode("utf-8", "ignore").lower()
        found += [(name, host) for host in HOSTS if host in text]
    assert found == []
