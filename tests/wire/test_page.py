"""The status page without a browser: what it says, who may see it, how it is served, and the stream of its changes."""

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from proxy.page import watch
from proxy.page.html import SECTIONS, page, sections
from proxy.page.view import MOST_REQUESTS, MOST_SNAPSHOTS, look
from proxy.settle import Record
from tests.fakes.llama import FakeLlama
from tests.servers import PATIENCE, until
from tests.wire.conftest import Serve
from tests.wire.page_scenes import SCRIPT, crowd, hostile_talk, snapshot
from tests.wire.wire import CHAT, Wire, chat

ROOT = "/slotkeeper/"
ALLOWED = set(
    "html head meta title link script body a header h1 h2 h3 p span button noscript main section div dl dt dd svg rect "
    "table caption thead tbody tr th td code bdi small strong time details summary ul li footer".split()
)


class Seen(HTMLParser):
    """Every tag with its attributes, and the text in between."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


async def seen(wire: Wire) -> Seen:
    """The page, parsed."""
    answer = await wire.get(ROOT)
    assert answer.status_code == 200
    return Seen(answer.text)


def is_plain(found: Seen) -> bool:
    """Only tags of ours, all of them closed, no handlers, no styles, nothing from elsewhere, no id twice."""
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    names = {name for _, attributes in found.tags for name in attributes}
    addresses = {attributes.get("href") or attributes.get("src") or "" for _, attributes in found.tags}
    return (
        {tag for tag, _ in found.tags} <= ALLOWED
        and not found.open
        and not {n for n in names if n.startswith("on") or n == "style"}
        and not {a for a in addresses if ":" in a or a.startswith("//")}
        and len(ids) == len(set(ids))
    )


async def test_everything_is_there_without_a_script(serve: Serve, fake: FakeLlama) -> None:
    """Slots, waiting line, requests with cause, divergence and repairs: in the document itself."""
    wire = await serve(fake)
    await hostile_talk(wire)
    async with crowd(wire, fake):
        found = await seen(wire)
    assert is_plain(found)
    assert {a.get("id") for _, a in found.tags} >= SECTIONS.keys()
    for text in ("ses_61f0b2c4", "history_edited", "base_changed", "token ", "changed: edited", "whitespace", "busy"):
        assert text in found.text
    assert found.text.count("about 48 tokens") == 2
    assert "Load the page again" in found.text


async def test_hostile_names_and_prompts_are_text(serve: Serve, tmp_path: Path) -> None:
    """Model, session and prompt can neither add a tag nor turn the text around them."""
    async with FakeLlama(n_slots=2, alias=f"{SCRIPT}\u202eledom") as fake:
        wire = await serve(fake, show_prompts=True)
        await hostile_talk(wire)
        answer = await wire.get(ROOT)
        found = Seen(answer.text)
        assert is_plain(found)
        scripts = [attributes for tag, attributes in found.tags if tag == "script"]
        assert scripts == [{"src": "page.js", "defer": None}]
        assert SCRIPT in found.text
        assert "<b onmouseover=alert(1)>'\"&amp;</b>" in found.text
        assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00-\x09\x0b-\x1f]", answer.text)
        assert "U+202Egnp.exeU+202C" in found.text
        assert '<bdi class="prose" dir="auto">' in answer.text


async def test_prompts_are_not_shown_unless_asked_for(serve: Serve, fake: FakeLlama) -> None:
    """Neither in the page nor in its events."""
    wire = await serve(fake)
    await hostile_talk(wire)
    secret = ("careful", "careless", "longer talk", "gnp.exe", "document.title")
    async with listening(wire) as events:
        told = orjson.dumps(await anext(events)).decode()
    for text in ((await wire.get(ROOT)).text, told):
        assert not [s for s in secret if s in text]
    shown = await serve(fake, show_prompts=True, state_dir=wire.service.settings.state_dir.parent / "other")
    await hostile_talk(shown)
    text = (await shown.get(ROOT)).text
    assert not [s for s in secret if s not in text]


async def test_snapshots_with_size_age_and_pin(wire: Wire) -> None:
    """The newest by use, and how many more there are."""
    index = wire.service.store._index
    for number in range(1, MOST_SNAPSHOTS + 4):
        index.put(snapshot(number, pinned=number == 50, effective=False if number == 49 else None))
    try:
        view = look(wire.service, now=1_700_000_000.0 + 7200)
    finally:
        for found in wire.service.store.all():
            index.drop(found.id)
    html = sections(view)["snapshots"]
    assert html.count('id="snap-') == MOST_SNAPSHOTS
    assert "3 more" in html
    assert html.count("pinned") == 2  # class and word
    assert html.count("restoring it did not help") == 1
    assert "2 h ago" in html
    assert "6.5 GiB" in html  # number 50
    assert is_plain(Seen(page(view).decode()))


async def test_rows_are_bounded(wire: Wire) -> None:
    """Thousands of requests are one page of them."""
    for number in range(MOST_REQUESTS + 20):
        wire.service.show_record(Record(f"req_{number}", "local", "chat", "main", 1.0))
    html = sections(look(wire.service))["requests"]
    assert html.count("<details>") == MOST_REQUESTS
    assert "20 earlier" in html


async def test_records_of_other_shapes_are_shown(wire: Wire) -> None:
    """What an earlier run wrote, and what never reached an engine."""
    records = [
        Record("req_a", "t\x1fsalt", "chat", "main", 1e18, outcome="engine_error", error="<x>" * 30),
        Record("req_b", "", "messages", "other", -5.0, cache_n=10, cause="evicted", reprocessed=1, waited_ms=61_000),
        Record("req_c", "t", "chat", "main", 0.0, divergence={"message": None, "section": "tools", "path": "<p>"}),
        Record("req_d", "t", "chat", "main", 0.0, divergence={"kind": "\u202e", "role": "<i>"}, repairs=["<r>"]),
    ]
    for record in records:
        wire.service.show_record(record)
    found = await seen(wire)
    assert is_plain(found)
    assert "salt" not in found.text
    assert "1 token again" in found.text


# --- how it is served -----------------------------------------------------------------------------------------------


async def test_headers(wire: Wire) -> None:
    """A policy that forbids all but our own files, on each of them; nothing is kept by caches."""
    for path, kind in (("", "text/html"), ("page.js", "text/javascript"), ("page.css", "text/css")):
        answer = await wire.get(ROOT + path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] in ("no-store", "no-cache")
    assert (await wire.get(f"{ROOT}icon.svg")).headers["content-type"] == "image/svg+xml"
    redirect = await wire.get("/slotkeeper")
    assert (redirect.status_code, redirect.headers["location"]) == (308, "slotkeeper/")
    for path in ("page.html", "../page.js", "__init__.py", "text.py"):
        assert (await wire.get(ROOT + path)).status_code in (403, 404)


@pytest.fixture
async def keyed(serve: Serve, fake: FakeLlama, tmp_path: Path) -> Wire:
    """A proxy with two tenants."""
    (tmp_path / "keys").write_text("anna:key-a\nadmin:key:röot\nadmin:key-root\n")
    return await serve(fake, api_key_file=tmp_path / "keys")


def basic(key: str, name: str = "me") -> dict[str, str]:
    """What a browser sends for a user name and password."""
    return {"authorization": "Basic " + base64.b64encode(f"{name}:{key}".encode()).decode()}


@pytest.mark.parametrize("path", ["", "events", "page.js", "state", "requests"])
async def test_keys(path: str, keyed: Wire) -> None:
    """Without a key a browser is asked for one; it may be a password or a bearer's."""
    for headers in ({}, basic("wrong"), {"authorization": "Basic ?"}, {"authorization": "Basic"}, basic("")):
        answer = await keyed.get(ROOT + path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic realm=")
    if path != "events":
        for headers in (basic("key:röot"), basic("key:röot", ""), {"x-api-key": "key-root"}):
            assert (await keyed.get(ROOT + path, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["", "events"])
async def test_other_tenants_see_nothing(path: str, keyed: Wire) -> None:
    """A browser that remembers the wrong key is asked again; a program is refused."""
    answer = await keyed.get(ROOT + path, headers=basic("key-a"))
    assert (answer.status_code, answer.headers["www-authenticate"][:5]) == (401, "Basic")
    answer = await keyed.get(ROOT + path, headers={"authorization": "Bearer key-a"})
    assert answer.status_code == 403


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("POST", f"{ROOT}state")])
async def test_passwords_open_nothing_else(method: str, path: str, keyed: Wire) -> None:
    """A browser sends them by itself, for other sites' pages, too."""
    answer = await keyed.http.request(method, path, headers=basic("key:röot"), json=chat("hi"))
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


