"""Fetching a model and building llama-server, with a progress bar on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from llamacpp.engines.build import Backend
from llamacpp.engines.build import build_server as build
from llamacpp.engines.download import Progress as Moved
from llamacpp.engines.models import fetch_demo


def demo_model(models_dir: Path) -> Path:
    """SmolLM2-135M-Instruct in `models_dir`, fetched when it is not there. Raises EngineSetupError."""
    with _bar("demo model (SmolLM2-135M, 94 MB)", DownloadColumn(), TransferSpeedColumn()) as moved:
        return fetch_demo(models_dir, moved)


def llama_server(backend: Backend) -> Path:
    """The binary for `backend`, built when its cache is empty. Raises EngineSetupError."""
    with _bar(f"llama-server ({backend})", TaskProgressColumn()) as moved:
        return build(backend, moved)


@contextmanager
def _bar(text: str, *figures: ProgressColumn) -> Iterator[Moved]:
    """A callback (what, done, total) that moves a bar on a terminal; elsewhere each new `what` is one line."""
    console = Console(stderr=True, highlight=False)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *figures, TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task, said = progress.add_task(text, total=None), set[str]()

        def moved(what: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total or None, description=f"{text}: {what}")
            if not console.is_terminal and what not in said:
                said.add(what)
                console.print(f"{text}: {what}", markup=False, soft_wrap=True)

        yield moved
