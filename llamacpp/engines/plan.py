"""Flags from memory arithmetic: context, slots, whole sliding windows or checkpoints, from a model's header and the RAM
at hand.

Sources: `server_context::create_checkpoint` and the loop around it (tools/server/server-context.cpp of llama.cpp
0c1e57098), llamacpp/memory for sizes. VRAM is not measured here: nothing that is portable tells it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llamacpp import memory
from llamacpp.engines.flags import spelled
from llamacpp.gguf import GGUFHeader
from llamacpp.memory import MemoryFacts

Swa = Literal["auto", "full", "checkpoints"]

MOST_CTX, MOST_PARALLEL = 32768, 4
"""Tokens and slots that are chosen at most (contract.md)."""
LEAST_CTX = 4096
"""Below this no coding agent's base fits; a smaller model's own context is kept."""
CTX_STEP = 1024
UBATCH = 512
"""llama-server's default -ub; its compute buffer holds the logits of so many tokens."""
SPARE_SHARE, SPARE_BYTES = 0.10, 512 << 20
"""Of the RAM at hand left to everybody else: this share, at least so many bytes (at most a quarter)."""
CHECKPOINT_SHARE = 0.25
"""Of what is left beside weights and caches, for the checkpoints of all slots."""
MOST_CHECKPOINTS, LEAST_CHECKPOINTS = 32, 4
"""llama-server's own --ctx-checkpoints; and two for a prompt's end, one for the last user message, one for the base."""
LONGEST_STEP, SHORTEST_STEP = 8192, 256
"""Tokens between two checkpoints: llama-server's own --checkpoint-min-step; a batch and a bit."""
UNKNOWN_VRAM_SHARE = 0.25
"""Where a GPU may hold the cache: a whole window cache may add so much of the weights' size."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the person fixed, and what is known of the machine.

    n_ctx, parallel, checkpoints, min_step: None where we may choose. ram: bytes that can be had now, None unknown.
    needs_full: the build restores nothing of a window that is not kept whole. has_gpu: the cache may lie in VRAM.
    """

    n_ctx: int | None = None
    parallel: int | None = None
    swa: Swa = "auto"
    checkpoints: int | None = None
    min_step: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    n_ubatch: int = UBATCH
    unified: bool = True
    swa_full_given: bool = False
    needs_full: bool = False
    has_gpu: bool = False
    ram: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine is started with, and the sums behind it (bytes). `why`: sentences on what was given up or not
    known."""

    n_ctx: int
    parallel: int
    swa_full: bool
    checkpoints: int | None
    min_step: int | None
    kind: str
    n_swa: int
    bytes_per_token: int
    cache_bytes: int
    full_cache_bytes: int
    checkpoint_bytes: int
    weights: int
    compute: int
    ram: int | None
    fits: bool
    why: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of weights, buffers, caches and all checkpoints when every slot has them."""
        return self.weights + self.compute + self.cache_bytes + self.all_checkpoints

    @property
    def all_checkpoints(self) -> int:
        """Bytes of the checkpoints of all slots."""
        return (self.checkpoints or 0) * self.checkpoint_bytes * self.parallel

    def flags(self, asked: Asked) -> tuple[str, ...]:
        """Those beside context and slots that the person did not give, in llama-server's spelling."""
        words: list[str] = []
        if self.swa_full and not asked.swa_full_given:
            words.append("--swa-full")
        if self.checkpoints is not None and asked.checkpoints is None:
            words += ["--ctx-checkpoints", str(self.checkpoints)]
        if self.min_step is not None and asked.min_step is None:
            words += ["--checkpoint-min-step", str(self.min_step)]
        return tuple(words)


def plan(header: GGUFHeader, asked: Asked, facts: MemoryFacts | None = None) -> Plan:
    """The flags for a model. What the person fixed stays; the rest is given up in this order until it fits: whole
    windows (where restores work without), checkpoints, slots, context. Raises KeyError for a cache
    type that llamacpp/memory does not know (`cache_types` gives none).
    """
    facts = facts or memory.facts(header)
    choices = _choices(facts, asked)
    first = found = _sums(header, facts, asked, *choices[0])
    for choice in choices[1:]:
        if found.fits:
            break
        found = _sums(header, facts, asked, *choice)
    return replace(found, why=_reasons(found, first, facts, asked))


