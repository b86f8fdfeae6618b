"""`slotkeeper warm`: prompts that the running server processes and keeps before anyone asks."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from proxy.config import load
from proxy.control import ControlRefused, NoServer, follow
from proxy.errors import StoreError, UsageError
from proxy.recorded import LONGEST_LINE, Recorded, Trace, recorded
from proxy.shown import print_json
from proxy.snapshots import AsJson, StateDir

Json = dict[str, Any]
SAID = {
    "saved": "processed and saved",
    "not_saved": "processed, but not saved: this server keeps no slot files",
    "known": "known already",
    "too_short": "too short to be worth a file",
    "too_long": "longer than the engine's context",
    "unknown": "not known any more: send a request with it, or warm it from a file",
}
DONE = ("saved", "known", "too_short", "not_saved")


def warm(
    file: Annotated[
        Path | None,
        typer.Argument(help="a recorded request, several (JSON lines), or messages and tools as JSON", metavar="FILE"),
    ] = None,
    from_state: Annotated[
        bool, typer.Option("--from-state", help="process again what another model or build has made useless")
    ] = False,
    tenant: Annotated[str, typer.Option(help="whose prompts they are, where there are API keys", metavar="NAME")] = "",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Process and keep prompts before anyone asks. By the running server: the bases of recorded requests (system text
    and tools), or with --from-state the bases and pinned conversations that were kept for another model or build."""
    if (file is None) is not from_state:
        raise UsageError("Name a file with recorded requests, or give --from-state: one of the two.")
    asked: Json = {"from_state": True} if file is None else {"requests": requests_in(file), "tenant": tenant}
    settings = load({"state_dir": state_dir} if state_dir else {})
    try:
        found = _followed(settings.control_socket, asked)
    except NoServer:
        raise StoreError(
            f"No Slotkeeper runs on {settings.state_dir}: only its engine can process a prompt. Start it, or name its "
            "state directory with --state-dir."
        ) from None
    if as_json:
        print_json({"warmed": found})
    else:
        _print(found)
    if any(item["state"] not in DONE for item in found):
        raise ControlRefused("Not everything could be warmed.")


def requests_in(file: Path) -> list[Json]:
    """The requests of a file, one for each base. Raises UsageError."""
    try:
        text = file.read_bytes() if file.stat().st_size <= LONGEST_LINE else b""
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {(error.strerror or 'unknown reason').lower()}.") from None
    try:
        one = json.loads(text)
    except (ValueError, RecursionError):
        one = None
    found = _one(one) if isinstance(one, dict) else list(Trace(file))
    distinct: dict[bytes, Json] = {}
    for request in found:
        if request.dialect != "completion":
            asked = {"body": request.body, "path": request.path, "headers": request.headers}
            _spelled(file, asked)
            distinct.setdefault(_spelled(file, _base_of(request.body)), asked)
    if not distinct:
        raise UsageError(f"{file} holds no model request with messages: nothing to warm.")
    return list(distinct.values())


def _one(found: Json) -> list[Recorded]:
    """A file that is one object; tools and system text alone get a question, which no base holds."""
    body = found.get("body", found)
    if (
        isinstance(body, dict)
        and not {"messages", "input", "prompt"} & body.keys()
        and {"tools", "system"} & body.keys()
    ):
        body = {**body, "messages": [{"role": "user", "content": "hi"}]}
    request = recorded({**found, "body": body} if "body" in found else body)
    return [] if request is None else [request]


def _spelled(file: Path, found: Any) -> bytes:
    """It as JSON. Raises UsageError for what can be sent to no server: half surrogates, a thousand levels."""
    try:
        return orjson.dumps(found, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise UsageError(f"{file} holds what no request can: {error}.") from None


def _base_of(body: Json) -> Any:
    """What stands in front of a body's first question."""
    front = []
    for name in ("messages", "input"):
        for message in body[name] if isinstance(body.get(name), list) else ():
            if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
                break
            front.append(message)
    return [body.get("system"), body.get("instructions"), body.get("tools"), front]


def _followed(socket: Path, asked: Json) -> list[Json]:
    """What came of each item; a bar on a terminal meanwhile."""
    found = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,} tokens"))
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("warming", total=1)
        for step in follow(socket, "/warm", asked):
            if "state" in step:
                found.append({name: value for name, value in step.items() if name not in ("item", "of")})
                continue
            name = f"warming {step['item'] + 1} of {step['of']}"
            bar.update(task, description=name, completed=step["done"], total=step["total"])
    return found


def _print(found: list[Json]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    if not found:
        out.print("Nothing to do: all that is kept fits the engine.")
    for item in found:
        words = item.get("error") or SAID.get(item["state"], item["state"])
        size = f"{item['tokens']:,} tokens, {item['processed']:,} processed: " if "tokens" in item else ""
        name = f" ({item['snapshot']})" if item.get("snapshot") else ""
        out.print(f"{item.get('kind', 'prompt')}, {size}{words}{name}", markup=False)
