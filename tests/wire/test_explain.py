"""`slotkeeper explain` and the positions in /slotkeeper/requests, with a real server in front of a fake engine."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from proxy.api.ops import control_app
from proxy.cli import _control, main
from tests.fakes.llama import FakeLlama
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire

Run = Callable[..., Awaitable[str]]
SECRET = "tomorrow belongs to nobody"
LONG = "one two three four five six seven eight nine ten " * 20


def asked(date: str, *more: str) -> dict[str, Any]:
    """A conversation whose system prompt holds a date."""
    texts = ("hello there", "answer", *more)
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    system = f"You are a helper.\nToday's date: {date}\n{LONG}"
    return {"messages": [{"role": "system", "content": system}, *messages], "max_tokens": 2}


async def explained(wire: Wire, *, count: int = 1) -> dict[str, Any]:
    """The newest request, once its divergence was found."""

    async def found() -> bool:
        records = await wire.records()
        return len(records) >= count and "section" in records[0]["divergence"]

    await until(found)
    return (await wire.records())[0]


@pytest.fixture
async def wire(serve: Serve, fake: FakeLlama) -> Wire:
    """A proxy that sends prompts as they come."""
    return await serve(fake, mode="observe")


@pytest.fixture
async def run(wire: Wire, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """`slotkeeper explain ...` against the running proxy: what it printed."""
    monkeypatch.setenv("COLUMNS", "160")
    settings = wire.service.settings

    async def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        done = await asyncio.to_thread(main, ["explain", *words, "--state-dir", str(settings.state_dir)])
        said = capsys.readouterr()
        assert done == code, said
        return said.out + said.err

    async def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as knock:
            return knock.connect_ex(str(settings.control_socket)) == 0

    async with _control(control_app(wire.service), settings):
        await until(listens)
        yield run


async def post(wire: Wire, *bodies: dict[str, Any]) -> None:
    """Some requests of one conversation, one after the other."""
    for body in bodies:
        answer = await wire.post(CHAT, body, headers={"x-slotkeeper-session": "s1"})
        assert answer.status_code == 200, answer.text


async def test_a_date_that_changed(wire: Wire, run: Run) -> None:
    """Section, message, character and token; the setting; and a window of twelve tokens on both sides."""
    await post(wire, asked("Sun Nov 29 2026", "more"), asked("Mon Nov 30 2026", "more", "yes", "again"))
    record = await explained(wire, count=2)
    found = record["divergence"]
    assert (found["section"], found["message"], found["role"], found["path"]) == ("system", 0, "system", "content")
    assert found["character"] == found["flat_character"] == len("You are a helper.\nToday's date: ")
    assert found["kind"] == "date"
    assert "--mode repair" in found["advice"]
    assert found["reusable"] == record["reprocessed"] > 100
    said = json.loads(await run("--json"))["requests"]
    assert [one["id"] for one in said] == [record["id"]]
    assert said[0]["texts"]["old"].startswith("Sun Nov 29 2026\n")
    assert said[0]["texts"]["new"].startswith("Mon Nov 30 2026\n")
    tokens = said[0]["tokens"]
    assert tokens["shared"].endswith("Today's date:")
    assert tokens["old"].split()[:4] == ["Sun", "Nov", "29", "2026"]
    assert tokens["new"].split()[:4] == ["Mon", "Nov", "30", "2026"]
    text = await run(record["id"][:8])
    assert f"character {found['character']}, token {found['token']}" in text
    assert "base_changed" in text and "Sun Nov 29 2026" in text


async def test_the_token_is_the_engines(wire: Wire, fake: FakeLlama, run: Run) -> None:
    """The index of the first token that differs is where the engine's cache ended."""
    await post(wire, asked("x", "first question", "fine", "more"), asked("x", "first", "fine", "more"))
    record = await explained(wire, count=2)
    assert record["divergence"]["token"] == record["cache_n"]
    assert record["divergence"]["message"] == 3


async def test_over_http_there_is_no_text(wire: Wire, run: Run) -> None:
    """Positions and hashes only; the command line shows what changed."""
    await post(wire, asked("x", "first", "fine", "more"), asked("x", SECRET, "fine", "more"))
    record = await explained(wire, count=2)
    shown = (await wire.get(f"/slotkeeper/requests/{record['id']}")).text
    assert "nobody" not in shown and "first" not in shown
    assert len(record["divergence"]["new_hash"]) == 16
    assert SECRET in await run()


async def test_with_show_prompts_there_is(serve: Serve, fake: FakeLlama) -> None:
    """--show-prompts shows the texts over HTTP, too."""
    wire = await serve(fake, show_prompts=True, mode="observe")
    await post(wire, asked("x", "first", "fine", "more"), asked("x", SECRET, "fine", "more"))
    record = await explained(wire, count=2)
    assert record["texts"]["new"].startswith(SECRET)


async def test_a_continued_line_has_nothing_to_explain(wire: Wire, run: Run) -> None:
    """Prompts that append are not listed, and asking for one says so."""
    await post(wire, asked("x", "more"), asked("x", "more", "yes", "again"))
    record = (await wire.recorded(2))[0]
    assert "No request so far" in await run()
    assert "nothing was processed again" in await run(record["id"])
    assert json.loads(await run("--json")) == {"requests": []}


async def test_hostile_text_stays_text(wire: Wire, run: Run) -> None:
    """Markup and control characters of a prompt do not reach the terminal."""
    evil = "[bold red]\x1b[2J\x07[/nope] \u202e"
    await post(wire, asked("x", "first", "fine", "more"), asked("x", evil, "fine", "more"))
    await explained(wire, count=2)
    text = await run()
    assert "[bold red]" in text and "[/nope" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


async def test_unknown_requests(wire: Wire, run: Run) -> None:
    """A sentence, not a traceback."""
    assert "No request has an id that begins with 'nope'" in await run("nope", code=1)
    await post(wire, asked("x", "first"), asked("y", "first"))
    assert "2 requests have ids that begin with 'req_'" in await run("req_", code=1)


def test_without_a_server(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts are in the server's memory only, and the command says what to do."""
    assert main(["explain", "--state-dir", str(tmp_path)]) == 1
    assert "No Slotkeeper runs" in capsys.readouterr().err


async def test_repair_leaves_nothing_to_explain(serve: Serve, fake: FakeLlama) -> None:
    """With mode repair a date that changes costs nothing; an edit is explained, and is not blamed on the mode."""
    wire = await serve(fake, mode="repair")
    await post(wire, asked("Sun Nov 29 2026", "more"), asked("Mon Nov 30 2026", "more", "yes", "again"))
    dated = (await wire.recorded(2))[0]
    assert dated["cause"] is None and "section" not in dated["divergence"]
    await post(wire, asked("Mon Nov 30 2026", "other", "yes", "again"))
    edited = await explained(wire, count=3)
    assert (edited["divergence"]["section"], edited["divergence"]["message"]) == ("messages", 3)
    assert "honoured" in edited["divergence"]["advice"]
