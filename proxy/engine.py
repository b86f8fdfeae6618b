"""One engine as the proxy knows it: is it up, what can it do, what lies in its slots, what do its files cost."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from llamacpp.capabilities import TemplateFacts, probe_printed, probe_template
from llamacpp.client import LlamaClient, pauses_between_looks
from llamacpp.engines.flags import EngineSpec
from llamacpp.engines.plan import Plan
from llamacpp.errors import EngineError
from llamacpp.memory import MemoryFacts
from llamacpp.probes import N_AT, Learned
from llamacpp.render import Rendered, Renderer
from llamacpp.reports import Props, SlotFileReport, SlotReport
from llamacpp.templates import keep_reasoning, prints_clock
from policies.checkpoints import BEFORE_END, REWINDS, Checkpoints, Memory, reused
from policies.layout_text import placeholder
from policies.placement import most_useful
from policies.prefix import common_prefix, n_tokens
from policies.types import Abilities, SnapshotFacts
from proxy.engine_errors import unasked
from proxy.engine_spec import memory_facts
from proxy.engine_template import CLOCK_PRICE, ChosenTemplate
from proxy.errors import EngineDown, EngineStarting, ended
from proxy.metrics import Metrics
from proxy.slots import SlotTable
from proxy.store import Store
from proxy.store_types import Snapshot

log = structlog.get_logger(__name__)

UNKNOWN_PREFILL_SECONDS = 1 / 500
"""Per token, until the engine has told its own: a small model on a few cores."""
UNKNOWN_BYTES = 50_000
"""Of KV per token, where the model's header cannot be read: a model of a few billion parameters."""
FILE_BYTES_PER_SECOND = 500e6
"""Until measured: a slow SSD. Reading comes from the page cache and is four times faster."""
UNKNOWN_SAVE_SECONDS = UNKNOWN_BYTES / FILE_BYTES_PER_SECOND
LEAST_SLEEP_SECONDS = 5.0
"""Before an attached engine is asked whether it sleeps; whoever lets one sleep sooner has nothing of a cache."""
LEARNING = 0.3
"""Weight of the newest measurement."""


@dataclass(slots=True)
class Costs:
    """Seconds per token of prefill, save and restore, as measured; newest measurements weigh most."""

    prefill: float = UNKNOWN_PREFILL_SECONDS
    save: float = UNKNOWN_SAVE_SECONDS
    restore: float = UNKNOWN_SAVE_SECONDS / 4
    bytes_per_token: float = 0.0
    _known: set[str] = field(default_factory=set)

    def expect(self, bytes_per_token: float) -> None:
        """What files will cost by the model's own header, until it is measured."""
        self.bytes_per_token = bytes_per_token
        self.save = bytes_per_token / FILE_BYTES_PER_SECOND
        self.restore = self.save / 4

    def learn(self, what: str, seconds: float, tokens: int) -> None:
        """`what`: prefill, save or restore; small amounts say nothing about the rate."""
        if tokens < 64 or seconds <= 0:
            return
        now, old = seconds / tokens, getattr(self, what)
        setattr(self, what, old + LEARNING * (now - old) if what in self._known else now)
        self._known.add(what)


