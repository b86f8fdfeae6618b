"""What `slotkeeper doctor` says of one engine: each finding with its consequence in tokens or bytes, and what would be
better. Facts in, sentences out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from llamacpp.capabilities import TemplateFacts
from llamacpp.determinism import TOLERANCE, Comparison
from llamacpp.engines.plan import Plan, size
from llamacpp.memory import MemoryFacts, checkpoint_bytes, kv_bytes_per_token, slot_file_bytes
from llamacpp.probes import Learned

Level = Literal["ok", "costs", "broken", "unknown"]

SMALL_CTX = 16384
"""Tokens: the base of an agent (system text and tools) has up to 15,000."""
OURS = frozenset({"--append-only-template", "--persist"})
"""Flags of `slotkeeper serve` among those that are better; the others are llama-server's."""
_PROBE = "run `slotkeeper doctor --probe` while a slot is empty"


@dataclass(frozen=True, slots=True)
class Finding:
    """level: ok; costs: tokens or bytes that need not be; broken: caching is ineffective; unknown: not tried yet.

    better: a flag or a command. All are sentences, or empty.
    """

    name: str
    level: Level
    what: str
    consequence: str = ""
    better: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an engine.

    unified, swa_full: None where nothing tells it. slot_dir: as we see it. given: flags after `--`. types: of K and V
    in the cache. missing: further sentences. files_help: slot files are worth making. compared: answers after restores,
    if that was tried.
    """

    name: str
    kind: str
    url: str
    model: str
    model_path: str
    build: str
    n_ctx: int
    n_slots: int
    learned: Learned
    memory: MemoryFacts | None = None
    plan: Plan | None = None
    template: TemplateFacts | None = None
    prints_clock: bool = False
    drops_reasoning: bool = False
    unified: bool | None = None
    swa_full: bool | None = None
    speculative: bool = False
    slot_dir: str | None = None
    persists: bool = True
    has_fingerprint: bool | None = None
    types: tuple[str, str] = ("f16", "f16")
    given: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    files_help: bool = True
    compared: tuple[Comparison, ...] | None = field(default=None)

    @property
    def is_ours(self) -> bool:
        """We start it."""
        return self.kind != "attached"

    @property
    def is_windowed(self) -> bool:
        """Local layers keep a window only, as far as that is known."""
        return self.memory is not None and self.memory.kind == "swa" and not self.swa_full

    @property
    def rolls_back(self) -> bool:
        """A slot can go back for free, as far as that is known."""
        return self.memory is not None and (self.memory.kind == "dense" or bool(self.memory.n_swa and self.swa_full))


def findings(facts: Facts) -> list[Finding]:
    """All there is to say of an engine, in reading order."""
    found = [
        *_slots(facts),
        *_files(facts),
        *_memory(facts),
        *_template(facts),
        *_context(facts),
        *_determinism(facts),
    ]
    return [*found, *(Finding("engine", "costs", sentence) for sentence in facts.missing)]


def report(facts: Facts) -> dict[str, Any]:
    """One engine for JSON."""
    found = findings(facts)
    is_better = any(f.level in ("costs", "broken") and f.better.startswith("-") for f in found)
    plan = facts.plan
    return {
        "name": facts.name,
        "kind": facts.kind,
        "url": facts.url,
        "model": facts.model,
        "build": facts.build,
        "effective": all(f.level != "broken" for f in found),
        "findings": [asdict(f) for f in found],
        "learned": asdict(facts.learned),
        "plan": {**asdict(plan), "total": plan.total, "all_checkpoints": plan.all_checkpoints} if plan else None,
        "command": command(facts, found) if is_better else None,
    }


def command(facts: Facts, found: list[Finding]) -> str:
    """The engine's command line with everything that was found better."""
    better = {f.better: None for f in found if f.level in ("costs", "broken") and f.better.startswith("-")}
    flags = [word for flag in better for word in shlex.split(flag)]
    model = shlex.quote(facts.model_path or "MODEL.gguf")
    if facts.is_ours:
        own, rest = [w for w in flags if w in OURS], [*facts.given, *(w for w in flags if w not in OURS)]
        return " ".join(["slotkeeper serve --model", model, *own, *(["--", shlex.join(rest)] if rest else [])])
    n_ctx = facts.n_ctx * (facts.n_slots if facts.unified is False else 1)
    always = {"-c": str(n_ctx), "-np": str(facts.n_slots), "--slot-save-path": facts.slot_dir or "DIR"}
    words = [word for name, value in always.items() if name not in flags for word in (name, value)]
    words += ["--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0", "--metrics"]
    words += [w for w in flags if w not in words]
    return shlex.join(["llama-server", "-m", facts.model_path or "MODEL.gguf", *words])


