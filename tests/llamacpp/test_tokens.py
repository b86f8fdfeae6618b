"""Estimates and tokenisers without an engine; live: equal to the engine's /tokenize."""

from __future__ import annotations

import dataclasses
import json
import sys
from array import array
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.errors import EngineSetupError
from llamacpp.gguf import GGUFHeader, read_header
from llamacpp.tokens import FIRST_RATIO, PATTERNS, Estimator, GGUFEncoding, gguf_encoding, native_tokenizer
from tests.conftest import StartEngine
from tests.fakes.gguf_bytes import Setting, gguf_file
from tests.servers import LiveEngine

DATA = Path(__file__).parent.parent / "data"
TEXTS = [
    *(DATA / "pi-cut.jsonl").read_text().splitlines(),
    (DATA / "chatml-tools.jinja").read_text(),
    "  1 2   33\n\n  a\t\tb 12345 café's I'M it's  ",
    "日本語テスト 人工智能 नमस्ते 👩‍👩‍👧 e\u0301 \u00a0x\u3000y\r\n\r\n z",
    " " * 50 + "x\n" * 3,
    "<|im_start|>user\nhi<|im_end|>  <|endoftext|>",
    "HelloWorld fooBar ABCdef aB'S x's/y//z\n/",
    "".join(map(chr, range(1, 2000))),
]


# --- estimates ------------------------------------------------------------------------------------------------------


def test_first_estimate_is_careful() -> None:
    assert Estimator().expected(1000) == 1000 * FIRST_RATIO
    assert Estimator().at_most(1000) == 1000 * FIRST_RATIO


@given(st.floats(0.05, 0.9), st.lists(st.integers(500, 100_000), min_size=12, max_size=30))
def test_a_steady_line_is_learned(ratio: float, sizes: list[int]) -> None:
    estimator = Estimator()
    for size in sizes:
        estimator.observe(size, round(size * ratio))
    assert estimator.expected(10_000) == pytest.approx(10_000 * ratio, rel=0.03)
    assert estimator.at_most(10_000) >= estimator.expected(10_000)


@given(st.lists(st.tuples(st.integers(-5, 10**6), st.integers(-5, 10**6)), max_size=20), st.integers(-5, 10**6))
def test_estimates_stay_in_bounds(seen: list[tuple[int, int]], size: int) -> None:
    estimator = Estimator()
    for n_bytes, n_tokens in seen:
        estimator.observe(n_bytes, n_tokens)
    assert 0 <= estimator.at_most(size) <= max(0, size)


def test_a_short_text_teaches_little() -> None:
    estimator = Estimator()
    estimator.observe(10_000, 3000)
    estimator.observe(4, 4)
    assert estimator.expected(10_000) < 3010
    estimator.observe(10_000, 6000)
    assert estimator.expected(10_000) > 3700


def test_change_of_text_widens_the_margin() -> None:
    steady, changing = Estimator(), Estimator()
    for turn in range(20):
        steady.observe(10_000, 3000)
        changing.observe(10_000, 2000 if turn % 2 else 4000)
    assert changing.at_most(10_000) > 4000 > 3200 > steady.at_most(10_000)


# --- vocabularies ---------------------------------------------------------------------------------------------------


