"""Routers' lists, and requests that name a model, as llama-server (b11549) and llama-swap answer and take them."""

from collections.abc import AsyncIterator

import orjson
import pytest

from llamacpp.client import LlamaClient
from llamacpp.errors import EngineBroken, EngineRefused
from llamacpp.routers import RoutedModel, Router, find_router
from tests.fakes.http import Answer, Request, Server
from tests.fakes.llama import FakeLlama

ARGS = ["llama-server", "--port", "34101", "--model", "models/a.gguf"]
LISTED = [
    {"id": "a", "aliases": ["first"], "status": {"value": "loaded", "args": ARGS}},
    {"id": "b", "aliases": [], "status": {"value": "sleeping", "args": ["llama-server", "--port", "34102"]}},
    {"id": "c", "status": {"value": "unloaded", "args": ARGS, "failed": True, "exit_code": 1}},
    {"id": "d", "status": {"value": "loading", "args": ARGS}},
]


class FakeRouter:
    """llama-server's router, as far as it answers itself; what would go to a model is kept in `passed`."""

    def __init__(self) -> None:
        self.passed: list[Request] = []
        self.models: object = {"data": LISTED}
        self.status = 200
        self.server = Server(self._handle)

    async def _handle(self, request: Request, answer: Answer) -> None:
        if request.path == "/props" and not request.query:
            return await answer.json({"role": "router", "max_instances": 2})
        if request.path == "/models":
            return await answer.json(self.models)
        self.passed.append(request)
        error = {"error": {"code": self.status, "message": "model is not loaded", "type": "invalid_request_error"}}
        await answer.json([] if self.status == 200 else error, self.status)


@pytest.fixture
async def fake() -> AsyncIterator[FakeRouter]:
    """One that answers."""
    fake = FakeRouter()
    async with fake.server:
        yield fake


@pytest.fixture
async def router(fake: FakeRouter) -> AsyncIterator[Router]:
    """What was found there."""
    client = LlamaClient(fake.server.url)
    router = await find_router(client)
    assert router is not None
    yield router
    await client.aclose()


async def test_routers_are_told_from_engines(router: Router) -> None:
    """By the role in /props; an engine, and a URL that nobody answers at, are none."""
    assert (router.kind, router.most) == ("llama-server", 2)
    async with FakeLlama() as engine:
        for url in (engine.url, "http://127.0.0.1:9"):
            client = LlamaClient(url)
            assert await find_router(client) is None
            await client.aclose()


async def test_what_is_listed(fake: FakeRouter, router: Router) -> None:
    """A model's arguments hold the port that it was loaded on: another one is another instance."""
    models = await router.models()
    assert models[0] == RoutedModel("a", ("first",), " ".join(ARGS))
    assert [(m.instance is None, m.is_asleep, m.has_failed) for m in models] == [
        (False, False, False),
        (False, True, False),
        (True, False, True),
        (True, False, False),
    ]
    assert router.is_full(models)
    assert not router.is_full(models[1:])
    assert not Router("llama-server", router.client, 0).is_full(models)
    fake.models = {"error": "no"}
    with pytest.raises(EngineBroken, match="lists nothing"):
        await router.models()


async def test_a_request_names_its_model_and_a_question_loads_none(fake: FakeRouter, router: Router) -> None:
    """In the query of a GET, in the body of a POST, whatever the client called it."""
    client = router.client_for("a", "key")
    await client.slots()
    with pytest.raises(EngineBroken):
        await client.save_slot(0, "x.bin")
    async with client.stream("POST", "/v1/chat/completions", b'{"model":"first","n":1}') as response:
        await response.aread()
    with pytest.raises(EngineBroken):
        await client.prime(0, b"")
    await client.metrics()
    await client.aclose()
    asked, saved, sent, primed, counted = fake.passed
    assert (counted.path, counted.query) == ("/metrics", {"model": "a", "autoload": "false"})
    assert asked.query == {"model": "a", "autoload": "false"}
    assert saved.query == {"action": "save", "model": "a", "autoload": "false"}
    assert orjson.loads(saved.content) == {"filename": "x.bin", "model": "a"}
    assert (sent.query, orjson.loads(sent.content)) == ({}, {"model": "a", "n": 1})
    assert (primed.query, orjson.loads(primed.content)["model"]) == ({"autoload": "false"}, "a")


@pytest.mark.parametrize(("status", "is_loaded"), [(200, True), (501, True), (400, False), (500, False)])
async def test_loading_leaves_it_to_the_router(fake: FakeRouter, router: Router, status: int, is_loaded: bool) -> None:
    """No `autoload`: --no-models-autoload holds; --no-slots is no failure."""
    fake.status = status
    if is_loaded:
        await router.load("a")
    else:
        with pytest.raises(EngineRefused) as refused:
            await router.load("a")
        assert refused.value.status == status
    assert fake.passed[-1].query == {"model": "a"}
