"""The proxy under measurement, started, restarted on the same ports, and stopped.

As a script, `python -m tests.bench.process FILE` restarts the one that FILE describes and returns once it is ready:
the --restart command of prefill.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent.parent
ENGINE_KEY = "bench"
PATIENCE = 120.0  # seconds until a start or stop counts as failed


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Proxy:
    """One `slotkeeper serve`. Its description lies in a file, so that another process can restart it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.facts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    @classmethod
    def start(cls, folder: Path, arguments: list[str], engine_flags: list[str]) -> "Proxy":
        """Start with a fresh state directory in `folder` and wait until it is ready."""
        folder.mkdir(parents=True)
        proxy = cls(folder / "proxy.json")
        port, engine_port = free_port(), free_port()
        words = ["serve", "--port", str(port), "--state-dir", str(folder / "state"), *arguments]
        if "--upstream" not in arguments:
            words += ["--engine-port", str(engine_port), "--", *engine_flags]
        log = str(folder / "log")
        proxy.facts = {"words": words, "port": port, "engine": f"http://127.0.0.1:{engine_port}", "log": log}
        proxy.launch()
        return proxy

    @property
    def base(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.facts['port']}"

    def launch(self) -> None:
        """Spawn the process, write its pid down, wait until it is ready."""
        own = {"SLOTKEEPER_ENGINE_API_KEY": ENGINE_KEY, "LLAMA_SERVER_SLOTS_DEBUG": "1"}
        with Path(self.facts["log"]).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "proxy", *self.facts["words"]],
                cwd=ROOT,
                env=os.environ | own,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.facts["pid"] = process.pid
        self.file.write_text(json.dumps(self.facts))
        self._until(self.is_ready, process)
        process.returncode = 0  # from now on `alive` looks after it, in this process or in another

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone."""
        os.kill(self.facts["pid"], signal.SIGTERM)
        self._until(lambda: not alive(self.facts["pid"]))

    def is_ready(self) -> bool:
        """Whether an engine can be asked."""
        try:
            return httpx.get(f"{self.base}/readyz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _until(self, true: Any, process: "subprocess.Popen[bytes] | None" = None) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            if time.monotonic() > deadline or (process is not None and process.poll() is not None):
                raise SystemExit(f"the proxy failed:\n{Path(self.facts['log']).read_text()[-3000:]}")
            time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one of ours that has ended is reaped here."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3] if Path("/proc").is_dir() else True


if __name__ == "__main__":
    described = Proxy(Path(sys.argv[1]))
    described.stop()
    described.launch()