# --- slots ----------------------------------------------------------------------------------------------------------


def _slots(f: Facts) -> Iterator[Finding]:
    loss = f"up to {f.n_ctx:,} tokens are processed again whenever another conversation has been served"
    if f.learned.pinned is None:
        yield Finding(
            "slots_pinned", "unknown", "whether requests reach the slot they name was not seen yet", "", _PROBE
        )
    elif f.learned.pinned:
        yield Finding("slots_pinned", "ok", "a request runs in the slot that it names")
    else:
        yield Finding(
            "slots_pinned", "broken", "requests do not run in the slot that they name", loss, "use llama-server"
        )
    if f.learned.keeps_idle is None:
        yield Finding("idle_slots", "unknown", "whether idle slots keep their KV was not seen yet", "", _PROBE)
    elif f.learned.keeps_idle:
        yield Finding("idle_slots", "ok", "idle slots keep their KV")
    else:
        what = "idle slots are emptied when another slot works, and would be saved empty"
        yield Finding("idle_slots", "broken", what, loss, "--no-cache-idle-slots --cache-ram 0")
    if f.n_slots == 1:
        what = "there is one slot: a title request or a sub-agent takes it from the conversation"
        yield Finding("slots", "costs", what, loss, "-np 4")
    else:
        yield Finding("slots", "ok", f"{f.n_slots} slots")
    if f.learned.timings is False:
        what = "answers do not say how many tokens came from the cache"
        yield Finding("timings", "costs", what, "no hit can be checked, no loss explained", "use a newer llama-server")
    elif f.learned.timings:
        yield Finding("timings", "ok", "answers say how many tokens came from the cache")


# --- slot files -----------------------------------------------------------------------------------------------------


def _files(f: Facts) -> Iterator[Finding]:
    if f.speculative:
        what = "a draft model (or another speculation) is on, and slot files do not hold its state"
        price = f"nothing is restored: {f.n_ctx:,} tokens a conversation after each restart"
        yield Finding("draft_model", "costs", what, price, "leave out --model-draft and --spec-type")
        return
    yield Finding("draft_model", "ok", "no draft model")
    if not f.persists:
        yield Finding("slot_directory", "costs", "slot files are switched off (--no-persist)", _restart(f), "--persist")
        return
    if f.slot_dir is None:
        better = "--slot-save-path DIR" if not f.is_ours else "choose another --state-dir"
        yield Finding("slot_directory", "costs", "no slot directory is seen from here", _restart(f), better)
        return
    if f.learned.file_seen is False or f.has_fingerprint is False:
        what = f"the engine's slot files cannot be used in {f.slot_dir}"
        yield Finding("slot_directory", "broken", what, _restart(f), f"--slot-save-path {shlex.quote(f.slot_dir)}")
        return
    yield Finding("slot_directory", "ok", f"slot files are seen in {f.slot_dir}", _prices(f))
    yield _appended(f)
    yield _diverged(f)
    yield from _file_checkpoints(f)


def _restart(f: Facts) -> str:
    return f"after a restart, or when slots run short, up to {f.n_ctx:,} tokens a conversation are processed again"


def _prices(f: Facts) -> str:
    if f.memory is None:
        return ""
    whole = slot_file_bytes(f.memory, f.n_ctx, *f.types)
    each = kv_bytes_per_token(f.memory, *f.types) + 16
    more = "" if not f.learned.file_checkpoints else f", and {size(checkpoint_bytes(f.memory, *f.types))} a checkpoint"
    return f"a file takes {size(each)} a token, {size(whole)} for {f.n_ctx:,} tokens{more}"


def _appended(f: Facts) -> Finding:
    name, better = "restore_append", "--swa-full" if f.is_windowed or f.memory is None else ""
    seen = f.learned.appended
    if not f.files_help:
        what = "a prompt that extends a restored file finds nothing of it on this engine, so no files are made"
        return Finding(name, "broken", what, _restart(f), better or "use a newer llama-server")
    if seen is None:
        needs = f.memory is not None and f.memory.n_swa >= 48
        why = f", its file has to be longer than the window of {f.memory.n_swa} tokens" if needs and f.memory else ""
        return Finding(
            name, "unknown", f"whether a restored file serves a longer prompt was not seen yet{why}", "", _PROBE
        )
    told = f"{seen.reused:,} of {seen.shared:,} tokens reused when a prompt extended a restored file"
    if seen.is_effective:
        return Finding(name, "ok", told)
    lost = f"{_restart(f)}; each file is written and read for nothing"
    return Finding(name, "broken", told, lost, better or "use --no-persist, or a newer llama-server")


