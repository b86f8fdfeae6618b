"""What the explainer keeps, within its bounds, and what it says without text."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from llamacpp.errors import EngineUnreachable
from policies.causes import Cause
from policies.types import Match, Prompt
from proxy import explain
from proxy.engine import Engine
from proxy.explain import Explainer, advices, texts_of
from proxy.lines import Found, Identity, Line, new_line
from proxy.settle import Record
from proxy.slots import Want
from proxy.tasks import Tasks

NOTHING = Prompt(b"", b"", b"", (), ())


class _Renderer:
    """An engine that is gone."""

    async def tokens_of(self, *_: object) -> None:
        raise EngineUnreachable("gone")


ENGINE = cast(
    Engine,
    SimpleNamespace(name="e0", table=SimpleNamespace(holding=lambda _: None), known={}, renderer=_Renderer()),
)


def line() -> Line:
    """A line of its own."""
    return new_line(Identity("local"), NOTHING, b"", "main")


def body(text: str, system: str = "You help.") -> bytes:
    """A chat body."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return orjson.dumps({"messages": messages})


def record(name: str, cause: Cause | None = Cause.HISTORY_EDITED) -> Record:
    """A request that processed ten tokens again."""
    return Record(name, "local", "chat", "main", 0.0, cause=cause, reprocessed=10)


class Book:
    """Lines that are remembered, and an explainer that is told of their prompts."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.changed: list[str] = []
        self.tasks = Tasks()
        self.explainer = Explainer(self.tasks, self.lines.get, lambda record: self.changed.append(record.id))

    def settle(self, on: Line, found: Found, about: Record, raw: bytes | None, **more: Any) -> None:
        """One prompt of a line."""
        want = Want(on, found.match, 1, 1, lambda: None, **more)
        self.explainer.settled(ENGINE, want, found, about, raw, repaired=False)
        self.lines[on.id] = on


async def edited(book: Book, name: str, stem: Line, text: str, **more: Any) -> Record:
    """A prompt that edits a line's newest one."""
    about = record(name)
    book.settle(line(), Found(stem, Match.EDITED, 1), about, body(text), **more)
    await book.tasks.settle(5.0)
    return about


async def test_an_engine_that_is_gone_leaves_the_token_open() -> None:
    """Positions come from the bodies; the token alone needs the engine."""
    book, stem = Book(), line()
    book.settle(stem, Found(None, Match.NEW), record("a", None), body("one"))
    about = await edited(book, "b", stem, "two")
    assert about.divergence["token"] is None
    assert (about.divergence["section"], about.divergence["character"]) == ("messages", 0)
    assert book.changed == ["b"]
    explained = book.explainer.get("b")
    assert explained is not None and texts_of(explained) == {"shared": "You help.", "old": "one", "new": "two"}


async def test_nothing_is_kept_of_requests_that_must_not_be_found() -> None:
    """cache_prompt: false leaves no body behind."""
    book, stem = Book(), line()
    book.settle(stem, Found(None, Match.NEW), record("a", None), body("one"), fresh=True)
    about = await edited(book, "b", stem, "two")
    assert "section" not in about.divergence and book.changed == []


async def test_the_newest_divergences_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first."""
    monkeypatch.setattr(explain, "MOST_EXPLAINED", 2)
    book, stem = Book(), line()
    book.settle(stem, Found(None, Match.NEW), record("a", None), body("one"))
    for name in "bcd":
        await edited(book, name, stem, f"two {name}")
    assert [book.explainer.get(name) is not None for name in "bcd"] == [False, True, True]


async def test_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many bytes the oldest line's body goes; a single one stays whatever its size."""
    monkeypatch.setattr(explain, "MOST_BODY_BYTES", 2 * len(body("one")))
    book, lines = Book(), [line() for _ in range(3)]
    for one in lines:
        book.settle(one, Found(None, Match.NEW), record("a", None), body("one"))
    assert [book.explainer.diverged(one.id, orjson.loads(body("two"))) is not None for one in lines] == [
        False,
        True,
        True,
    ]
    book.settle(lines[0], Found(None, Match.NEW), record("a", None), body("one" * 999))
    assert book.explainer.diverged(lines[0].id, orjson.loads(body("two"))) is not None


async def test_bodies_of_forgotten_lines_go() -> None:
    """What the line book forgot is forgotten here as well."""
    book, lines = Book(), [line() for _ in range(3)]
    for one in lines[:2]:
        book.settle(one, Found(None, Match.NEW), record("a", None), body("one"))
    del book.lines[lines[0].id]
    book.settle(lines[2], Found(None, Match.NEW), record("a", None), body("one"))
    known = [book.explainer.diverged(one.id, orjson.loads(body("two"))) is not None for one in lines]
    assert known == [False, True, True]


def test_a_refusal_says_where_without_text() -> None:
    """For mode strict: positions and hashes of what was not sent."""
    book, stem = Book(), line()
    book.settle(stem, Found(None, Match.NEW), record("a", None), body("one", "Today is 2026-11-29."))
    found = book.explainer.diverged(stem.id, orjson.loads(body("one", "Today is 2026-11-30.")))
    assert found is not None
    assert (found["section"], found["kind"], found["character"]) == ("system", "date", len("Today is 2026-11-"))
    assert "2026" not in orjson.dumps(found).decode()
    assert book.explainer.diverged(stem.id, orjson.loads(body("one", "Today is 2026-11-29."))) is None
    assert book.explainer.diverged("unknown", {}) is None
    assert book.explainer.diverged(stem.id, {"messages": [2**70]}) is None


def test_advices() -> None:
    """For the cause, and for what the client changed; nothing without a cause."""
    about = record("a", Cause.EVICTED)
    about.divergence = {"advice": "use X"}
    assert len(advices(about)) == 2 and advices(about)[1] == "use X"
    about.cause = Cause.HISTORY_EDITED
    assert advices(about) == ["use X"]
    about.cause = None
    assert advices(about) == []


def test_event_loops_are_not_needed_for_reading() -> None:
    """An explainer that nobody told anything answers at once."""
    assert Book().explainer.get("x") is None
    assert asyncio.run(edited(Book(), "b", line(), "two")).divergence == {}