def _choices(facts: MemoryFacts, asked: Asked) -> list[tuple[int, int, bool]]:
    """(n_ctx, parallel, swa_full), the best first."""
    own = facts.n_ctx_train or MOST_CTX
    most = asked.n_ctx or min(own, MOST_CTX)
    lengths = [most] if asked.n_ctx else [most, *range((most - 1) // CTX_STEP * CTX_STEP, LEAST_CTX - 1, -CTX_STEP)]
    parallels = [asked.parallel] if asked.parallel else list(range(MOST_PARALLEL, 0, -1))
    kept = _windows(facts, asked)
    if len(kept) == 2 and asked.needs_full:  # a shorter context costs less than restores that reuse nothing
        order = [(n, p, True) for n in lengths for p in parallels]
        return [*order, *((n, p, False) for n in lengths for p in parallels)]
    first = [(most, p, full) for full in kept for p in parallels]
    return [*first, *((n, p, kept[-1]) for n in lengths[1:] for p in parallels[-2:])]


def _windows(facts: MemoryFacts, asked: Asked) -> list[bool]:
    """Whether windows are kept whole, the best first."""
    if not any(layer.is_swa for layer in facts.layers) or not facts.n_swa:
        return [False]
    if asked.swa_full_given or asked.swa == "full":
        return [True]
    return [False] if asked.swa == "checkpoints" else [True, False]


def _sums(header: GGUFHeader, facts: MemoryFacts, asked: Asked, n_ctx: int, parallel: int, full: bool) -> Plan:
    narrow, whole = (_caches(facts, asked, n_ctx, parallel, full=kept) for kept in (False, True))
    caches = whole if full else narrow
    weights, compute = header.size_bytes, compute_bytes(header, asked.n_ubatch)
    left = None if asked.ram is None else asked.ram - spare(asked.ram) - weights - compute - caches
    rolls_back = full and not facts.recurrent_bytes
    each = 0 if rolls_back else memory.checkpoint_bytes(facts, asked.type_k, asked.type_v)
    count, step = _checkpoints(facts, asked, n_ctx, parallel, each, left)
    fits = left is None or (left >= 0 and left >= (count or 0) * each * parallel)
    is_choice = asked.swa == "auto" and not asked.swa_full_given and not asked.needs_full
    if full and asked.has_gpu and is_choice:
        fits = fits and whole - narrow <= UNKNOWN_VRAM_SHARE * weights
    per_token = round(memory.kv_bytes_per_token(facts, asked.type_k, asked.type_v, swa_full=full))
    return Plan(
        n_ctx=n_ctx,
        parallel=parallel,
        swa_full=full,
        checkpoints=count,
        min_step=step,
        kind=facts.kind,
        n_swa=facts.n_swa,
        bytes_per_token=per_token,
        cache_bytes=caches,
        full_cache_bytes=whole,
        checkpoint_bytes=each,
        weights=weights,
        compute=compute,
        ram=asked.ram,
        fits=fits,
    )


def _caches(facts: MemoryFacts, asked: Asked, n_ctx: int, parallel: int, *, full: bool) -> int:
    return memory.cache_bytes(
        facts,
        n_ctx,
        parallel,
        asked.type_k,
        asked.type_v,
        swa_full=full,
        unified=asked.unified,
        n_ubatch=asked.n_ubatch,
    )


def _checkpoints(
    facts: MemoryFacts, asked: Asked, n_ctx: int, parallel: int, each: int, left: int | None
) -> tuple[int | None, int | None]:
    """How many a slot, and how far apart: as many as the RAM holds, spread over the whole context.

    Newer builds write all of a slot's checkpoints into its file, so together they take no more than its tokens.
    """
    if not each:
        return asked.checkpoints, asked.min_step
    most = MOST_CHECKPOINTS
    if left is not None:
        most = min(most, int(max(0, left) * CHECKPOINT_SHARE) // (each * parallel))
    if growing := memory.kv_bytes_per_token(facts, asked.type_k, asked.type_v):
        most = min(most, int(growing * n_ctx) // each)
    count = asked.checkpoints if asked.checkpoints is not None else max(LEAST_CHECKPOINTS, most)
    apart = n_ctx // max(1, count - LEAST_CHECKPOINTS)
    step = min(LONGEST_STEP, max(SHORTEST_STEP, -(-apart // SHORTEST_STEP) * SHORTEST_STEP))
    return count, step if asked.min_step is None else asked.min_step


def _reasons(found: Plan, first: Plan, facts: MemoryFacts, asked: Asked) -> tuple[str, ...]:
    why: list[str] = []
    if asked.ram is None:
        why.append("the RAM at hand is not known: nothing was fitted to it")
    elif not found.fits:
        why.append(f"needs {size(found.total)} where {size(asked.ram)} of RAM can be had: it may swap or be killed")
    if asked.has_gpu:
        why.append("VRAM is not known: what lies on a GPU was counted as RAM")
    if first.n_ctx != found.n_ctx:
        why.append(f"a context of {first.n_ctx:,} tokens does not fit, {found.n_ctx:,} does")
    if first.parallel != found.parallel:
        why.append(f"{first.parallel} slots do not fit, {found.parallel} do")
    if first.swa_full and not found.swa_full:
        cost = f"{size(found.full_cache_bytes)} against {size(found.cache_bytes)}"
        why.append(f"whole windows (--swa-full) do not fit: {cost}")
    if facts.kind == "swa" and not found.swa_full and asked.needs_full:
        why.append("this build reuses nothing of a restored slot file without --swa-full")
    return tuple(why)


def compute_bytes(header: GGUFHeader, n_ubatch: int = UBATCH) -> int:
    """About how large the compute buffers are: the logits of one batch (llama.cpp reserves for all of its tokens), and
    some rows of the model's width."""
    arch = header.text("general.architecture") or ""
    place = header.arrays.get("tokenizer.ggml.tokens")
    n_vocab = place.count if place else header.number(f"{arch}.vocab_size") or 0
    n_embd = header.number(f"{arch}.embedding_length") or 0
    return 4 * n_ubatch * (n_vocab + 16 * n_embd)


def spare(ram: int) -> int:
    """Bytes of the RAM at hand that are left alone."""
    return min(ram // 4, max(SPARE_BYTES, int(ram * SPARE_SHARE)))


def ram_at_hand() -> int | None:
    """Bytes that can be had now without swapping, within this process's control group; None where that is not known."""
    found = [n for n in (_meminfo(), _group_left()) if n is not None]
    return min(found) if found else _all_memory()


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    except (OSError, ValueError, IndexError):
        return None


def _group_left(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left of a control group's limit (version 2, as containers see it); file cache can be given back."""
    try:
        limit = (root / "memory.max").read_text("ascii").strip()
        if not limit.isdigit():
            return None
        used = int((root / "memory.current").read_text("ascii"))
        stat = dict(line.split() for line in (root / "memory.stat").read_text("ascii").splitlines())
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def _all_memory() -> int | None:
    """macOS: three quarters of what is built in."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4
    except (OSError, ValueError, AttributeError):
        return None


_GPUS = ("/dev/nvidia0", "/dev/kfd", "/dev/dri/renderD128")


def may_use_gpu(kind: str, extra: Sequence[str]) -> bool:
    """Whether layers and their cache may lie in VRAM: a graphics card is there, or -ngl says so. The embedded engine of
    Linux computes on the CPU alone."""
    given = last_value(extra, ("-ngl", "--gpu-layers", "--n-gpu-layers"))
    if given is not None:
        return given != "0"
    return kind == "binary" and any(Path(device).exists() for device in _GPUS)


def last_value(tokens: Sequence[str], names: Sequence[str]) -> str | None:
    """The value that the last of these flags has in a command line; None without it."""
    places = [i for i, token in enumerate(tokens[:-1]) if spelled(token) in names]
    return tokens[places[-1] + 1] if places else None


def cache_types(tokens: Sequence[str]) -> tuple[str, str]:
    """What -ctk and -ctv say in a command line; f16 where they do not, or name a type that is not known."""
    given = last_value(tokens, ("-ctk", "--cache-type-k")), last_value(tokens, ("-ctv", "--cache-type-v"))
    key, value = (kind if kind in memory.TYPE_BYTES else "f16" for kind in given)
    return key, value


def size(n_bytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"