@dataclass(eq=False)
class Engine:
    """One llama-server. `instance` counts its starts: a slot is named by engine, instance and number."""

    name: str
    kind: str
    store: Store
    metrics: Metrics
    max_waiting: int
    client: LlamaClient
    wanted_model: str | None = None
    slot_dir: Path | None = None
    can_rewind: bool = True
    files_rewind: bool = True
    """What was loaded from a slot file can be cut back too (policies/types.Abilities.rewind_files)."""
    memory: Memory = REWINDS
    """What it keeps where it cannot be rewound, and the flags that decide about checkpoints."""
    unified: bool = True
    plan: Plan | None = None
    """The sums behind its flags (ours, with the model's header at hand)."""
    spec: EngineSpec | None = None
    """What it was started with (ours only)."""
    build: str = ""
    """Its build's name: ours by file, an attached one's by its own word."""
    learned: Learned = field(default_factory=Learned)
    """What it was seen to do."""
    learned_key: str = ""
    instance: int = 0
    ready: bool = False
    why_not: str = "it is loading its model"
    is_loading: bool = True
    """Not ready because it loads, as far as we know: that passes by itself."""
    retry_after: float = 2.0
    """Seconds after which whoever it could not serve may ask again."""
    fingerprint: str | None = None
    speculative: bool = False
    has_slots_endpoint: bool = True
    props: Props | None = None
    template: TemplateFacts | None = None
    chosen_template: ChosenTemplate = field(default_factory=ChosenTemplate)
    """What we did to its template (ours only)."""
    prints_clock: bool = False
    """Its template prints the date by itself, and nothing was done about it: every prompt is new at midnight."""
    opening: int = 0
    """Tokens at a prompt's end that the next one may not have there (llamacpp/capabilities.probe_opening)."""
    drops_reasoning: bool = False
    """Its template drops the reasoning of earlier turns, and --append-only-template would keep it."""
    clock_printed: dict[tuple[bool, bool], frozenset[str]] = field(default_factory=dict)
    """Of a fixed clock, what stands in prompts: by whether there is a system message and whether there are tools."""
    n_requests: int = 0
    """Requests that it was picked for and that are not over."""
    n_unseen: int = 0
    """Of all that it works on, requests that send no events: it must not be polled meanwhile (design.md, rule 7)."""
    last_unseen: float = 0.0
    """When the last of them ended, by `clock`."""
    costs: Costs = field(default_factory=Costs)
    clock: Callable[[], float] = time.monotonic
    missing: list[str] = field(default_factory=list)
    """Sentences on what an attached engine lacks and what that costs."""
    sleep_seconds: float = 0.0
    """Its --sleep-idle-seconds; 0: it never sleeps or, attached, nothing tells."""
    restart: Callable[[], None] | None = None
    """Ends it, so that it is started again (ours only)."""
    doubt: Callable[[], None] = lambda: None
    """Told when it behaves as if it had been started anew unseen (proxy/beliefs)."""
    wake: Callable[[], Awaitable[None]] | None = None
    """Has its router load its model, for a request (proxy/routed; None where no router does)."""
    unloaded: bool = False
    """Not ready because its router has not loaded it, which a request does."""
    aliases: tuple[str, ...] = ()
    """What else its router calls it."""
    _header: tuple[Path | None, MemoryFacts | None] | None = None

    def __post_init__(self) -> None:
        self.table = self._new_table(0)
        self.renderer = Renderer(self.client)
        self.known: OrderedDict[tuple[str, bytes], Rendered] = OrderedDict()
        self.bases: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()

    @property
    def model(self) -> str:
        """The name that people know its model by."""
        if self.wanted_model:
            return self.wanted_model
        if self.props is None:
            return "unknown"
        return self.props.model_alias or Path(self.props.model_path).name or "unknown"

    @property
    def n_ctx(self) -> int:
        """Tokens that one request can use."""
        return self.props.n_ctx if self.props else 0

    @property
    def can_save(self) -> bool:
        """Slot files can be written and found again."""
        has_files = self.slot_dir is not None and self.store.persist
        return has_files and self.fingerprint is not None and not self.speculative and self.files_help

    @property
    def files_help(self) -> bool:
        """A prompt that extends what was loaded from a file finds it: by the engine's rule, and by what was seen."""
        if self.memory.rewinds or self.learned.is_useless:
            return not self.learned.is_useless
        n = self.memory.window + BEFORE_END + 1
        kept = (n - BEFORE_END,) if self.file_checkpoints else ()
        return reused(self.memory, n, n, n + 1, kept, from_file=True) > 0

    @property
    def files_step_back(self) -> bool:
        """A prompt that ends with a file finds its tokens (policies/types.Abilities.step_back_files): where files hold
        the checkpoint before their end (llama-server.md, "Slot files"), until one did not."""
        known = self.learned.steps_back
        return self.file_checkpoints if known is None else known

    @property
    def file_checkpoints(self) -> bool:
        """Its slot files hold the checkpoints of their slot."""
        known = self.learned.file_checkpoints
        return self.kind == "embedded" if known is None else known

    @property
    def clock_values(self) -> tuple[tuple[str, str], ...]:
        """(name, strftime format) of every `[[env:name]]` that its template prints where the engine's clock was."""
        return self.chosen_template.clock_values

    @property
    def clock_arguments(self) -> tuple[tuple[str, str], ...]:
        """(argument, name): `chat_template_kwargs` that put a value into the prompt instead of `[[env:name]]`."""
        return self.chosen_template.clock_arguments

    def clock_told(self, *, has_system: bool, has_tools: bool) -> tuple[tuple[str, str], ...]:
        """Those of `clock_values` that stand in such a prompt: some templates print the date without a system text."""
        printed = self.clock_printed.get((has_system, has_tools))
        return tuple(v for v in self.clock_values if printed is None or placeholder(v[0]) in printed)

    async def read_template(self, props: Props, advice: str) -> None:
        """What its template takes, where that can be asked, and says; `advice` is logged when it prints the clock."""
        try:
            self.template = await probe_template(self.client)
        except EngineError as error:
            self.template = None
            log.info("template_unknown", engine=self.name, error=str(error))
        knew, texts = self.prints_clock, (props.chat_template, str(props.raw.get("chat_template_tool_use") or ""))
        self.prints_clock = any(prints_clock(text, self.chosen_template.fixed) for text in texts)
        variant = keep_reasoning(props.chat_template)
        self.drops_reasoning = variant is not None and variant != props.chat_template
        if self.clock_values:
            self.clock_printed = await probe_printed(self.client, [placeholder(name) for name, _ in self.clock_values])
        if self.prints_clock and not knew:
            log.warning("template_prints_clock", engine=self.name, consequence=CLOCK_PRICE, advice=advice)

    def memory_facts(self) -> MemoryFacts | None:
        """What its model's own header says of its memory, where the file is seen from here. Reads it, once."""
        path = Path(self.props.model_path) if self.props and self.props.model_path else None
        if self._header is None or self._header[0] != path:
            self._header = path, memory_facts(path)
        return self._header[1]

    def may_sleep(self) -> bool:
        """It has been idle for so long that it may sleep by now, and holds something that would be lost then."""
        used = [s.last_used for s in self.table.slots if s.n_tokens]
        may_be_asked = self.ready and self.client.is_free_to_ask and (self.kind == "attached" or self.sleep_seconds > 0)
        if not may_be_asked or not used or self.table.runners():
            return False
        return self.clock() - max(used) >= (self.sleep_seconds or LEAST_SLEEP_SECONDS)

    @asynccontextmanager
    async def unseen(self, is_unseen: bool) -> AsyncIterator[None]:
        """A request without events, if it is one, runs as long as the body does."""
        self.n_unseen += is_unseen
        try:
            yield
        finally:
            self.n_unseen -= is_unseen
            self.last_unseen = self.clock() if is_unseen else self.last_unseen

    def require_ready(self) -> None:
        """Raises EngineStarting (ours) or EngineDown (attached) when it cannot be asked now."""
        if self.ready:
            return
        if self.kind == "attached" and not self.is_loading:
            raise EngineDown(unasked(self.client.base_url, self.why_not))
        why = ended(self.why_not)
        raise EngineStarting(f"The engine is not ready: {why} Try again soon.", retry_after=self.retry_after)

    def adopt(self, props: Props, slots: list[SlotReport]) -> None:
        """A fresh instance has answered: its slots are empty as far as we know."""
        self.props, self.instance = props, self.instance + 1
        self.renderer = Renderer(self.client)
        self.known.clear()
        self.bases.clear()
        self.speculative = any(s.speculative for s in slots)
        n_slots = len(slots) or props.total_slots
        capacity = props.n_ctx if self.unified else None
        if n_slots != self.table.n_slots:
            self.table = self._new_table(n_slots)
        self.table.capacity = capacity
        for report in slots:
            if report.id < n_slots and self.table.slots[report.id].is_idle:
                self.table.correct(self.table.slots[report.id], report.n_prompt_tokens)
        self.metrics.add_engine(self.name, self.model, props.n_ctx)

    def _new_table(self, n_slots: int) -> SlotTable:
        return SlotTable(
            n_slots,
            None,
            Abilities(),
            self.clock,
            self.max_waiting,
            is_kept=lambda name: self.store.get(name) is not None,
        )

    def up(self) -> None:
        """It may be asked."""
        self.ready, self.is_loading, self.unloaded = True, False, False
        self.refresh_abilities()

    def down(self, why: str) -> list[tuple[str | None, int]]:
        """It is gone, with everything in its slots (design.md, rule 7). Returns the lines that lost a slot."""
        self.ready, self.why_not = False, why
        lost = self.table.lose_all()
        error = EngineStarting(f"The engine stopped: {ended(why)} Try again soon.", retry_after=self.retry_after)
        self.table.refuse_waiting(error)
        return lost

    def give_up(self, why: str) -> None:
        """It is not trusted any more: started again, if it is ours; else nothing is restored into it from now on.
        Raises EngineStarting, for the request that it was to serve."""
        log.error("engine_given_up", engine=self.name, why=why)
        self.fingerprint = None
        if self.restart is None:
            self.missing.append(f"Nothing is saved or restored any more: {why}. Start it again.")
            self.refresh_abilities()
            return
        self.restart()
        raise EngineStarting(f"The engine is started again: {why}. Try again in a few seconds.", retry_after=2)

    def refresh_abilities(self) -> None:
        """Placement's prices from what was measured so far."""
        c, seen = self.costs, self.learned.diverged
        if seen is not None and not seen.reused and seen.shared >= N_AT:
            self.files_rewind = False  # its header could not be read, or the engine knows better
        self.table.abilities = replace(
            self.table.abilities,
            save=self.can_save,
            restore=self.can_save,
            rewind=self.can_rewind,
            rewind_files=self.files_rewind,
            step_back_files=self.files_step_back,
            memory=self.memory,
            file_checkpoints=self.file_checkpoints,
            save_cost=c.save / c.prefill,
            restore_cost=c.restore / c.prefill,
        )

    def learn_save(self, report: SlotFileReport) -> None:
        """What a save took."""
        self.costs.learn("save", report.seconds, report.n_tokens)
        self.costs.bytes_per_token = report.n_bytes / report.n_tokens
        self.refresh_abilities()

    def learn_restore(self, report: SlotFileReport) -> None:
        """What a restore took."""
        self.costs.learn("restore", report.seconds, report.n_tokens)
        self.refresh_abilities()

    def snapshots_for(self, tenant: str, tokens: bytes) -> tuple[SnapshotFacts, ...]:
        """The snapshots that serve a prompt best, of this engine's fingerprint and directory. One that was made
        with a larger --ctx-size fits no slot: the engine would refuse it, and empty the slot."""
        if not self.can_save or self.fingerprint is None:
            return ()
        facts = [
            SnapshotFacts(
                s.id, s.n_tokens, min(s.n_tokens, common_prefix(self.store.tokens(s), tokens)), self.checkpoints_in(s)
            )
            for s in self.store.candidates(tenant, self.fingerprint)
            if s.dir == self.slot_dir and s.effective is not False and s.n_tokens <= self.n_ctx
        ]
        return most_useful(self.table.abilities, n_tokens(tokens), facts)

    def snapshot(self, snapshot_id: str) -> Snapshot | None:
        """The snapshot of that id, if it is still there."""
        return self.store.get(snapshot_id)

    def checkpoints_in(self, snapshot: Snapshot) -> Checkpoints:
        """Those that its file surely brings along: it ends with a prompt (`carry_out.prime`)."""
        return (max(1, snapshot.n_tokens - BEFORE_END),) if self.file_checkpoints and not self.memory.rewinds else ()

    async def report(self, slot: int) -> SlotReport | None:
        """What the engine says of one slot; None when it cannot or will not say."""
        if not self.has_slots_endpoint:
            return None
        try:
            return next((s for s in await self.client.slots() if s.id == slot), None)
        except EngineError as error:
            log.debug("slots_unanswered", engine=self.name, error=str(error))
            return None

    async def wait_idle(self, slot: int, seconds: float) -> SlotReport | None:
        """Polls GET /slots until the slot no longer works; None when that cannot be known in time.

        Seldom, after the first looks: each answer of the engine keeps it from looking after a stream that was closed.
        """
        instance, deadline = self.instance, self.clock() + seconds
        for pause in pauses_between_looks():
            if self.instance != instance or not self.ready or self.clock() >= deadline:
                break
            report = await self.report(slot)
            if report is not None and not report.is_processing:
                return report
            await asyncio.sleep(pause)
        return None


def names_of(engine: Engine) -> set[str]:
    """Names that a client may call an engine's model by."""
    names = {engine.model, *engine.aliases}
    if engine.props is not None:
        path = Path(engine.props.model_path)
        names |= {engine.props.model_alias, engine.props.model_path, path.name, path.stem}
    return names - {""}
