"""`slotkeeper snapshots`: through the running server's control socket, else on the store itself.

`Desk` is what both ends share: the control application answers with the same dictionaries.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from proxy.config import Settings, load
from proxy.control import NoServer, call
from proxy.errors import NotFound, StoreError, UsageError
from proxy.page.text import size, span
from proxy.shown import clean
from proxy.state_dir import remembered_budget
from proxy.store_types import Snapshot
from proxy.tenants import load as load_tenants

if TYPE_CHECKING:
    from proxy.store import PruneReport, Store

app = typer.Typer(help="List, keep or delete slot files on disk.", no_args_is_help=True)
StateDir = Annotated[
    Path | None, typer.Option(help="state directory; else $SLOTKEEPER_STATE_DIR, else the default", metavar="DIR")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def _not_empty(name: str) -> str:
    if not name.strip():
        raise UsageError("ID is empty: give a snapshot's id, or the beginning of one; see `snapshots ls`.")
    return name


Id = Annotated[str, typer.Argument(help="snapshot id, or the beginning of one", metavar="ID", callback=_not_empty)]
_SHOWN = (
    *("id", "kind", "n_tokens", "bytes", "created", "last_used", "pinned", "effective", "reason"),
    *("tenant", "model", "line", "fingerprint", "file"),
)
_COLUMNS = ("id", "kind", "tokens", "size", "used", "model", "reason", "state")
_EFFECTIVE = {
    None: "not tried yet: nothing was restored from it",
    True: "yes, a restore from it gave its tokens",
    False: "no, a restore from it gave less than it holds",
}
_LEFT_OUT = ("reason", "model", "used", "size", "state")
"""Columns that a narrow terminal goes without, the first first; the others are never cut."""


class Desk:
    """What can be done with snapshots, as dictionaries for JSON. Raises NotFound for an id that names none or many."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def listed(self) -> dict[str, Any]:
        """Every snapshot, newest use first, and how much room they take."""
        found = sorted(self._store.all(), key=lambda s: -s.last_used)
        return {
            "snapshots": [as_dict(snapshot) for snapshot in found],
            "total_bytes": self._store.total_bytes,
            "budget_bytes": self._store.budget,
        }

    def shown(self, name: str) -> dict[str, Any]:
        """One snapshot."""
        return as_dict(self._get(name))

    async def pin(self, name: str) -> dict[str, Any]:
        """Keep a snapshot whatever the budget says."""
        return as_dict(await self._store.pin(self._get(name).id))

    async def unpin(self, name: str) -> dict[str, Any]:
        """Let a snapshot be evicted again."""
        return as_dict(await self._store.unpin(self._get(name).id))

    async def remove(self, name: str) -> dict[str, Any]:
        """Delete one snapshot, pinned or not."""
        gone = await self._store.remove(self._get(name).id)
        return {"removed": 1, "orphans": 0, "bytes": gone.bytes}

    async def prune(self) -> dict[str, Any]:
        """Bring the files within the budget and drop what no record names."""
        return _report_of(await self._store.prune())

    async def purge(self) -> dict[str, Any]:
        """Delete every snapshot."""
        return _report_of(await self._store.purge())

    def _get(self, name: str) -> Snapshot:
        found = self._store.get(name)
        if found is None:
            many = sum(snapshot.id.startswith(name) for snapshot in self._store.all())
            how = f"{many} snapshots have ids that begin" if many else "No snapshot has an id that begins"
            raise NotFound(f"{how} with '{name}': see `snapshots ls`.")
        return found


def _report_of(report: "PruneReport") -> dict[str, Any]:
    return {"removed": report.snapshots, "orphans": report.orphans, "bytes": report.bytes}


