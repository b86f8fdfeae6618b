"""The list of doors of contract.md: what each does, and that everything else is refused with a sentence."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire, chat, data

WRITES = [
    ("POST", "/props"),
    ("POST", "/slots/0?action=erase"),
    ("POST", "/slots/0?action=save"),
    ("POST", "/lora-adapters"),
    ("POST", "/models/load"),
    ("POST", "/models/unload"),
    ("DELETE", "/models"),
]
UNKNOWN = [
    ("GET", "/"),
    ("GET", "/index.html"),
    ("GET", CHAT),
    ("GET", "/v1/responses"),
    ("POST", "/api/chat"),
    ("POST", "/v1/nothing"),
    ("POST", "/slots"),
    ("PUT", "/slots/0"),
    ("DELETE", "/v1/models/x"),
    ("OPTIONS", CHAT),
    ("PATCH", "/healthz"),
    ("GET", "/tools"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
]


@pytest.mark.parametrize(("method", "path"), UNKNOWN)
async def test_unknown_paths(method: str, path: str, wire: Wire, fake: FakeLlama) -> None:
    """404 that says so; nothing goes upstream."""
    before = len(fake.requests)
    answer = await wire.http.request(method, wire.http.base_url.copy_with(raw_path=path.encode()))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_found")
    assert path in error["message"] and "README" in error["message"]
    assert ("/slotkeeper/" in error["message"]) is (path == "/"), "a person with a browser is told where to look"
    asked = [(r.method, r.path) for r in fake.requests[before:]]
    assert set(asked) <= {("GET", "/props")}  # which we ask an attached engine now and then


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_hello(method: str, wire: Wire) -> None:
    """Claude Code's first request."""
    assert (await wire.http.request(method, "/api/hello")).status_code == 200


@pytest.mark.parametrize(("method", "path"), WRITES)
async def test_writes_are_refused(method: str, path: str, wire: Wire, fake: FakeLlama) -> None:
    """403 that names the switch."""
    before = len(fake.requests)
    answer = await wire.http.request(method, path, json={"filename": "x"})
    assert answer.status_code == 403
    assert "--allow-engine-admin" in answer.json()["error"]["message"]
    assert len(fake.requests) == before


async def test_writes_are_open_on_demand(serve: Serve, fake: FakeLlama) -> None:
    """They reach the engine, and the table learns of what they did there."""
    wire = await serve(fake, allow_engine_admin=True)
    await wire.post(CHAT, chat("hi"))
    answer = await wire.post("/slots/0?action=erase", {})
    assert answer.json() == {"id_slot": 0, "n_erased": 11}
    await wire.has_slots("empty", "empty")
    assert (await wire.post("/models/load", {"model": "x"})).status_code == 404  # the engine's own answer


async def test_slots_come_from_our_own_table(wire: Wire, fake: FakeLlama) -> None:
    """In llama-server's shape, and without a request upstream."""
    await wire.post(CHAT, chat("hi"))
    before = len(fake.requests)
    shown = (await wire.get("/slots")).json()
    assert len(fake.requests) == before
    assert [(s["id"], s["n_ctx"], s["speculative"], s["is_processing"]) for s in shown] == [
        (0, 8192, False, False),
        (1, 8192, False, False),
    ]
    assert shown[0]["n_prompt_tokens"] == len(fake.slots[0].tokens)
    assert "prompt" not in str([list(slot) for slot in shown]).replace("n_prompt_tokens", "")


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
async def test_models(path: str, serve: Serve) -> None:
    """The union of the engines' models, with the context that one request can use."""
    async with FakeLlama(alias="big", n_ctx=8192) as big, FakeLlama(alias="small", n_ctx=512) as small:
        wire = await serve(upstream=(big.url, small.url))
        await all_ready(wire)
        found = (await wire.get(path)).json()
        assert found["object"] == "list"
        assert {m["id"]: (m["context_length"], m["meta"]["n_ctx"]) for m in found["data"]} == {
            "big": (8192, 8192),
            "small": (512, 512),
        }


async def all_ready(wire: Wire) -> None:
    """Return once every engine is attached."""

    async def ready() -> bool:
        return all(engine["ready"] for engine in (await wire.state())["engines"])

    await until(ready)


