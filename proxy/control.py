"""The control socket: where it listens, and the client that `slotkeeper snapshots` speaks through.

Requests, each answered with JSON (the server's side is proxy/api/ops.py): GET /snapshots, GET /snapshots/{id},
POST /snapshots/{id}/pin, POST /snapshots/{id}/unpin, DELETE /snapshots/{id}, POST /snapshots/prune,
POST /snapshots/purge, GET /explain, GET /explain/{id}, POST /doctor[?probe=1][&determinism=1], POST /warm (a line of
JSON for each step).
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson

from proxy.errors import SlotkeeperError

# Bytes of a socket's path: sun_path holds 108 on Linux and 104 on macOS (sys/un.h), with its end mark.
_LONGEST = 103
_SECONDS = 60.0  # a purge removes many large files


class ControlRefused(SlotkeeperError):
    """The running server refused; its own sentence."""


class NoServer(Exception):
    """Nobody listens on the control socket: no server runs on this state directory."""


def listen(path: Path) -> socket.socket:
    """A bound socket of mode 0600 at `path`; a stale one is replaced (the state directory's lock is ours). OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with _short(path) as short:
            listener.bind(short)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def call(path: Path, method: str, door: str, *, seconds: float = _SECONDS) -> Any:
    """One request to the running server; its JSON. Raises NoServer, ControlRefused."""
    if not path.exists():
        raise NoServer
    try:
        with _short(path) as short:
            _knock(short)
            with httpx.Client(transport=httpx.HTTPTransport(uds=short), timeout=seconds) as client:
                answer = client.request(method, f"http://slotkeeper{door}")
    except httpx.HTTPError as error:
        raise ControlRefused(f"The running server did not answer on {path} ({type(error).__name__}).") from None
    if answer.is_error:
        raise ControlRefused(_message(answer))
    return answer.json()


def follow(path: Path, door: str, body: Any) -> Iterator[Any]:
    """One POST to the running server whose answer is JSON, line by line, as it comes. Raises like `call`."""
    if not path.exists():
        raise NoServer
    try:
        with _short(path) as short:
            _knock(short)
            with (
                httpx.Client(transport=httpx.HTTPTransport(uds=short), timeout=None) as client,
                client.stream("POST", f"http://slotkeeper{door}", content=orjson.dumps(body)) as answer,
            ):
                if answer.is_error:
                    answer.read()
                    raise ControlRefused(_message(answer))
                for line in answer.iter_lines():
                    yield json.loads(line)
    except httpx.HTTPError as error:
        raise ControlRefused(f"The running server broke off on {path} ({type(error).__name__}).") from None


def _knock(address: str) -> None:
    """Raise NoServer when nobody listens: tried first, because httpcore 1.0.9 leaks its socket when that fails."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        try:
            knock.connect(address)
        except OSError:
            raise NoServer from None


def _message(answer: httpx.Response) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(answer.json()["error"]["message"])
    return f"The running server answered {answer.status_code}."


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of the path that fits a socket address: on Linux a long directory is reached by its open descriptor."""
    if len(os.fsencode(path)) <= _LONGEST or not sys.platform.startswith("linux"):
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
