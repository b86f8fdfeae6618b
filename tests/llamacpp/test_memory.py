"""Memory kinds and sizes, from keys as converters write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp import memory
from llamacpp.gguf import read_header
from llamacpp.memory import (
    MemoryFacts,
    cache_bytes,
    checkpoint_bytes,
    end_checkpoints,
    kv_bytes_per_token,
    slot_file_bytes,
)
from tests.fakes.gguf_bytes import Setting, gguf_file


def facts_of(tmp_path: Path, arch: str, **keys: Setting) -> MemoryFacts:
    named: dict[str, Setting] = {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file({"general.architecture": arch, **named}))
    return memory.facts(read_header(path))


TINY: dict[str, Setting] = {
    "block_count": 4,
    "context_length": 131072,
    "embedding_length": 128,
    "attention__head_count": 4,
    "attention__head_count_kv": 2,
}


def test_dense_tiny_costs_what_its_slot_file_shows(tmp_path: Path) -> None:
    """748 tokens of the dense tiny model: 778,068 bytes (llama-server.md), 1,040 a token and a header."""
    facts = facts_of(tmp_path, "llama", **TINY)
    assert (facts.kind, facts.n_layers_kv, facts.n_ctx_train, facts.can_rewind) == ("dense", 4, 131072, True)
    assert kv_bytes_per_token(facts) == 1024
    assert slot_file_bytes(facts, 748) == 778_068
    assert (checkpoint_bytes(facts), end_checkpoints(facts, 748)) == (0, [])


def test_sliding_window_counts_only_full_layers(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "gemma3", **{**TINY, "block_count": 12}, attention__sliding_window=128)
    assert (facts.kind, facts.n_swa, facts.can_rewind) == ("swa", 128, False)
    assert [layer.is_swa for layer in facts.layers] == [*[True] * 5, False] * 2
    assert kv_bytes_per_token(facts) == 2 * 256
    assert kv_bytes_per_token(facts, swa_full=True) == 12 * 256
    grown = slot_file_bytes(facts, 1129) - slot_file_bytes(facts, 129)
    assert grown == 1000 * (2 * 256 + 12 + 4)


def test_caches_of_windows(tmp_path: Path) -> None:
    """A window for each slot and one batch, padded; all tokens with --swa-full; split slots have one each."""
    facts = facts_of(tmp_path, "gemma3", **{**TINY, "block_count": 12}, attention__sliding_window=128)
    assert cache_bytes(facts, 32768, 4) == 2 * 256 * 32768 + 10 * 256 * 1024
    assert cache_bytes(facts, 32768, 4, swa_full=True) == 12 * 256 * 32768
    assert cache_bytes(facts, 32768, 4, unified=False) == 2 * 256 * 32768 + 10 * 256 * 4 * 768
    assert cache_bytes(facts, 100, 1) == 12 * 256 * 256
    assert checkpoint_bytes(facts) == 128 * (10 * 256 + 12) + 24 + 20 * 12 + 48
    assert end_checkpoints(facts, 1000) == [484, 996]
    assert end_checkpoints(facts, 1000, swa_full=True) == []


def test_state_of_every_slot(tmp_path: Path) -> None:
    """Recurrent layers cost by slots, not by tokens."""
    keys = {**TINY, "attention__head_count_kv": [0, 2, 0, 2]}
    facts = facts_of(tmp_path, "lfm2", **keys, shortconv__l_cache=3)
    assert cache_bytes(facts, 1024, 3) == 512 * 1024 + 3 * 2048
    assert checkpoint_bytes(facts) == 2048 + 20 + 48 + 48
    assert end_checkpoints(facts, 100, swa_full=True) == [96]


def test_window_of_an_architecture_that_names_its_layers(tmp_path: Path) -> None:
    """Gemma 4: pattern, head sizes of local layers, layers that share K and V."""
    facts = facts_of(
        tmp_path,
        "gemma4",
        **TINY,
        attention__sliding_window=512,
        attention__sliding_window_pattern=[True, False, True, False],
        attention__key_length=64,
        attention__value_length=64,
        attention__key_length_swa=32,
        attention__value_length_swa=32,
        attention__shared_kv_layers=1,
    )
    assert (facts.kind, facts.n_layers_kv) == ("swa", 3)
    assert [layer.n_embd_k_gqa for layer in facts.layers] == [64, 128, 64]


@pytest.mark.parametrize("arch", ["phi3", "qwen2", "exaone4"])
def test_a_window_that_llama_cpp_ignores_is_none(tmp_path: Path, arch: str) -> None:
    facts = facts_of(tmp_path, arch, **TINY, attention__sliding_window=2047)
    assert (facts.kind, facts.n_swa) == ("dense", 0)


def test_gpt_oss_alternates(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "gpt-oss", **TINY, attention__sliding_window=128)
    assert [layer.is_swa for layer in facts.layers] == [True, False, True, False]


def test_dense_first_pattern(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "smallthinker", **TINY, attention__sliding_window=4096)
    assert [layer.is_swa for layer in facts.layers] == [False, True, True, True]


def test_hybrid_by_kv_heads(tmp_path: Path) -> None:
    keys = {**TINY, "attention__head_count_kv": [0, 2, 0, 2]}
    facts = facts_of(tmp_path, "lfm2", **keys, shortconv__l_cache=3)
    assert (facts.kind, facts.n_layers_kv, facts.recurrent_bytes) == ("hybrid", 2, 2 * 4 * 256)
    assert kv_bytes_per_token(facts) == 512


def test_hybrid_by_interval_without_its_prediction_layer(tmp_path: Path) -> None:
    keys = {**TINY, "block_count": 9}
    facts = facts_of(tmp_path, "qwen35", **keys, nextn_predict_layers=1, full_attention_interval=4)
    assert (facts.kind, facts.n_layers, facts.n_layers_kv) == ("hybrid", 8, 2)


def test_later_architecture_is_judged_by_its_keys(tmp_path: Path) -> None:
    keys = {**TINY, "attention__head_count_kv": [0, 2, 0, 2]}
    assert facts_of(tmp_path, "newthing", **keys, ssm__state_size=16).kind == "hybrid"
    pattern = [True, True, True, False]
    new = facts_of(
        tmp_path, "newthing", **TINY, attention__sliding_window=64, attention__sliding_window_pattern=pattern
    )
    assert (new.kind, new.n_swa) == ("swa", 64)


def test_recurrent_has_no_cache_by_token(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "mamba", block_count=2, ssm__conv_kernel=4, ssm__inner_size=256, ssm__state_size=16)
    assert (facts.kind, facts.n_layers_kv, kv_bytes_per_token(facts)) == ("recurrent", 0, 0)
    assert facts.recurrent_bytes == 4 * 2 * (3 * 256 + 16 * 256)


def test_latent_attention_keeps_no_values(tmp_path: Path) -> None:
    keys = {**TINY, "attention__head_count_kv": 1}
    facts = facts_of(tmp_path, "deepseek2", **keys, attention__key_length=576, attention__key_length_mla=192)
    assert kv_bytes_per_token(facts) == 4 * 576 * 2


def test_quantised_cache_is_smaller(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "llama", **TINY)
    assert kv_bytes_per_token(facts, "q8_0", "q4_0") == 4 * 64 * (34 / 32 + 18 / 32)
    with pytest.raises(KeyError):
        kv_bytes_per_token(facts, "q9")


def test_header_without_keys_is_survived(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "clip")
    assert (facts.kind, facts.n_layers, kv_bytes_per_token(facts), facts.name) == ("dense", 0, 0, "m")
