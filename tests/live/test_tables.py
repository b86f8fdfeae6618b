"""The tables of what slots and slot files give, asked of both engines, against policies/checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from llamacpp.client import LlamaClient
from llamacpp.gguf import read_header
from llamacpp.memory import facts
from policies.checkpoints import Checkpoints, Memory, after_prompt, reused
from policies.prefix import common_prefix, n_tokens
from proxy.engine_spec import kept_memory
from tests.conftest import StartEngine, StartProxy
from tests.live.talk import CHATML, FOX, TEMPLATE, Conversation, engine_state, foxes, post

KINDS = [("dense", ()), ("hybrid", ()), ("swa", ()), ("swa", ("--swa-full",))]
FEW = ("--ctx-checkpoints", "3", "--checkpoint-min-step", "300")


class Simulated:
    """One slot, and what we believe of it."""

    def __init__(self, client: LlamaClient, memory: Memory) -> None:
        self.client, self.memory = client, memory
        self.held, self.checkpoints, self.from_file = b"", Checkpoints(), False

    async def prime(self, tokens: bytes) -> tuple[int, int]:
        """Tokens predicted and tokens really reused."""
        common = common_prefix(self.held, tokens)
        held, n = n_tokens(self.held), n_tokens(tokens)
        predicted = reused(self.memory, held, common, n, self.checkpoints, from_file=self.from_file)
        found = (await self.client.prime(0, tokens)).cache_n
        self.checkpoints = after_prompt(self.memory, self.checkpoints, found, n)
        self.held, self.from_file = tokens, False
        return predicted, found

    async def reload(self, *, keeps: bool) -> None:
        """Through a file; `keeps`: it holds the checkpoints."""
        await self.client.save_slot(0, "table")
        await self.client.erase_slot(0)
        await self.client.restore_slot(0, "table")
        self.from_file, self.checkpoints = True, self.checkpoints if keeps else ()


@pytest.mark.parametrize(("model", "extra"), KINDS, ids=["dense", "hybrid", "swa", "swa-full"])
@pytest.mark.parametrize("few", [(), FEW], ids=["many", "few"])
async def test_what_is_reused(
    live_engine: StartEngine,
    tiny_models: dict[str, Path],
    engine_kind: str,
    model: str,
    extra: tuple[str, ...],
    few: tuple[str, ...],
) -> None:
    """Prompts that go on, depart, come back and are loaded again: never less than predicted, and where memory has no
    windows exactly that."""
    memory = kept_memory(facts(read_header(tiny_models[model])), swa_full=bool(extra))
    if few:
        memory = Memory(memory.window, memory.recurrent, most=3, min_step=300)
    engine = await live_engine(tiny_models[model], extra=(*CHATML, *extra, *few))
    words = [await engine.client.tokenize(foxes(2500, letter)) for letter in "BCD"]
    slot, luck = Simulated(engine.client, memory), random.Random(5)
    for step in range(14):
        at = luck.choice([n_tokens(slot.held), luck.randrange(n_tokens(slot.held) + 1)])
        more = words[step % 3][4 * at : 4 * (at + luck.choice([1, 30, 400]) + (700 if not step else 0))]
        before = n_tokens(slot.held), slot.checkpoints, slot.from_file
        predicted, found = await slot.prime(slot.held[: 4 * at] + more)
        told = f"step {step}: {before}, {at} shared, {n_tokens(more)} more: {predicted} predicted, {found} reused"
        assert predicted <= found <= at, told
        assert memory.window or predicted == found, told
        if luck.random() < 0.3 and not extra:
            await slot.reload(keeps=engine_kind == "embedded")


TABLE: dict[tuple[str, str], tuple[int | None, int | None]] = {
    ("dense", "A"): (0, 0),
    ("dense", "B"): (0, 0),
    ("hybrid", "A"): (0, None),
    ("hybrid", "B"): (0, 50),
    ("swa", "A"): (None, None),
    ("swa", "B"): (5, 51),
}
"""Tokens that are lost after a restore when the next prompt extends the file, and when it departs from it 50 tokens
behind a checkpoint; None: all (llama-server.md, "Slot files")."""


@pytest.mark.parametrize("model", ["dense", "hybrid", "swa"])
async def test_what_a_file_gives(
    live_engine: StartEngine, tiny_models: dict[str, Path], engine_kind: str, model: str
) -> None:
    """The two tables of slot files; with a whole window (--swa-full) an extended file gives all on both engines."""
    engine = await live_engine(tiny_models[model], extra=CHATML)
    client = engine.client
    words, others = [await client.tokenize(foxes(1600, letter)) for letter in "BC"]
    at, n = 604, 1200  # priming 604 leaves a checkpoint at 600
    await client.prime(0, words[: 4 * at])
    await client.prime(0, words[: 4 * n])
    await client.save_slot(0, "table")
    lost = []
    for shared in (n, at - 4 + 50):
        await client.erase_slot(0)
        await client.restore_slot(0, "table")
        found = await client.prime(0, words[: 4 * shared] + others[: 4 * 300])
        lost.append(None if not found.cache_n else shared - found.cache_n)
    assert tuple(lost) == TABLE[model, "B" if engine_kind == "embedded" else "A"]


async def test_a_whole_window_gives_its_file_back(live_engine: StartEngine, tiny_models: dict[str, Path]) -> None:
    engine = await live_engine(tiny_models["swa"], extra=(*CHATML, "--swa-full"))
    words = await engine.client.tokenize(foxes(1600, "B"))
    await engine.client.prime(0, words[: 4 * 1200])
    await engine.client.save_slot(0, "table")
    await engine.client.erase_slot(0)
    await engine.client.restore_slot(0, "table")
    assert (await engine.client.prime(0, words[: 4 * 1500])).cache_n == 1200


@pytest.mark.parametrize("extra", [(), ("--swa", "checkpoints")], ids=["auto", "checkpoints"])
async def test_what_two_bases_share(proxy_server: StartProxy, extra: tuple[str, ...], engine_kind: str) -> None:
    """350 tokens in common with a prompt of 1,841, window 128: found again by the second one, with whole windows, which
    is what is chosen; with checkpoints alone by the third one, where files are worth something."""
    proxy = await proxy_server("--parallel", "4", *extra, model="swa", engine_flags=CHATML)
    shared = foxes(340, "Shared")
    talks = [Conversation(proxy, f"{shared} {foxes(n, a)}", a) for a, n in (("B", 1450), ("C", 400), ("D", 400))]
    turns = [await talk.say("hello") for talk in talks]
    common = 345
    assert turns[1].cache_n >= common or extra, (turns, proxy.said())
    is_useless = extra and engine_kind == "binary"
    assert turns[2].cache_n >= common or is_useless, (turns, proxy.said())
    assert not is_useless or not (await engine_state(proxy))["snapshots"]["count"], "files that give nothing are made"
    back = await talks[0].say("go on")
    assert back.cache_n >= turns[0].n_prompt - 5, (turns, back, proxy.said())


async def test_a_file_ends_with_the_last_complete_message(proxy_server: StartProxy) -> None:
    """Hybrid: the template opens each answer with <think>, and the history has none of it; the file serves all the
    same."""
    flags = ("--jinja", "--chat-template-file", str(TEMPLATE.parent / "think.jinja"))
    asked = [{"role": "user", "content": foxes(600, "Think")}]
    proxy = await proxy_server("--parallel", "2", "--ctx-size", "4096", model="hybrid", engine_flags=flags)
    opened = await post(proxy, "/v1/chat/completions", {"messages": asked, "max_tokens": 8, **FOX})
    assert await proxy.stop() == 0
    again = await proxy_server("--parallel", "2", "--ctx-size", "4096", model="hybrid", engine_flags=flags)
    later = [*asked, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    back = await post(again, "/v1/chat/completions", {"messages": later, "max_tokens": 8, **FOX})
    assert back.headers["x-slotkeeper-placement"] == "restore", again.said()
    assert back.cache_n >= opened.n_prompt - 16, (opened, back)
