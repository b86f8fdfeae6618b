"""Slot files: tokens read back, damage refused at every length, equality up to the slot's number."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp import memory
from llamacpp.gguf import read_header as read_gguf
from llamacpp.slot_files import BadSlotFile, compare, fingerprint_bytes, is_whole, read_header
from tests.conftest import StartEngine
from tests.fakes.slot_bytes import attention_state, packed_words, slot_file
from tests.servers import LiveEngine

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


# --- live: the same checks on both engines' own files ----------------------------------------------------------------

PROMPT = array("i", range(300, 348)).tobytes()


async def saved(engine: LiveEngine, slot: int, tokens: bytes = PROMPT) -> Path:
    await engine.client.prime(slot, tokens)
    report = await engine.client.save_slot(slot, f"slot-{slot}.bin")
    path = engine.slot_dir / f"slot-{slot}.bin"
    assert (report.n_tokens, report.n_bytes) == (len(tokens) // 4, path.stat().st_size)
    return path


async def check_files(live_engine: StartEngine, model: Path) -> None:
    """Tokens as sent, a layout we know, one fingerprint in every slot, and about the size that the header promises."""
    engine = await live_engine(model)
    first, second = await saved(engine, 0), await saved(engine, 1)
    header = read_header(first)
    assert (header.tokens, header.has_media) == (PROMPT, False)
    assert is_whole(first)
    assert first.read_bytes() != second.read_bytes()  # the slot's number is in it
    assert fingerprint_bytes(first.read_bytes()) == fingerprint_bytes(second.read_bytes())
    assert compare(first.read_bytes(), second.read_bytes())

    facts = memory.facts(read_gguf(model))
    long = array("i", [300 + i % 900 for i in range(1200)]).tobytes()
    size = (await saved(engine, 0, long)).stat().st_size
    assert is_whole(engine.slot_dir / "slot-0.bin")
    if facts.kind == "dense":
        assert abs(size - memory.slot_file_bytes(facts, 1200)) < 100
    else:  # checkpoints may lie behind it
        assert size / memory.slot_file_bytes(facts, 1200) > 0.9


@pytest.mark.live
@pytest.mark.parametrize("kind", ["dense", "swa", "hybrid"])
async def test_live_files(kind: str, live_engine: StartEngine, tiny_models: dict[str, Path]) -> None:
    await check_files(live_engine, tiny_models[kind])


@pytest.mark.native
@pytest.mark.parametrize("kind", ["dense", "swa", "hybrid"])
async def test_native_files(kind: str, live_engine: StartEngine, tiny_models: dict[str, Path]) -> None:
    await check_files(live_engine, tiny_models[kind])


@pytest.mark.live
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
async def test_live_fingerprint_tells_models_and_caches_apart(kind: str, live_engine: StartEngine) -> None:
    plain = (await saved(await live_engine(kind), 0)).read_bytes()
    again = (await saved(await live_engine(kind, ctx_size=1024, extra=("-b", "64", "-ub", "32")), 1)).read_bytes()
    quantised = (await saved(await live_engine(kind, extra=("-ctk", "q8_0")), 0)).read_bytes()
    assert compare(plain, again)
    assert not compare(plain, quantised)


@pytest.mark.native
@pytest.mark.parametrize("flags", [("--rope-freq-base", "500000"), ("--rope-freq-scale", "0.5"), ("-fa", "off")])
async def test_native_fingerprint_tells_ropes_apart(flags: tuple[str, str], live_engine: StartEngine) -> None:
    plain = (await saved(await live_engine("dense"), 0)).read_bytes()
    other = (await saved(await live_engine("dense", extra=flags), 0)).read_bytes()
    assert not compare(plain, other)


SCATTERED = ((0, 20), (1, 300), (2, 20), (3, 120))
REUSED = ((1, 500), (2, 300), (3, 500), (0, 100))  # beyond the window a slot's own cells are used again


@pytest.mark.live
@pytest.mark.parametrize(("kind", "used"), [("dense", SCATTERED), ("swa", REUSED)])
async def test_live_fingerprint_in_a_used_pool(
    kind: str, used: tuple[tuple[int, int], ...], live_engine: StartEngine
) -> None:
    """Cells that lie scattered, because other slots were filled and emptied around them, change nothing."""
    clean = (await saved(await live_engine(kind), 0)).read_bytes()
    engine = await live_engine(kind, parallel=4, ctx_size=512 if kind == "dense" else 4096, extra=("-ub", "64"))
    for slot, n_tokens in used:
        await engine.client.prime(slot, array("i", range(1000, 1000 + n_tokens)).tobytes())
    await engine.client.erase_slot(0)
    await engine.client.erase_slot(2)
    assert compare(clean, (await saved(engine, 0)).read_bytes())
