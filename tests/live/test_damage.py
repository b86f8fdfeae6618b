"""State that was damaged while nobody looked: nothing wrong is ever restored, and the proxy serves all the same."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from llamacpp.slot_files import read_header
from tests.conftest import StartProxy
from tests.live.talk import CHATML, Turn, complete, engine_state, foxes
from tests.servers import ProxyServer

FLAGS = ("--parallel", "2", "--ctx-size", "4096")
N = 300
"""Tokens of each prefix."""
LETTERS = "BCDEFGH"


async def fill(proxy: ProxyServer, letters: str) -> None:
    """One prefix per letter, saved at exit or before it is lost."""
    for letter in letters:
        assert (await complete(proxy, foxes(N - 1, letter), 1)).n_prompt == N
    assert await proxy.stop() == 0, proxy.said()


async def again(proxy: ProxyServer, letter: str) -> Turn:
    """The prefix and a bit more, which has to be answered whatever became of its file."""
    return await complete(proxy, foxes(N + 4, letter), 1)


def files_by_letter(slots: Path, tokens: dict[str, bytes]) -> dict[str, Path]:
    """Which snapshot belongs to which prefix, by the tokens in its header."""
    found = {}
    for file in slots.glob("*.bin"):
        header = read_header(file)
        found.update({letter: file for letter, first in tokens.items() if header.tokens.startswith(first)})
    return found


async def first_tokens(proxy: ProxyServer, letters: str) -> dict[str, bytes]:
    """The packed first token of each prefix."""
    found = {}
    for letter in letters:
        answer = await proxy.client.post("/tokenize", json={"content": foxes(3, letter)})
        found[letter] = int(answer.json()["tokens"][0]).to_bytes(4, "little")
    return found


async def test_slot_files_damaged_while_stopped(proxy_server: StartProxy) -> None:
    """Truncated at several lengths, foreign tokens, another's file: all refused; the sound one is restored."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    tokens = await first_tokens(proxy, LETTERS)
    await fill(proxy, LETTERS)
    files = files_by_letter(proxy.state_dir / "slots", tokens)
    assert set(files) == set(LETTERS)
    whole = files["B"].read_bytes()
    header = read_header(files["B"]).header_bytes
    for letter, length in zip("BCDE", (0, 11, header + 5, len(whole) - 1), strict=True):
        files[letter].write_bytes(files[letter].read_bytes()[:length])
    patched = bytearray(files["F"].read_bytes())
    at = patched.find(tokens["F"])
    patched[at : at + 4] = tokens["B"]
    files["F"].write_bytes(patched)
    shutil.copyfile(files["H"], files["G"])
    after = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    turns = {letter: await again(after, letter) for letter in LETTERS}
    assert {letter: t.cache_n for letter, t in turns.items() if t.cache_n > N // 2} == {"H": N}, after.said()
    assert "Traceback" not in after.said()


async def test_slot_file_damaged_under_a_running_proxy(proxy_server: StartProxy) -> None:
    """Cut off after the index was read: noticed before it is restored."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    await fill(proxy, "B")
    after = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    file = next((after.state_dir / "slots").glob("*.bin"))
    file.write_bytes(file.read_bytes()[:-100])
    turn = await again(after, "B")
    assert (turn.cache_n, turn.headers["x-slotkeeper-placement"]) == (0, "cold")


DAMAGES = 12
"""Of the 200 that issue 5 asks for; the store's own test has them all."""


async def test_random_damage_changes_no_answer(proxy_server: StartProxy) -> None:
    """A bit flipped or an end cut off in every file: none is restored, and each answer is that of an engine without."""
    prefixes = [foxes(N - 1, f"Prefix {i}") for i in range(DAMAGES)]
    alone = await proxy_server(*FLAGS, "--no-persist", model="dense", engine_flags=CHATML)
    expected = [(await complete(alone, f"{p} and more", 6, logit_bias=[])).text for p in prefixes]
    assert await alone.stop() == 0
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    for prefix in [*prefixes, "x" + prefixes[0], "y" + prefixes[0]]:  # the last two stay in the slots
        await complete(proxy, prefix, 1)
    luck, files = random.Random(5), sorted((proxy.state_dir / "slots").glob("*.bin"))
    assert len(files) >= DAMAGES
    for file in files:
        data = bytearray(file.read_bytes())
        if luck.random() < 0.25:
            del data[luck.randrange(len(data)) :]
        else:
            data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
        file.write_bytes(data)
    for prefix, answer in zip(prefixes, expected, strict=True):
        turn = await complete(proxy, f"{prefix} and more", 6, logit_bias=[])
        assert (turn.headers["x-slotkeeper-placement"], turn.text) == ("cold", answer), proxy.said()
    assert "Traceback" not in proxy.said()


async def test_file_that_the_engine_refuses(proxy_server: StartProxy) -> None:
    """One whose checksum nobody knew: refused with room enough, so it is deleted; engine and slot serve on."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    await fill(proxy, "B")
    file = next((proxy.state_dir / "slots").glob("*.bin"))
    data = bytearray(file.read_bytes())
    at = read_header(file).header_bytes
    data[at : at + 4] = b"\xff\xff\0\0"
    file.write_bytes(data)
    with sqlite3.connect(proxy.state_dir / "state.db") as database:
        database.execute("UPDATE snapshots SET checksum = ''")
    database.close()
    after = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    turn = await again(after, "B")
    assert (turn.cache_n, turn.headers["x-slotkeeper-placement"]) == (0, "cold")
    assert "restore_failed" in after.said() and "engine_given_up" not in after.said()
    assert not file.exists()
    assert (await again(after, "B")).cache_n > 0


async def test_another_rope_is_another_fingerprint(proxy_server: StartProxy) -> None:
    """Nothing in a slot file says how its KV was computed; the fingerprint does, and both live side by side."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    await fill(proxy, "B")
    other = await proxy_server(*FLAGS, model="dense", engine_flags=(*CHATML, "--rope-freq-base", "50000"))
    assert (await again(other, "B")).cache_n == 0
    assert await other.stop() == 0
    back = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    assert (await again(back, "B")).cache_n == N


async def test_file_of_another_model(proxy_server: StartProxy) -> None:
    """A hybrid model's file under a dense model's name."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    await fill(proxy, "B")
    dense = next((proxy.state_dir / "slots").glob("*.bin"))
    name = dense.name
    other = await proxy_server(*FLAGS, model="hybrid", engine_flags=CHATML)
    await fill(other, "B")
    hybrid = next(f for f in (proxy.state_dir / "slots").glob("*.bin") if f.name != name)
    shutil.copyfile(hybrid, dense)
    back = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    assert (await again(back, "B")).cache_n == 0
    assert (await again(back, "B")).cache_n > 0, "its slot was poisoned"


def overwritten(database: Path) -> None:
    """Its first pages are noise."""
    data = bytearray(database.read_bytes())
    data[:4096] = b"\xa5" * 4096
    database.write_bytes(data)
    for extra in ("-wal", "-shm"):
        Path(f"{database}{extra}").unlink(missing_ok=True)


def removed(database: Path) -> None:
    """It is not there."""
    database.unlink()


@pytest.mark.parametrize("damage", [overwritten, removed])
async def test_database_is_lost(proxy_server: StartProxy, damage: Callable[[Path], None]) -> None:
    """The index is rebuilt from the slot files: one tenant, and each file's name proves whose it is."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    await fill(proxy, "B")
    damage(proxy.state_dir / "state.db")
    after = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    assert (await engine_state(after))["snapshots"]["count"] == 1, after.said()
    assert (await again(after, "B")).cache_n == N
    assert "Traceback" not in after.said()


async def test_database_of_a_newer_version(proxy_server: StartProxy) -> None:
    """Refused with a sentence; nothing in the directory is touched."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    await fill(proxy, "B")
    with sqlite3.connect(proxy.state_dir / "state.db") as database:
        database.execute("PRAGMA user_version = 9999")
    database.close()
    before = sorted((proxy.state_dir / "slots").iterdir())
    refused = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML, wait=False)
    assert await refused.ended() != 0
    assert "newer" in refused.said()
    assert "Traceback" not in refused.said()
    assert sorted((proxy.state_dir / "slots").iterdir()) == before
