"""No engine outlives us, and none is ended by the Ctrl-C that asks us to save first. Real processes."""

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamacpp.engines import guard
from tests.llamacpp.engines.conftest import KINDS, QUICK, native_path

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 20.0

# A parent that starts one child with spawn() in the given mode, tells its pid, and waits to be killed.
SPAWNER = """
    import asyncio, os, signal, sys
    from llamacpp.engines.process import spawn

    async def main():
        child = ["/bin/sh", "-c", "echo up; exec sleep 600"]
        up = asyncio.Event()
        run = spawn(child, environment=dict(os.environ), stdin=None, log_file=None, mode=sys.argv[1],
                    on_line=lambda line: up.set())
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: print("interrupted", flush=True))
        await up.wait()
        print(run.pid, flush=True)
        print("ended", await run.wait(), flush=True)

    asyncio.run(main())
"""

# The same with a real engine, and it tells when the engine serves.
STARTER = """
    import asyncio, signal, sys
    from pathlib import Path
    from llamacpp.client import LlamaClient
    from llamacpp.engines import EngineSpec, start

    async def main():
        kind, model, state, server, *extra = sys.argv[1:]
        server = Path(server) if server else None
        spec = EngineSpec(Path(model), kind=kind, llama_server=server, ctx_size=512, extra=tuple(extra))
        child = await start(spec, state_dir=Path(state))
        client = LlamaClient(child.base_url, child.api_key)
        while not await client.health():
            if child.exit_code is not None:
                sys.exit(child.obituary())
            await asyncio.sleep(0.02)
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, told.set)
        print(child.pid, flush=True)
        await told.wait()
        print("healthy", await client.health(), flush=True)
        await child.wait()

    asyncio.run(main())
"""


class Parent:
    def __init__(self, script: str, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self.child = int(self.line())
        except BaseException:
            self._end()
            raise
        # Opened while it lives, so that the number cannot be somebody else's later.
        self.watch = os.pidfd_open(self.child)

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def child_is_gone(self, seconds: float = SECONDS) -> bool:
        return bool(select.select([self.watch], [], [], seconds)[0])

    def close(self) -> None:
        if not self.child_is_gone(0):
            signal.pidfd_send_signal(self.watch, signal.SIGKILL)
        os.close(self.watch)
        self._end()

    def _end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@pytest.fixture
def parents() -> Iterator[list[Parent]]:
    made: list[Parent] = []
    yield made
    for parent in made:
        parent.close()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches processes of others by pidfd")
class TestGuard:
    @pytest.mark.parametrize("mode", ["signal", "pipe"])
    def test_the_child_dies_when_its_parent_is_killed(self, mode: str, parents: list[Parent]) -> None:
        parents.append(parent := Parent(SPAWNER, mode))
        assert not parent.child_is_gone(0)
        parent.popen.kill()
        assert parent.child_is_gone()

    @pytest.mark.parametrize("mode", ["signal", "pipe"])
    def test_ctrl_c_reaches_the_parent_and_not_the_child(self, mode: str, parents: list[Parent]) -> None:
        parents.append(parent := Parent(SPAWNER, mode))
        os.killpg(parent.popen.pid, signal.SIGINT)
        assert parent.line() == "interrupted"
        assert not parent.child_is_gone(0)
        os.kill(parent.child, signal.SIGTERM)
        assert parent.line() == "ended -15"

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_engine_is_left_after_kill_9(
        self, kind: str, parents: list[Parent], demo_model: Path, tmp_path: Path
    ) -> None:
        server = str(native_path()) if kind == "binary" else ""
        parents.append(parent := Parent(STARTER, kind, str(demo_model), str(tmp_path), server, *QUICK))
        os.killpg(parent.popen.pid, signal.SIGINT)
        assert parent.line() == "healthy True"
        parent.popen.kill()
        assert parent.child_is_gone()


def test_a_child_of_a_parent_that_has_gone_does_not_start() -> None:
    command = guard.command(["/bin/echo", "started"], parent=1, mode="signal", fd=-1, python=sys.executable)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_program_that_cannot_run_is_named(tmp_path: Path) -> None:
    command = guard.command([str(tmp_path)], parent=os.getpid(), mode="signal", fd=-1, python=sys.executable)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (127, f"cannot run {tmp_path}: Permission denied\n")
