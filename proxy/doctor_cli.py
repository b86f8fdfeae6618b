"""`slotkeeper doctor`: what an engine really does, what that costs, and the command line that would be better."""

import asyncio
import textwrap
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from llamacpp.engines.flags import refuse_reserved
from llamacpp.engines.model_file import check_model
from proxy import logs
from proxy.config import Settings, load
from proxy.control import NoServer, call
from proxy.errors import StoreError
from proxy.shown import plain, print_json
from proxy.snapshots import AsJson, StateDir
from proxy.stop import FAILED

PROBE_SECONDS = 900.0
"""Longest wait for a running server's probes: a window of 4,096 tokens on a slow machine."""
INDENT = 29
"""Columns before a finding's text: mark and name."""
LEAST_WIDTH = 40
_MARKS = {
    "ok": ("ok", "green"),
    "costs": ("costs", "yellow"),
    "broken": ("BROKEN", "bold red"),
    "unknown": ("?", "dim"),
}


def doctor(
    context: typer.Context,
    upstream: Annotated[
        list[str] | None,
        typer.Option(help="a llama-server that runs: URL[,slots=DIR]; repeatable", show_default=False, metavar="URL"),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="start an engine with it, look, end it", metavar="FILE")] = None,
    engine: Annotated[str | None, typer.Option(help="with --model", metavar="auto|embedded|binary")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="binary to start; with --model", metavar="PATH")] = None,
    parallel: Annotated[int | None, typer.Option(help="slots; with --model", metavar="N")] = None,
    ctx_size: Annotated[int | None, typer.Option(help="context; with --model", metavar="TOKENS")] = None,
    swa: Annotated[
        str | None, typer.Option(help="sliding windows; with --model", metavar="auto|full|checkpoints")
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="try it, with short prompts in an empty slot")] = False,
    determinism: Annotated[
        bool, typer.Option("--determinism", help="compare answers after a restore with answers that had none")
    ] = False,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what an engine really does, and what to change. Also what its flags cost. Exit code 1: caching is
    ineffective, or what was asked for could not be tried.

    Asks the running server; with --upstream or --model, an engine of its own. After --: flags for llama-server.
    """
    words = {"llama_server": llama_server, "parallel": parallel, "ctx_size": ctx_size, "swa": swa, "engine": engine}
    given: dict[str, Any] = {"state_dir": state_dir, "model": model, "upstream": tuple(upstream or ()), **words}
    given["engine_flags"] = context.obj or ()
    settings = load({name: value for name, value in given.items() if value})
    answer = _ask(settings, bool(model or upstream), probe=probe, determinism=determinism)
    if as_json:
        print_json(answer)
    else:
        _print(answer)
    if not (answer["effective"] and answer["done"]):
        raise typer.Exit(FAILED)


def _ask(settings: Settings, is_own: bool, *, probe: bool, determinism: bool) -> Any:
    """The running server's answer, or that of an engine of our own."""
    if not is_own:
        try:
            door = f"/doctor?probe={int(probe)}&determinism={int(determinism)}"
            return call(settings.control_socket, "POST", door, seconds=PROBE_SECONDS)
        except NoServer:
            if not settings.upstream and settings.model is None:
                raise StoreError(
                    f"No Slotkeeper runs on {settings.state_dir}. Start it, name its state directory with --state-dir, "
                    "or name an engine: --upstream URL for one that runs, --model FILE to start one."
                ) from None
    refuse_reserved(settings.engine_flags)
    if settings.model is not None:
        check_model(settings.model)
    from proxy.doctor import alone

    logs.configure("console", "error")
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    waits = partial(err.print, markup=False)
    return asyncio.run(alone(settings, waits, probe=probe, determinism=determinism))


def _print(answer: dict[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    width = out.width if out.is_terminal else None
    for i, engine in enumerate(answer["engines"]):
        out.print(*([""] if i else []), _told(engine, width), sep="\n")


def _told(engine: dict[str, Any], width: int | None) -> Text:
    """One engine: a line for each finding, its consequence and what is better below it. `width`: of a terminal."""
    head = "  ".join(str(engine[name]) for name in ("name", "kind", "model", "build", "url") if engine.get(name))
    lines = [plain(head, "bold")]
    for finding in engine["findings"]:
        mark, style = _MARKS[finding["level"]]
        first, *more = _wrapped(finding["what"], width)
        lines.append(plain(f"  {mark:<7}", style) + plain(f"{finding['name']:<20}{first}"))
        lines += [plain(f"{'':{INDENT}}{line}") for line in more]
        lines += [plain(f"{'':{INDENT}}{line}", "dim") for line in _wrapped(finding["consequence"], width)]
        better = f"better: {finding['better']}" if finding["better"] else ""
        lines += [plain(f"{'':{INDENT}}{line}") for line in _wrapped(better, width)]
    if engine["command"]:
        lines.append(plain(f"  command  {engine['command']}"))
    return Text("\n").join(lines)


def _wrapped(text: str, width: int | None) -> list[str]:
    """The text in lines that fit behind the indent; whole where the width is not known (a pipe)."""
    if width is None:
        return [text] if text else []
    return textwrap.wrap(text, max(LEAST_WIDTH, width - INDENT), break_long_words=False, break_on_hyphens=False)
