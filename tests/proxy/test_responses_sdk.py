"""The official SDK reads what the writer writes, streamed and whole."""

from __future__ import annotations

import httpx
import openai
import orjson
import pytest

from llamacpp.wire import assemble
from tests.proxy.responses_chunks import SPOKEN, writer, written


def client(raw: bytes, content_type: str, cut: int) -> openai.OpenAI:
    pieces = [raw[:cut], raw[cut:]] if cut else [raw]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": content_type}, content=iter(pieces))

    return openai.OpenAI(
        api_key="k",
        base_url="http://engine.invalid/v1",
        http_client=httpx.Client(transport=httpx.MockTransport(answer)),
        max_retries=0,
    )


@pytest.mark.parametrize("at", range(20))
def test_the_sdk_accumulates_a_stream_cut_anywhere(at: int) -> None:
    raw = written(SPOKEN)
    cut = len(raw) * at // 20
    with client(raw, "text/event-stream", cut) as sdk, sdk.responses.stream(model="m", input="hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == "Hé🙂"
    call = final.output[2].model_dump()
    assert (call["namespace"], call["name"], call["arguments"]) == ("agents", "spawn", '{"a":1}')


def test_the_sdk_reads_a_whole_answer() -> None:
    raw = orjson.dumps(writer().whole(assemble("chat", SPOKEN)))
    with client(raw, "application/json", 0) as sdk:
        response = sdk.responses.create(model="m", input="hi")
    assert response.output_text == "Hé🙂"
    assert response.usage is not None and response.usage.input_tokens_details.cached_tokens == 20
