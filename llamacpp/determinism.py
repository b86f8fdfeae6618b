"""Does a restored slot answer like one that was not? On demand only: it generates.

Greedy answers after reuse and after a fresh prefill differ on healthy engines (batch shapes), so both sides process the
same tokens in the same batches: a prefix is processed and saved; then the rest and the answer, once on top of it and
once on top of its restored file (llama-server.md: 0 of 60 differ).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import orjson

from llamacpp.errors import EngineBroken, EngineError, EngineRefused
from llamacpp.packed import unpack
from llamacpp.probes import SLACK, Slots

TOLERANCE = 0.02
"""Largest difference of two log-probabilities of one token that counts as none (float16 caches: about 1e-3)."""
N_REST, N_ANSWER = 12, 16
"""Tokens processed behind the cut, and generated."""
SHORT = 96
"""Tokens before the cut for memory without windows."""
PROMPTS = (
    "In the harbour town of Velm the lamps are lit by hand. Each evening at 6 o'clock a keeper climbs 212 steps and ",
    "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] <= right[0]:\n   ",
    "Dear Ms. Okafor, thank you for your letter of 3 May about the broken bridge; our engineers have measured it and ",
    '{"name": "sensor-17", "unit": "celsius", "values": [20.1, 20.4, 21.0, 19.8], "note": "window open", "next": ',
    "Step 1: peel two onions. Step 2: heat the butter slowly. Step 3: stir until golden, then add 300 ml of stock and ",
)


class Answers(Slots, Protocol):
    """The part of `llamacpp.client.LlamaClient` that is used here."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        params: Any = None,
        headers: Any = None,
        seconds: float | None = None,
    ) -> httpx.Response: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated token ids, their log-probabilities, and how many prompt tokens came from the cache."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cache_n: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt. n_cut: tokens before the cut; reused: of them after the restore; same: leading tokens that are
    equal; apart: largest difference of their log-probabilities, that of the first two unequal tokens included."""

    n_cut: int
    reused: int
    same: int
    length: int
    apart: float

    @property
    def is_tested(self) -> bool:
        """The restored tokens were used at all."""
        return self.reused + SLACK >= self.n_cut

    @property
    def is_equal(self) -> bool:
        """Within the tolerance; unequal tokens are a near tie then."""
        return self.apart <= TOLERANCE


async def compare_answers(
    client: Answers, slot: int, file: Path, *, n_cut: int = SHORT, count: int = len(PROMPTS)
) -> list[Comparison]:
    """Several prompts, each answered in `slot` (empty, nobody's) on top of its prefix and of that prefix's restored
    file. `file` is overwritten, not deleted; the slot is empty afterwards. Raises EngineError."""
    found = []
    try:
        for text in PROMPTS[:count]:
            tokens = (await client.tokenize(text * (n_cut // 8 + 4)))[: 4 * (n_cut + N_REST)]
            found.append(await _compare(client, slot, file, tokens, n_cut))
        return found
    finally:
        with contextlib.suppress(EngineError):
            await client.erase_slot(slot)


async def _compare(client: Answers, slot: int, file: Path, tokens: bytes, n_cut: int) -> Comparison:
    await client.erase_slot(slot)
    await client.prime(slot, tokens[: 4 * n_cut])
    await client.save_slot(slot, file.name)
    straight = await _answer(client, slot, tokens)
    await client.erase_slot(slot)
    await client.restore_slot(slot, file.name)
    restored = await _answer(client, slot, tokens)
    return difference(n_cut, straight, restored)


def difference(n_cut: int, straight: Answer, restored: Answer) -> Comparison:
    """How far two answers are apart; behind their first unequal token they say nothing more."""
    same, apart = 0, 0.0
    pairs = zip(straight.tokens, restored.tokens, straight.logprobs, restored.logprobs, strict=False)
    for one, two, first, second in pairs:
        apart = max(apart, abs(first - second))
        if one != two:
            break
        same += 1
    length = max(len(straight.tokens), len(restored.tokens))
    if same == min(len(straight.tokens), len(restored.tokens)) < length:
        apart = math.inf
    return Comparison(n_cut, restored.cache_n, same, length, apart)


async def _answer(client: Answers, slot: int, tokens: bytes) -> Answer:
    """Greedy, with log-probabilities."""
    body = {
        "prompt": unpack(tokens),
        "n_predict": N_ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "n_probs": 1,
        "cache_prompt": True,
        "id_slot": slot,
        "samplers": ["top_k", "temperature"],
        "seed": 1,
    }
    headers = {"content-type": "application/json"}
    response = await client.request("POST", "/completion", content=orjson.dumps(body), headers=headers)
    if response.status_code != httpx.codes.OK:
        raise EngineRefused(response.status_code, response.content, "the engine would not answer a test prompt")
    try:
        found = orjson.loads(response.content)
        probs = found["completion_probabilities"]
        return Answer(
            tuple(int(p["id"]) for p in probs),
            tuple(float(p["logprob"]) for p in probs),
            int(found["timings"]["cache_n"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise EngineBroken("POST /completion gave no log-probabilities; is the engine a llama-server?") from error
