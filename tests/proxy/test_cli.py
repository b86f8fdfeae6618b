"""The real command as a process: exit codes, one sentence instead of a traceback, orderly stops."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import structlog

from proxy import fetch
from proxy.__main__ import main as start
from proxy.cli import ServeFailed, _listen, _warn, main
from proxy.config import load
from tests.servers import PATIENCE, ROOT, ProxyServer, clean_environment

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., Awaitable[ProxyServer]]
STUB = "tests.fakes.serve_stub"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command line to its end: run("serve", "--port", "x", STUB="fail")."""

    def run(*words: str, module: str = "proxy", **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"SLOTKEEPER_STATE_DIR": str(tmp_path / "state"), "COLUMNS": "120"}
        return subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            env=clean_environment() | own | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    return run


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Start]:
    """Start `serve` around a stand-in for the app, and wait until it listens."""
    async with AsyncExitStack() as stack:

        async def start(*words: str, state_dir: Path | None = None, **environment: str) -> ProxyServer:
            folder = state_dir or tmp_path / "state"
            own = ["serve", "--upstream", "http://127.0.0.1:9", "--port", "0", "--log-format", "json"]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", STUB, *own, "--state-dir", str(folder), *words),
                cwd=ROOT,
                env=clean_environment() | environment,
                stderr=asyncio.subprocess.PIPE,
            )
            proxy = ProxyServer(process, folder)
            stack.push_async_callback(proxy.stop, signal.SIGKILL)
            await proxy.listening()
            return proxy

        yield start


def events(proxy: ProxyServer) -> list[object]:
    """What was logged, in order."""
    return [line["event"] for line in proxy.lines]


def test_version_and_help(run: Run) -> None:
    """Both are done (0) and say what they should."""
    assert run("--version").stdout == "slotkeeper 0.1.0\n"
    helped = run("serve", "--help")
    assert helped.returncode == 0
    assert "--disk-budget" in helped.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serve", "--port", "abc"], "--port abc: input should be a valid integer"),
        (["serve", "--nonsense"], "No such option"),
        (["serve", "model.gguf"], "unexpected extra argument"),
        (["serve", "--", "--host", "0.0.0.0"], "--host cannot stand after --"),
        (["serve", "--", "--no-slots"], "--no-slots cannot stand after --"),
        (["serve", "--api-key-file", "/nowhere"], "/nowhere cannot be read"),
        (["serve", "--config", "/nowhere.toml"], "/nowhere.toml cannot be read"),
        (["fetch-model", "large"], "No model 'large'"),
        (["build-server", "--backend", "abacus"], "choose cpu, cuda, metal"),
        (["snapshots", "bury"], "No such command"),
    ],
)
def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    """One sentence that names the culprit."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert said.out == ""


def test_wrong_usage_as_a_process(run: Run) -> None:
    """The same through the interpreter: exit code and no traceback."""
    ended = run("serve", "--port", "abc")
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)


def test_failures_are_1(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is not there or is no GGUF, and a start that the engine spoils."""
    (tmp_path / "not.gguf").write_text("hello")
    for words, expected in [
        (["serve", "--model", str(tmp_path / "none.gguf")], "none.gguf"),
        (["serve", "--model", str(tmp_path / "not.gguf")], "not.gguf"),
    ]:
        assert main(words) == 1
        said = capsys.readouterr().err
        assert expected in said
        assert said.count("\n") == 1
    ended = run("serve", "--upstream", "http://127.0.0.1:9", "--port", "0", module=STUB, STUB="fail")
    assert (ended.returncode, ended.stderr) == (1, "slotkeeper: The model cannot be loaded. Choose another.\n")


