"""Finding a llama-server that has what we need. Programs of a few shell lines stand for it."""

from pathlib import Path

import pytest

from llamacpp.engines import binary
from llamacpp.errors import EngineSetupError
from tests.llamacpp.engines.test_flags import HELP


def program(path: Path, text: str = HELP, *, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    help_file = path.with_suffix(".help")
    help_file.write_text(text)
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "version: 1.2 (abc)" >&2 && exit 0\ncat {help_file}\n')
    path.chmod(mode)
    return path


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    return tmp_path / "bin" / "llama-server"


def test_the_one_on_path_is_found(on_path: Path) -> None:
    found = binary.find()
    assert found is None or found.path != on_path
    program(on_path)
    found = binary.find()
    assert found is not None
    assert (found.path, found.version) == (on_path, "1.2 (abc)")
    assert "--slot-save-path" in found.help_text


def test_one_without_the_flags_is_passed_over_for_a_built_one(on_path: Path, tmp_path: Path) -> None:
    program(on_path, HELP.replace("--slot-save-path PATH", "--slot-file PATH"))
    built = program(tmp_path / "cache" / "llama-server")
    found = binary.find(also=[tmp_path / "absent", built])
    assert found is not None
    assert found.path == built


def test_one_that_was_asked_for_must_be_right(tmp_path: Path) -> None:
    old = program(tmp_path / "llama-server", HELP.replace("--no-cache-idle-slots", ""))
    with pytest.raises(EngineSetupError, match=r"does not know the flags --no-cache-idle-slots, so it is too old"):
        binary.find(old)


def test_what_does_not_run_is_named(tmp_path: Path) -> None:
    plain = program(tmp_path / "plain", mode=0o644)
    with pytest.raises(EngineSetupError, match="plain is not executable"):
        binary.find(plain)
    with pytest.raises(EngineSetupError, match="No llama-server at"):
        binary.find(tmp_path / "absent")
    wrong = program(tmp_path / "wrong")
    wrong.write_bytes(b"\x00\x01 no program")
    with pytest.raises(EngineSetupError, match="wrong does not run: Exec format error"):
        binary.find(wrong)


def test_one_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "HELP_TIMEOUT", 0.1)
    path = program(tmp_path / "llama-server")
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(EngineSetupError, match="no answer to --help"):
        binary.find(path)
