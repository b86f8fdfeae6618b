"""The control socket: private, replaceable, reachable under long paths; what its client makes of answers."""

import socket
import stat
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from proxy.control import ControlRefused, NoServer, call, listen

Answer = Callable[[int, bytes], Path]


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answer]:
    """A server on a control socket that gives one answer to everything."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes) -> Path:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

            def address_string(self) -> str:
                return "local"

        path = tmp_path / "control.sock"
        server = HTTPServer(("", 0), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = listen(path)
        server.socket.listen()
        server.get_request = lambda: (server.socket.accept()[0], ("local", 0))  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return path

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_answers_are_json(answering: Answer) -> None:
    """What the server says comes back as values."""
    assert call(answering(200, b'{"removed": 1}'), "GET", "/snapshots") == {"removed": 1}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, b'{"error": {"message": "No such snapshot."}}', "No such snapshot."),
        (500, b"oops", "answered 500"),
        (500, b'{"error": 1}', "answered 500"),
        (500, b"[]", "answered 500"),
    ],
)
def test_refusals_are_sentences(answering: Answer, status: int, body: bytes, expected: str) -> None:
    """The server's own sentence, else its status."""
    with pytest.raises(ControlRefused, match=expected):
        call(answering(status, body), "GET", "/snapshots/x")


def test_nobody_there(tmp_path: Path) -> None:
    """No socket, or one that a killed server left behind: no server."""
    with pytest.raises(NoServer):
        call(tmp_path / "control.sock", "GET", "/snapshots")
    listen(tmp_path / "control.sock").close()
    with pytest.raises(NoServer):
        call(tmp_path / "control.sock", "GET", "/snapshots")


@pytest.mark.parametrize("folder", ["short", "long" * 40])
def test_private_and_replaceable(tmp_path: Path, folder: str) -> None:
    """Mode 0600 from the first moment; a stale socket gives way; the path may be longer than an address."""
    (tmp_path / folder).mkdir()
    path = tmp_path / folder / "control.sock"
    for _ in range(2):
        listener = listen(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert listener.family == socket.AF_UNIX
        listener.close()


def test_an_impossible_place_is_an_os_error(tmp_path: Path) -> None:
    """The caller says it and goes on without a control socket."""
    with pytest.raises(OSError, match="No such file"):
        listen(tmp_path / "nowhere" / "control.sock")
