"""Slot files: tokens read back, damage refused at every length, equality up to the slot's number."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.slot_files import BadSlotFile, compare, fingerprint_bytes, is_whole, read_header
from tests.fakes.slot_bytes import attention_state, packed_words, slot_file

TOKENS = [7, 0, 151643, 2]


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "slot.bin"
    path.write_bytes(data)
    return path


def plain_file(tokens: list[int]) -> bytes:
    """As builds before `server_tokens::serialize` wrote it."""
    return struct.pack("<4sII", b"qsgg", 2, len(tokens)) + array("i", tokens).tobytes() + attention_state(len(tokens))


def test_tokens_come_back(tmp_path: Path) -> None:
    data = slot_file(TOKENS)
    header = read_header(write(tmp_path, data))
    assert array("i", header.tokens).tolist() == TOKENS
    assert (header.n_tokens, header.size_bytes, header.has_media) == (4, len(data), False)
    assert data[header.header_bytes :] == attention_state(4)


def test_plain_token_list_of_older_builds_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, plain_file(TOKENS))
    assert array("i", read_header(path).tokens).tolist() == TOKENS
    assert is_whole(path)


def test_empty_slot_has_no_tokens(tmp_path: Path) -> None:
    """Saving an empty slot writes a valid file of 36 bytes (seen: build A)."""
    path = write(tmp_path, slot_file([]))
    assert read_header(path).n_tokens == 0
    assert path.stat().st_size == 36


def test_media_is_noticed(tmp_path: Path) -> None:
    words = packed_words(array("i", [5, -1, -1, 6]).tobytes(), media=[1])
    data = struct.pack("<4sII", b"qsgg", 3, len(words) // 4) + words + attention_state(4)
    assert read_header(write(tmp_path, data)).has_media


def test_every_truncation_is_refused_or_seen_as_not_whole(tmp_path: Path) -> None:
    data = slot_file(TOKENS)
    behind_keys = len(data) - 12 - 16  # looks like an MLA cache there: sizes tell
    for length in range(len(data)):
        path = write(tmp_path, data[:length])
        try:
            assert not is_whole(path) or length == behind_keys, length
        except BadSlotFile as error:
            assert str(path) in str(error)
    assert is_whole(write(tmp_path, data))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "only 0 bytes"),
        (b"GGUF" + bytes(60), "not a llama-server slot file"),
        (struct.pack("<4sII", b"qsgg", 1, 0), "version 1"),
        (struct.pack("<4sII", b"qsgg", 3, 2**31), "cut off"),
        (struct.pack("<4sIIii", b"qsgg", 3, 2, -1, 1), "damaged token list"),
        (struct.pack("<4sIIiIII", b"qsgg", 3, 4, -1, 9, 0, 0), "token list of version 9"),
        (struct.pack("<4sIIiIII", b"qsgg", 3, 4, -1, 1, 999, 0), "damaged token list"),
    ],
)
def test_damage_is_said_in_a_sentence(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(BadSlotFile, match=says) as caught:
        read_header(write(tmp_path, data))
    assert "delete it" in str(caught.value)


def test_missing_file_is_a_bad_slot_file(tmp_path: Path) -> None:
    with pytest.raises(BadSlotFile, match="cannot be read"):
        read_header(tmp_path / "none.bin")


def test_slot_number_does_not_count() -> None:
    a, b = slot_file(TOKENS, slot=0), slot_file(TOKENS, slot=3)
    assert a != b
    assert fingerprint_bytes(a) == fingerprint_bytes(b)
    assert compare(a, b)


def halves(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ((1.0, -2.0, 0.001, 4.0), True),
        ((1.005, -2.0, 0.001, 4.0), True),  # half a percent
        ((1.0, -2.0, 0.004, 4.0), True),  # small beside its tensor
        ((1.1, -2.0, 0.001, 4.0), False),
        ((1.0, 2.0, 0.001, 4.0), False),
        ((1.0, float("nan"), 0.001, 4.0), False),
    ],
)
def test_values_within_one_percent_are_the_same(values: tuple[float, ...], same: bool) -> None:
    v = halves(1.0, 1.0, 1.0, 1.0)
    one = slot_file(TOKENS, state=attention_state(4, rows=(halves(1.0, -2.0, 0.001, 4.0), v)))
    other = slot_file(TOKENS, state=attention_state(4, rows=(halves(*values), v)))
    assert compare(one, other) is same


@pytest.mark.parametrize(("kind", "letter"), [(0, "f"), (30, "H")])
def test_float32_and_bfloat16_are_compared_by_value(kind: int, letter: str) -> None:
    def state(high: int) -> bytes:
        bits = [0x3F80 + high, 0x4000, 0x4040, 0x4080]  # about 1, 2, 3, 4 as bfloat16
        data = struct.pack("<4H", *bits) if letter == "H" else struct.pack("<4I", *(b << 16 for b in bits))
        return attention_state(4, rows=(data, data), kind=kind)

    same, near, far = (slot_file(TOKENS, state=state(high)) for high in (0, 1, 16))
    assert compare(same, near)
    assert not compare(same, far)


def test_quantised_values_must_be_equal() -> None:
    one, other = (slot_file(TOKENS, state=attention_state(4, rows=(bytes([n] * 8), bytes(8)), kind=8)) for n in (1, 2))
    assert compare(one, one)
    assert not compare(one, other)


def test_other_tokens_are_another_file() -> None:
    assert not compare(slot_file(TOKENS), slot_file([7, 0, 151643, 3]))
    assert not compare(slot_file(TOKENS), slot_file([*TOKENS, 3]))


@given(st.lists(st.integers(0, 300_000), max_size=50), st.integers(0, 3), st.data())
def test_garbage_behind_a_good_header_never_crashes(tokens: list[int], slot: int, data: st.DataObject) -> None:
    whole = bytearray(slot_file(tokens, slot=slot))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at : at + 4] = data.draw(st.binary(min_size=1, max_size=4))
    assert compare(bytes(whole), bytes(whole))
    assert compare(slot_file(tokens, slot=slot), bytes(whole)) == compare(bytes(whole), slot_file(tokens, slot=slot))
