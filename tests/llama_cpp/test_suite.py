"""llama.cpp's own server tests pass through Slotkeeper; and the harness that says so tells when they do not."""

import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.llama_cpp.source import TEMPLATES, TESTS, known_source, lay_out
from tests.llama_cpp.stand_in import translated
from tests.llama_cpp.suite import FILES, Ended, Row, ended, exceptions, rows, run, unknown

PASSED, FAILED = Ended("passed", "", "[]"), Ended("failed", "line 3: assert 1 == 2", "[]")


@pytest.mark.native
@pytest.mark.timeout(1500)
def test_llama_cpp(native_server: Path, tiny_models: dict[str, Path]) -> None:
    """What passes directly passes through Slotkeeper, with the same text, but for the exceptions listed."""
    named = os.environ.get("SLOTKEEPER_LLAMA_CPP")
    source = Path(named) if named else known_source()
    if source is None:
        pytest.skip(
            "llama.cpp's source is not there: set SLOTKEEPER_LLAMA_CPP to it, or run `python -m tests.llama_cpp`"
        )
    table = run(source, native_server, tiny_models["dense"])
    assert [row.wrong for row in table if row.wrong] + unknown(table, exceptions(FILES)) == []
    assert sum(row.direct.outcome == "passed" for row in table) > 80


@pytest.mark.parametrize(
    ("direct", "through", "reason", "is_wrong"),
    [
        (PASSED, PASSED, "", False),
        (PASSED, FAILED, "", True),
        (PASSED, FAILED, "why", False),
        (PASSED, PASSED, "why", True),
        (FAILED, FAILED, "", False),
        (FAILED, FAILED, "why", True),
        (FAILED, Ended("failed", "line 3: assert 5 == 2", "[]"), "", True),
        (PASSED, Ended("passed", "", '["other text"]'), "", True),
        (PASSED, Ended("absent", ""), "", True),
    ],
)
def test_what_is_wrong(direct: Ended, through: Ended, reason: str, is_wrong: bool) -> None:
    """A test that ends otherwise and is not listed; one that is listed and does not."""
    assert bool(Row("test", direct, through, reason).wrong) is is_wrong


def test_rows_hold_every_test_of_either_run() -> None:
    """Also one that only one run has; an exception for a test that there is not is told."""
    table = rows({"a": PASSED}, {"a": PASSED, "b": PASSED}, {"b": "why", "c": "why"})
    assert [(row.test, row.direct.outcome, row.reason) for row in table] == [
        ("a", "passed", ""),
        ("b", "absent", "why"),
    ]
    assert len(unknown(table, {"b": "why", "c": "why"})) == 1


def test_the_last_word_on_a_test_counts() -> None:
    """A test that passes and then fails to clean up has failed."""
    lines = [json.dumps({"test": "a", "outcome": o, "why": "", "seen": []}) for o in ("passed", "failed")]
    assert ended("\n".join(lines))["a"].outcome == "failed"


def test_every_exception_has_a_reason() -> None:
    """Of a file that is run."""
    listed = exceptions(FILES)
    assert listed and all(reason.strip() for reason in listed.values())
    assert exceptions(["no.py"]) == {}


def test_flags_become_ours() -> None:
    """Slotkeeper's own are taken, those it sets itself are dropped, the others go to the engine."""
    words = "--port 1 --seed 2 --host h --model m --no-slots --api-key k --jinja --ctx-size 3 --parallel 4".split()
    ours = "--port 1 --host h --model m --ctx-size 3 --parallel 4 -- --seed 2 --jinja".split()
    assert translated(words) == ours


@pytest.mark.parametrize("shape", ["llama.cpp", "sdist", "archive"])
def test_the_source_may_have_three_shapes(tmp_path: Path, shape: str) -> None:
    """Tests and templates are copied, their conftest.py is not; the source stays as it is."""
    sdist = tmp_path / "llama_cpp_python-1"
    root = sdist / "vendor" / "llama.cpp"
    for name in (TESTS / "utils.py", TESTS / "conftest.py", TESTS / "unit" / "test_a.py", TEMPLATES / "a.jinja"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    source = {"llama.cpp": root, "sdist": sdist}.get(shape, tmp_path / "sdist.tar.gz")
    if shape == "archive":
        with tarfile.open(source, "w:gz") as archive:
            archive.add(sdist, sdist.name)
    place = lay_out(source, tmp_path / "out")
    assert (place / "unit" / "test_a.py").is_file() and not (place / "conftest.py").exists()
    assert (place / ".." / ".." / ".." / "models" / "templates" / "a.jinja").is_file()
    assert (root / TESTS / "conftest.py").is_file()


def test_a_source_without_tests_is_told(tmp_path: Path) -> None:
    """In a sentence with its name."""
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} holds no"):
        lay_out(tmp_path, tmp_path / "out")
