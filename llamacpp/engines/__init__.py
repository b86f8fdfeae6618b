"""Child engines: `start(spec)` gives a llama-server on loopback that only we can talk to, and that dies with us.

Standard library only, because the embedded child imports this package too. Attached engines: `attached`.
"""

import asyncio
import json
import os
import re
import secrets
import socket
import sys
from pathlib import Path

from llamacpp.engines import binary, embedded, leftovers, process
from llamacpp.engines.embedded_flags import params_for_embedded
from llamacpp.engines.flags import (
    RESERVED_ENVIRONMENT,
    EngineSpec,
    UsageError,
    argv_for_binary,
    refuse_reserved,
    spelled,
)
from llamacpp.engines.model_file import check_model
from llamacpp.engines.process import OnLine, Process
from llamacpp.errors import EngineSetupError

__all__ = ["Child", "EngineSpec", "UsageError", "build_of", "check_program", "choose", "refuse_reserved", "start"]


class Child:
    """One running engine of ours. It may still be loading its model: ask its /health."""

    def __init__(
        self, run: Process, spec: EngineSpec, *, kind: str, port: int, api_key: str, build: str, pid_file: Path
    ) -> None:
        self._process = run
        self._pid_file = pid_file
        self.kind = kind
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}"
        self.api_key = api_key
        self.build = build
        self.spec = spec
        self.slot_dir = spec.slot_dir

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.exit_code

    async def wait(self) -> int:
        """Its exit code, once it has ended by itself or by `stop`."""
        code = await self._process.wait()
        self._pid_file.unlink(missing_ok=True)
        return code

    async def stop(self, seconds: float = 10.0) -> int:
        """SIGTERM, after `seconds` SIGKILL; returns the exit code. Harmless when it has ended already."""
        await self._process.stop(seconds)
        return await self.wait()

    def tail(self) -> str:
        """The last lines that it logged."""
        return self._process.tail()

    def obituary(self, *, has_served: bool = False) -> str:
        """One sentence on how it ended, for error messages. With its last words, unless it `has_served`: then they may
        hold a request's text (refused tools, grammars), and the sentence is told to everybody."""
        code = self.exit_code
        how = "is running" if code is None else f"ended with {process.signal_name(code)}"
        where = f" Its log: {self.spec.log_file}." if self.spec.log_file else ""
        words = "" if has_served else last_words(self.tail())
        return f"The {self.kind} engine {how}" + (f": {words.rstrip('.')}." if words else ".") + where


LAST_LINES = 15  # a failed start says why in its last lines; errors further up may be old and of no account


def last_words(tail: str) -> str:
    """What a log's end says of the reason: its first error line, without the time; or ""."""
    lines = tail.splitlines()[-LAST_LINES:]
    found = next((line for line in lines if _ERROR_LINE.search(line)), "")
    return _LOG_PREFIX.sub("", found).strip()[:400]


# llama.cpp's log: minutes.seconds.milliseconds.microseconds, then a level letter (common/log.cpp).
_LOG_PREFIX = re.compile(r"^[\d.]+ [A-Z] +(srv|cmn|slot|que)? *")
_ERROR_LINE = re.compile(
    r"^[\d.]+ E |error:|Error:|cannot run|terminate called|GGML_ASSERT|out of memory", re.IGNORECASE
)


def choose(spec: EngineSpec, built: tuple[Path, ...] = ()) -> binary.Binary | None:
    """The binary to run, or None for the embedded engine. `built`: where `build-server` may have put one.

    Raises EngineSetupError when the kind asked for is not to be had.
    """
    if spec.kind == "embedded":
        return None
    found = binary.find(spec.llama_server, also=built)
    if found is not None:
        return found
    if spec.kind == "auto" and embedded.is_installed():
        return None
    raise EngineSetupError(
        "No llama-server with the flags that are needed was found on PATH"
        + (", and the embedded engine is not installed" if spec.kind == "auto" else "")
        + ". Give one with --llama-server PATH, build one with `slotkeeper build-server --backend cpu`, install the "
        "embedded one (`pip install '.[embedded]'` in Slotkeeper's folder), or attach a running one with "
        "--upstream URL."
    )


def build_of(found: binary.Binary) -> str:
    """How a binary's build is called."""
    return f"llama-server {found.version}"


async def start(
    spec: EngineSpec, *, state_dir: Path, on_line: OnLine | None = None, built: tuple[Path, ...] = ()
) -> Child:
    """Spawn the engine; it is not ready yet (poll /health). Left-overs of an earlier run are ended first.

    `on_line` gets each line of its log, in the event loop. Raises UsageError for wrong flags, EngineSetupError for
    everything else that stands in the way; the sentence says what to do.
    """
    check_models(spec)
    await asyncio.to_thread(leftovers.end_leftovers, state_dir)
    found = await asyncio.to_thread(choose, spec, built)
    port = free_port() if spec.port is None else claim_port(spec.port)
    key = os.environ.get("SLOTKEEPER_ENGINE_API_KEY") or secrets.token_hex(24)
    if spec.slot_dir is not None:
        spec.slot_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    environment = {name: value for name, value in os.environ.items() if name not in RESERVED_ENVIRONMENT}
    environment["LLAMA_API_KEY"] = key
    if found is None:
        kind, build, stdin = "embedded", embedded.build_name(), json.dumps(params_for_embedded(spec, port)).encode()
        program, environment = embedded.command(sys.executable), embedded.environment(environment)
    else:
        kind, build, stdin = "binary", build_of(found), None
        program = [str(found.path.absolute()), *argv_for_binary(spec, found.help_text, port)]
    run = process.spawn(program, environment=environment, stdin=stdin, log_file=spec.log_file, on_line=on_line)
    pid_file = leftovers.record(state_dir, run.pid, port)
    return Child(run, spec, kind=kind, port=port, api_key=key, build=build, pid_file=pid_file)


def check_program(spec: EngineSpec, built: tuple[Path, ...] = ()) -> None:
    """Raises what `start` would for program, flags and port: before a model is fetched for them."""
    found = choose(spec, built)
    if spec.port is not None:
        claim_port(spec.port)
    if found is None:
        embedded.build_name()
        params_for_embedded(spec, 0)
    else:
        argv_for_binary(spec, found.help_text, 0)


def check_models(spec: EngineSpec) -> None:
    """Raises EngineSetupError when no model is named, or a named file is no GGUF."""
    named = [Path(value) for flag, value in zip(spec.extra, spec.extra[1:], strict=False) if spelled(flag) in _FILES]
    if spec.model is None and not spec.names_model:
        raise EngineSetupError("No model is named. Give one with --model FILE, or after -- in llama-server's way.")
    if spec.model is not None and not spec.names_model:
        named.append(spec.model)
    for path in named:
        check_model(path)


_FILES = frozenset({"-m", "--model", "-md", "--model-draft", "--spec-draft-model"})


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def claim_port(port: int) -> int:
    """`port`, if it can be had. Raises EngineSetupError when it is taken or not allowed."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as llama-server does: TIME_WAIT is no obstacle
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EngineSetupError(
                f"The engine cannot listen on port {port}: {error.strerror}. Give another --engine-port, or leave it "
                "out and a free one is taken."
            ) from error
    return port
