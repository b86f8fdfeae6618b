"""The arithmetic of llamacpp/memory against slot files that the engines wrote: within 1 %."""

from pathlib import Path

import pytest

from llamacpp import memory
from llamacpp.gguf import read_header
from tests.conftest import StartEngine
from tests.live.talk import CHATML, foxes

QUANTISED = ("-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on")
LENGTHS = (100, 300, 1000)
"""Below and above a window (128) and a batch (512)."""


def expected(facts: memory.MemoryFacts, n_tokens: int, kind: str, extra: tuple[str, ...]) -> int:
    """Bytes of a file of so many tokens; engine B writes checkpoints behind the state, engine A does not."""
    type_kv = "q8_0" if "q8_0" in extra else "f16"
    swa_full = "--swa-full" in extra
    made = memory.end_checkpoints(facts, n_tokens, swa_full=swa_full) if kind == "embedded" else []
    return memory.slot_file_bytes(facts, n_tokens, type_kv, type_kv, checkpoints=made)


MODELS = ("dense", "swa", "hybrid", "SmolLM2")


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        *(pytest.param(model, (), id=f"{model}-f16") for model in MODELS),
        *(pytest.param(model, QUANTISED, id=f"{model}-q8_0") for model in MODELS),
        pytest.param("swa", ("--swa-full",), id="swa-full"),
    ],
)
async def test_slot_files_are_as_large_as_computed(
    live_engine: StartEngine,
    tiny_models: dict[str, Path],
    demo_model: Path,
    engine_kind: str,
    model: str,
    extra: tuple[str, ...],
) -> None:
    """Every memory kind and both cache types, shorter and longer than a window."""
    path = {**tiny_models, "SmolLM2": demo_model}[model]
    facts = memory.facts(read_header(path))
    engine = await live_engine(path, extra=(*CHATML, *extra))
    tokens = await engine.client.tokenize(foxes(1000, "B"))
    for n_tokens in LENGTHS if model != "SmolLM2" else LENGTHS[:1]:
        await engine.client.erase_slot(0)
        await engine.client.prime(0, tokens[: 4 * n_tokens])
        report = await engine.client.save_slot(0, "measured")
        computed = expected(facts, n_tokens, engine_kind, extra)
        assert report.n_tokens == n_tokens
        assert computed == pytest.approx(report.n_bytes, rel=0.01), f"{n_tokens} tokens"
