"""Bodies of any shape in every dialect: an answer or an error of the dialect's own, never a mistake of ours."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.fakes.http import Answer, Request
from tests.fakes.llama import FakeLlama
from tests.wire.bodies import EVILS, GOOD, bodies
from tests.wire.conftest import Serve
from tests.wire.dialects import COUNT, MESSAGES, PARSERS, RESPONSES, error_of
from tests.wire.wire import CHAT, Wire

DOORS = [CHAT, MESSAGES, RESPONSES, COUNT]
FUZZ = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


class PickyLlama(FakeLlama):
    """One that refuses what it cannot render, as the real one does."""

    async def _handle(self, request: Request, answer: Answer) -> None:
        try:
            await super()._handle(request, answer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            await answer.json({"error": {"code": 400, "message": repr(error), "type": "invalid_request_error"}}, 400)


@pytest.fixture
async def picky(serve: Serve) -> Any:
    """A proxy in front of a picky engine."""
    async with PickyLlama(n_ctx=100_000) as fake:
        fake.most = 100
        yield await serve(fake)


def check(path: str, answer: httpx.Response) -> None:
    """The answer is one of the dialect's, and no error in it is a mistake of ours."""
    if answer.status_code == 200:
        if answer.headers["content-type"] == "text/event-stream" and path in PARSERS:
            PARSERS[path](answer.content)
        return
    error = error_of(path, answer)
    assert error["code"] != "internal_error"
    assert error["source"] == "engine" or 400 <= answer.status_code < 500
    assert error["message"] and "Traceback" not in error["message"]


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("evil", EVILS)
async def test_known_evils(path: str, evil: str, picky: Wire) -> None:
    """The worst that is known."""
    answer = await picky.http.post(path, content=EVILS[evil])
    check(path, answer)
    assert (await picky.get("/readyz")).status_code == 200


@pytest.mark.parametrize("path", DOORS)
async def test_the_good_bodies_are_good(path: str, picky: Wire) -> None:
    """What is damaged here was whole."""
    for stream in (False, True):
        answer = await picky.post(path, GOOD[path] | {"stream": stream})
        assert answer.status_code == 200, answer.text
        check(path, answer)


def fuzz(path: str) -> Callable[..., None]:
    """A test of one door."""

    @FUZZ
    @given(body=bodies(path))
    async def test(picky: Wire, body: Any) -> None:
        check(path, await picky.http.post(path, content=json.dumps(body).encode()))

    return test


test_any_chat_body = fuzz(CHAT)
test_any_messages_body = fuzz(MESSAGES)
test_any_responses_body = fuzz(RESPONSES)
test_any_count_body = fuzz(COUNT)
