"""All engines of one proxy: started or attached, watched, started again, found by model name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from llamacpp import engines as children
from llamacpp.capabilities import probe_opening
from llamacpp.client import LlamaClient
from llamacpp.engines import attached, build
from llamacpp.errors import EngineError, EngineSetupError, EngineStarting
from llamacpp.reports import Props, is_same
from policies.causes import Cause
from policies.checkpoints import REWINDS
from proxy import fingerprint
from proxy.beliefs import Beliefs
from proxy.config import Settings
from proxy.engine import Engine, names_of
from proxy.engine_spec import (
    can_rewind,
    child_spec,
    file_bytes_per_token,
    is_unified,
    kept_memory,
    memory_facts,
    rewinds,
    sleep_seconds,
    slot_memory,
    tell,
)
from proxy.engine_template import clock_advice, with_template
from proxy.errors import BadRequest, StoreError, UnknownModel
from proxy.learned import LearnedBook, learn_ways
from proxy.lines import Line, LineBook
from proxy.metrics import Metrics
from proxy.store import Store
from proxy.tasks import Tasks
from proxy.watching import Watch, say_not_attached

log = structlog.get_logger(__name__)

HEALTH_SECONDS = 0.1
"""Pause between two looks at a loading engine."""
FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0
"""Seconds before an engine that died is started again, doubled each time; a run of STABLE_SECONDS starts anew."""
STABLE_SECONDS = 60.0
LOADING_SECONDS = 2.0
"""For an engine to load a small model: SDKs ask again twice, after as long as they are told to wait."""
GIVEN_UP_SECONDS = 5.0
"""For an engine that is not trusted any more to end by itself."""
HOPELESS = 3
"""Starts of an engine that was never ready after which we give up: its model cannot be loaded."""


@dataclass(eq=False)
class Engines:
    """The engines of this process. `start` returns at once; /readyz says when one can be asked."""

    settings: Settings
    store: Store
    metrics: Metrics
    lines: LineBook
    tasks: Tasks
    all: list[Engine] = field(default_factory=list)
    on_hopeless: Callable[[Exception], None] = lambda _: None
    """Told why no engine of ours can be started, or why an attached one never can be one."""
    on_pressure: Callable[[Engine], None] = lambda _: None
    """Told of an engine one of whose runners has outgrown its reserve."""
    learned: LearnedBook = field(init=False)
    beliefs: Beliefs = field(init=False)
    """What we believe of slots, against what the engines say."""
    _children: dict[str, children.Child] = field(default_factory=dict)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _kinds: dict[str, str] = field(default_factory=dict)
    _watches: list[Watch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.learned = LearnedBook(self.settings.state_dir / "engines")
        self.beliefs = Beliefs(self.lines, self.metrics, self.tasks, self.renew)

    # --- choosing ---------------------------------------------------------------------------------------------------

    def pick(self, model: str | None, door: str = "chat", line: str | None = None) -> Engine:
        """The engine for a request: named by alias, file or id; else any, when all serve one model (contract.md).

        Of several the one that holds most of the request's line, else the one with least to do.
        """
        able = [
            e for e in self.all if self._kinds.get(e.name, "chat") == ("embedding" if door == "embedding" else "chat")
        ]
        if not able:
            raise BadRequest(
                f"No engine here takes {door} requests: they would overwrite a conversation's slot. Attach one "
                f"for them with --upstream URL,kind={'embedding' if door == 'embedding' else 'chat'}."
            )
        named = [e for e in able if model and model in names_of(e)]
        known_yet = [e for e in able if e.props is not None or e.wanted_model] or able
        if not named and len({e.model for e in known_yet}) == 1:
            named = known_yet
        if not named:
            known = ", ".join(sorted({e.model for e in able}))
            raise UnknownModel(f"No engine here serves the model '{model or ''}'. Served are: {known}.", param="model")
        ready = [e for e in named if e.ready] or named
        held = {e.name: slot.n_tokens for e in ready if line and (slot := e.table.holding(line)) is not None}
        return min(ready, key=lambda e: (-held.get(e.name, 0), e.n_requests, e.name))

    async def awake(self, engine: Engine) -> None:
        """It can be asked now, its model loaded by its router if need be. Raises SlotkeeperError."""
        if engine.wake is not None:
            await engine.wake()
        engine.require_ready()

    def is_ready(self) -> bool:
        """At least one can be asked, or will be when a request comes."""
        return any(e.ready or e.unloaded for e in self.all)

    def is_stopping(self) -> bool:
        """Engines that end now are not started again."""
        return self._stopping.is_set()

    def why_not_ready(self) -> str:
        """For /readyz."""
        return "; ".join(f"{e.name}: {e.why_not}" for e in self.all if not e.ready) or "no engine is configured"

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begins to start or attach; raises EngineSetupError or UsageError for what can be known at once."""
        key = self.settings.upstream_api_key
        if not self.settings.upstream:
            await self._start_child()
            return
        for number, text in enumerate(self.settings.upstream):
            spec = attached.parse_upstream(text)
            client = LlamaClient(spec.url, key.get_secret_value() if key else None)
            engine = self.new_engine(f"engine{number}", "attached", client, spec.kind)
            engine.wanted_model, engine.slot_dir = spec.model, spec.slots
            watch = Watch(self, engine, spec)
            self._watches.append(watch)
            self.tasks.spawn(watch.run(self._stopping), f"watch-{engine.name}")

    async def stop(self, seconds: float) -> None:
        """Ends our children (their slots are saved by then) and closes all connections."""
        self._stopping.set()
        await asyncio.gather(*(child.stop(seconds) for child in self._children.values()))
        for engine in {*self.all, *(watch.engine for watch in self._watches)}:
            await engine.client.aclose()

    async def wait_released(self, seconds: float) -> None:
        """Until no request holds a slot, at most so long. Nothing ends a batch of the engine's: up to `-b` tokens of a
        cancelled prompt are processed to their end, and what the slot holds then can be saved."""
        deadline = asyncio.get_running_loop().time() + seconds
        if held := self._held():
            log.info("stop_waits_for_batch", slots=held, at_most_seconds=round(seconds, 1))
        while self._held():
            if asyncio.get_running_loop().time() > deadline:
                log.warning("slots_not_released", consequence="what they hold is not saved, and processed again")
                return
            await asyncio.sleep(0.05)

    def _held(self) -> int:
        return sum(not s.is_idle for e in self.all for s in e.table.slots)

    def remember(self, line: Line) -> None:
        """Writes a line's ledger behind, so that it is known after a restart."""
        self.store.put_ledger(line.to_record())
        for forgotten in self.lines.take_forgotten():
            self.tasks.spawn(self._forget(forgotten), "forget-line")

    async def _forget(self, line: str) -> None:
        try:
            await self.store.forget_line(line)
        except StoreError as error:
            log.warning("line_not_forgotten", line=line, error=str(error))

    def new_engine(self, name: str, kind: str, client: LlamaClient, takes: str = "chat") -> Engine:
        """One more in `all`, not ready yet; `takes`: chat or embedding requests."""
        self._kinds[name] = takes
        engine = Engine(name, kind, self.store, self.metrics, self.settings.max_waiting, client)
        engine.doubt = lambda: self.beliefs.suspect(engine, is_doubtful=True)
        engine.metrics.add_engine(name, "unknown", 0)
        self.all.append(engine)
        return engine

    # --- children ---------------------------------------------------------------------------------------------------

    async def _start_child(self) -> None:
        planned, sums = await asyncio.to_thread(child_spec, self.settings, self.learned.restores_windows)
        spec, chosen = await asyncio.to_thread(with_template, self.settings, planned)
        child = await children.start(spec, state_dir=self.settings.state_dir, built=build.built_servers())
        tell(sums, spec)
        engine = self.new_engine("engine0", child.kind, LlamaClient(child.base_url, child.api_key))
        engine.slot_dir, engine.can_rewind, engine.chosen_template = self.settings.slots_dir, can_rewind(spec), chosen
        engine.files_rewind = spec.model is None or not spec.model.is_file() or rewinds(spec.model)
        if (n_bytes := file_bytes_per_token(spec.model)) > 0:
            engine.costs.expect(n_bytes)
        engine.memory = slot_memory(spec)
        engine.sleep_seconds = sleep_seconds(spec)
        engine.unified, engine.plan, engine.spec, engine.build = is_unified(spec), sums, spec, child.build
        self.tasks.spawn(self._keep_child(engine, spec, child), "keep-engine")

    async def _keep_child(self, engine: Engine, spec: children.EngineSpec, child: children.Child | None) -> None:
        """Runs one child after another until we stop."""
        backoff, deaths = FIRST_BACKOFF, 0
        while not self.is_stopping():
            began = engine.clock()
            try:
                if child is None:
                    built = build.built_servers()
                    child = await children.start(spec, state_dir=self.settings.state_dir, built=built)
                    old, engine.client = engine.client, LlamaClient(child.base_url, child.api_key)
                    await old.aclose()
                self._children[engine.name] = child
                engine.restart = lambda child=child: self._end(child)
                await self._until_dead(engine, child)
                why = child.obituary(has_served=engine.ready)
            except EngineSetupError as error:
                why = str(error)
            except Exception as error:  # whatever it is: without this loop there would never be an engine again
                log.error("engine_not_kept", engine=engine.name, exc_info=error)
                why = f"it could not be started ({type(error).__name__}); the log says more"
                if child is not None:
                    await child.stop(0)
            child = None
            self._children.pop(engine.name, None)
            if self.is_stopping():
                return
            backoff = FIRST_BACKOFF if engine.clock() - began > STABLE_SECONDS else backoff
            engine.retry_after = LOADING_SECONDS + backoff
            self.lost_instance(engine, why)
            deaths += 1
            if engine.instance == 0 and deaths == HOPELESS:
                return self.on_hopeless(EngineSetupError(f"{why} It has never been ready in {deaths} starts."))
            log.error("engine_ended", engine=engine.name, why=why, again_in_seconds=backoff)
            await asyncio.sleep(backoff)
            backoff = min(LONGEST_BACKOFF, backoff * 2)

    def _end(self, child: children.Child) -> None:
        """It is started again once it is dead."""
        self.tasks.spawn(child.stop(GIVEN_UP_SECONDS), "end-engine")

    async def _until_dead(self, engine: Engine, child: children.Child) -> None:
        dead = asyncio.create_task(child.wait())
        try:
            while not dead.done():
                if await self._is_taken_over(engine):
                    log.info(
                        "engine_ready", engine=engine.name, kind=child.kind, model=engine.model, n_ctx=engine.n_ctx
                    )
                    await dead
                    return
                await asyncio.wait({dead}, timeout=HEALTH_SECONDS)
        finally:
            dead.cancel()

    async def _is_taken_over(self, engine: Engine) -> bool:
        """Whether it serves now. One that dies, or stops answering, between two of our questions is asked again."""
        if not await engine.client.health():
            return False
        try:
            await self._take_over(engine)
        except EngineError as error:
            log.warning("engine_not_taken_over", engine=engine.name, error=str(error))
            return False
        return True

    def lost_instance(self, engine: Engine, why: str) -> None:
        """It is not there any more, and nothing that lay in its slots: their lines are told."""
        was_ready = engine.ready
        lost = engine.down(why)
        for line in filter(None, (self.lines.get(name) for name, _ in lost if name)):
            line.lost = Cause.ENGINE_RESTART
        if was_ready:
            self.metrics.engine_restarted(engine.name)

    async def _take_over(self, engine: Engine, has_slots: bool = True) -> None:
        """A new instance answers: what is it, and by which fingerprint are its files known?"""
        slots = await engine.client.slots() if has_slots else []
        props = await engine.client.props()
        engine.adopt(props, slots)
        await engine.read_template(props, clock_advice(self.settings, engine.kind))
        if engine.template is not None and not engine.files_rewind:
            engine.opening = await probe_opening(engine.client)
        await self._take_fingerprint(engine, {s.id for s in slots if not s.n_prompt_tokens and not s.is_processing})
        await learn_ways(self, engine, slots)
        engine.table.watch = lambda: self.on_pressure(engine)
        engine.up()

    async def identify(self, engine: Engine) -> None:
        """Tries again to learn a fingerprint that could not be made before, in a slot that is empty by now."""
        slot = next((s for s in engine.table.slots if s.is_idle and not s.n_tokens), None)
        if (
            slot is None
            or engine.fingerprint is not None
            or engine.slot_dir is None
            or await self.beliefs.is_asleep(engine)
        ):
            return
        if not slot.is_idle or slot.n_tokens:
            return
        engine.table.lease(slot)
        try:
            await self._take_fingerprint(engine, {slot.id})
        finally:
            engine.table.release(slot)
        engine.refresh_abilities()

    async def _take_fingerprint(self, engine: Engine, empty: set[int]) -> None:
        if engine.slot_dir is None or engine.speculative or not self.settings.persist or not empty:
            return
        known = self.settings.state_dir / fingerprint.DIRECTORY
        try:
            if engine.kind == "attached":
                await fingerprint.check_dir(engine.client, max(empty), engine.slot_dir)
            engine.slot_dir = await self.store.add_dir(engine.slot_dir)
            engine.fingerprint = await fingerprint.take(engine.client, max(empty), engine.slot_dir, self.store, known)
        except fingerprint.WrongDir as error:
            engine.fingerprint = engine.slot_dir = None
            engine.missing.append(str(error))
            log.warning("engine_lacks", engine=engine.name, what=str(error))
        except (EngineError, OSError, StoreError) as error:
            engine.fingerprint = None
            log.warning(
                "no_fingerprint", engine=engine.name, error=str(error), consequence="nothing is saved or restored"
            )

    # --- attached ---------------------------------------------------------------------------------------------------

    async def renew(self, engine: Engine, props: Props | None) -> None:
        """It was started anew, perhaps with other flags: what it is, or at least what its files are known by, is found
        out again. An engine of ours or of a router has others who look after it."""
        if engine.kind != "attached" or engine.wake is not None:
            return
        log.warning("engine_gone" if props is None else "engine_may_have_restarted", engine=engine.name)
        if props is None or engine.props is None or not is_same(engine.props, props):
            self.lost_instance(engine, "it was started anew.")
            engine.is_loading = props is not None  # it answers: the next look attaches it
        elif engine.fingerprint is not None:
            engine.fingerprint = None
            engine.refresh_abilities()
            await self.identify(engine)

    async def attach(self, engine: Engine, spec: attached.AttachedSpec, *, is_start: bool = False) -> None:
        """Finds out what it is and can do; it is ready then, or says why not. `is_start`: this is the first look at
        it, so what can never work ends the start."""
        try:
            found = await attached.inspect(engine.client, spec)
            engine.has_slots_endpoint, engine.missing = found.has_slots, list(found.missing)
            engine.slot_dir = spec.slots if found.can_save else None
            facts = memory_facts(Path(found.props.model_path))
            engine.can_rewind = engine.files_rewind = facts is None or facts.kind == "dense"
            # Whether it keeps windows whole does not show: what it gives is seen then.
            engine.memory = kept_memory(facts) if facts is not None and not facts.n_swa else REWINDS
            await self._take_over(engine, has_slots=found.has_slots)
        except EngineStarting:
            engine.why_not, engine.is_loading = "it is loading its model", True
            return
        except children.UsageError as error:
            say_not_attached(engine, spec, error, has_key=False)
            if is_start:
                self.on_hopeless(error)
            return
        except EngineError as error:
            say_not_attached(engine, spec, error, has_key=self.settings.upstream_api_key is not None)
            return
        for sentence in found.missing:
            log.warning("engine_lacks", engine=engine.name, what=sentence)
        log.info("engine_attached", engine=engine.name, url=spec.url, model=engine.model, n_ctx=engine.n_ctx)