def as_dict(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot for JSON: sizes in bytes, times in seconds since 1970."""
    return {name: getattr(snapshot, name) for name in _SHOWN} | {"dir": str(snapshot.dir)}


@app.command("ls")
def list_(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """List snapshots, the last used first."""
    answer = _ask(state_dir, "GET", "/snapshots", lambda desk: _now(desk.listed()))
    if as_json:
        return _print_json(answer)
    out = Console(highlight=False, soft_wrap=True)
    width = out.width if out.is_terminal else None
    for line in _table([_COLUMNS, *map(_row, answer["snapshots"])], width):
        out.print(line, markup=False)
    total, budget = size(answer["total_bytes"]), size(answer["budget_bytes"])
    count = len(answer["snapshots"])
    out.print(f"{count} snapshot{'' if count == 1 else 's'}, {total} of {budget}")


@app.command()
def show(name: Id, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Show one snapshot."""
    answer = _ask(state_dir, "GET", _door(name), lambda desk: _now(desk.shown(name)))
    if as_json:
        return _print_json(answer)
    for field, value in _described(answer).items():
        print(f"{field:12} {clean(value)}")


@app.command()
def pin(name: Id, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Keep a snapshot whatever the disk budget says."""
    answer = _ask(state_dir, "POST", _door(name, "/pin"), lambda desk: desk.pin(name))
    _report(answer, as_json, f"{answer['id']} is pinned.")


@app.command()
def unpin(name: Id, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Let a snapshot be evicted again."""
    answer = _ask(state_dir, "POST", _door(name, "/unpin"), lambda desk: desk.unpin(name))
    _report(answer, as_json, f"{answer['id']} is no longer pinned.")


@app.command()
def rm(name: Id, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Delete one snapshot."""
    answer = _ask(state_dir, "DELETE", _door(name), lambda desk: desk.remove(name))
    _report(answer, as_json, _removed(answer))


@app.command()
def prune(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Bring slot files within the disk budget; drop what no record names."""
    answer = _ask(state_dir, "POST", "/snapshots/prune", lambda desk: desk.prune())
    _report(answer, as_json, _removed(answer))


@app.command()
def purge(
    state_dir: StateDir = None,
    as_json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask; needed where there is no terminal")] = False,
) -> None:
    """Delete every snapshot, pinned ones too."""
    if not yes and not sys.stdin.isatty():
        raise UsageError("This deletes every snapshot, pinned ones too, and no terminal is here to ask on: give --yes.")
    if not yes:
        typer.confirm("Delete every snapshot, pinned ones too?", abort=True)
    answer = _ask(state_dir, "POST", "/snapshots/purge", lambda desk: desk.purge())
    _report(answer, as_json, _removed(answer))


def _ask(state_dir: Path | None, method: str, door: str, alone: Callable[[Desk], Awaitable[dict[str, Any]]]) -> Any:
    """The running server's answer, or what `alone` says on the opened store when none runs."""
    settings = load({"state_dir": state_dir} if state_dir else {})
    if not settings.state_dir.is_dir():
        raise StoreError(f"There is no state directory at {settings.state_dir}: has Slotkeeper run with it?")
    try:
        return call(settings.control_socket, method, door)
    except NoServer:
        return asyncio.run(_alone(settings, alone))


async def _alone(settings: Settings, work: Callable[[Desk], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    from proxy.store import Store

    owners = load_tenants(settings.api_key_file).names
    store = await Store.open(
        settings.state_dir, budget=_budget(settings), max_lines=settings.max_lines, adopt_for=owners
    )
    try:
        await store.add_dir(settings.slots_dir, evict=False)  # only `prune` deletes what is beyond the budget
        return await work(Desk(store))
    finally:
        await store.close()


def _budget(settings: Settings) -> int:
    """The budget that was set here (environment, file), else the last server's: its flags are not known here."""
    if "disk_budget" in settings.model_fields_set:
        return settings.disk_budget
    known = remembered_budget(settings.state_dir)
    return settings.disk_budget if known is None else known


async def _now(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _door(name: str, tail: str = "") -> str:
    return f"/snapshots/{quote(name, safe='')}{tail}"


def _print_json(answer: Any) -> None:
    print(json.dumps(answer, indent=2))


def _report(answer: dict[str, Any], as_json: bool, sentence: str) -> None:
    return _print_json(answer) if as_json else print(sentence)


def _removed(answer: dict[str, Any]) -> str:
    orphans = f" and {answer['orphans']} without a record" if answer["orphans"] else ""
    memory = " What lies in the engine's memory stays there until the server stops." if answer.get("in_memory") else ""
    return f"{answer['removed']} removed{orphans}, {size(answer['bytes'])} freed.{memory}"


def _table(rows: list[tuple[str, ...]], width: int | None) -> list[str]:
    """Lines of a table, the first row its head; without the columns that do not fit (None: all fit)."""
    widths = {cells[0]: max(map(len, cells)) for cells in zip(*rows, strict=True)}
    for name in _LEFT_OUT:
        if width is not None and sum(widths.values()) + 2 * len(widths) - 2 > width:
            del widths[name]
    shown = [(column, widths[name]) for column, name in enumerate(rows[0]) if name in widths]
    return ["  ".join(row[column].ljust(size) for column, size in shown).rstrip() for row in rows]


def _described(snapshot: dict[str, Any]) -> dict[str, str]:
    """A snapshot for people: units as in `ls`; what is not known is left out."""
    words = {
        "n_tokens": f"{snapshot['n_tokens']:,}",
        "bytes": size(snapshot["bytes"]),
        "created": _ago(snapshot["created"]),
        "last_used": _ago(snapshot["last_used"]),
        "pinned": "yes, it is never evicted" if snapshot["pinned"] else "no",
        "effective": _EFFECTIVE[snapshot["effective"]],
    }
    named = {"n_tokens": "tokens", "bytes": "size", "last_used": "used"}
    found = {named.get(name, name): words.get(name, value) for name, value in snapshot.items()}
    return {name: value for name, value in found.items() if value}


def _ago(moment: float) -> str:
    return f"{span(time.time() - moment)} ago"


def _row(snapshot: dict[str, Any]) -> tuple[str, ...]:
    state = "pinned" if snapshot["pinned"] else "" if snapshot["effective"] is not False else "ineffective"
    texts = snapshot["id"], snapshot["kind"], f"{snapshot['n_tokens']:,}", size(snapshot["bytes"])
    return *texts, _ago(snapshot["last_used"]), snapshot["model"], snapshot["reason"], state