async def test_model_names(serve: Serve) -> None:
    """By alias, file or the name given in --upstream; an unknown one is refused when there is a choice."""
    async with FakeLlama(alias="big") as big, FakeLlama(alias="small") as small:
        wire = await serve(upstream=(big.url, f"{small.url},model=tiny"))
        await all_ready(wire)
        for name, engine in (("big", big), ("tiny", small), ("small", small)):
            before = len(engine.model_requests)
            assert (await wire.post(CHAT, chat("hi", model=name))).status_code == 200
            assert len(engine.model_requests) == before + 1
            tokenized = sum(r.path == "/tokenize" for r in engine.requests)
            await wire.post("/tokenize", {"content": "hi", "model": name})
            await wire.post(f"/tokenize?model={name}", {"content": "hi"})
            assert sum(r.path == "/tokenize" for r in engine.requests) == tokenized + 2
        for body in (chat("hi", model="gpt-4o"), chat("hi")):
            answer = await wire.post(CHAT, body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            assert "big" in answer.json()["error"]["message"]


async def test_any_name_when_there_is_one_model(wire: Wire) -> None:
    """Agents invent small-model names."""
    for name in ("gpt-4o-mini", "", "fake", None, 5):
        assert (await wire.post(CHAT, chat("hi", model=name))).status_code == 200


async def test_two_engines_of_one_model_share_the_work(serve: Serve) -> None:
    """Whoever has less to do takes the next one."""
    async with FakeLlama(n_slots=1) as one, FakeLlama(n_slots=1) as two:
        wire = await serve(upstream=(one.url, two.url))
        await all_ready(wire)
        go = asyncio.Event()
        for fake in (one, two):
            fake.cues.append(Cue(hold_before=go))
        sent = [asyncio.create_task(wire.post(CHAT, chat(f"hi {i}", model="any"))) for i in range(2)]
        await asyncio.gather(one.arrived(1), two.arrived(1))
        go.set()
        assert [answer.status_code for answer in await asyncio.gather(*sent)] == [200, 200]


async def test_a_conversation_stays_with_its_engine(serve: Serve) -> None:
    """Its next turn goes where its tokens lie, whoever has less to do."""
    async with FakeLlama() as one, FakeLlama() as two:
        wire = await serve(upstream=(one.url, two.url))
        await all_ready(wire)
        go = asyncio.Event()
        one.cues.append(Cue(hold_before=go))
        busy = asyncio.create_task(wire.post(CHAT, chat("elsewhere")))
        await one.arrived(1)
        await wire.post(CHAT, chat("a question " * 20))
        go.set()
        await busy
        await wire.post(CHAT, chat("a question " * 20, " w0 w1 w2 w3", "more"))
        assert (len(one.model_requests), len(two.model_requests)) == (1, 2)


async def test_an_engine_that_is_down_does_not_narrow_the_names(serve: Serve, fake: FakeLlama) -> None:
    """One model is served, so any name will do; the dead engine's name is not known anyway."""
    wire = await serve(upstream=("http://127.0.0.1:9", fake.url))
    assert (await wire.post(CHAT, chat("hi", model="gpt-4o"))).status_code == 200


async def test_fields_that_are_ours(wire: Wire, fake: FakeLlama) -> None:
    """Dropped and replaced by what was decided here; everything else arrives as sent."""
    own = {"id_slot": 7, "slot_id": 7, "n_keep": 5, "n_discard": 5, "n_cache_reuse": 5, "cache_prompt": True}
    other = {"temperature": 0.25, "top_k": 3, "seed": 9, "unheard_of": {"a": [1, None]}, "stop": ["x"]}
    await wire.post(CHAT, chat("hi", **own, **other))
    sent = fake.model_requests[-1].body
    assert (sent.pop("id_slot"), sent.pop("cache_prompt")) == (0, True)
    assert sent.items() >= other.items()
    assert not set(sent) & {"slot_id", "n_keep", "n_discard", "n_cache_reuse", "n"}
    assert sent["messages"] == chat("hi")["messages"]


async def test_no_cache_means_a_scratch_slot(wire: Wire, fake: FakeLlama) -> None:
    """`cache_prompt: false` neither reads nor harms what its line has in a slot."""
    first = await wire.post(CHAT, chat("a question of some length " * 10))
    scratch = await wire.post(CHAT, chat("a question of some length " * 10, cache_prompt=False))
    assert fake.model_requests[-1].body["cache_prompt"] is False
    assert scratch.headers["x-slotkeeper-slot"] != first.headers["x-slotkeeper-slot"]
    assert (scratch.headers["x-slotkeeper-placement"], scratch.json()["timings"]["cache_n"]) == ("cold", 0)
    follows = chat("a question of some length " * 10, " w0 w1 w2 w3", "and more")
    third = await wire.post(CHAT, follows)
    assert third.headers["x-slotkeeper-slot"] == first.headers["x-slotkeeper-slot"]
    assert third.json()["timings"]["cache_n"] == int(third.headers["x-slotkeeper-predicted-cache-n"]) > 50


NS = [(CHAT, chat("hi", n=3, seed=5)), ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "n": 3, "seed": 5})]


