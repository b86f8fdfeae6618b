"""The models behind one router (llamacpp/routers), each an engine of its own: own slots, files, fingerprint, figures.

A model that the router unloads is an engine that restarted: its slots are empty, its files restore. What we ask of our
own accord loads nothing; a model request does, and waits until its engine is ready, so that none overtakes a restore.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from llamacpp.engines.attached import AttachedSpec
from llamacpp.errors import EngineError
from llamacpp.routers import RoutedModel, Router
from proxy.engine import Engine
from proxy.engine_errors import as_ours
from proxy.errors import Busy, SlotkeeperError, StoreError, WaitedTooLong
from proxy.saving import save_idle

if TYPE_CHECKING:
    from proxy.engines import Engines

log = structlog.get_logger(__name__)

UNLOADED = "its router has not loaded its model; a request for it does"
LOOK_SECONDS = 0.05
"""Pause between two looks at an engine that still answers, before its model may be pushed out."""


@dataclass(eq=False)
class Fleet:
    """`front` stands for the router in the list of engines while that lists no model."""

    engines: Engines
    front: Engine
    spec: AttachedSpec
    router: Router
    _members: dict[str, Engine] = field(default_factory=dict)
    _models: dict[str, RoutedModel] = field(default_factory=dict)
    """As the router listed them last."""
    _instances: dict[str, str | None] = field(default_factory=dict)
    """What was loaded when we took a model for what it is, or saw it unloaded."""
    _loads: dict[str, asyncio.Task[SlotkeeperError | None]] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One model after another: each may push out the one before."""
    _wanted: Counter[str] = field(default_factory=Counter)
    """Requests that wait for a model."""
    _leaving: frozenset[str] = frozenset()
    """Models that may be pushed out now: a request for one would have the router load it again at once, and push out
    the one that is being loaded."""

    async def look(self) -> None:
        """Compares with what the router says: models that are new, gone, loaded, unloaded. Wakes nothing."""
        async with self._turn:
            try:
                found = await self.router.models()
            except EngineError as error:
                return self._lose_all(str(error))
            self._models = {m.name: m for m in found if self.spec.model in (None, m.name, *m.aliases)}
            for name in self._members.keys() - self._models.keys():
                self._remove(name)
            for model in self._models.values():
                self._compare(self._members.get(model.name) or self._add(model), model)
            self._show_front()

    async def wake(self, engine: Engine) -> None:
        """Returns once its model is loaded and its slots are known. Raises SlotkeeperError."""
        await self.look()
        if (engine.ready and engine.model not in self._leaving) or engine.model not in self._members:
            return
        settings = self.engines.settings
        if (n := self._wanted.total()) >= settings.max_waiting:
            raise Busy(f"{n} requests wait for models to be loaded; try again later.", retry_after=5)
        self._wanted[engine.model] += 1
        try:
            load = self._begin(engine)
            await asyncio.wait({load}, timeout=settings.max_wait_seconds)
        finally:
            self._wanted[engine.model] -= 1
        if not load.done():
            raise WaitedTooLong(f"{engine.model} is still being loaded; try again later.", retry_after=5)
        if (error := load.result()) is not None:
            raise error

    # --- what is listed ---------------------------------------------------------------------------------------------

    def _add(self, model: RoutedModel) -> Engine:
        key = self.engines.settings.upstream_api_key
        client = self.router.client_for(model.name, key.get_secret_value() if key else None)
        engine = self.engines.new_engine(f"{self.front.name}/{model.name}", "attached", client, self.spec.kind)
        engine.wanted_model, engine.slot_dir, engine.aliases = model.name, self.spec.slots, model.aliases
        engine.wake = lambda: self.wake(engine)
        self._members[model.name] = engine
        log.info("model_listed", engine=engine.name, url=self.spec.url, router=self.router.kind)
        return engine

    def _remove(self, name: str) -> None:
        engine = self._members.pop(name)
        self._instances.pop(name, None)
        self.engines.lost_instance(engine, "its router does not list it any more")
        engine.unloaded = False
        self.engines.all.remove(engine)
        self.engines.tasks.spawn(engine.client.aclose(), f"close-{engine.name}")
        log.info("model_gone", engine=engine.name)

    def _compare(self, engine: Engine, model: RoutedModel) -> None:
        engine.sleep_seconds = model.idle_seconds
        is_same = model.instance == self._instances.get(model.name)
        if engine.ready and not is_same and not engine.table.runners():
            self.engines.lost_instance(engine, "its router unloaded it")
            log.info("model_unloaded", engine=engine.name)
        if engine.ready:
            return  # one that sleeps meanwhile is noticed like any other (beliefs.notice_sleep)
        self._instances[model.name] = model.instance
        was, engine.unloaded = engine.unloaded, model.instance is None or model.is_asleep
        if engine.unloaded:
            engine.why_not, engine.is_loading = UNLOADED + (", but failed to" if model.has_failed else ""), True
        elif was or not engine.instance:
            engine.why_not = "its model was loaded just now"
        if not engine.unloaded:
            self._begin(engine)

    def _lose_all(self, why: str) -> None:
        if any(e.ready or e.unloaded for e in self._members.values()):
            log.warning("router_gone", url=self.spec.url, why=why)
        for name, engine in self._members.items():
            if not engine.table.runners():
                self.engines.lost_instance(engine, why)
                self._instances[name] = None
                engine.unloaded = engine.is_loading = False
        self.front.why_not = why

    def _show_front(self) -> None:
        """/readyz and errors speak of the router where there is nothing else to speak of."""
        every = self.engines.all
        if self._members and self.front in every:
            every.remove(self.front)
        elif not self._members and self.front not in every:
            every.append(self.front)
        self.front.why_not = f"the router at {self.spec.url} lists no model" + (
            f" {self.spec.model}" if self.spec.model else ""
        )

    # --- loading ----------------------------------------------------------------------------------------------------

    def _begin(self, engine: Engine) -> asyncio.Task[SlotkeeperError | None]:
        """Loads and looks at one model; who asks meanwhile waits for the same."""
        task = self._loads.get(engine.model)
        if task is None or task.done():
            task = self._loads[engine.model] = self.engines.tasks.spawn(self._load(engine), f"load-{engine.name}")
        return task

    async def _load(self, engine: Engine) -> SlotkeeperError | None:
        """Why it could not be loaded."""
        async with self._loading:
            if engine.ready:
                return None  # what was to push it out did not
            try:
                if engine.unloaded:
                    await self._keep_others(engine)
                    await self._load_unloaded(engine)
            except EngineError as error:
                return as_ours(error)
            finally:
                self._leaving = frozenset()
            await self.engines.attach(engine, self.spec)
        return None

    async def _load_unloaded(self, engine: Engine) -> None:
        try:
            await self.router.load(engine.model)
        finally:
            await self.look()

    async def _keep_others(self, engine: Engine) -> None:
        """A router that is full pushes out what is idle: saved first, as nobody else would. One that has requests is
        waited for, as the router does."""
        if not self.router.is_full(list(self._models.values())):
            return
        others = [e for e in self._members.values() if e is not engine and e.ready]
        deadline = engine.clock() + self.engines.settings.max_wait_seconds
        while any(e.ready and (e.n_requests or e.table.runners() or self._wanted[e.model]) for e in others):
            if engine.clock() > deadline:
                break
            await asyncio.sleep(LOOK_SECONDS)
        self._leaving = frozenset(e.model for e in others)
        for other in others:
            try:
                await save_idle(other, self.engines.beliefs, "loss", [])
            except (EngineError, StoreError) as error:
                log.warning("not_saved_before_unload", engine=other.name, error=str(error))