def test_a_bug_is_one_line(run: Run) -> None:
    """Type and place, no traceback, no message that could quote a prompt."""
    ended = run("serve", "--upstream", "http://127.0.0.1:9", "--port", "0", module=STUB, STUB="bug")
    assert ended.returncode == 1
    assert "internal error: RuntimeError (serve_stub.py:" in ended.stderr
    assert "secret" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_port_in_use(run: Run) -> None:
    """The sentence names host and port and comes before anything is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run("serve", "--upstream", "http://127.0.0.1:9", "--port", str(port), module=STUB)
    assert ended.returncode == 1
    assert f"Cannot listen on 127.0.0.1 port {port}: address already in use" in ended.stderr


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--llama-server", "/bin/true"], 1, "/bin/true does not know the flags"),
        (["--engine", "embedded", "--", "--nonsense"], 2, "--nonsense"),
        (["--engine-port", "{taken}"], 1, "The engine cannot listen on port {taken}"),
        (["--port", "{taken}"], 1, "Cannot listen on 127.0.0.1 port {taken}"),
    ],
)
def test_nothing_is_fetched_in_vain(
    words: list[str],
    code: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """What cannot be served is known before the demo model is downloaded for it."""
    monkeypatch.setattr(fetch, "demo_model", lambda _: pytest.fail("it was fetched"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        own = ["serve", "--state-dir", str(tmp_path / "state"), *(["--port", "0"] if "--port" not in words else [])]
        assert main([*own, *(word.format(taken=port) for word in words)]) == code
    assert expected.format(taken=port) in capsys.readouterr().err


def test_no_such_address() -> None:
    """A host that is none of this machine's, and one that is no address."""
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(ServeFailed, match=host):
            _listen(host, 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_an_orderly_stop(stub: Start, number: signal.Signals, code: int) -> None:
    """The lifespan ends (slot files are saved) before the process does; the exit code says how it was stopped."""
    proxy = await stub()
    assert (await proxy.client.get("/readyz")).json() == {"ready": True}
    assert await proxy.stop(number) == code
    assert events(proxy) == ["listening", "stopping", "saving", "saved"]
    assert not (proxy.state_dir / "control.sock").exists()


async def test_a_running_answer_is_cut_after_its_share(stub: Start) -> None:
    """Answers get a third of the exit deadline; saving comes after them and is not lost."""
    proxy = await stub("--exit-deadline-seconds", "3")
    request = asyncio.create_task(proxy.client.get("/endless"))
    await proxy.logged("endless began")
    assert await proxy.stop() == 0
    await asyncio.gather(request, return_exceptions=True)
    assert events(proxy)[-1] == "saved"


async def test_a_stop_that_hangs_is_cut_off(stub: Start) -> None:
    """The exit deadline holds even when the app does not return."""
    proxy = await stub("--exit-deadline-seconds", "0.1", STUB="slow")
    assert await proxy.stop() == 1
    assert "stop took too long, ending now" in events(proxy)


async def test_control_socket_is_private_and_answers(stub: Start, run: Run, tmp_path: Path) -> None:
    """Mode 0600, even in a directory whose path is longer than a socket address; `snapshots` speaks through it."""
    folder = tmp_path / ("long" * 30)
    proxy = await stub(state_dir=folder)
    assert stat.S_IMODE((folder / "control.sock").stat().st_mode) == 0o600
    listed = await asyncio.to_thread(run, "snapshots", "ls", "--state-dir", str(folder))
    assert listed.stdout.endswith("0 snapshots, 1 B of 2 B\n"), listed.stderr
    refused = await asyncio.to_thread(run, "snapshots", "show", "x", "--state-dir", str(folder))
    assert refused.returncode == 1
    assert "404" in refused.stderr
    assert await proxy.stop() == 0


async def test_headers_give_nothing_away(stub: Start) -> None:
    """No server header; connections are kept."""
    proxy = await stub()
    answer = await proxy.client.get("/readyz")
    assert "server" not in answer.headers
    assert answer.http_version == "HTTP/1.1"


async def test_port_is_free_again_at_once(stub: Start) -> None:
    """A restart on the same port needs no waiting."""
    proxy = await stub()
    port = httpx.URL(proxy.url).port
    await proxy.client.get("/readyz")
    await proxy.stop()
    again = await stub("--port", str(port))
    assert (await again.client.get("/readyz")).status_code == 200
    assert os.path.basename(again.state_dir) == "state"


def test_ctrl_c_during_imports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """130 and not a word."""

    def interrupted(name: str) -> object:
        raise KeyboardInterrupt

    half = types.ModuleType("proxy.cli")
    half.__getattr__ = interrupted  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "proxy.cli", half)
    assert start() == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, []),
        ({"host": "0.0.0.0"}, ["open_to_the_network"]),
        ({"disk_budget": "20"}, ["small_disk_budget"]),
        ({"disk_budget": "20", "persist": False}, []),
        ({"ctx_size": 8192, "engine_flags": ("-c", "4096")}, ["context_given_twice"]),
        ({"ctx_size": 4096}, ["large_reply_reserve"]),
    ],
)
def test_what_is_probably_not_meant(flags: dict[str, object], said: list[str]) -> None:
    """One warning at start, and only where it is due."""
    with structlog.testing.capture_logs() as logs:
        _warn(load(flags))
    assert [line["event"] for line in logs] == said
    assert all("--allowed-host" in line["what"] for line in logs if line["event"] == "open_to_the_network")


@pytest.mark.parametrize(("mode", "said"), [(0o600, []), (0o644, ["keys_readable_by_others"])])
def test_a_key_file_for_all_to_read(mode: int, said: list[str], tmp_path: Path) -> None:
    """It holds keys as they are."""
    path = tmp_path / "keys"
    path.write_text("a:b")
    path.chmod(mode)
    with structlog.testing.capture_logs() as logs:
        _warn(load({"api_key_file": path}))
    assert [line["event"] for line in logs] == said
