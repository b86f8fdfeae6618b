"""What kind of memory a model has and how many bytes a token costs in it, from its GGUF header alone.

Rules from llama.cpp 0c1e57098: `llm_arch_is_recurrent` and `llm_arch_is_hybrid` (src/llama-arch.cpp),
`load_swa_pattern` and `create_memory` (src/llama-model.cpp and src/models/), `n_embd_k_gqa` and following
(src/llama-hparams.cpp). Architectures that came later are judged by their keys. This is for planning; whether memory
can be rewound is shown by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llamacpp.gguf import GGUFHeader

Kind = Literal["dense", "swa", "hybrid", "recurrent"]

RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
HYBRID = frozenset(
    "jamba falcon-h1 plamo2 granitehybrid lfm2 lfm2moe nemotron_h nemotron_h_moe qwen3next kimi-linear bailingmoe3 "
    "kimi-k3 glm5-next qwen35 qwen35moe qwen4exp deepseek4 minimax-01".split()
)
SWA_PERIODS: dict[str, tuple[int, bool]] = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "exaone4": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "llama4": (4, False),
    "mellum": (4, False),
    "muse-glimmer": (4, False),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
}
"""Every n-th layer sees everything, the others a window; True: the first of each n does, False: the last."""
WINDOWS = {"gemma2": 4096, "exaone4": 4096, "llama4": 8192}
"""Windows (tokens) of models whose files need not name one."""
FULL_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
"""Hybrids of which every n-th layer is attention, when the file does not name its recurrent layers."""
TYPE_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Bytes a value in the cache, by the names that -ctk and -ctv take (ggml block sizes)."""
CELL_BYTES, TOKEN_BYTES = 12, 4
"""In a slot file each cell of a cache has position and sequence, and each token its id (slot_layout.py)."""
FILE_HEAD, SECTION_HEAD, CHECKPOINT_HEAD = 28, 12, 48
"""Bytes before the state, before all checkpoints and before each of them (slot_layout.py, files of both builds)."""
CELL_PAD = 256
"""Cells of a cache come in multiples of this (llama_context: n_ctx; llama_kv_cache_iswa)."""


@dataclass(frozen=True)
class LayerKV:
    """One attention layer's cache: values a token in K and in V, and whether only a window of it is kept."""

    n_embd_k_gqa: int
    n_embd_v_gqa: int
    is_swa: bool


@dataclass(frozen=True)
class MemoryFacts:
    """A model's memory. n_swa: window in tokens, 0 without; n_ctx_train: tokens; layers: those with a cache of their
    own.

    recurrent_bytes: state of one sequence in all recurrent layers, whatever its length; 0 when there is none or its
    architecture is not one whose size we know.
    """

    architecture: str
    name: str
    kind: Kind
    n_layers: int
    n_swa: int
    n_ctx_train: int
    layers: tuple[LayerKV, ...]
    recurrent_bytes: int = 0
    n_recurrent: int = 0
    """Layers with recurrent state."""

    @property
    def n_layers_kv(self) -> int:
        """Layers with an attention cache of their own."""
        return len(self.layers)

    @property
    def can_rewind(self) -> bool:
        """Whether a slot can go back to any earlier position for free (without `--swa-full`)."""
        return self.kind == "dense"


def facts(header: GGUFHeader) -> MemoryFacts:
    """Facts about a model from its header; missing keys count as 0 or as llama.cpp's defaults. Raises nothing."""
    keys = _Keys(header)
    arch = keys.arch
    n_layers = max(0, keys.number("block_count") - keys.number("nextn_predict_layers"))
    window = _window(keys, n_layers)
    local = _swa_layers(keys, n_layers) if window else [False] * n_layers
    recurrent = _recurrent_layers(keys, n_layers)
    layers = tuple(
        layer
        for i in range(min(n_layers, _own_kv_layers(keys, n_layers)))
        if (arch == "falcon-h1" or not recurrent[i]) and (layer := _layer(keys, i, local[i])).n_embd_k_gqa
    )
    n_recurrent = sum(recurrent)
    return MemoryFacts(
        architecture=arch,
        name=header.text("general.name") or header.path.stem,
        kind=_kind(arch, layers, n_recurrent, window),
        n_layers=n_layers,
        n_swa=window,
        n_ctx_train=keys.number("context_length"),
        layers=layers,
        recurrent_bytes=4 * n_recurrent * _recurrent_width(keys),
        n_recurrent=n_recurrent,
    )


def kv_bytes_per_token(
    facts: MemoryFacts, type_k: str = "f16", type_v: str = "f16", *, swa_full: bool = False
) -> float:
    """Bytes of attention cache that one more token takes for good; layers with a window count only with `swa_full`.

    Raises KeyError for a cache type that is not in TYPE_BYTES.
    """
    return sum(_width(layer, type_k, type_v) for layer in facts.layers if swa_full or not layer.is_swa)


