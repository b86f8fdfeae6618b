"""GGUF headers: what was written is read; damage of any kind is a sentence about the file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.errors import EngineSetupError
from llamacpp.gguf import NotGGUF, read_header
from tests.fakes.gguf_bytes import gguf_file

WORDS = ["a", "Ġthe", "", "日本"] * 600


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def test_keys_of_every_kind_come_back(tmp_path: Path) -> None:
    keys = {
        "general.architecture": "llama",
        "llama.block_count": 4,
        "a.scale": 0.5,
        "a.flag": True,
        "a.list": [0, 2, 0],
    }
    header = read_header(write(tmp_path, gguf_file(keys, n_tensors=7)))
    assert header.metadata == keys
    assert (header.n_tensors, header.version) == (7, 3)
    assert header.text("general.architecture") == "llama"
    assert header.number("llama.block_count") == 4
    assert header.number("a.flag") is None
    assert header.text("no.such") is None


def test_vocabulary_is_read_only_when_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_file({"tokenizer.ggml.tokens": WORDS, "types": [1] * 5000, "after": 9}))
    header = read_header(path)
    assert header.metadata == {"after": 9}
    assert header.arrays["tokenizer.ggml.tokens"].count == len(WORDS)
    assert header.array("tokenizer.ggml.tokens") == WORDS
    assert header.array("types") == [1] * 5000


def test_short_arrays_are_kept_and_missing_ones_say_so(tmp_path: Path) -> None:
    header = read_header(write(tmp_path, gguf_file({"kv": [0, 2]})))
    assert header.array("kv") == [0, 2]
    with pytest.raises(KeyError):
        header.array("none")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\3\4" + bytes(100), "not a GGUF file"),
        (gguf_file({"a": 1}, version=1), "version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**40), "damaged"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**62), "damaged"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 2**63), "damaged"),
        (struct.pack("<4sIQQQ1sIIQQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 2, 2**63), "damaged"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 77), "damaged"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 1), "damaged"),
    ],
)
def test_what_is_no_gguf_is_said_in_a_sentence(tmp_path: Path, data: bytes, says: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(NotGGUF, match=says) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, EngineSetupError)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(NotGGUF, match="cannot be read"):
            read_header(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = gguf_file({"general.architecture": "llama", "x": [1, 2], "words": ["a", "bc"], "f": 1.5})
    for length in range(len(data)):
        with pytest.raises(NotGGUF):
            read_header(write(tmp_path, data[:length]))
    assert read_header(write(tmp_path, data)).array("words") == ["a", "bc"]


@given(st.data())
def test_damaged_bytes_never_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = bytearray(gguf_file({"general.architecture": "llama", "x": [1, 2], "words": ["a", "bc"] * 20, "f": 1.5}))
    at = data.draw(st.integers(4, len(whole) - 1))
    new = data.draw(st.binary(min_size=1, max_size=8))
    whole[at : at + len(new)] = new
    path = tmp_path_factory.mktemp("fuzz") / "x.gguf"
    path.write_bytes(whole)
    try:
        header = read_header(path)
        for key in header.arrays:
            assert len(header.array(key)) == header.arrays[key].count
    except NotGGUF as error:
        assert str(path) in str(error)
