"""Which line a prompt belongs to, and what a line remembers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.tokens import Estimator
from policies.causes import Cause
from policies.types import Match, Prompt, digest
from proxy.app import _load_lines
from proxy.layouts import Layouts
from proxy.ledger import Ledger
from proxy.lines import MOST_COMPARED, TEMPLATE_TOKENS, Found, Identity, Line, LineBook, new_line
from proxy.store import Store
from proxy.store_types import LedgerRecord

ME = Identity("local")


def prompt(*messages: str, system: str = "be brief", tools: str = "") -> Prompt:
    """A chat with a system message, reduced as proxy/api/read does it."""
    texts = [system, *messages]
    parts = digest(system.encode()), digest(tools.encode()), digest()
    chain, last = [], digest(*parts)
    for text in texts:
        last = digest(last, text.encode())
        chain.append(last)
    return Prompt(*parts, tuple(chain), tuple(len(t) for t in texts), n_leading=1)


def first(*messages: str) -> bytes:
    """Digest of the first user message."""
    return digest(messages[0].encode()) if messages else digest(b"")


def find(book: LineBook, *messages: str, who: Identity = ME, **base: str) -> Found:
    """What the book says of a conversation."""
    return book.find(who, prompt(*messages, **base), first(*messages))


def tell(book: LineBook, *messages: str, who: Identity = ME, line: Line | None = None, **base: str) -> Line:
    """A conversation was answered: on its line, or on a new one."""
    line = line or new_line(who, prompt(*messages, **base), first(*messages), "main")
    book.advance(line, prompt(*messages, **base), 100 * len(messages))
    return line


# --- matching ---


def test_nothing_is_known_of_a_first_prompt() -> None:
    assert find(LineBook(10), "hi") == Found(None, Match.NEW)


def test_a_history_that_grew_extends_its_line() -> None:
    book = LineBook(10)
    line = tell(book, "hi", "hello")
    assert find(book, "hi", "hello", "bye") == Found(line, Match.EXTENDS, 3)
    assert find(book, "hi", "hello") == Found(line, Match.EXTENDS, 3)
    assert find(book, "hi", "hello", "bye").held == line.n_tokens == 200


def test_the_longest_ledger_wins() -> None:
    book = LineBook(10)
    short, long = tell(book, "hi"), tell(book, "hi", "hello")
    assert find(book, "hi", "hello", "bye").line is long
    assert find(book, "hi", "HELLO").line is short


def test_only_the_newest_prompt_can_be_extended() -> None:
    """After an advance the earlier end is history: a prompt that ends there has been edited."""
    book = LineBook(10)
    line = tell(book, "hi")
    tell(book, "hi", "hello", line=line)
    assert find(book, "hi", "what?") == Found(line, Match.EDITED, 2)


def test_an_edit_is_found_by_the_first_message() -> None:
    book = LineBook(10)
    line = tell(book, "hi", "hello", "how are you?", "fine")
    found = find(book, "hi", "hello", "who are you?", "me")
    assert found == Found(line, Match.EDITED, 3)
    # be brief, hi, hello: 15 of 31 bytes of a prompt of 400 tokens.
    assert found.held == 400 * 15 // 31


def test_another_base_is_a_base_change() -> None:
    book = LineBook(10)
    line = tell(book, "hi", "hello")
    assert find(book, "hi", "hello", system="be long") == Found(line, Match.BASE, 0)
    assert find(book, "hi", "hello", tools="[grep]") == Found(line, Match.BASE, 0)
    assert find(book, "hi", system="be long").held == 0


def test_another_first_message_is_a_new_line() -> None:
    book = LineBook(10)
    tell(book, "hi", "hello")
    assert find(book, "good day", "hello") == Found(None, Match.NEW)


def test_a_ledger_of_system_messages_alone_is_not_extended() -> None:
    """Every conversation of the agent would extend it."""
    book = LineBook(10)
    tell(book)
    assert find(book, "hi").match is Match.NEW


def test_a_side_line_with_the_same_first_message_does_not_hide_the_conversation() -> None:
    """A title request repeats the first message under another system text; an edit still finds the main line."""
    book = LineBook(10)
    main = tell(book, "hi", "hello", "how?")
    tell(book, "hi", system="write a title")
    assert find(book, "hi", "hello", "why?") == Found(main, Match.EDITED, 3)


def test_a_copy_that_went_on_does_not_hide_the_line_that_stayed() -> None:
    """Two conversations came to the same end; one grew; the other can still be extended."""
    book = LineBook(10)
    stayed, grew = tell(book, "hi", "hello"), tell(book, "hi", "hello")
    assert find(book, "hi", "hello").line is grew
    tell(book, "hi", "hello", "bye", line=grew)
    assert find(book, "hi", "hello", "more").line is stayed


def test_the_same_start_often_costs_no_more_than_a_few_comparisons() -> None:
    """Of many that begin alike the newest are compared; an older one is not looked for."""
    book = LineBook(100)
    oldest = tell(book, "hi", "a", "b", "c")
    for i in range(MOST_COMPARED):
        newest = tell(book, "hi", f"other {i}")
    assert find(book, "hi", "a", "b", "d") == Found(newest, Match.EDITED, 2)
    book.keep(oldest)
    assert find(book, "hi", "a", "b", "d") == Found(oldest, Match.EDITED, 4)


@pytest.mark.parametrize(
    "other",
    [
        Identity("else"),
        Identity("local", session="s"),
        Identity("local", agent="a"),
        Identity("else", session="s", agent="a"),
    ],
    ids=["tenant", "session", "agent", "all"],
)
def test_tenants_sessions_and_agents_never_mix(other: Identity) -> None:
    book = LineBook(10)
    mine, theirs = tell(book, "hi", "hello"), tell(book, "hi", "hello", who=other)
    assert find(book, "hi", "hello", "x").line is mine
    assert find(book, "hi", "hello", "x", who=other).line is theirs
    assert find(book, "hi", "edited", who=other).line is theirs
    book.forget(theirs)
    assert find(book, "hi", "hello", "x", who=other) == Found(None, Match.NEW)
    assert find(book, "hi", "hello", "x").line is mine


WORDS = st.sampled_from(["a", "b"])
CHATS = st.lists(WORDS, min_size=1, max_size=4)


@given(st.lists(st.tuples(st.sampled_from(["x", "y"]), CHATS), max_size=12), st.sampled_from(["x", "y"]), CHATS)
def test_find_is_the_rule_read_aloud(told: list[tuple[str, list[str]]], tenant: str, chat: list[str]) -> None:
    """Against a search through all lines: longest extended ledger, else most in common among the same starts."""
    book, who = LineBook(100), Identity(tenant)
    for owner, messages in told:
        tell(book, *messages, who=Identity(owner))
    mine = [(i, m) for i, (owner, m) in enumerate(told) if owner == tenant]
    extended = [m for _, m in mine if chat[: len(m)] == m]
    found = find(book, *chat, who=who)
    if extended:
        assert found.match is Match.EXTENDS
        assert found.line is not None and found.line.who == who
        assert found.shared == 1 + max(map(len, extended))
    elif any(m[0] == chat[0] for _, m in mine):
        shared = max(
            next(i for i, (a, b) in enumerate(zip([*m, ""], [*chat, "-"], strict=False)) if a != b) for _, m in mine
        )
        assert (found.match, found.shared) == (Match.EDITED, 1 + shared)
    else:
        assert found == Found(None, Match.NEW)


# --- bounds ---


def test_the_oldest_line_goes_first_and_is_named() -> None:
    book = LineBook(2)
    a, b = tell(book, "a"), tell(book, "b")
    tell(book, "a", "more", line=a)
    c = tell(book, "c")
    assert [line.id for line in book] == [a.id, c.id]
    assert book.take_forgotten() == [b.id]
    assert book.take_forgotten() == []
    assert book.get(b.id) is None
    assert find(book, "b", "more") == Found(None, Match.NEW)


def test_a_line_that_runs_is_not_forgotten() -> None:
    book = LineBook(1)
    a = tell(book, "a")
    a.running = 1
    b = tell(book, "b")
    assert len(book) == 1
    assert book.get(a.id) is a
    assert book.take_forgotten() == [b.id]
    b.running = 1
    tell(book, "b", line=b)
    assert len(book) == 2
    a.running = b.running = 0
    tell(book, "c")
    assert len(book) == 1
    assert book.take_forgotten() == [a.id, b.id]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=30), st.integers(1, 4))
def test_the_book_is_bounded(told: list[tuple[str, bool]], limit: int) -> None:
    """At most `limit` lines and those that run; its indexes hold nothing of lines that are gone."""
    book = LineBook(limit)
    for start, running in told:
        line = find(book, start).line
        line = tell(book, start, line=line)
        line.running = int(running)
    book.keep(new_line(ME, prompt("last"), first("last"), "main"))
    assert len(book) <= max(limit, sum(bool(line.running) for line in book))
    for index in (book._by_tail, book._by_start):
        assert {i for ids in index._ids.values() for i in ids} == {line.id for line in book}
    for line in list(book):
        book.forget(line)
    assert not book._by_tail._ids
    assert not book._by_start._ids


def test_forgetting_twice_is_harmless() -> None:
    book = LineBook(2)
    line = tell(book, "a")
    book.forget(line)
    book.forget(line)
    assert len(book) == 0
    assert book.get(None) is None


# --- what a line learns ---


def test_an_advance_replaces_the_ledger_and_settles_the_loss() -> None:
    book = LineBook(2)
    line = tell(book, "a")
    line.lost = Cause.EVICTED
    tell(book, "a", "b", line=line)
    assert (line.prompt, line.n_tokens, line.lost, line.n_requests) == (prompt("a", "b"), 200, None, 2)


def test_only_what_was_added_teaches_tokens_by_bytes() -> None:
    """400 new bytes that made 100 tokens: a quarter of a token a byte."""
    book = LineBook(2)
    line = tell(book, "a")
    tell(book, "a", "x" * 400, line=line)
    assert line.estimator.ratio == pytest.approx(0.25)
    assert 100 <= line.tokens_of(400) - TEMPLATE_TOKENS <= 400


def test_an_edited_or_cancelled_prompt_teaches_nothing() -> None:
    book = LineBook(2)
    line = tell(book, "a")
    before = line.estimator.ratio
    tell(book, "b" * 100, "c", line=line)
    book.advance(line, prompt("b" * 100, "c", "d" * 50), line.n_tokens)
    assert line.estimator.ratio == before


# --- records ---

LINES = st.builds(
    lambda tenant, session, agent, parent, messages, n, ratio, kind: replace_estimator(
        new_line(Identity(tenant, session, agent, parent), prompt(*messages), first(*messages), kind), n, ratio
    ),
    st.text(min_size=1, max_size=9),
    *[st.none() | st.text(min_size=1, max_size=9)] * 3,
    st.lists(st.text(max_size=9), max_size=5),
    st.integers(0, 200_000),
    st.floats(0.01, 2.0),
    st.sampled_from(["main", "subagent"]),
)


def replace_estimator(line: Line, n_tokens: int, ratio: float) -> Line:
    """A line that has been used."""
    line.n_tokens, line.estimator = n_tokens, Estimator(ratio)
    return line


@given(LINES)
def test_a_line_survives_the_database(line: Line) -> None:
    """As a blob, through JSON: the same line, whose slot was lost with the engine."""
    again = Line.from_record(LedgerRecord.from_blob(line.to_record().to_blob()))
    for name in ("id", "who", "prompt", "first_user", "n_tokens", "kind"):
        assert getattr(again, name) == getattr(line, name)
    assert again.estimator.ratio == line.estimator.ratio
    assert (again.lost, again.running) == (Cause.ENGINE_RESTART, 0)


def test_a_line_of_an_earlier_run_is_extended() -> None:
    before, after = LineBook(5), LineBook(5)
    record = tell(before, "hi", "hello").to_record()
    after.keep(Line.from_record(record))
    found = find(after, "hi", "hello", "bye")
    assert found.match is Match.EXTENDS
    assert found.line is not None and found.line.id == record.line


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_base_laid_out_by_lost_values_is_no_base(is_kept: bool) -> None:
    """Other values will be learned under the same names."""
    line = tell(LineBook(5), "hi", "hello")
    line.ledger = Ledger(n_learned=1)
    known = b'{"orders":[],"spelled":{},"bases":[],"learned":[["Lamp: "," on","value_1"]]}'
    layouts, book = Layouts(), LineBook(5)
    layouts.load(line.who.tenant, known if is_kept else b"")
    records = [line.to_record()]

    async def load_ledgers() -> list[LedgerRecord]:
        return records

    await _load_lines(cast(Store, SimpleNamespace(load_ledgers=load_ledgers)), book, layouts)
    assert len(book) == is_kept


@pytest.mark.parametrize(
    "damage",
    [
        {"sizes": None},
        {"sizes": [1]},
        {"sizes": ["x", "y"]},
        {"n_leading": "many"},
        {"first_user": "zz"},
        {"first_user": 5},
        {"tokens_per_byte": 0},
        {"tokens_per_byte": float("nan")},
        {"tokens_per_byte": []},
    ],
    ids=str,
)
def test_a_record_that_is_not_whole_is_refused(damage: dict[str, Any]) -> None:
    record = tell(LineBook(1), "a").to_record()
    assert Line.from_record(record).id == record.line
    with pytest.raises(ValueError, match="."):
        Line.from_record(replace(record, extra={**record.extra, **damage}))


@pytest.mark.parametrize("name", ["sizes", "n_leading", "first_user", "kind", "tokens_per_byte"])
def test_a_record_without_a_field_is_refused(name: str) -> None:
    record = tell(LineBook(1), "a").to_record()
    extra = {key: value for key, value in record.extra.items() if key != name}
    with pytest.raises(ValueError, match=name):
        Line.from_record(replace(record, extra=extra))


def test_a_record_whose_base_was_cut_is_refused() -> None:
    record = tell(LineBook(1), "a").to_record()
    with pytest.raises(ValueError, match="base"):
        Line.from_record(replace(record, base=record.base[:-1]))