def letters() -> list[str]:
    """GPT-2's letters of the 256 bytes, for vocabularies of a test."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in plain] + [chr(256 + n) for n in range(256 - len(plain))]


def vocabulary(tmp_path: Path, **changed: Setting) -> GGUFHeader:
    words = ["<|end|>", *letters(), "ab", "abc", "Ġab"]
    keys: dict[str, Setting] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3, *[1] * (len(words) - 1)],
        "tokenizer.ggml.merges": ["a b", "ab c", "Ġ ab"],
    }
    path = tmp_path / "v.gguf"
    path.write_bytes(gguf_file(keys | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}))
    return read_header(path)


def ids(encoding: GGUFEncoding | None, text: str) -> list[int]:
    assert encoding is not None
    return array("i", encoding.encode(text)).tolist()


def test_merges_in_their_order(tmp_path: Path) -> None:
    found = gguf_encoding(vocabulary(tmp_path))
    assert ids(found, "abc ab") == [258, 259]
    assert ids(found, "abab") == [257, 257]


def test_special_tokens_are_cut_out_first(tmp_path: Path) -> None:
    assert ids(gguf_encoding(vocabulary(tmp_path)), "ab<|end|>ab") == [257, 0, 257]


def test_byte_that_the_vocabulary_lacks_is_left_out(tmp_path: Path) -> None:
    words = [letter for letter in letters() if letter != "z"]
    found = gguf_encoding(vocabulary(tmp_path, tokens=[*words, "ab"], token_type=[1] * 300, merges=["a b"]))
    assert ids(found, "azb") == [words.index("a"), words.index("b")]


def test_a_million_spaces_are_survived(tmp_path: Path) -> None:
    assert len(ids(gguf_encoding(vocabulary(tmp_path)), " " * 1_000_000 + "q")) == 1_000_001


@pytest.mark.parametrize(
    "changed", [{"model": "llama"}, {"pre": "deepseek-v3"}, {"pre": "default"}, {"merges": [0] * 2}]
)
def test_other_vocabularies_have_no_encoding(tmp_path: Path, changed: dict[str, Setting]) -> None:
    assert gguf_encoding(vocabulary(tmp_path, **changed)) is None


# --- llama_cpp ------------------------------------------------------------------------------------------------------


def fake_llama_cpp(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """llama-cpp-python's shape (0.3.36), since it is compiled where it is installed."""

    class Llama:
        def __init__(self, *, model_path: str, vocab_only: bool, verbose: bool) -> None:
            assert vocab_only
            assert not verbose
            if error:
                raise error

        def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
            assert special
            return [1, *text] if add_bos else list(text)

    module = ModuleType("llama_cpp")
    module.Llama = Llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)


def test_native_tokeniser_parses_special_tokens_and_adds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_llama_cpp(monkeypatch)
    tokenize = native_tokenizer(Path("m.gguf"))
    assert tokenize is not None
    assert array("i", tokenize("aé")).tolist() == [97, 0xC3, 0xA9]


def test_native_tokeniser_of_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_llama_cpp(monkeypatch, ValueError("Failed to load model from file"))
    with pytest.raises(EngineSetupError, match=r"cannot read the vocabulary of m\.gguf"):
        native_tokenizer(Path("m.gguf"))


def test_native_tokeniser_is_none_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # what a missing module looks like to `import`
    assert native_tokenizer(Path("m.gguf")) is None


# --- live -----------------------------------------------------------------------------------------------------------


async def differing(engine: LiveEngine, encoding: GGUFEncoding | None) -> list[str]:
    assert encoding is not None
    return [text[:40] for text in TEXTS if await engine.client.tokenize(text) != encoding.encode(text)]


@pytest.mark.live
async def test_live_vocabulary_of_smollm2(live_engine: StartEngine, tiny_models: dict[str, Path]) -> None:
    """The tiny models have SmolLM2's vocabulary, whole."""
    engine = await live_engine("dense", ctx_size=512)
    assert await differing(engine, gguf_encoding(read_header(tiny_models["dense"]))) == []


@pytest.mark.live
async def test_live_native_tokeniser(live_engine: StartEngine, tiny_models: dict[str, Path]) -> None:
    tokenize = native_tokenizer(tiny_models["dense"])
    if tokenize is None:
        pytest.skip("llama-cpp-python (extra `native`) is not installed")
    engine = await live_engine("dense", ctx_size=512)
    assert [text[:40] for text in TEXTS if await engine.client.tokenize(text) != tokenize(text)] == []


@pytest.mark.native
@pytest.mark.parametrize("pre", sorted({pattern: name for name, pattern in PATTERNS.items()}.values()))
async def test_native_every_pattern(pre: str, live_engine: StartEngine, tiny_models: dict[str, Path]) -> None:
    """One vocabulary under every pre-tokeniser: the engine is told another name for its own."""
    engine = await live_engine("dense", ctx_size=512, extra=("--override-kv", f"tokenizer.ggml.pre=str:{pre}"))
    header = read_header(tiny_models["dense"])
    renamed = dataclasses.replace(header, metadata={**header.metadata, "tokenizer.ggml.pre": pre})
    assert await differing(engine, gguf_encoding(renamed)) == []


def test_texts_hold_a_conversation() -> None:
    assert sum("messages" in json.loads(text)["body"] for text in TEXTS[:3]) == 3
