"""Every error has a status, a shape that clients know, and says who failed."""

import json
from typing import Any

import httpx
import openai
import pytest

from proxy import errors
from proxy.errors import SlotkeeperError


def every() -> list[SlotkeeperError]:
    """One of each class in the tree."""
    special: dict[type[SlotkeeperError], SlotkeeperError] = {
        errors.ContextExceeded: errors.ContextExceeded("too long", n_prompt_tokens=9, n_ctx=8),
        errors.EngineAnswered: errors.EngineAnswered(418, {"message": "no", "type": "teapot"}),
    }
    found, todo = [], [SlotkeeperError]
    while todo:
        kind = todo.pop()
        found.append(special.get(kind) or kind("a sentence"))
        todo += kind.__subclasses__()
    return found


@pytest.mark.parametrize("error", every(), ids=lambda e: type(e).__name__)
def test_shape(error: SlotkeeperError) -> None:
    """OpenAI's object, the source beside it and inside it."""
    body = json.loads(errors.body(error))
    assert body["source"] == body["error"]["source"] == error.source
    assert {"message", "type", "param", "code"} <= body["error"].keys()
    assert body["error"]["message"] == error.message
    assert 400 <= error.status <= 599
    assert json.loads(errors.event(error).removeprefix(b"data: ")) == body
    assert errors.event(error).endswith(b"\n\n")


def test_codes_are_distinct_enough() -> None:
    """A program can tell the refusals apart by status and code."""
    pairs = [(e.status, e.code) for e in every() if type(e) not in (SlotkeeperError, errors.InternalError)]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(("seconds", "header"), [(0.2, "1"), (1, "1"), (1.1, "2"), (30, "30")])
def test_retry_after_is_whole_seconds_rounded_up(seconds: float, header: str) -> None:
    """Never 0, which would mean at once."""
    assert errors.Busy("full", retry_after=seconds).headers == {"retry-after": header}


def test_the_engines_own_fields_stay() -> None:
    """n_prompt_tokens and n_ctx reach the client, and the refusal counts as an overflow."""
    raw = {"code": 400, "message": "long", "type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 8}
    error = errors.EngineAnswered(400, raw)
    inner = json.loads(errors.body(error))["error"]
    assert (inner["n_prompt_tokens"], inner["n_ctx"], inner["type"]) == (9, 8, "exceed_context_size_error")
    assert (error.outcome, error.source) == ("overflow", "engine")


@pytest.mark.parametrize("raw", [{}, {"message": None}, {"message": "", "type": None}])
def test_an_empty_refusal_still_says_something(raw: dict[str, Any]) -> None:
    """A message is made up from the status."""
    assert "500" in errors.EngineAnswered(500, raw).message


async def test_the_openai_sdk_understands_us() -> None:
    """The SDK picks its own class by status, and shows our sentence, code and source."""
    wanted = errors.UnknownModel("No engine serves 'x'.", param="model")

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(wanted.status, content=errors.body(wanted), headers={"content-type": "application/json"})

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    async with openai.AsyncOpenAI(base_url="http://test", api_key="k", http_client=http, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.list()
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["source"] == "slotkeeper"
