"""Engines whose answers are scripted: a fake for the tool loop, and a real one whose prompts are computed."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from tests.agents.forward import Forward
from tests.agents.script import Answer, Steps, answer
from tests.fakes.http import Answer as Out
from tests.fakes.http import Request
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue

Json = dict[str, Any]
ALIAS = "your-model"
"""As in the README."""


class ScriptedLlama(FakeLlama):
    """A fake llama-server that plays `steps`; of an answer it keeps one token.

    Its tokens are as long as a real model's, more or less: agents compact by the counts that they are told.
    """

    plain = re.compile(r"\s?\w+|\s+|[^\w\s]+")
    piece = re.compile(rf"<\|\w+\|>|{plain.pattern}")

    def __init__(self, steps: Steps) -> None:
        super().__init__(n_slots=4, n_ctx=131_072, alias=ALIAS)
        self._steps, self._numbers = steps, count()

    async def _model(self, request: Request, out: Out) -> None:
        said = answer(request.body, self._steps)
        number = next(self._numbers)
        name = f"chatcmpl-{number}"  # Claude Code joins answers of one id
        self.cues.append(Cue(text=[" said"], deltas=said.deltas(number), finish=said.finish, id=name))
        await super()._model(request, out)


class Puppet(Forward):
    """In front of a real llama-server: the prompt is computed there, one token generated, the answer scripted."""

    def __init__(self, base: str, api_key: str, steps: Steps) -> None:
        super().__init__(base, headers={"authorization": f"Bearer {api_key}"})
        self._steps, self._numbers = steps, count()

    def asked(self, request: Request) -> bytes:
        if request.path != "/v1/chat/completions":
            return request.content
        body = {k: v for k, v in request.body.items() if k != "max_completion_tokens"}
        return json.dumps(body | {"max_tokens": 1}).encode()

    def events(self, request: Request, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        if request.path != "/v1/chat/completions":
            return data
        return self._scripted(answer(request.body, self._steps), data)

    async def _scripted(self, said: Answer, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        deltas = said.deltas(next(self._numbers))
        async for event in split(data):
            for made in instead(event, deltas, said.finish):
                yield made


def instead(event: bytes, deltas: list[Json], finish: str) -> list[bytes]:
    """What is sent for one event of the engine: generated text is left out, `deltas` stand before the finish."""
    data = event.removeprefix(b"data: ")
    if not event.startswith(b"data: ") or data == b"[DONE]":
        return [event + b"\n\n"]
    value = json.loads(data)
    choices = value.get("choices")
    if "prompt_progress" in value or not choices or "role" in choices[0].get("delta", {}):
        return [event + b"\n\n"]
    if choices[0].get("finish_reason") is None:
        return []
    last = _event(value | {"choices": [choices[0] | {"finish_reason": finish}]})
    bare = {k: v for k, v in value.items() if k not in ("usage", "timings")}
    return [*(_event(bare | {"choices": [{"index": 0, "delta": d, "finish_reason": None}]}) for d in deltas), last]


def _event(value: Json) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def split(data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events of a stream, without the empty line that ends each."""
    rest = b""
    async for piece in data:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            yield event
