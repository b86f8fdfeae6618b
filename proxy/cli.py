"""The command `slotkeeper`. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted; never a traceback."""

import asyncio
import contextlib
import gc
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer
import uvicorn
import uvloop
from rich.console import Console

from llamacpp.engines import build, check_program
from llamacpp.engines.build import BACKENDS
from llamacpp.engines.flags import MODEL_FLAGS, refuse_reserved, spelled
from llamacpp.engines.flags import UsageError as EngineUsageError
from llamacpp.engines.model_file import check_model
from llamacpp.errors import EngineError, EngineSetupError
from proxy import (
    __version__,
    audit_cli,
    control,
    doctor_cli,
    explain_cli,
    fetch,
    logs,
    sd_notify,
    snapshots,
    tenants,
    warm_cli,
)
from proxy.config import Settings, load
from proxy.engine_spec import asked_spec
from proxy.errors import SlotkeeperError, StoreError, UsageError
from proxy.flags import Grouped, with_settings
from proxy.shown import lines
from proxy.state_dir import ensure_private_dir
from proxy.stop import DONE, FAILED, INTERRUPTED, Stop

if TYPE_CHECKING:
    from proxy.service import Service

USAGE = 2
EXAMPLES = """\b
Examples:
  slotkeeper serve --model ~/models/your-model.gguf
  slotkeeper serve --model ~/models/your-model.gguf -- -ngl 99 -c 65536 -fa on
  slotkeeper serve --upstream http://127.0.0.1:8080,slots=/var/llama/slots
"""
SMALLEST_BUDGET = 1_000_000  # bytes; the slot file of a small model's 64 tokens is 1.5 MB
_KEEP_ALIVE = 75  # seconds an idle client connection is kept: agents think for longer than uvicorn's default of 5

app = typer.Typer(
    name="slotkeeper",
    help="An HTTP proxy in front of llama-server that makes it compute each prompt token once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's table cuts the names of flags in a narrow terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)
err = Console(stderr=True, highlight=False, soft_wrap=True)
log = structlog.get_logger()


class ServeFailed(Exception):
    """The server cannot start. The message is one sentence for people."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Everything after `--` belongs to llama-server."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    try:
        app(words[:cut], prog_name="slotkeeper", obj=tuple(words[cut + 1 :]))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _explain(error)
    return DONE


def _explain(error: Exception) -> int:
    """One sentence on stderr, and the exit code that fits."""
    expected = (ServeFailed, UsageError, StoreError, SlotkeeperError, EngineError, EngineSetupError)
    if isinstance(error, expected):
        err.print(lines(f"slotkeeper: {error}"))  # it may name a file, and those have any names
        return USAGE if isinstance(error, UsageError | EngineUsageError) else FAILED
    if os.environ.get("SLOTKEEPER_DEBUG"):
        raise error
    what = f"{logs.describe(error)} ({logs.places(error)})"
    err.print(f"slotkeeper: internal error: {what}. SLOTKEEPER_DEBUG=1 shows where it came from.", markup=False)
    return FAILED


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"slotkeeper {__version__}")
        raise typer.Exit(DONE)


@app.command(cls=Grouped, options_metavar="[OPTIONS] [-- LLAMA_SERVER_FLAG ...]", epilog=EXAMPLES)
@with_settings
def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings; else $SLOTKEEPER_CONFIG", metavar="FILE")
    ] = None,
    **given: Any,
) -> None:
    """Serve a model: Slotkeeper and a llama-server behind it. With no argument: the demo model, fetched on first use.
    Everything after -- goes to llama-server."""
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if value}
    flags |= {name: False for name, value in given.items() if value is False}
    if context.obj:
        flags["engine_flags"] = context.obj
    settings = load(flags, config)
    _check(settings)
    logs.configure(settings.log_format, settings.log_level)
    raise typer.Exit(run_server(settings))


def _check(settings: Settings) -> None:
    """Raise for what cannot work, before a model is fetched, a port taken or an engine started."""
    tenants.load(settings.api_key_file)
    refuse_reserved(settings.engine_flags)
    if settings.model is not None:
        check_model(settings.model)


def _with_model(settings: Settings) -> Settings:
    """The settings with a model: the one given, the one that a flag after -- names, or the demo model."""
    if settings.model or settings.upstream or any(spelled(word) in MODEL_FLAGS for word in settings.engine_flags):
        return settings
    check_program(asked_spec(settings), build.built_servers())
    ensure_private_dir(settings.state_dir)
    return settings.model_copy(update={"model": fetch.demo_model(settings.models_dir)})


# -- the server ------------------------------------------------------------------------------------------------------


def run_server(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises the sentence-bearing errors of whatever cannot start."""
    with _listen(settings.host, settings.port) as listener:
        settings = _with_model(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, listener))


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port in use is known before an engine is started. Raises ServeFailed."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ServeFailed(
            f"'{host}' is no address of this machine ({error.strerror}): choose another --host."
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServeFailed(
            f"Cannot listen on {host} port {port}: {(error.strerror or 'unknown reason').lower()}. "
            "Stop what listens there, or choose another --port (make run ARGS='--port 9000') or --host."
        ) from None
    return listener


