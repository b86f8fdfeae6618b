"""Fetching a model and building llama-server, with a progress bar on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def demo_model(models_dir: Path) -> Path:
    """SmolLM2-135M-Instruct in `models_dir`, fetched when it is not there. Raises EngineSetupError."""
    from llamacpp.engines.models import fetch_demo

    with _bar("demo model (94 MB)") as bar:
        return fetch_demo(models_dir, bar)


def llama_server(backend: str) -> Path:
    """The binary for `backend`, built when its cache is empty. Raises EngineSetupError."""
    from llamacpp.engines.build import build_server

    with _bar(f"llama-server ({backend})") as bar:
        return build_server(backend, bar)


@contextmanager
def _bar(text: str) -> Iterator[object]:
    """A callback (done, total, what) that moves a bar on a terminal, and says nothing elsewhere."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)

        def moved(done: int, total: int | None = None, what: str | None = None) -> None:
            progress.update(task, completed=done, total=total, description=f"{text}: {what}" if what else text)

        yield moved
