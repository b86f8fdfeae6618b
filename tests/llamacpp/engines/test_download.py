"""One file from a registry, by its hash. Real pip, with a directory in the registry's place."""

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from llamacpp.engines import download
from llamacpp.engines.download import Package, fetch, run_lines, sha256_of
from llamacpp.errors import EngineSetupError

FILE = "slotkeeper_test_wheel-1.0-py3-none-any.whl"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A wheel in a directory that pip takes for its registry."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    info = "slotkeeper_test_wheel-1.0.dist-info"
    with zipfile.ZipFile(shelf / FILE, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: slotkeeper-test-wheel\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return Package("slotkeeper-test-wheel", "1.0", FILE, sha256_of(shelf / FILE))


def test_a_file_is_fetched_once(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    target = fetch(package, tmp_path / "into", lambda what, done, total: said.append(what))
    assert target == tmp_path / "into" / FILE
    assert sha256_of(target) == package.sha256
    assert said[0] == f"downloading {FILE}"
    assert [path.name for path in target.parent.iterdir()] == [FILE]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert fetch(package, tmp_path / "into") == target


def test_another_file_under_that_name_is_refused(package: Package, tmp_path: Path) -> None:
    wrong = replace(package, sha256="0" * 64)
    with pytest.raises(EngineSetupError, match=rf"pip could not fetch {FILE}: .*try again"):
        fetch(wrong, tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


def test_a_damaged_file_is_fetched_again(package: Package, tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / FILE).write_bytes(b"half")
    assert sha256_of(fetch(package, tmp_path / "into")) == package.sha256


def test_what_the_registry_lacks_is_said_in_pips_words(package: Package, tmp_path: Path) -> None:
    missing = replace(package, name="slotkeeper-absent", file_name="slotkeeper_absent-1.0-py3-none-any.whl")
    with pytest.raises(EngineSetupError, match=r"No matching distribution found for slotkeeper-absent==1\.0"):
        fetch(missing, tmp_path / "into")


def test_a_python_without_pip_is_told_so(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineSetupError, match="-m ensurepip"):
        fetch(package, tmp_path / "into")


def test_raw_progress_becomes_bytes(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["Collecting it", "Progress 0 of 200", "Progress 200 of 200", "exit code 0"]
    monkeypatch.setattr(download, "run_lines", lambda command: iter(lines))
    seen: list[tuple[int, int]] = []
    with pytest.raises(EngineSetupError, match="did not bring"):
        fetch(package, tmp_path / "into", lambda what, done, total: seen.append((done, total)))
    assert seen == [(0, 0), (0, 200), (200, 200)]


def test_lines_come_with_the_exit_code_at_the_end() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr, flush=True); sys.exit(3)"
    assert sorted(run_lines([sys.executable, "-u", "-c", code])) == ["err", "exit code 3", "out"]
    with pytest.raises(EngineSetupError, match="/no/such/program cannot be run: No such file"):
        next(run_lines(["/no/such/program"]))


def test_a_reader_that_leaves_ends_the_process() -> None:
    lines = run_lines([sys.executable, "-u", "-c", "import os, time; print(os.getpid()); time.sleep(600)"])
    pid = int(next(lines))
    lines.close()
    assert not Path(f"/proc/{pid}").exists() or sys.platform != "linux"


def test_hashes_are_of_the_whole_file(tmp_path: Path) -> None:
    data = b"x" * 300_000
    (tmp_path / "f").write_bytes(data)
    assert sha256_of(tmp_path / "f") == hashlib.sha256(data).hexdigest()
