"""Flags from memory arithmetic: what is given up when RAM is short, what is fixed, what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp.engines import plan as planning
from llamacpp.engines.plan import Asked, Plan, cache_types, last_value, may_use_gpu, plan, size, spare
from llamacpp.gguf import GGUFHeader, read_header
from tests.fakes.gguf_bytes import Setting, gguf_file

GIB = 1 << 30


def header_of(tmp_path: Path, arch: str, **keys: Setting) -> GGUFHeader:
    named: dict[str, Setting] = {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file({"general.architecture": arch, **named}))
    return read_header(path)


SHAPE: dict[str, Setting] = {
    "block_count": 48,
    "context_length": 131072,
    "embedding_length": 4096,
    "attention__head_count": 32,
    "attention__head_count_kv": 8,
}
"""192 KiB a token in all layers, 6 GiB for 32,768 tokens."""


@pytest.fixture
def dense(tmp_path: Path) -> GGUFHeader:
    """A model of 8 billion parameters whose weights weigh nothing."""
    return header_of(tmp_path, "llama", **SHAPE)


@pytest.fixture
def swa(tmp_path: Path) -> GGUFHeader:
    """40 of 48 layers see 1,024 tokens: 160 MiB a checkpoint, 1 GiB and 5 GiB for 32,768 tokens."""
    return header_of(tmp_path, "gemma3", **SHAPE, attention__sliding_window=1024)


@pytest.fixture
def hybrid(tmp_path: Path) -> GGUFHeader:
    """Every fourth layer is attention: 1.5 GiB for 32,768 tokens; 36 layers of state."""
    ssm: dict[str, Setting] = {"ssm__inner_size": 4096, "ssm__state_size": 128, "ssm__conv_kernel": 4}
    return header_of(tmp_path, "qwen3next", **SHAPE, **ssm, ssm__group_count=16)


def test_everything_fits(dense: GGUFHeader) -> None:
    found = plan(dense, Asked(ram=64 * GIB))
    assert (found.n_ctx, found.parallel, found.swa_full, found.checkpoints, found.fits) == (32768, 4, False, None, True)
    assert (found.cache_bytes, found.bytes_per_token, found.why) == (6 * GIB, 196_608, ())
    assert found.flags(Asked()) == ()
    assert found.total == found.weights + found.compute + 6 * GIB


def test_a_small_model_keeps_its_own_context(tmp_path: Path) -> None:
    found = plan(header_of(tmp_path, "llama", **{**SHAPE, "context_length": 2048}), Asked(ram=64 * GIB))
    assert found.n_ctx == 2048


def test_context_shrinks_to_what_fits(dense: GGUFHeader) -> None:
    found = plan(dense, Asked(ram=4 * GIB))
    assert found.fits and found.n_ctx % 1024 == 0 and 4096 < found.n_ctx < 32768
    assert found.total <= 4 * GIB - spare(4 * GIB)
    larger = plan(dense, Asked(ram=4 * GIB, n_ctx=found.n_ctx + 1024))
    assert not larger.fits
    assert any("32,768 tokens does not fit" in sentence for sentence in found.why)


def test_what_was_asked_for_stays(dense: GGUFHeader) -> None:
    found = plan(dense, Asked(ram=2 * GIB, n_ctx=65536, parallel=7))
    assert (found.n_ctx, found.parallel, found.fits) == (65536, 7, False)
    assert "may swap or be killed" in found.why[0]


def test_nothing_fits(dense: GGUFHeader) -> None:
    found = plan(dense, Asked(ram=GIB // 4))
    assert (found.n_ctx, found.parallel, found.fits) == (4096, 1, False)


def test_unknown_memory_takes_the_most(swa: GGUFHeader) -> None:
    found = plan(swa, Asked(ram=None))
    assert (found.n_ctx, found.parallel, found.swa_full, found.fits) == (32768, 4, True, True)
    assert "not known" in found.why[0]


def test_whole_windows_where_they_fit(swa: GGUFHeader) -> None:
    found = plan(swa, Asked(ram=16 * GIB))
    assert (found.swa_full, found.cache_bytes, found.checkpoints) == (True, 6 * GIB, None)
    assert found.flags(Asked()) == ("--swa-full",)
    assert found.flags(Asked(swa_full_given=True)) == ()


def test_checkpoints_where_whole_windows_do_not_fit(swa: GGUFHeader) -> None:
    asked = Asked(ram=6 * GIB)
    found = plan(swa, asked)
    assert (found.n_ctx, found.swa_full, found.fits) == (32768, False, True)
    words = found.flags(asked)
    assert words == ("--ctx-checkpoints", str(found.checkpoints), "--checkpoint-min-step", str(found.min_step))
    assert found.checkpoint_bytes == pytest.approx(160 << 20, rel=0.01)
    assert any("--swa-full" in sentence for sentence in found.why)


def test_a_build_that_needs_whole_windows_gets_them_before_context(swa: GGUFHeader) -> None:
    found = plan(swa, Asked(ram=6 * GIB, needs_full=True))
    assert found.swa_full and found.fits and 4096 <= found.n_ctx < 32768
    forced = plan(swa, Asked(ram=6 * GIB, needs_full=True, swa="checkpoints"))
    assert not forced.swa_full
    assert "reuses nothing of a restored slot file" in forced.why[-1]


@pytest.mark.parametrize(("swa_setting", "full"), [("full", True), ("checkpoints", False)])
def test_the_setting_decides(swa: GGUFHeader, swa_setting: planning.Swa, full: bool) -> None:
    assert plan(swa, Asked(ram=6 * GIB, n_ctx=32768, swa=swa_setting)).swa_full is full
    assert plan(swa, Asked(ram=64 * GIB, swa=swa_setting, swa_full_given=True)).swa_full


def test_unknown_vram_is_said_and_not_filled(swa: GGUFHeader) -> None:
    """The weights weigh nothing here, so a whole window cache is more than a quarter of them."""
    found = plan(swa, Asked(ram=64 * GIB, has_gpu=True))
    assert not found.swa_full
    assert any("VRAM is not known" in sentence for sentence in found.why)
    assert plan(swa, Asked(ram=64 * GIB, has_gpu=True, needs_full=True)).swa_full


def test_checkpoints_of_states(hybrid: GGUFHeader) -> None:
    """As many as llama-server makes itself when RAM is plenty, spread over the context; fewer when it is not."""
    rich, poor = plan(hybrid, Asked(ram=64 * GIB)), plan(hybrid, Asked(ram=5 * GIB))
    assert rich.kind == "hybrid" and not rich.swa_full
    assert rich.checkpoints == min(32, rich.bytes_per_token * 32768 // rich.checkpoint_bytes)
    assert rich.min_step is not None and rich.min_step * (rich.checkpoints - 4) >= 32768
    assert poor.checkpoints is not None and 4 <= poor.checkpoints < rich.checkpoints
    assert poor.all_checkpoints == poor.checkpoints * poor.checkpoint_bytes * poor.parallel


def test_given_checkpoints_stay(hybrid: GGUFHeader) -> None:
    asked = Asked(ram=64 * GIB, checkpoints=3, min_step=64)
    found = plan(hybrid, asked)
    assert (found.checkpoints, found.min_step, found.flags(asked)) == (3, 64, ())


def test_slots_are_given_up_before_context(hybrid: GGUFHeader) -> None:
    """A slot costs its state and its checkpoints."""
    tried = [plan(hybrid, Asked(ram=n * GIB // 16)) for n in range(16, 128)]
    least = next(found for found in tried if found.n_ctx == 32768)
    assert (least.fits, least.parallel, tried[-1].parallel) == (True, 1, 4)


def test_quantised_caches_are_counted(dense: GGUFHeader) -> None:
    found = plan(dense, Asked(ram=64 * GIB, type_k="q8_0", type_v="q8_0"))
    assert found.cache_bytes == 6 * GIB * 34 / 64


def test_words_of_a_command_line() -> None:
    words = ("-c", "1", "--ctx_size", "2", "-ngl")
    assert (last_value(words, ("-c", "--ctx-size")), last_value(words, ("-ngl",))) == ("2", None)
    assert cache_types(("-ctk", "q8_0", "-ctv", "strange")) == ("q8_0", "f16")
    assert (may_use_gpu("binary", ("-ngl", "0")), may_use_gpu("embedded", ("-ngl", "9"))) == (False, True)
    assert may_use_gpu("embedded", ()) is False
    assert [size(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    """File cache counts as free; no limit, no answer."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200\n")
    assert planning._group_left(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert planning._group_left(tmp_path) is None
    assert planning._group_left(tmp_path / "none") is None


def test_memory_of_this_machine() -> None:
    found = planning.ram_at_hand()
    assert found is not None and found > 1 << 24


def test_sums_are_of_the_plan(swa: GGUFHeader) -> None:
    """The whole cache beside the narrow one, for whoever has to be told what --swa-full costs."""
    found: Plan = plan(swa, Asked(ram=64 * GIB, swa="checkpoints"))
    assert found.full_cache_bytes == 6 * GIB
    assert found.cache_bytes == GIB + 40 * 4096 * (4 * 1024 + 512)
