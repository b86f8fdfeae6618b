"""The embedded engine: xllamacpp's llama-server in a process of its own.

`python -m llamacpp.engines` reads one JSON object (dotted CommonParams names -> values) from standard input
and LLAMA_API_KEY from the environment, serves until it is killed, and writes llama.cpp's log to its standard output.
"""

import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from llamacpp.errors import EngineSetupError


def is_installed() -> bool:
    """True when the extra `embedded` is there."""
    return importlib.util.find_spec("xllamacpp") is not None


def build_name() -> str:
    """What `Child.build` says of the embedded engine.

    Raises EngineSetupError when the extra is not installed.
    """
    try:
        return f"xllamacpp {importlib.metadata.version('xllamacpp')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineSetupError(
            "The embedded engine is not installed. Run `pip install 'slotkeeper[embedded]'`, or give a llama-server "
            "with --llama-server PATH, or build one with `slotkeeper build-server`."
        ) from error


def command(python: str) -> list[str]:
    """The child's command line. `-P`: a file of the person's working directory must not be imported in ours."""
    return [python, "-P", "-m", "llamacpp.engines"]


def environment(base: dict[str, str]) -> dict[str, str]:
    """`base` with this package first on the child's import path."""
    root = str(Path(__file__).resolve().parents[2])
    rest = base.get("PYTHONPATH")
    return base | {"PYTHONPATH": f"{root}{os.pathsep}{rest}" if rest else root, "PYTHONUNBUFFERED": "1"}


def assign(params: Any, settings: dict[str, Any]) -> None:
    """Set dotted names on CommonParams; nested objects are views, so setting them sets the parameters."""
    for name, value in settings.items():
        *path, last = name.split(".")
        target = params
        for step in path:
            target = getattr(target, step)
        setattr(target, last, set(value) if name == "model_alias" else value)


def serve(settings: dict[str, Any], key: str) -> None:
    """Load the model and answer HTTP until the process is killed. Raises what xllamacpp raises on a bad model."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    assign(params, settings)
    params.api_keys = [key]
    server = xllamacpp.Server(params)
    threading.Event().wait()
    del server


def main() -> int:
    # Nothing of value is in this process, and a graceful end may hang on an open stream: die at once when told to.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        serve(json.load(sys.stdin), os.environ["LLAMA_API_KEY"])
    except Exception as error:
        print(f"error: {error}", flush=True)
        return 1
    return 0
