"""What the official SDKs raise for errors before and inside a stream."""

from typing import Any

import anthropic
import openai
import pytest

from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.live.dialects import DIALECTS, Ask, arguments, sdks
from tests.wire.conftest import Serve
from tests.wire.test_doors import all_ready
from tests.wire.test_errors import OWN
from tests.wire.wire import Wire

ASK = Ask([("user", "hi")], n=4)
SDK: dict[str, Any] = {"chat": openai, "messages": anthropic, "responses": openai}
STATUSES = [
    (400, "BadRequestError"),
    (401, "AuthenticationError"),
    (403, "PermissionDeniedError"),
    (404, "NotFoundError"),
    (429, "RateLimitError"),
    (500, "InternalServerError"),
    (503, "InternalServerError"),
]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_class_is_that_of_the_status(stream: bool, dialect: str, wire: Wire, fake: FakeLlama) -> None:
    """The engine's own status and words, as the exception that programs wait for."""
    async with sdks(wire.url) as both:
        for status, name in STATUSES:
            fake.cues.append(
                Cue(status=status, error={"code": status, "message": "no such luck", "type": "server_error"})
            )
            with pytest.raises(getattr(SDK[dialect], name), match="no such luck"):
                await both.ask(dialect, ASK, stream=stream)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_model_that_nobody_serves(dialect: str, serve: Serve) -> None:
    """NotFoundError, which names the models that are there."""
    async with FakeLlama(alias="big") as big, FakeLlama(alias="small") as small:
        wire = await serve(upstream=(big.url, small.url))
        await all_ready(wire)
        async with sdks(wire.url) as both:
            with pytest.raises(SDK[dialect].NotFoundError, match="small"):
                await both.ask(dialect, ASK, stream=True)


@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_an_error_inside_a_stream_is_raised(dialect: str, wire: Wire, fake: FakeLlama) -> None:
    """After what was said until then; nobody takes the answer for a whole one."""
    async with sdks(wire.url) as both:
        fake.cues.append(Cue(error_at=2, error=OWN))
        with pytest.raises(SDK[dialect].APIError, match="Context size has been exceeded"):
            await both.ask(dialect, ASK, stream=True)


async def test_an_error_inside_a_response_is_its_last_event(wire: Wire, fake: FakeLlama) -> None:
    """The API has an event for it, and its SDK raises nothing."""
    async with sdks(wire.url) as both:
        fake.cues.append(Cue(error_at=2, error=OWN))
        stream: Any = await both.openai.responses.create(**arguments("responses", ASK), stream=True)
        events = [event async for event in stream]
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == [" w0", " w1"]
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].response.error.message == OWN["message"]


async def test_betas_are_tolerated(wire: Wire) -> None:
    """Whatever the header names, on the path that the SDK's beta client uses."""
    async with sdks(wire.url) as both:
        given = arguments("messages", ASK)
        answer = await both.anthropic.beta.messages.create(betas=["context-1m-2025-08-07", "no-such-beta"], **given)
        count = await both.anthropic.beta.messages.count_tokens(
            model="fake", messages=given["messages"], betas=["token-counting-2024-11-01"]
        )
    assert [block.type for block in answer.content] == ["text"]
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
