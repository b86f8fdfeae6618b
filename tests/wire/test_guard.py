"""Who may ask what: hosts, pages, keys, tenants; and what never goes upstream."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire, chat

PATHS = ["/healthz", "/metrics", "/slotkeeper/state", "/v1/models", "/slots", "/props", "/nothing"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8484", "127.0.0.1.evil.example", "", "a@b", "[::1"])
async def test_foreign_hosts(path: str, host: str, wire: Wire) -> None:
    """A name that leads here by DNS rebinding is refused on every path."""
    answer = await wire.get(path, headers={"host": host})
    assert answer.status_code in (400, 403)
    assert answer.status_code == 400 or "--allowed-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8484", "[::1]:8484"])
async def test_our_own_hosts(host: str, wire: Wire) -> None:
    """Loopback's names with any port."""
    assert (await wire.get("/healthz", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost.evil.example", "file://", ""])
@pytest.mark.parametrize("path", [CHAT, "/healthz", "/slots/0?action=erase"])
async def test_foreign_pages(path: str, origin: str, wire: Wire, fake: FakeLlama) -> None:
    """A web page of somebody else gets nothing done, and no CORS header invites it."""
    before = len(fake.requests)
    answer = await wire.post(path, chat("hi"), headers={"origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert not [r for r in fake.requests[before:] if r.method == "POST"]


async def test_allowed_hosts(serve: Serve, fake: FakeLlama) -> None:
    """--allowed-host opens one name, as Host and as Origin."""
    wire = await serve(fake, allowed_host=("box.lan",))
    assert (await wire.get("/healthz", headers={"host": "Box.lan:8484"})).status_code == 200
    assert (await wire.post(CHAT, chat("hi"), headers={"origin": "http://box.lan"})).status_code == 200
    assert (await wire.post(CHAT, chat("hi"), headers={"origin": "http://localhost:3000"})).status_code == 200
    assert (await wire.get("/healthz", headers={"host": "other.lan"})).status_code == 403


@pytest.fixture
async def keyed(serve: Serve, fake: FakeLlama, tmp_path: Path) -> AsyncIterator[dict[str, Wire]]:
    """A proxy with keys, and a client for each of its tenants; "" has none."""
    keys = tmp_path / "keys"
    keys.write_text("anna:key-a\nben:key-b\nadmin:key-root\n")
    wire = await serve(fake, api_key_file=keys)
    wires = {"": wire} | {name: Wire(wire.url, key) for name, key in WHO.items()}
    yield wires
    for name in WHO:
        await wires[name].http.aclose()


WHO = {"anna": "key-a", "ben": "key-b", "admin": "key-root"}


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/slotkeeper/state", "/slotkeeper/requests", "/x"])
async def test_keys_are_needed(path: str, keyed: dict[str, Wire], fake: FakeLlama) -> None:
    """401 without one and with a wrong one, also for paths that are not there; health is open."""
    wire, before = keyed[""], len(fake.model_requests)
    wrong = ({}, {"authorization": "Bearer key-c"}, {"authorization": "Basic key-a"}, {"x-api-key": "key-"})
    for headers in wrong:
        answer = await wire.post(path, chat("hi"), headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert len(fake.model_requests) == before
    for open_path in ("/healthz", "/readyz"):
        assert (await wire.get(open_path)).status_code == 200
    assert (await wire.post(CHAT, chat("hi"), headers={"x-api-key": "key-a"})).status_code == 200


async def test_operators_doors_need_the_admin(keyed: dict[str, Wire]) -> None:
    """/metrics and /slotkeeper/state show everybody's numbers."""
    for path in ("/metrics", "/slotkeeper/state"):
        assert (await keyed["anna"].get(path)).status_code == 403
        assert (await keyed["admin"].get(path)).status_code == 200


async def test_a_tenant_sees_its_own(keyed: dict[str, Wire]) -> None:
    """Requests by list and by id, slots by what they hold."""
    ids = {}
    for name in ("anna", "ben"):
        headers = {"x-slotkeeper-salt": "s"} if name == "ben" else {}
        answer = await keyed[name].post(CHAT, chat(f"I am {name}"), headers=headers)
        ids[name] = answer.headers["x-slotkeeper-request-id"]
    for name, other in (("anna", "ben"), ("ben", "anna")):
        assert [r["id"] for r in await keyed[name].recorded(1)] == [ids[name]]
        assert (await keyed[name].get(f"/slotkeeper/requests/{ids[name]}")).json()["tenant"] == name
        assert (await keyed[name].get(f"/slotkeeper/requests/{ids[other]}")).status_code == 404
        shown = (await keyed[name].get("/slots")).json()
        assert sum("n_prompt_tokens" in slot for slot in shown) == 1
    assert {r["id"] for r in await keyed["admin"].recorded(2)} == set(ids.values())
    assert all("n_prompt_tokens" in slot for slot in (await keyed["admin"].get("/slots")).json())


async def test_nothing_crosses_tenants(serve: Serve, tmp_path: Path) -> None:
    """A slot is erased before another tenant gets it; the same words are a cold start for whoever says them first.
    A salt makes a tenant of its own."""
    keys = tmp_path / "keys"
    keys.write_text("anna:key-a\nben:key-b\n")
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake, api_key_file=keys)
        said = chat("the very same words " * 20)
        callers = [("key-a", {}), ("key-b", {}), ("key-b", {"x-slotkeeper-salt": "one"})]
        for number, (key, headers) in enumerate(callers):
            answer = await wire.post(CHAT, said, headers={"authorization": f"Bearer {key}"} | headers)
            assert answer.headers["x-slotkeeper-placement"] == "cold"
            assert answer.json()["timings"]["cache_n"] == 0
            erased = [r for r in fake.requests if r.query.get("action") == "erase"]
            assert len(erased) == number
        again = await wire.post(CHAT, said, headers={"authorization": "Bearer key-b", "x-slotkeeper-salt": "one"})
        assert again.json()["timings"]["cache_n"] > 60


async def test_what_never_goes_upstream(keyed: dict[str, Wire], fake: FakeLlama) -> None:
    """Neither keys nor hop-by-hop, identifying or our own headers; and the engine's own key is never the client's."""
    sent = {
        "connection": "x-private",
        "x-private": "p",
        "te": "trailers",
        "proxy-authorization": "Basic x",
        "cookie": "c=1",
        "x-conversation-id": "abc",
        "x-forwarded-for": "10.0.0.1",
        "x-slotkeeper-session": "s",
        "x-session-id": "s",
        "accept-encoding": "gzip",
        "origin": "http://localhost",
    }
    before = len(fake.requests)
    wire = keyed["anna"]
    await wire.post(CHAT, chat("hi"), headers=sent)
    await wire.post(CHAT, chat("hi", stream=True), headers=sent)
    await wire.post("/tokenize", {"content": "hi"}, headers=sent)
    await wire.get("/props", headers=sent)
    await wire.get("/v1/models", headers=sent)
    allowed = {"host", "accept", "accept-encoding", "connection", "user-agent", "content-type", "content-length"}
    assert len(fake.requests) > before + 4
    for request in fake.requests[before:]:
        assert set(request.headers) <= allowed
        assert request.headers["accept-encoding"] == "identity"
        assert request.headers["connection"] == "keep-alive"
        assert "key-a" not in str(request.headers)


async def test_the_engines_key_is_ours_to_send(serve: Serve) -> None:
    """An engine with a key gets its own, whatever the client sent; the client never sees it."""
    async with FakeLlama(api_key="engine-key") as fake:
        wire = await serve(fake, upstream_api_key="engine-key")
        answer = await wire.post(CHAT, chat("hi"), headers={"authorization": "Bearer mine"})
        assert answer.status_code == 200
        assert {r.headers["authorization"] for r in fake.requests} == {"Bearer engine-key"}
        assert "engine-key" not in answer.text + str(answer.headers) + (await wire.get("/slotkeeper/state")).text


async def test_the_engine_may_not_speak_for_us(wire: Wire, fake: FakeLlama) -> None:
    """Headers of the engine that are about its own connection or origin are not the client's."""
    fake.cues.append(Cue())
    fake.more_headers = ("connection: x-engine", "x-engine: 1", "access-control-allow-origin: *", "set-cookie: a=b")
    for answer in (await wire.post(CHAT, chat("hi")), await wire.post("/tokenize", {"content": "hi"})):
        assert answer.status_code == 200
        for name in ("x-engine", "access-control-allow-origin", "set-cookie", "connection"):
            assert name not in answer.headers


@pytest.mark.parametrize(
    "host", ["localhost/slots/0?x=", "localhost/slots?", "localhost#", "localhost\\@evil", "localhost, a"]
)
async def test_a_host_that_names_a_path(host: str, wire: Wire, fake: FakeLlama) -> None:
    """It reaches nothing but what was routed: no engine endpoint is opened by it."""
    before = len(fake.requests)
    assert (await wire.get("/props", headers={"host": host})).status_code == 403
    assert (await wire.post("/tokenize?action=erase", {"content": ""}, headers={"host": host})).status_code == 403
    assert not fake.requests[before:]


@pytest.mark.parametrize("query", ["last=%C2%B2", "last=" + "9" * 5000, "last=-1", "last=", "last=1e3", "last=%00"])
async def test_numbers_that_are_none(query: str, wire: Wire) -> None:
    """A sentence, not an internal error."""
    assert (await wire.get(f"/slotkeeper/requests?{query}")).status_code == 400


@pytest.mark.parametrize("path", ["/props", "/tokenize", "/nothing", "/slots/0", "/slotkeeper/state", "/v1/models"])
async def test_a_query_that_is_not_utf8(path: str, wire: Wire) -> None:
    """Bytes of any kind after the question mark."""
    url = httpx.URL(wire.url)
    method, body = ("POST", b'{"content": "a"}') if path in ("/tokenize", "/slots/0") else ("GET", b"")
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"{method} {path}?a=".encode() + b"\xff\xfe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    writer.write(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
    status = int((await reader.readline()).split()[1])
    assert status < 500
    writer.close()


@pytest.mark.parametrize("shown", [True, False])
async def test_prompts_are_shown_only_on_demand(shown: bool, serve: Serve, fake: FakeLlama) -> None:
    """--show-prompts adds the body to a request's report; without it no text is there."""
    wire = await serve(fake, show_prompts=shown)
    answer = await wire.post(CHAT, chat("a secret word"))
    await wire.recorded(1)
    report = (await wire.get(f"/slotkeeper/requests/{answer.headers['x-slotkeeper-request-id']}")).text
    assert ("a secret word" in report) is shown


async def test_what_was_sent_in_a_prompts_place_is_shown(serve: Serve, fake: FakeLlama) -> None:
    """Whoever asks what the model was told is shown that, not only what the client said."""
    wire = await serve(fake, show_prompts=True)
    dated = {"messages": [{"role": "system", "content": "Today is 2026-11-30."}, {"role": "user", "content": "hi"}]}
    for body, is_repaired in ((chat("as it is"), False), (dated, True)):
        answer = await wire.post(CHAT, body)
        report = (await wire.get(f"/slotkeeper/requests/{answer.headers['x-slotkeeper-request-id']}")).json()
        assert report["body"]["messages"] == body["messages"]
        assert ("sent" in report) is is_repaired
    system, asked = report["sent"]["messages"]
    assert system["content"] == "Today is [[env:date]]."
    assert "2026-11-30" in asked["content"]


async def test_what_one_tenant_rendered_helps_no_other(keyed: dict[str, Wire], fake: FakeLlama) -> None:
    """How much of a text is tokenised again would tell how much of it somebody else had sent."""
    long = "<|im_start|>word " * 300

    async def tokenised(name: str, end: str) -> int:
        before = len(fake.requests)
        await keyed[name].post(CHAT, chat(long + end))
        return sum(len(str(r.body["content"])) for r in fake.requests[before:] if r.path == "/tokenize")

    first, own, other = await tokenised("anna", "one"), await tokenised("anna", "two"), await tokenised("ben", "three")
    assert own < first / 2
    assert other >= first