def _diverged(f: Facts) -> Finding:
    name, seen = "restore_diverge", f.learned.diverged
    if seen is None:
        what = "whether a restored file serves a prompt that differs from it was not seen yet"
        return Finding(name, "unknown", what, "", _PROBE)
    told = f"{seen.reused:,} of {seen.shared:,} shared tokens reused when a prompt diverged inside a restored file"
    if seen.is_effective:
        return Finding(name, "ok", told)
    if seen.reused:
        lost = "the tokens behind the last checkpoint before the difference are processed again"
        return Finding(name, "ok", told, lost)
    lost = f"a restored conversation that is edited is processed whole, up to {f.n_ctx:,} tokens"
    return Finding(name, "costs", told, lost, "files are cut at boundaries here; nothing to set")


def _file_checkpoints(f: Facts) -> Iterator[Finding]:
    if f.learned.file_checkpoints is None or f.rolls_back or f.memory is None:
        return
    each = checkpoint_bytes(f.memory, *f.types)
    if f.learned.file_checkpoints:
        yield Finding("file_checkpoints", "ok", f"slot files hold checkpoints, {size(each)} each")
    else:
        lost = "behind a restore the memory cannot go back: a difference costs the whole restored prompt"
        yield Finding("file_checkpoints", "costs", "slot files hold no checkpoints", lost, "use a newer llama-server")


# --- memory ---------------------------------------------------------------------------------------------------------


def _memory(f: Facts) -> Iterator[Finding]:
    if f.memory is None:
        what = "the model's file is not seen from here, so its memory is not known"
        yield Finding("memory", "unknown", what, "", "run doctor on the engine's machine, or with --model FILE")
        return
    if f.memory.kind == "dense":
        yield Finding("memory", "ok", "dense: a slot can go back to any token for free")
    elif f.memory.kind == "swa":
        yield _window(f, f.memory)
    else:
        each = checkpoint_bytes(f.memory, *f.types)
        lost = f"a difference costs everything behind the last checkpoint; {size(each)} a checkpoint{_spread(f)}"
        yield Finding("memory", "ok", f"{f.memory.kind}: state cannot be rolled back", lost)
    if f.plan is not None:
        yield Finding("arithmetic", "ok", _sums(f.plan))
    if f.plan is not None and not f.plan.fits:
        least = "-c 8192" if f.plan.n_ctx > 8192 else "-ctk q8_0 -ctv q8_0 -fa on"
        yield Finding("fit", "costs", "; ".join(f.plan.why), "the engine may swap or be killed", least)
    elif f.plan is not None and f.plan.why:
        yield Finding("fit", "ok", "; ".join(f.plan.why))


def _window(f: Facts, memory: MemoryFacts) -> Finding:
    name, what = "memory", f"sliding window of {memory.n_swa:,} tokens"
    if f.swa_full:
        return Finding(name, "ok", f"{what}, kept whole (--swa-full)")
    each = size(checkpoint_bytes(memory, *f.types))
    per_token = kv_bytes_per_token(memory, *f.types, swa_full=True) - kv_bytes_per_token(memory, *f.types)
    price = f"--swa-full takes {size(per_token * f.n_ctx)} more; {each} a checkpoint{_spread(f)}"
    lost = f"a difference costs everything behind the last checkpoint, up to {f.n_ctx:,} tokens; {price}"
    if f.swa_full is None:
        return Finding(name, "unknown", f"{what}; whether it is kept whole does not show", lost, "--swa-full")
    return Finding(name, "costs", f"{what}, not kept whole", lost, "--swa-full")


def _spread(f: Facts) -> str:
    if f.plan is None or not f.plan.checkpoints:
        return ""
    step = f", {f.plan.min_step:,} tokens apart" if f.plan.min_step else ""
    return f", {f.plan.checkpoints} a slot{step}, {size(f.plan.all_checkpoints)} in all slots"


