"""What to start, and what a model's own header says about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from llamacpp import engines as children
from llamacpp import gguf, memory
from llamacpp.engines import build, plan
from llamacpp.engines.flags import spelled
from llamacpp.engines.plan import Asked, Plan
from llamacpp.errors import EngineSetupError
from policies.checkpoints import REWINDS, Memory
from proxy.config import Settings

log = structlog.get_logger(__name__)

_CTX, _PARALLEL = ("-c", "--ctx-size"), ("-np", "--parallel")
_CHECKPOINTS = ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints")
_MIN_STEP, _UBATCH = ("-cms", "--checkpoint-min-step"), ("-ub", "--ubatch-size")
_SLEEP = ("--sleep-idle-seconds",)
_MODEL = ("-m", "--model")
_SPLIT = frozenset({"--no-kv-unified", "-no-kvu"})


def child_spec(
    settings: Settings, restores_windows: Callable[[str], bool] = lambda _: False
) -> tuple[children.EngineSpec, Plan | None]:
    """What to start, and the sums behind it (None: the model's header is not at hand).

    Context, slots and window are the model's and the memory's (llamacpp/engines/plan) unless they were asked for, by a
    setting or after `--`. `restores_windows`: whether files of that build were seen to be worth something without
    --swa-full.
    """
    spec = asked_spec(settings)
    path = model_file(settings)
    if path is None:
        return spec, None
    asked = _asked(settings, spec, restores_windows)
    found = plan.plan(gguf.read_header(path), asked)
    spec = replace(spec, ctx_size=found.n_ctx, parallel=found.parallel, chosen=found.flags(asked))
    return spec, found


def tell(found: Plan | None, spec: children.EngineSpec) -> None:
    """The arithmetic of a start, one line."""
    if found is None:
        return
    log.info(
        "engine_memory",
        sentence=_sums_in_words(found),
        memory=found.kind,
        n_ctx=found.n_ctx,
        parallel=found.parallel,
        bytes_per_token=found.bytes_per_token,
        weights=plan.size(found.weights),
        buffers=plan.size(found.compute),
        cache=plan.size(found.cache_bytes),
        checkpoint=plan.size(found.checkpoint_bytes),
        checkpoints=plan.size(found.all_checkpoints),
        total=plan.size(found.total),
        ram="unknown" if found.ram is None else plan.size(found.ram),
        flags=" ".join(spec.chosen),
        notes="; ".join(found.why),
    )


def _sums_in_words(found: Plan) -> str:
    slots = f"{found.parallel} slot{'' if found.parallel == 1 else 's'}"
    parts = [
        f"{plan.size(found.weights)} of weights",
        f"{plan.size(found.cache_bytes)} for a context of {found.n_ctx:,} tokens in {slots}",
        f"{plan.size(found.compute)} of buffers",
    ]
    if found.all_checkpoints:
        parts.append(f"{plan.size(found.all_checkpoints)} for checkpoints")
    at_hand = f", of {plan.size(found.ram)} at hand" if found.ram is not None else ""
    return "; ".join((f"Memory: {' + '.join(parts)} = {plan.size(found.total)}{at_hand}", *found.why)) + "."


def _asked(settings: Settings, spec: children.EngineSpec, restores_windows: Callable[[str], bool]) -> Asked:
    """What was fixed, by a setting or after `--` (which wins); what the engine and the machine are like."""
    extra, given = spec.extra, settings.model_fields_set
    kind, name = _engine(spec)
    type_k, type_v = plan.cache_types(extra)
    return Asked(
        n_ctx=_number(extra, _CTX, settings.ctx_size),
        parallel=_number(extra, _PARALLEL, settings.parallel if "parallel" in given else None),
        swa=settings.swa,
        checkpoints=_number(extra, _CHECKPOINTS, None, least=0),
        min_step=_number(extra, _MIN_STEP, None, least=0),
        type_k=type_k,
        type_v=type_v,
        n_ubatch=_number(extra, _UBATCH, None) or plan.UBATCH,
        unified=is_unified(spec),
        swa_full_given="--swa-full" in map(spelled, extra),
        needs_full=kind == "binary" and not restores_windows(name),
        has_gpu=plan.may_use_gpu(kind, extra),
        ram=plan.ram_at_hand(),
    )


def _engine(spec: children.EngineSpec) -> tuple[str, str]:
    """embedded or binary, and its build's name; what cannot be started is told by the start itself."""
    try:
        found = children.choose(spec, build.built_servers())
    except EngineSetupError:
        return spec.kind, ""
    return ("embedded", "") if found is None else ("binary", children.build_of(found))


def _number(extra: tuple[str, ...], names: tuple[str, ...], otherwise: int | None, *, least: int = 1) -> int | None:
    """The number that one of these flags has after `--`; `otherwise` without it, or where it leaves the choice (0)."""
    text = plan.last_value(extra, names)
    if text is None:
        return otherwise
    return int(text) if text.isdigit() and int(text) >= least else None


def model_file(settings: Settings) -> Path | None:
    """The model's file, where it is at hand: the one after `--` wins, as in llama-server."""
    named = plan.last_value(settings.engine_flags, _MODEL)
    path = Path(named) if named else settings.model
    if path is None or not path.is_file() or (named is None and _names_other(settings)):
        return None
    return path


def _names_other(settings: Settings) -> bool:
    return children.EngineSpec(model=None, extra=settings.engine_flags).names_model


def is_unified(spec: children.EngineSpec) -> bool:
    """All slots share one pool, as we choose it unless a flag after `--` says otherwise."""
    return not _SPLIT.intersection(map(spelled, spec.extra))


def asked_spec(settings: Settings) -> children.EngineSpec:
    """What the settings name, nothing of it chosen."""
    return children.EngineSpec(
        model=settings.model,
        kind=settings.engine,
        llama_server=settings.llama_server,
        parallel=settings.parallel,
        ctx_size=settings.ctx_size,
        slot_dir=settings.slots_dir if settings.persist else None,
        port=settings.engine_port,
        extra=settings.engine_flags,
        log_file=settings.logs_dir / "engine0.log",
        alias=settings.model.stem if settings.model else None,
    )


def can_rewind(spec: children.EngineSpec) -> bool:
    """A slot's end can be cut off for free: dense memory, or a sliding window that is kept whole."""
    if spec.model is None or not spec.model.is_file():
        return True
    return "--swa-full" in (*spec.chosen, *spec.extra) or rewinds(spec.model)


def slot_memory(spec: children.EngineSpec) -> Memory:
    """What decides how far a slot of an engine of ours can go back; dense where its model's header is not at hand."""
    facts = memory_facts(spec.model)
    if facts is None:
        return REWINDS
    words = (*spec.chosen, *spec.extra)
    most = _number(words, _CHECKPOINTS, None, least=0)
    step = _number(words, _MIN_STEP, None, least=0)
    usual = kept_memory(facts, swa_full="--swa-full" in map(spelled, words))
    return replace(
        usual,
        most=usual.most if most is None else most,
        min_step=usual.min_step if step is None else step,
        micro_batch=_number(words, _UBATCH, None) or usual.micro_batch,
    )


def sleep_seconds(spec: children.EngineSpec) -> float:
    """After how many idle seconds an engine of ours unloads its model; 0.0: never."""
    return float(_number(spec.extra, _SLEEP, None) or 0)


def kept_memory(facts: memory.MemoryFacts, *, swa_full: bool = False) -> Memory:
    """What a model's header says of it, with llama-server's own checkpoints."""
    return Memory(window=0 if swa_full else facts.n_swa, recurrent=facts.kind in ("hybrid", "recurrent"))


def file_bytes_per_token(model: Path | None) -> float:
    """Bytes that one more token adds to a slot file; 0.0 when the model's header is not at hand."""
    if model is None or not model.is_file():
        return 0.0
    return memory.kv_bytes_per_token(memory.facts(gguf.read_header(model)))


def memory_facts(model: Path | None) -> memory.MemoryFacts | None:
    """By the model's own header; None where it cannot be read."""
    try:
        return memory.facts(gguf.read_header(model)) if model is not None and model.is_file() else None
    except (EngineSetupError, OSError):
        return None


def rewinds(model: Path) -> bool:
    """By the model's own header; a file that cannot be read is taken to be dense, and the engine's figures tell."""
    try:
        return memory.facts(gguf.read_header(model)).kind == "dense"
    except (EngineSetupError, OSError):
        return True