def checkpoint_bytes(facts: MemoryFacts, type_k: str = "f16", type_v: str = "f16", *, at: int | None = None) -> int:
    """About how large one context checkpoint is: a whole window of the local layers, and all recurrent state.

    `at`: tokens before it, where they are fewer than a window. 0 for dense memory, which has none. Raises KeyError as
    above.
    """
    if facts.kind == "dense":
        return 0
    local = [layer for layer in facts.layers if layer.is_swa]
    n_cells = facts.n_swa if at is None else min(at, facts.n_swa)
    total = facts.recurrent_bytes + (_state_head(facts) if facts.recurrent_bytes else 0)
    if local:
        total += _attention_bytes(local, n_cells, type_k, type_v)
    return total + CHECKPOINT_HEAD


def cache_bytes(
    facts: MemoryFacts,
    n_ctx: int,
    parallel: int,
    type_k: str = "f16",
    type_v: str = "f16",
    *,
    swa_full: bool = False,
    unified: bool = True,
    n_ubatch: int = 512,
) -> int:
    """Memory of all caches of an engine, checkpoints not counted: n_ctx tokens, `parallel` slots.

    A cache of windows has n_swa cells a slot and one batch, padded to 256 (llama_kv_cache_iswa); with `swa_full` as
    many as the others. Raises KeyError as above.
    """
    n_cells = _padded(n_ctx)
    n_local = n_cells
    if not swa_full:
        each = min(n_ctx if unified else n_ctx // parallel, facts.n_swa * (parallel if unified else 1) + n_ubatch)
        n_local = _padded(each) * (1 if unified else parallel)
    growing = kv_bytes_per_token(facts, type_k, type_v)
    local = kv_bytes_per_token(facts, type_k, type_v, swa_full=True) - growing
    return round(growing * n_cells + local * n_local) + facts.recurrent_bytes * parallel


def slot_file_bytes(
    facts: MemoryFacts, n_tokens: int, type_k: str = "f16", type_v: str = "f16", *, checkpoints: Sequence[int] = ()
) -> int:
    """How large the slot file of n_tokens is, within 1 % of files of both builds (tests/live/test_memory.py).

    Of a local layer a file holds one window, also with `--swa-full` (`llama_kv_cache::state_write`). `checkpoints`:
    where those lie that newer builds write behind it, in tokens. Raises KeyError as above.
    """
    full = [layer for layer in facts.layers if not layer.is_swa]
    total = FILE_HEAD + TOKEN_BYTES * n_tokens
    if facts.layers:
        total += _attention_bytes(full, n_tokens, type_k, type_v)
    if facts.n_swa:
        local = [layer for layer in facts.layers if layer.is_swa]
        total += _attention_bytes(local, min(n_tokens, facts.n_swa), type_k, type_v)
    if facts.recurrent_bytes:
        total += _state_head(facts) + facts.recurrent_bytes
    if checkpoints:
        total += SECTION_HEAD + sum(checkpoint_bytes(facts, type_k, type_v, at=at) for at in checkpoints)
    return total


def end_checkpoints(facts: MemoryFacts, n_tokens: int, *, swa_full: bool = False, n_ubatch: int = 512) -> list[int]:
    """Where llama-server makes checkpoints at a prompt's end: 4 tokens and a batch before it, and 4 before it."""
    if facts.kind == "dense" or (swa_full and not facts.recurrent_bytes):
        return []
    return [at for at in (n_tokens - 4 - n_ubatch, n_tokens - 4) if at > 0]


def _padded(n_cells: int) -> int:
    return -(-n_cells // CELL_PAD) * CELL_PAD


def _attention_bytes(layers: Sequence[LayerKV], n_cells: int, type_k: str, type_v: str) -> int:
    """One attention cache as it is written: 24 bytes before the cells, 12 before each tensor (version 4)."""
    each = sum(_width(layer, type_k, type_v) for layer in layers) + CELL_BYTES
    tensors = sum(1 + bool(layer.n_embd_v_gqa) for layer in layers)
    return round(each * n_cells) + 24 + 12 * tensors


def _state_head(facts: MemoryFacts) -> int:
    """Bytes around recurrent state: one cell, two rows a layer."""
    return 20 + 24 * facts.n_recurrent


class _Keys:
    """Metadata under the architecture's name; settings that may be given once or per layer."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.arch = header.text("general.architecture") or ""

    def number(self, key: str, default: int = 0) -> int:
        found = self.header.number(f"{self.arch}.{key}")
        return default if found is None else found

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.header.metadata

    def listed(self, key: str) -> Sequence[object] | None:
        found = self.header.metadata.get(f"{self.arch}.{key}")
        return found if isinstance(found, list) else None

    def per_layer(self, key: str, layer: int, default: int = 0) -> int:
        found = self.listed(key)
        if found is None:
            return self.number(key, default)
        value = found[layer] if layer < len(found) else default
        return value if isinstance(value, int) else default


def _window(keys: _Keys, n_layers: int) -> int:
    """The sliding window in tokens, 0 when llama.cpp runs the model without one."""
    if keys.arch == "phi3" or (keys.arch == "exaone4" and n_layers != 64):  # src/models/phi3.cpp, exaone4.cpp
        return 0
    if keys.arch not in SWA_PERIODS and keys.listed("attention.sliding_window_pattern") is None:
        return keys.number("attention.sliding_window") if keys.arch.startswith("lfm2") else 0
    return keys.number("attention.sliding_window", WINDOWS.get(keys.arch, 0))


def _swa_layers(keys: _Keys, n_layers: int) -> list[bool]:
    listed = keys.listed("attention.sliding_window_pattern")
    if listed is not None:
        return [bool(listed[i]) if i < len(listed) else False for i in range(n_layers)]
    period, dense_first = SWA_PERIODS.get(keys.arch, (0, False))
    period = keys.number("attention.sliding_window_pattern", period)
    if period == 0:
        return [True] * n_layers
    return [i % period != 0 if dense_first else i % period < period - 1 for i in range(n_layers)]


def _recurrent_layers(keys: _Keys, n_layers: int) -> list[bool]:
    if keys.arch in RECURRENT or keys.arch == "falcon-h1":
        return [True] * n_layers
    listed = keys.listed("attention.recurrent_layers")
    if listed is not None:
        return [bool(listed[i]) if i < len(listed) else False for i in range(n_layers)]
    if keys.arch in FULL_INTERVAL:
        interval = max(1, keys.number("full_attention_interval", FULL_INTERVAL[keys.arch]))
        return [(i + 1) % interval != 0 for i in range(n_layers)]
    if keys.arch in HYBRID or keys.has("ssm.state_size") or keys.has("shortconv.l_cache"):
        no_kv = [keys.per_layer("attention.head_count_kv", i) == 0 for i in range(n_layers)]
        return [no_kv[i] and not _is_feed_forward(keys, i) for i in range(n_layers)]
    return [False] * n_layers


def _is_feed_forward(keys: _Keys, layer: int) -> bool:
    """Nemotron-H has layers that are neither attention nor recurrent."""
    return keys.arch.startswith("nemotron_h") and keys.per_layer("feed_forward_length", layer) > 0


def _own_kv_layers(keys: _Keys, n_layers: int) -> int:
    """Layers from the start that keep K and V themselves; Gemma 3n and 4 share those of earlier layers behind them."""
    if keys.arch == "gemma3n":
        return 20  # src/models/gemma3n.cpp
    return n_layers - keys.number("attention.shared_kv_layers")


def _layer(keys: _Keys, layer: int, is_swa: bool) -> LayerKV:
    n_head = keys.per_layer("attention.head_count", layer)
    n_head_kv = keys.per_layer("attention.head_count_kv", layer, n_head)
    head = keys.number("embedding_length") // n_head if n_head else 0
    k, v = keys.number("attention.key_length", head), keys.number("attention.value_length", head)
    if is_swa:
        k, v = keys.number("attention.key_length_swa", k), keys.number("attention.value_length_swa", v)
    if keys.number("attention.key_length_mla"):
        v = 0  # latent attention reads V out of K
    return LayerKV(k * n_head_kv, v * n_head_kv, is_swa)


def _recurrent_width(keys: _Keys) -> int:
    """Values (float32) of recurrent state in one layer: `n_embd_r` + `n_embd_s` for short convolutions and Mamba
    kinds.
    """
    if conv := keys.number("shortconv.l_cache"):
        return keys.number("embedding_length") * (conv - 1)
    inner, state = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
    conv = max(0, keys.number("ssm.conv_kernel") - 1)
    return conv * (inner + 2 * keys.number("ssm.group_count") * state) + state * inner


def _kind(arch: str, layers: tuple[LayerKV, ...], n_recurrent: int, window: int) -> Kind:
    if arch in RECURRENT or (n_recurrent and not layers):
        return "recurrent"
    if arch in HYBRID or n_recurrent:
        return "hybrid"
    return "swa" if window and any(layer.is_swa for layer in layers) else "dense"


def _width(layer: LayerKV, type_k: str, type_v: str) -> float:
    return layer.n_embd_k_gqa * TYPE_BYTES[type_k] + layer.n_embd_v_gqa * TYPE_BYTES[type_v]
