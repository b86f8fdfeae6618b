"""`slotkeeper doctor` where the engines are: facts from each, and probes in slots that are nobody's.

`DoctorDesk` is what both ends share: the control application of a running server, and `alone`, which starts or attaches
engines of its own in a temporary state directory.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog

from llamacpp.determinism import SHORT, Comparison, compare_answers
from llamacpp.engines.plan import cache_types
from llamacpp.errors import EngineError, EngineSetupError
from llamacpp.memory import MemoryFacts
from llamacpp.probes import BEYOND_WINDOW, LONGEST, Learned
from proxy.config import Settings
from proxy.engine import Engine
from proxy.engine_errors import unasked
from proxy.engines import Engines
from proxy.findings import Facts, report
from proxy.learned import probe_ways
from proxy.lines import LineBook
from proxy.metrics import Metrics
from proxy.store import Store
from proxy.tasks import Tasks

log = structlog.get_logger(__name__)

READY_SECONDS = 600.0
"""Most seconds that a model may take to load."""
ATTACH_SECONDS = 5.0
"""Most seconds for an engine that runs already."""
PATIENCE = 0.5
"""Seconds after which it is said what is waited for."""


Say = Callable[[str], None]
_Work = Callable[[list[int]], Awaitable[None]]


class DoctorDesk:
    """What is known of the engines, as dictionaries for JSON."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._busy = asyncio.Lock()

    async def told(self, *, probe: bool = False, determinism: bool = False) -> dict[str, Any]:
        """A report on every engine, after what was asked for. `done`: all of that could be tried."""
        async with self._busy:
            reports = [await self._one(e, probe=probe, determinism=determinism) for e in self._engines.all]
        return {"engines": reports, **{name: all(r.get(name, True) for r in reports) for name in ("effective", "done")}}

    async def _one(self, engine: Engine, *, probe: bool, determinism: bool) -> dict[str, Any]:
        if engine.unloaded:
            return {"name": engine.name, "effective": True, "findings": [_away(engine)], "plan": None, "command": None}
        if not engine.ready:
            return {"name": engine.name, "effective": False, "findings": [_down(engine)], "plan": None, "command": None}
        notes: list[str] = []
        compared, is_done = None, True
        if probe:
            ways = partial(probe_ways, self._engines, engine, asked=True)
            is_done = await self._with_slots(engine, notes, "--probe", ways)
        if determinism:
            compared = await self._compared(engine, notes)
            is_done = is_done and compared is not None
        found = report(await asyncio.to_thread(facts_of, engine, self._engines.settings, compared, tuple(notes)))
        return {**found, "done": is_done}

    async def _compared(self, engine: Engine, notes: list[str]) -> tuple[Comparison, ...] | None:
        """Answers after a restore against answers without; None where that cannot be tried."""
        if engine.slot_dir is None or engine.speculative:
            notes.append("Answers after a restore cannot be compared: there are no slot files that could be restored.")
            return None
        facts = await asyncio.to_thread(engine.memory_facts)
        n_cut = max(SHORT, min(LONGEST, engine.n_ctx // 2, (facts.n_swa if facts else 0) + BEYOND_WINDOW))
        file = engine.slot_dir / f"0000-{secrets.token_hex(8)}.tmp"
        found: list[Comparison] = []

        async def compare(slots: list[int]) -> None:
            try:
                found.extend(await compare_answers(engine.client, slots[0], file, n_cut=n_cut))
            except EngineError as error:
                notes.append(f"Answers after a restore could not be compared: {error}")
            finally:
                await asyncio.to_thread(file.unlink, missing_ok=True)

        await self._with_slots(engine, notes, "--determinism", compare)
        return tuple(found) or None

    async def _with_slots(self, engine: Engine, notes: list[str], asked: str, work: _Work) -> bool:
        """`work` with up to two empty slots that nobody else can get meanwhile. False, and a note, when none are."""
        table = engine.table
        empty = [s for s in table.slots if s.is_idle and not s.n_tokens][::-1][:2] if engine.has_slots_endpoint else []
        if not empty or (table.capacity is not None and table.used() > table.capacity // 2):
            why = "the context is more than half full" if empty else "no slot is empty, or the engine shows none"
            notes.append(
                f"Nothing was tried for {asked}: {why}. Idle conversations keep their slots, so that waiting frees "
                f"none. Use an engine of its own (slotkeeper doctor {asked} --model FILE), or ask right after a start."
            )
            return False
        for slot in empty:
            table.lease(slot)
        try:
            await work([slot.id for slot in empty])
        finally:
            for slot in empty:
                slot.clear()
                table.release(slot)
        return True


def _down(engine: Engine) -> dict[str, str]:
    return {
        "name": "engine",
        "level": "broken",
        "what": unasked(engine.client.base_url, engine.why_not),
        "consequence": "nothing is served",
        "better": "",
    }


def _away(engine: Engine) -> dict[str, str]:
    """A router's model that no request has asked for: doctor loads none either."""
    better = f"send a request for {engine.model}, then ask again"
    return {
        "name": "engine",
        "level": "unknown",
        "what": engine.why_not,
        "consequence": "not known yet",
        "better": better,
    }


def facts_of(
    engine: Engine, settings: Settings, compared: tuple[Comparison, ...] | None = None, notes: tuple[str, ...] = ()
) -> Facts:
    """Everything that findings are made of. Reads the model's header, once."""
    persists = settings.persist
    words = (*engine.spec.chosen, *engine.spec.extra) if engine.spec else ()
    known_dir = engine.slot_dir if engine.kind == "attached" or persists else None
    return Facts(
        name=engine.name,
        kind=engine.kind,
        url=engine.client.base_url,
        model=engine.model,
        model_path=engine.props.model_path if engine.props else "",
        build=engine.build or (engine.props.build_info if engine.props else ""),
        n_ctx=engine.n_ctx,
        n_slots=engine.table.n_slots,
        learned=engine.learned,
        memory=engine.memory_facts(),
        plan=engine.plan,
        template=engine.template,
        prints_clock=engine.prints_clock,
        drops_reasoning=engine.drops_reasoning,
        unified=engine.unified if engine.spec else None,
        swa_full="--swa-full" in words if engine.spec else keeps_windows(engine.learned, engine.memory_facts()),
        speculative=engine.speculative,
        slot_dir=str(known_dir) if known_dir else None,
        persists=persists or engine.kind == "attached",
        has_fingerprint=engine.fingerprint is not None if engine.store.persist else None,
        types=cache_types(words),
        given=settings.engine_flags,
        missing=(*engine.missing, *notes),
        files_help=engine.files_help,
        compared=compared,
    )


def keeps_windows(known: Learned, memory: MemoryFacts | None) -> bool | None:
    """Whether an attached engine has --swa-full, as a file longer than a window shows: without it, older builds reuse
    nothing of one, and newer ones write checkpoints into it. None: not known."""
    if memory is None or not memory.n_swa or known.probed <= memory.n_swa or known.appended is None:
        return None
    return known.appended.is_effective and known.file_checkpoints is False


async def alone(settings: Settings, say: Say, *, probe: bool, determinism: bool) -> dict[str, Any]:
    """The same without a running server: an engine of ours is started and ended, others are attached.

    Nothing is written but to a temporary directory and, for a probe, one file in an attached engine's `slots=DIR`,
    which is deleted. `say`: told what it waits for. Raises EngineSetupError for an engine that does not come up.
    """
    async with _engines(settings) as engines:
        await _until_ready(engines, say)
        return await DoctorDesk(engines).told(probe=probe, determinism=determinism)


@asynccontextmanager
async def _engines(settings: Settings) -> AsyncIterator[Engines]:
    """Engines with a state of their own. Attached ones run without a store: it would take the files of another server
    in their directory for left-overs."""
    with TemporaryDirectory(prefix="slotkeeper-doctor-") as folder:
        changed = {"state_dir": Path(folder), "persist": not settings.upstream and settings.persist}
        settings = settings.model_copy(update=changed)
        store = await Store.open(
            settings.state_dir, budget=settings.disk_budget, max_lines=settings.max_lines, persist=settings.persist
        )
        tasks = Tasks()
        engines = Engines(settings, store, Metrics(), LineBook(settings.max_lines), tasks)
        try:
            await engines.start()
            yield engines
        finally:
            await engines.stop(5.0)
            await tasks.settle(1.0)
            await store.close()


async def _until_ready(engines: Engines, say: Say) -> None:
    """Returns once all of them can be asked. Raises EngineSetupError with the reason when one cannot, in time."""
    hopeless: list[Exception] = []
    engines.on_hopeless = hopeless.append
    began, is_told = asyncio.get_running_loop().time(), False
    while late := [e for e in engines.all if not e.ready and not e.unloaded]:
        seconds = asyncio.get_running_loop().time() - began
        most = ATTACH_SECONDS if late[0].kind == "attached" and not late[0].is_loading else READY_SECONDS
        if hopeless:
            raise hopeless[0]
        if seconds > most:
            raise EngineSetupError(unasked(late[0].client.base_url, late[0].why_not))
        if seconds > PATIENCE and not is_told:
            say(f"Waiting up to {most:.0f} s for {late[0].client.base_url or 'the engine'} ...")
            is_told = True
        await asyncio.sleep(0.05)