# --- events ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def listening(wire: Wire, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, str]]]:
    """The sections that a page is told of, event by event."""
    async with wire.http.stream("GET", f"{ROOT}events", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, str]]:
    async with asyncio.timeout(PATIENCE):
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield orjson.loads(line.removeprefix("data: "))


async def test_changes_are_told(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at first, then what has changed, to each listener; the engine is never asked."""
    monkeypatch.setattr(watch, "SAMPLE_SECONDS", 0.05)
    async with listening(wire) as one, listening(wire) as two:
        assert set(await anext(one)) == set(await anext(two)) == set(SECTIONS)
        sent = await wire.post(CHAT, chat("hi"))
        for events in (one, two):
            while sent.headers["x-slotkeeper-request-id"] not in (news := await anext(events)).get("requests", ""):
                assert set(news) < set(SECTIONS)


async def test_nobody_is_asked_for_the_page(wire: Wire, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking sends nothing upstream: what upkeep asks meanwhile is far less than one request a look."""
    looks = 0

    def counted(service: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(service)

    monkeypatch.setattr(watch, "SAMPLE_SECONDS", 0.01)
    monkeypatch.setattr(watch, "look", counted)

    async def often() -> bool:
        return looks >= 20

    async with listening(wire) as events:
        await anext(events)
        before = len([r for r in fake.requests if r.path.startswith("/slots")])
        await until(often)
        assert len([r for r in fake.requests if r.path.startswith("/slots")]) <= before + 3


async def test_one_task_looks_while_somebody_listens(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts with the first listener and ends after the last."""
    monkeypatch.setattr(watch, "SAMPLE_SECONDS", 0.05)
    shared = watch.Watch(wire.service)
    assert not shared.is_looking
    one, two = shared.open(), shared.open()
    task = shared._task
    assert shared.is_looking
    assert set(await one.next(PATIENCE)) == set(await two.next(PATIENCE)) == set(SECTIONS)
    late = shared.open()
    assert set(await late.next(0)) == set(SECTIONS) or set(await late.next(PATIENCE)) == set(SECTIONS)
    assert shared._task is task
    for listener in (one, two, late):
        shared.close(listener)
    assert task is not None
    async with asyncio.timeout(PATIENCE):
        await task
    assert not shared.is_looking
    again = shared.open()
    assert set(await again.next(PATIENCE)) == set(SECTIONS)
    shared.close(again)


async def test_what_a_slow_page_has_missed_is_told_once(wire: Wire) -> None:
    """The newest of each section, whatever came in between."""
    listener = watch.Listener()
    for number in range(1000):
        listener.tell({"slots": f"{number}", "waiting": "w"})
    assert await listener.next(0) == {"slots": "999", "waiting": "w"}
    assert await listener.next(0) == {}


async def test_listeners_are_bounded(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is refused, and finds room when another page is closed."""
    monkeypatch.setattr(watch, "MOST_LISTENERS", 2)
    monkeypatch.setattr(watch, "SAMPLE_SECONDS", 0.05)
    async with listening(wire) as one:
        await anext(one)
        async with listening(wire) as two:
            await anext(two)
            answer = await wire.get(f"{ROOT}events")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
            assert "close one" in answer.json()["error"]["message"]

        async def is_free() -> bool:
            async with wire.http.stream("GET", f"{ROOT}events") as answer:
                return answer.status_code == 200

        await until(is_free)


async def test_other_sites_may_not_listen(wire: Wire) -> None:
    """An image of theirs with our address would take a page's place."""
    for site in ("cross-site", "same-site"):
        assert (await wire.get(f"{ROOT}events", headers={"sec-fetch-site": site})).status_code == 403


async def test_listening_ends_with_a_stop(wire: Wire) -> None:
    """In good order, long before the drain's end; nobody begins to listen then."""
    async with listening(wire) as events:
        await anext(events)
        wire.service.begin_stop(at_once=False)
        assert "stopping" in (await wire.get(ROOT)).text
        assert [event async for event in events] == []
    answer = await wire.get(f"{ROOT}events")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


async def test_a_failed_look_ends_the_events(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages connect again and start another; none waits for ever."""
    shared = watch.Watch(wire.service)
    monkeypatch.setattr(watch, "look", lambda _: 1 / 0)
    listener = shared.open()
    assert await listener.next(PATIENCE) == {}
    assert (listener.is_over, shared.is_looking) == (True, False)
    shared.close(listener)
