"""From settings, flags after `--` and the model's header to what is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

from llamacpp.engines import plan
from llamacpp.engines.flags import EngineSpec
from proxy import engine_spec
from proxy.config import load
from proxy.engine_spec import child_spec, model_file


@pytest.fixture(autouse=True)
def ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a graphics card, of 8 GiB."""
    monkeypatch.setattr(plan, "ram_at_hand", lambda: 8 << 30)
    monkeypatch.setattr(plan, "may_use_gpu", lambda kind, extra: False)


def started(model: Path, *extra: str, **settings: Any) -> EngineSpec:
    """What the embedded engine is started with."""
    return child_spec(load({"model": model, "engine": "embedded", "engine_flags": extra, **settings}))[0]


def test_the_defaults(tiny_models: dict[str, Path]) -> None:
    spec = started(tiny_models["dense"])
    assert (spec.ctx_size, spec.parallel, spec.chosen) == (32768, 4, ())
    assert started(tiny_models["swa"]).chosen == ("--swa-full",)
    assert started(tiny_models["hybrid"]).chosen == ("--ctx-checkpoints", "32", "--checkpoint-min-step", "1280")


def test_the_sums_in_words(tiny_models: dict[str, Path]) -> None:
    """One sentence: what is known, and why something was given up."""
    planned, sums = child_spec(load({"model": tiny_models["hybrid"], "engine": "embedded", "ctx_size": 2048}))
    with structlog.testing.capture_logs() as logs:
        engine_spec.tell(sums, planned)
    said = logs[0]["sentence"]
    assert said.startswith("Memory: ")
    assert "for a context of 2,048 tokens in 4 slots + " in said
    assert " for checkpoints = " in said
    assert said.endswith(", of 8.0 GiB at hand.")


def test_settings_win_over_the_choice(tiny_models: dict[str, Path]) -> None:
    spec = started(tiny_models["swa"], swa="checkpoints", ctx_size=2048, parallel=2)
    assert (spec.ctx_size, spec.parallel) == (2048, 2)
    assert "--swa-full" not in spec.chosen and "--ctx-checkpoints" in spec.chosen


def test_flags_win_over_everything(tiny_models: dict[str, Path]) -> None:
    spec = started(tiny_models["hybrid"], "-c", "1024", "-np", "3", "-ctxcp", "5", "-cms", "64", ctx_size=2048)
    assert (spec.ctx_size, spec.parallel, spec.chosen) == (1024, 3, ())
    assert started(tiny_models["swa"], "--swa-full", swa="checkpoints").chosen == ()
    assert started(tiny_models["dense"], "-c", "0").ctx_size == 32768


def test_no_header_no_choice(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """A model that another flag names is not looked for."""
    spec, sums = child_spec(load({"engine_flags": ("-hf", "someone/model"), "ctx_size": 512}))
    assert (spec.ctx_size, spec.parallel, spec.chosen, sums) == (512, 4, (), None)
    assert model_file(load({"engine_flags": ("-m", str(tiny_models["dense"]))})) == tiny_models["dense"]
    assert model_file(load({"model": tmp_path / "none.gguf"})) is None


@pytest.mark.parametrize(("seen", "full"), [(False, True), (True, False)])
def test_a_binary_needs_whole_windows_until_it_was_seen_to_restore(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, seen: bool, full: bool
) -> None:
    """With memory for checkpoints only: files of an older build are worth nothing without --swa-full."""
    monkeypatch.setattr(engine_spec, "_engine", lambda spec: ("binary", "b1"))
    monkeypatch.setattr(plan, "ram_at_hand", lambda: 180 << 20)
    spec, sums = child_spec(load({"model": tiny_models["swa"]}), lambda build: seen)
    assert sums is not None and sums.fits
    assert ("--swa-full" in spec.chosen) is full