async def _serve(settings: Settings, listener: socket.socket) -> int:
    """Start what the app owns, listen, stop in the reverse order: first no new requests, then engines and files.

    The lifespan is ours to run, not uvicorn's: its errors must reach `main` as sentences, and uvicorn raises captured
    signals again before a lifespan around it could save anything.
    """
    from proxy.app import create_app

    application = create_app(settings)
    stop = Stop(settings.exit_deadline_seconds)
    with stop.on_signals():
        async with application.router.lifespan_context(application), contextlib.AsyncExitStack() as stack:
            control = getattr(application.state, "control", None)
            if control is not None:
                await stack.enter_async_context(_control(control, settings))
            server = _server(application, settings)
            service = getattr(application.state, "service", None)
            stop.watch(server, service)
            _settle_memory()
            host, port = listener.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            _warn(settings)
            log.info("listening", url=f"{url}/v1", port=port)
            if service is not None:
                greet = greeting(settings, service, url)
                why_not = service.engines.why_not_ready
                await stack.enter_async_context(sd_notify.told(service.is_ready, why_not, greet))
            await server.serve(sockets=[listener])
    if stop.failure is not None:
        raise stop.failure
    return stop.exit_code


def greeting(settings: Settings, service: "Service", url: str) -> Callable[[], None]:
    """What to call once an engine can be asked; says at once that one loads. On the console only: scripts have
    `listening`, `engine_ready` and /readyz."""
    from proxy.api.page import ROOT

    if settings.log_format != "console":
        return lambda: None
    if not settings.upstream:
        name = settings.model.stem if settings.model else "the model"
        log.info("loading", sentence=f"Loading {name} and trying the engine out. Until then requests are answered 503.")

    def greet() -> None:
        models = ", ".join(dict.fromkeys(e.model for e in service.engines.all if e.ready))
        log.info("ready", sentence=f"Ready: {url}/v1  model {models}  status page {url}{ROOT}")

    return greet


def _warn(settings: Settings) -> None:
    """What works and is probably not meant, once at start."""
    if not is_loopback(settings.host) and settings.api_key_file is None:
        log.warning(
            "open_to_the_network",
            host=settings.host,
            what="everybody who reaches this address can use the model and read its state: give --api-key-file; and "
            "--allowed-host NAME for each name or address that clients call it by",
        )
    if settings.api_key_file is not None and stat.S_IMODE(settings.api_key_file.stat().st_mode) & 0o077:
        path = str(settings.api_key_file)
        log.warning(
            "keys_readable_by_others", path=path, what=f"every user of this machine reads them: chmod 600 {path}"
        )
    if settings.disk_budget < SMALLEST_BUDGET and settings.persist:
        log.warning(
            "small_disk_budget", bytes=settings.disk_budget, what="no slot file fits: write a unit, as in 20GiB"
        )
    if settings.ctx_size is not None and {"-c", "--ctx-size"} & {spelled(word) for word in settings.engine_flags}:
        log.warning("context_given_twice", what="-c after -- goes before --ctx-size: leave one of them out")
    if settings.ctx_size is not None and settings.reply_reserve >= settings.ctx_size:
        what = "each request is set aside the whole context, so they run one by one: lower --reply-reserve"
        log.warning("large_reply_reserve", tokens=settings.reply_reserve, ctx_size=settings.ctx_size, what=what)


def _settle_memory() -> None:
    """Keep what was imported out of later garbage collections: a full one took 25 ms here, in which no stream moves."""
    gc.collect()
    gc.freeze()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process before slot files are saved."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Stop`."""
        yield


def _server(application: Any, settings: Settings) -> _Server:
    return _Server(
        uvicorn.Config(
            application,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        )
    )


@contextlib.asynccontextmanager
async def _control(application: Any, settings: Settings) -> AsyncIterator[None]:
    """The control application on its own socket in the state directory (mode 0600), for as long as the body runs."""
    try:
        listener = control.listen(settings.control_socket)
    except OSError as error:
        log.warning("no control socket", path=str(settings.control_socket), reason=error.strerror or str(error))
        yield
        return
    server = _server(application, settings)
    running = asyncio.create_task(server.serve(sockets=[listener]), name="control socket")
    try:
        yield
    finally:
        server.should_exit = True
        await running
        settings.control_socket.unlink(missing_ok=True)


# -- the other commands ----------------------------------------------------------------------------------------------


@app.command("fetch-model")
def fetch_model(
    name: Annotated[str, typer.Argument(help="demo (SmolLM2-135M-Instruct, 94 MB)", metavar="NAME")] = "demo",
) -> None:
    """Fetch a model, checked by hash, and print where it is."""
    if name != "demo":
        raise UsageError(f"No model '{name}' is known here: 'demo' is the one that can be fetched.")
    print(fetch.demo_model(load().models_dir))


@app.command("build-server")
def build_server(
    backend: Annotated[str, typer.Option(help="what it computes on", metavar="|".join(BACKENDS))] = "cpu",
) -> None:
    """Build llama-server, and print where it is. From the llama.cpp source in llama-cpp-python's sdist."""
    chosen = next((known for known in BACKENDS if known == backend), None)
    if chosen is None:
        raise UsageError(f"--backend {backend}: choose {', '.join(BACKENDS)}.")
    print(fetch.llama_server(chosen))


app.add_typer(snapshots.app, name="snapshots")
app.command()(explain_cli.explain)
app.command()(audit_cli.audit)
app.command()(warm_cli.warm)
app.command()(doctor_cli.doctor)

if __name__ == "__main__":
    sys.exit(main())
