"""Several prompts in one request: one request each upstream, one answer to the client."""

import orjson
import pytest

from proxy.api.read import one_by_one, read
from proxy.errors import BadRequest
from proxy.lines import Identity
from tests.fakes.llama import FakeLlama
from tests.wire.wire import CHAT, Wire, chat, data

ME = Identity("local")


async def test_several_prompts_are_placed_one_by_one_and_merged(wire: Wire, fake: FakeLlama) -> None:
    """Indices run over prompts, then choices; a prompt's tokens count once for all its choices."""
    body = {"prompt": ["first text " * 9, "second text " * 30], "n": 2, "max_tokens": 4}
    answer = (await wire.post("/v1/completions", body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    sent = [request.body["prompt"] for request in fake.model_requests]
    assert sent == [body["prompt"][0]] * 2 + [body["prompt"][1]] * 2
    alone = [(await wire.post("/v1/completions", {"prompt": p, "max_tokens": 4})).json() for p in body["prompt"]]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


async def test_several_prompts_in_one_stream(wire: Wire, fake: FakeLlama) -> None:
    """Every event says which prompt it answers, and one [DONE] ends them all."""
    events = await wire.events("/v1/completions", {"prompt": ["a b c", "d e f"], "max_tokens": 3})
    indices = [choice["index"] for event in events[:-1] for choice in data(event)["choices"]]
    assert sorted(set(indices)) == [0, 1]
    assert indices == sorted(indices)
    assert events.count(b"data: [DONE]\n\n") == 1


@pytest.mark.parametrize("prompt", [["one"], [1, 2, 3], ["mixed", 5], "plain"])
def test_one_prompt_stays_one(prompt: object) -> None:
    """Lists of tokens, of text and tokens, or of one text are one prompt."""
    request = read("native", "/completion", orjson.dumps({"prompt": prompt}), ME)
    assert [one.body["prompt"] for one in one_by_one(request)] == [prompt]


def test_a_fixed_seed_differs_between_choices_only() -> None:
    """Each prompt's first choice has the client's own seed."""
    raw = orjson.dumps({"prompt": ["a", "b"], "n": 2, "seed": 7})
    assert [one.body["seed"] for one in one_by_one(read("completion", "/v1/completions", raw, ME))] == [7, 8, 7, 8]


def test_too_many_answers_are_refused() -> None:
    """The bound is on prompts times choices."""
    with pytest.raises(BadRequest, match="too many"):
        read("completion", "/v1/completions", orjson.dumps({"prompt": ["x"] * 17, "n": 2}), ME)


FIRST = ("a first question " * 20,)
SECOND = (*FIRST, " w0 w1 w2 w3", "a second question")


@pytest.mark.parametrize("texts", [FIRST, SECOND])
async def test_a_repeated_prompt_is_predicted_exactly(texts: tuple[str, ...], wire: Wire) -> None:
    """Its slot holds the reply too, which the repeated prompt does not: all but its last token comes from the cache."""
    for count in range(1, len(texts) + 1, 2):
        await wire.post(CHAT, chat(*texts[:count]))
    for _ in range(2):
        again = await wire.post(CHAT, chat(*texts))
        timings = again.json()["timings"]
        predicted = int(again.headers["x-slotkeeper-predicted-cache-n"])
        assert predicted == timings["cache_n"] == timings["cache_n"] + timings["prompt_n"] - 1
        assert (await wire.records())[0]["cause"] is None


async def test_a_prompt_that_goes_on_without_the_reply(wire: Wire) -> None:
    """The client sends another message of its own: the reply in the slot is not counted on."""
    await wire.post(CHAT, chat("a first question " * 20))
    body = chat("a first question " * 20)
    body["messages"].append({"role": "user", "content": "and another"})
    answer = await wire.post(CHAT, body)
    predicted = int(answer.headers["x-slotkeeper-predicted-cache-n"])
    assert abs(predicted - answer.json()["timings"]["cache_n"]) <= 3
    assert answer.headers["x-slotkeeper-placement"] == "continue"