def _sums(p: Plan) -> str:
    at_hand = "of an unknown amount of RAM" if p.ram is None else f"of {size(p.ram)} of RAM at hand"
    parts = [f"weights {size(p.weights)}", f"buffers {size(p.compute)}", f"cache {size(p.cache_bytes)}"]
    parts += [f"checkpoints {size(p.all_checkpoints)}"] if p.all_checkpoints else []
    shape = f"{p.n_ctx:,} tokens at {p.bytes_per_token:,} bytes, {p.parallel} slots"
    return f"{shape}: {' + '.join(parts)} = {size(p.total)} {at_hand}"


# --- template -------------------------------------------------------------------------------------------------------


def _template(f: Facts) -> Iterator[Finding]:
    t = f.template
    if t is None:
        yield Finding("template", "unknown", "the chat template could not be asked", "", "serve a chat model")
        return
    late = "takes" if t.late_system else "refuses"
    folded = (
        "" if t.late_system and t.late_in_place else "folded into the neighbouring turn here, the same way each time"
    )
    yield Finding("template_system", "ok", f"the template {late} system text behind the first user message", folded)
    tools = "takes tool definitions" if t.takes_tools else "leaves tool definitions out"
    yield Finding(
        "template_tools", "ok" if t.takes_tools else "costs", f"the template {tools}", *_no_tools(t.takes_tools)
    )
    if f.drops_reasoning:
        what = "the template drops the reasoning of earlier turns"
        price = "each question has the answers since the last one processed again"
        yield Finding("template_reasoning", "costs", what, price, "--append-only-template" if f.is_ours else "")
    else:
        kept = "takes" if t.takes_reasoning else "has no place for"
        yield Finding("template_reasoning", "ok", f"the template {kept} reasoning")
    if f.prints_clock:
        price = f"every prompt is new at midnight, up to {f.n_ctx:,} tokens a conversation"
        better = "let Slotkeeper start the engine (--template-clock fixed)"
        yield Finding("template_clock", "costs", "the template prints the date", price, better)
    else:
        yield Finding("template_clock", "ok", "the prompt does not depend on the clock")


def _no_tools(takes: bool) -> tuple[str, str]:
    return ("", "") if takes else ("agents' tools do not reach the model", "give a template with --chat-template-file")


# --- context --------------------------------------------------------------------------------------------------------


def _context(f: Facts) -> Iterator[Finding]:
    trained = f.memory.n_ctx_train if f.memory else 0
    of = f" of the model's {trained:,}" if trained else ""
    what = f"{f.n_ctx:,} tokens{of} can be used by one request"
    if f.n_ctx < SMALL_CTX and (not trained or trained > f.n_ctx):
        more = min(trained or SMALL_CTX, 32768)
        each = kv_bytes_per_token(f.memory, *f.types, swa_full=bool(f.swa_full)) if f.memory else 0.0
        cost = f", {size(each * (more - f.n_ctx))} more" if each else ""
        lost = f"an agent's base alone has up to 15,000 tokens; {more:,} would do{cost}"
        yield Finding("context", "costs", what, lost, f"-c {more}")
    else:
        yield Finding("context", "ok", what)
    if f.unified is False and f.n_slots > 1:
        lost = f"one request gets {f.n_ctx:,} tokens although {f.n_ctx * f.n_slots:,} are there"
        yield Finding("context_split", "costs", "the context is split between the slots", lost, "--kv-unified")
    elif f.unified:
        yield Finding("context_split", "ok", "all slots share one pool")
    elif f.unified is None and f.n_slots > 1:
        what = "whether the slots share one pool does not show"
        yield Finding("context_split", "unknown", what, "", "--kv-unified, which llama-server leaves out beside -np")


# --- determinism ----------------------------------------------------------------------------------------------------


def _determinism(f: Facts) -> Iterator[Finding]:
    if f.compared is None:
        return
    tested = [c for c in f.compared if c.is_tested]
    apart = max((c.apart for c in tested), default=0.0)
    if not tested:
        what = "no restore was used, so nothing could be compared"
        yield Finding("determinism", "unknown", what, "", "see restore_append")
    elif all(c.is_equal for c in tested):
        what = f"{len(tested)} answers after a restore equal those without (log-probabilities within {apart:.1e})"
        yield Finding("determinism", "ok", what)
    else:
        wrong = [c for c in tested if not c.is_equal]
        what = f"{len(wrong)} of {len(tested)} answers after a restore differ (by {apart:.2g}, allowed {TOLERANCE})"
        lost = "the model answers otherwise behind restored tokens"
        yield Finding("determinism", "broken", what, lost, "use --no-persist, or another llama-server")
