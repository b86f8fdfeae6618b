"""The status page in Debian's Chromium: what it logs, how it fits, how keys reach everything, what stays in place."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.page import watch
from proxy.page.html import page
from proxy.page.view import look
from tests.deploy.tools import need
from tests.fakes.llama import FakeLlama
from tests.wire.chromium import Chromium, Tab, chromium
from tests.wire.conftest import Serve
from tests.wire.page_scenes import SCRIPT, crowd, hostile_talk, snapshot
from tests.wire.wire import CHAT, Wire, chat

ROOT = "/slotkeeper/"
LIVE = "document.getElementById('live').textContent === 'Live' && !!document.getElementById('slots').innerHTML"
CONTRAST = """(() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const bright = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parsed = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = parsed(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => {
    const [x, y] = [bright(a), bright(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (own && e.checkVisibility() && !e.closest('noscript')) {
      const r = ratio(parsed(getComputedStyle(e).color).slice(0, 3), ground(e));
      if (r < 4.5) found.push(`${e.tagName} ${e.className} ${r.toFixed(2)}`);
    }
  }
  for (const e of document.querySelectorAll('svg.bar rect:not(.free)')) {
    const r = ratio(parsed(getComputedStyle(e).fill).slice(0, 3), ground(e));
    if (r < 3) found.push(`${e.className.baseVal} ${r.toFixed(2)}`);
  }
  return [...new Set(found)];
})()"""
"""Texts with less contrast than 4.5 and bars with less than 3 against what lies behind them (WCAG 1.4.3, 1.4.11)."""


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Chromium]:
    """A browser with an empty profile."""
    async with chromium(need("chromium", "chromium"), tmp_path / "profile") as found:
        yield found


@pytest.fixture
async def busy(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    """A proxy with everything on its page, hostile names and shown prompts among it."""
    monkeypatch.setattr(watch, "SAMPLE_SECONDS", 0.1)
    async with FakeLlama(n_slots=2, alias=f"{SCRIPT}\u202eledom") as fake:
        wire = await serve(fake, show_prompts=True)
        await hostile_talk(wire)
        index = wire.service.store._index
        for number in range(1, 4):
            index.put(snapshot(number, pinned=number == 2, model="m" * 200, tenant="\u202e<i>x"))
        async with crowd(wire, fake):
            yield wire
            for found in wire.service.store.all():
                index.drop(found.id)


async def fits(tab: Tab, width: int) -> bool:
    """Nothing sticks out to the right."""
    return bool(await tab.js(f"document.documentElement.scrollWidth <= {width} && innerWidth === {width}"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1280])
async def test_looks(width: int, dark: bool, busy: Wire, browser: Chromium, tmp_path: Path) -> None:
    """No console message, no horizontal scrolling, enough contrast, also with all details opened."""
    async with browser.tab() as tab:
        await tab.open(busy.url + ROOT, width=width, dark=dark)
        await tab.until(LIVE)
        assert await fits(tab, width)
        await tab.js("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert await fits(tab, width)
        assert await tab.js(CONTRAST) == []
        await tab.picture(tmp_path / "page.png")
        assert tab.console == []


async def test_hostile_text_stays_text(busy: Wire, browser: Chromium) -> None:
    """Nothing of it runs or becomes an element, neither in the document nor in what the script fills in."""
    async with browser.tab() as tab:
        await tab.open(busy.url + ROOT)
        await tab.until(LIVE)
        assert await tab.js("document.title") == "Slotkeeper"
        assert (
            await tab.js("document.querySelectorAll('main script, main img, main b, main i, main [style]').length") == 0
        )
        assert SCRIPT[:40] in await tab.js("document.querySelector('h3').textContent")
        await tab.js("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert SCRIPT in await tab.js("document.querySelector('#requests').innerText")
        assert await tab.js("getComputedStyle(document.querySelector('h3 bdi')).unicodeBidi") == "isolate"
        assert tab.console == []


async def test_the_policy_holds(busy: Wire, browser: Chromium) -> None:
    """Were something not escaped, it would still not run."""
    async with browser.tab() as tab:
        await tab.open(busy.url + ROOT)
        await tab.until(LIVE)
        await tab.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
        await tab.js(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'document.title=2'}))"
        )
        await tab.until("document.title === 'Slotkeeper'")
        for _ in range(100):  # what was refused is reported behind it
            if sum("Content Security Policy" in line for line in tab.console) >= 2:
                break
            await asyncio.sleep(0.05)
        assert await tab.js("document.title") == "Slotkeeper"
        assert sum("Content Security Policy" in line for line in tab.console) >= 2


WHERE = "(() => { const e = document.activeElement; return e.id || (e.textContent || '').trim() || e.tagName; })()"


async def test_keyboard(busy: Wire, browser: Chromium) -> None:
    """Tab goes from top to bottom through everything that can be used; the focus is seen; keys work it."""
    async with browser.tab() as tab:
        await tab.open(busy.url + ROOT)
        await tab.until(LIVE)
        ids = await tab.js("[...document.querySelectorAll('summary')].map((e) => e.textContent)")
        assert len(ids) == 7
        order = []
        for _ in range(3 + len(ids)):
            await tab.key("Tab")
            order.append(await tab.js(WHERE))
            style = "getComputedStyle(document.activeElement)"
            assert await tab.js(f"{style}.outlineStyle === 'solid' && parseFloat({style}.outlineWidth) >= 2")
        assert order[:2] == ["Skip to the figures", "pause"]
        assert order[2:-1] == ids
        assert order[-1] == "state"
        await tab.key("Tab", shift=True)
        await tab.key("Enter")
        await tab.until("document.activeElement.parentElement.open === true")
        await tab.key("Tab")
        assert await tab.js(WHERE) == "as JSON"


async def test_skipping_and_pausing(busy: Wire, browser: Chromium) -> None:
    """The first key press leads past the head; the second control stops the changes and lets them go on."""
    async with browser.tab() as tab:
        await tab.open(busy.url + ROOT)
        await tab.until(LIVE)
        await tab.key("Tab")
        assert await tab.js("document.activeElement.getBoundingClientRect().left >= 0")
        await tab.key("Enter")
        await tab.until("document.activeElement.id === 'main'")
        await tab.js("document.getElementById('pause').focus()")
        await tab.key("Space")
        await tab.until("document.getElementById('live').textContent === 'Paused'")
        assert await tab.js("document.getElementById('pause').textContent") == "Resume"
        await tab.key("Space")
        await tab.until(LIVE)
        assert tab.console == []


async def test_changes_leave_focus_and_details_alone(
    serve: Serve, fake: FakeLlama, browser: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request comes in above the row that is read, and goes; the script makes the same page as the proxy."""
    monkeypatch.setattr(watch, "SAMPLE_SECONDS", 0.1)
    wire = await serve(fake)
    first = (await wire.post(CHAT, chat("one"))).headers["x-slotkeeper-request-id"]
    async with browser.tab() as tab:
        await tab.open(wire.url + ROOT)
        await tab.until(LIVE)
        await tab.js("document.querySelector('summary').focus(); document.querySelector('details').open = true")
        await tab.js("window.kept = document.querySelector('details')")
        second = (await wire.post(CHAT, chat("two"))).headers["x-slotkeeper-request-id"]
        await tab.until(f"!!document.getElementById('{second}')")
        assert await tab.js("document.activeElement.textContent") == first
        assert await tab.js("kept.isConnected && kept.open && kept.textContent.includes('Placed because')")
        assert await tab.js("[...document.querySelectorAll('summary')].map((e) => e.textContent)") == [second, first]
        del wire.service.records[second]
        await tab.until(f"!document.getElementById('{second}')")
        assert await tab.js("kept.isConnected && document.activeElement.textContent") == first
        await tab.js("kept.open = false")
        shown = await tab.js("[...document.querySelectorAll('main section > div')].map((e) => e.innerHTML).join('')")
        made = "".join(re.findall(r"<div id=\"\w+\">(.*)</div></section>", page(look(wire.service)).decode()))
        assert await tab.js(f"new DOMParser().parseFromString({made!r}, 'text/html').body.innerHTML") == shown
        assert tab.console == []


async def test_a_row_that_goes_hands_its_focus_on(
    serve: Serve, fake: FakeLlama, browser: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the heading of its table, not to the page's top."""
    monkeypatch.setattr(watch, "SAMPLE_SECONDS", 0.1)
    wire = await serve(fake)
    await wire.post(CHAT, chat("one"))
    async with browser.tab() as tab:
        await tab.open(wire.url + ROOT)
        await tab.until(LIVE)
        await tab.js("document.querySelector('summary').focus()")
        wire.service.records.clear()
        await tab.until("document.activeElement.id === 'h-requests'")
        assert tab.console == []


async def test_without_scripts(busy: Wire, browser: Chromium) -> None:
    """The same figures, and a word on how to see newer ones."""
    async with browser.tab() as tab:
        await tab.send("Emulation.setScriptExecutionDisabled", value=True)
        await tab.open(busy.url + ROOT, width=360)
        found = await tab.send("DOM.getDocument", depth=0)
        html = (await tab.send("DOM.getOuterHTML", nodeId=found["root"]["nodeId"]))["outerHTML"]
        assert "Load the page again" in html
        assert "about 48 tokens" in html
        metrics = await tab.send("Page.getLayoutMetrics")
        assert metrics["cssContentSize"]["width"] == 360
        assert tab.console == []


async def test_a_tree_that_can_be_read_aloud(busy: Wire, browser: Chromium) -> None:
    """Landmarks, headings, tables with captions, bars with words: at 360 px, where rows are no table rows any more."""
    async with browser.tab() as tab:
        await tab.open(busy.url + ROOT, width=360)
        await tab.until(LIVE)
        nodes = (await tab.send("Accessibility.getFullAXTree"))["nodes"]
        seen = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
        roles = [role for role, _ in seen]
        for role in ("banner", "main", "contentinfo", "status", "columnheader"):
            assert role in roles
        assert [n for r, n in seen if r == "region"] == [
            *("Overview", "Slots", "Waiting line", "Last requests", "Snapshots")
        ]
        tables = [n for r, n in seen if r == "table"]
        assert len(tables) == 4
        assert all(tables)
        assert roles.count("row") >= 4 + 2 + 2 + 7 + 3
        bars = [n for r, n in seen if r == "image"]
        assert len(bars) >= 1 + 2 + 7 + 1
        assert all(re.search(r"\d", name) for name in bars)
        assert ("button", "Pause") in seen


async def test_a_browser_with_a_key(
    serve: Serve, fake: FakeLlama, browser: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for a password once, it sends it for the events, too."""
    monkeypatch.setattr(watch, "SAMPLE_SECONDS", 0.1)
    (tmp_path / "keys").write_text("anna:key-a\nadmin:key-root\n")
    wire = await serve(fake, api_key_file=tmp_path / "keys")
    async with browser.tab() as tab:
        await tab.open(wire.url.replace("//", "//me:key-root@") + ROOT)
        await tab.until(LIVE)
        await tab.until("document.querySelectorAll('#slots tbody tr').length === 2")
        assert tab.console == []


async def test_the_end_and_the_next_start(
    serve: Serve, fake: FakeLlama, browser: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page whose proxy stops says so, and does not go on saying that it is live."""
    monkeypatch.setattr(watch, "SAMPLE_SECONDS", 0.1)
    wire = await serve(fake)
    async with browser.tab() as tab:
        await tab.open(wire.url + ROOT)
        await tab.until(LIVE)
        wire.service.begin_stop(at_once=False)
        await tab.until("/lost|Not live/.test(document.getElementById('live').textContent)")
        wire.service.stopping = False
        await tab.until(LIVE)
