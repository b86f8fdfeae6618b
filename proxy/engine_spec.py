"""What to start, and what a model's own header says about it."""

from __future__ import annotations

from pathlib import Path

from llamacpp import engines as children
from llamacpp import gguf, memory
from llamacpp.errors import EngineSetupError
from proxy.config import Settings

DEFAULT_CTX = 32768
"""Tokens of context of a child engine whose model could take more (contract.md, `--ctx-size`)."""


def child_spec(settings: Settings) -> children.EngineSpec:
    """What to start. The context is the model's own, at most DEFAULT_CTX, unless it was asked for."""
    chosen: list[str] = []
    ctx = settings.ctx_size
    if settings.model is not None and settings.model.is_file():
        facts = memory.facts(gguf.read_header(settings.model))
        ctx = ctx or min(facts.n_ctx_train or DEFAULT_CTX, DEFAULT_CTX)
        if facts.kind == "swa":
            # A sliding window that is not kept whole cannot be cut back (llama-server.md, "Sliding window ...").
            chosen.append("--swa-full")
    return children.EngineSpec(
        model=settings.model,
        kind=settings.engine,
        llama_server=settings.llama_server,
        parallel=settings.parallel,
        ctx_size=ctx,
        slot_dir=settings.slots_dir if settings.persist else None,
        port=settings.engine_port,
        extra=settings.engine_flags,
        log_file=settings.logs_dir / "engine0.log",
        alias=settings.model.stem if settings.model else None,
        chosen=tuple(chosen),
    )


def can_rewind(spec: children.EngineSpec) -> bool:
    """A slot's end can be cut off for free: dense memory, or a sliding window that is kept whole."""
    if spec.model is None or not spec.model.is_file():
        return True
    return "--swa-full" in (*spec.chosen, *spec.extra) or rewinds(spec.model)


def file_bytes_per_token(model: Path | None) -> float:
    """Bytes that one more token adds to a slot file; 0.0 when the model's header is not at hand."""
    if model is None or not model.is_file():
        return 0.0
    return memory.kv_bytes_per_token(memory.facts(gguf.read_header(model)))


def rewinds(model: Path) -> bool:
    """By the model's own header; a file that cannot be read is taken to be dense, and the engine's figures tell."""
    try:
        return memory.facts(gguf.read_header(model)).kind == "dense"
    except (EngineSetupError, OSError):
        return True