@pytest.mark.parametrize(("path", "body"), NS)
async def test_several_choices_whole(path: str, body: dict[str, Any], wire: Wire, fake: FakeLlama) -> None:
    """One answer, merged by index; the prompt is processed once, each choice has a seed of its own."""
    fake.cues.extend(Cue(text=[f" {name}"] * 4) for name in "abc")
    answer = (await wire.post(path, body)).json()
    texts = [c["message"]["content"] if "message" in c else c["text"] for c in answer["choices"]]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert texts == [" a a a a", " b b b b", " c c c c"]
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 12
    check_several(fake)


def check_several(fake: FakeLlama) -> None:
    """Three requests in one slot, of which the first alone processed the prompt."""
    bodies = [r.body for r in fake.model_requests]
    assert [b.get("n") for b in bodies] == [None] * 3
    assert [b["seed"] for b in bodies] == [5, 6, 7]
    assert len({b["id_slot"] for b in bodies}) == 1
    total = len(
        fake.tokens_of("hi" if "prompt" in bodies[0] else "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    )
    assert fake.processed_total == total + 2


@pytest.mark.parametrize(("path", "body"), NS)
async def test_several_choices_streamed(path: str, body: dict[str, Any], wire: Wire, fake: FakeLlama) -> None:
    """One stream with one id, one [DONE], and one usage for all when it was asked for."""
    fake.cues.extend(Cue(text=[f" {name}"] * 4) for name in "abc")
    events = await wire.events(path, body | {"stream_options": {"include_usage": True}})
    assert events.count(b"data: [DONE]\n\n") == 1
    assert events[-1] == b"data: [DONE]\n\n"
    found = [data(event) for event in events[:-1]]
    texts = {0: "", 1: "", 2: ""}
    for choice in (c for event in found for c in event["choices"]):
        delta = choice.get("delta", choice)
        texts[choice["index"]] += delta.get("content") or delta.get("text") or ""
    assert texts == {0: " a a a a", 1: " b b b b", 2: " c c c c"}
    assert len({event["id"] for event in found}) == 1
    assert found[-1]["usage"]["completion_tokens"] == 12
    if path == CHAT:
        assert sum(event["choices"] == [] for event in found) == 1
    check_several(fake)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_choice_that_fails_ends_the_answer(stream: bool, wire: Wire, fake: FakeLlama) -> None:
    """One error, and no further choice is begun."""
    fake.cues.extend([Cue(), Cue(break_at=1)])
    answer = await wire.post(CHAT, chat("hi", n=3, stream=stream))
    assert answer.text.count('"engine_failed"') == 1
    assert "[DONE]" not in answer.text
    assert (answer.status_code, len(fake.model_requests)) == (200 if stream else 502, 2)


@pytest.mark.parametrize("path", ["/embeddings", "/v1/embeddings", "/v1/rerank", "/v1/audio/transcriptions"])
async def test_embeddings_need_an_engine_of_their_own(path: str, serve: Serve, tmp_path: Path) -> None:
    """Refused on a chat engine, which would lose a conversation; passed to one that is there for them."""
    async with FakeLlama() as fake, FakeLlama(alias="embedder") as embedder:
        wire = await serve(fake)
        answer = await wire.post(path, {"input": "hi"})
        assert answer.status_code == 400
        assert "kind=embedding" in answer.json()["error"]["message"]
        assert path not in [r.path for r in fake.requests]
        both = await serve(upstream=(fake.url, f"{embedder.url},kind=embedding"), state_dir=tmp_path / "second")
        await all_ready(both)
        await both.post(path, {"input": "hi"})
        assert path in [r.path for r in embedder.requests]
        assert (await both.post(CHAT, chat("hi", model="any"))).status_code == 200
        assert embedder.model_requests == []


async def test_reading_doors_pass_through(wire: Wire, fake: FakeLlama) -> None:
    """Bodies and answers unchanged; paths of the engine's machine are not shown."""
    assert (await wire.post("/tokenize", {"content": "a b"})).json() == {"tokens": fake.tokens_of("a b")}
    tokens = {"tokens": fake.tokens_of("a b")}
    assert (await wire.post("/detokenize", tokens)).json() == {"content": "a b"}
    assert (await wire.post("/apply-template", chat("x"))).json()["prompt"].startswith("<|im_start|>user\nx")
    props = (await wire.get("/props")).json()
    assert (props["total_slots"], props["model_path"]) == (2, "fake.gguf")
    assert (await wire.get("/health")).json() == {"status": "ok"}
    assert (await wire.get("/lora-adapters")).status_code == 404  # the engine's own answer


JUNK = [(p, j) for j in (b"", b"<html>", b"[]", b"null") for p in ("/v1/models", "/props")]
JUNK += [("/v1/models", b'{"data": [{}]}'), ("/v1/models", b'{"data": 5}'), ("/v1/models", b"{}")]


@pytest.mark.parametrize(("path", "junk"), JUNK)
async def test_an_engine_that_answers_junk(path: str, junk: bytes, wire: Wire, fake: FakeLlama) -> None:
    """Doors that look into the answer say that the engine is at fault."""
    fake.junk = junk
    answer = await wire.get(path)
    assert (answer.status_code, answer.json()["source"]) == (502, "engine")


async def test_other_adapters_share_no_tokens(serve: Serve) -> None:
    """Equal tokens, other KV: what was processed under one list of adapters serves no prompt under another."""
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake)
        for lora in (None, [{"id": 0, "scale": 0.5}], [], [{"id": 0, "scale": 1.0}], None):
            more = {} if lora is None else {"lora": lora}
            timings = (await wire.post(CHAT, chat("word " * 200, **more))).json()["timings"]
            assert timings["cache_n"] == 0, lora
            again = (await wire.post(CHAT, chat("word " * 200, **more))).json()["timings"]
            assert again["cache_n"] > 200
        assert {record["tenant"] for record in await wire.records()} == {"local"}


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/props", "/health", "/slots", "/readyz"])
async def test_head_is_get_without_the_body(path: str, serve: Serve) -> None:
    """Health checks ask with HEAD, which llama-server does not know."""
    async with FakeLlama() as fake:
        wire = await serve(fake)
        answer = await wire.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert "HEAD" not in {request.method for request in fake.requests}


@pytest.mark.parametrize("name", ["fake", "fake.gguf"])
async def test_one_model(name: str, wire: Wire) -> None:
    """OpenAI's `models.retrieve`: the entry of the list."""
    answer = await wire.get(f"/v1/models/{name}")
    assert answer.json() == (await wire.get("/v1/models")).json()["data"][0]
    assert answer.json()["context_length"] == 8192


@pytest.mark.parametrize("name", ["gpt-4o", "a/b", "x" * 200])
async def test_one_model_that_is_not_served(name: str, wire: Wire) -> None:
    """404 in OpenAI's shape, with the names that are."""
    answer = await wire.get(f"/v1/models/{name}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_found")
    assert "Served are: fake." in error["message"]


@pytest.mark.parametrize(
    ("path", "said"), [("/v1/v1/models", "leave it out of the base URL"), (f"{CHAT}/", "the slash at its end")]
)
async def test_paths_that_are_nearly_right(path: str, said: str, wire: Wire) -> None:
    """What to change is in the sentence."""
    answer = await wire.post(path, chat("hi"))
    assert answer.status_code == 404
    assert said in answer.json()["error"]["message"]
