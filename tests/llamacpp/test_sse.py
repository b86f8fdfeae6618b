"""EventSplitter and data_of: bytes are kept as they came, however they are cut."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamacpp.errors import EngineBroken
from llamacpp.sse import EventSplitter, data_of

PIECES = st.sampled_from(
    [
        b"data: ",
        b"data:",
        b"event: ping",
        b":",
        b"\n",
        b"\n\n",
        b"\r\n",
        b"\r\n\r\n",
        b"\r",
        b"x",
        b'{"a": 1}',
        "é".encode(),
        b" ",
    ]
)
STREAMS = st.lists(PIECES, max_size=40).map(b"".join)


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream and the chunks that it arrives in."""
    stream = draw(STREAMS)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    return stream, [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def fed(chunks: list[bytes]) -> tuple[list[bytes], bytes]:
    """All events of the chunks, and what is left."""
    splitter = EventSplitter()
    return [event for chunk in chunks for event in splitter.feed(chunk)], splitter.rest()


@given(cut_streams())
@example((b"a\r\n\r\nb", [b"a\r\n\r", b"\nb"]))
@example((b"a\n\nb", [b"a\n", b"\nb"]))
def test_no_cut_changes_what_comes_out(case: tuple[bytes, list[bytes]]) -> None:
    """The same events from any chunks, together exactly the bytes received."""
    stream, chunks = case
    events, rest = fed(chunks)
    assert b"".join(events) + rest == stream
    assert (events, rest) == fed([stream])


@given(cut_streams())
def test_an_event_ends_with_the_first_blank_line(case: tuple[bytes, list[bytes]]) -> None:
    """No event holds a blank line before its end, and what is left holds none."""
    events, rest = fed(case[1])
    for event in events:
        assert event.endswith((b"\n\n", b"\r\n\r\n"))
        assert b"\n\n" not in event[:-1] and b"\r\n\r\n" not in event[:-1]
    assert b"\n\n" not in rest and b"\r\n\r\n" not in rest


def test_comments_are_events() -> None:
    """llama-server's keep-alive (`:`) passes as an event without data."""
    assert fed([b':\n\ndata: {"a":1}\n\n']) == ([b":\n\n", b'data: {"a":1}\n\n'], b"")
    assert data_of(b":\n\n") is None


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: [DONE]\n\n", b"[DONE]"),
        (b"data: x\r\n\r\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x \n\n", b" x "),
        (b"event: error\ndata: x\n\n", b"x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: \n\n", b""),
        (b"event: ping\n\n", None),
        (b"database: x\n\n", None),
        (b"\n\n", None),
    ],
)
def test_data_of(event: bytes, data: bytes | None) -> None:
    """The data lines, joined; one space after the colon belongs to the format."""
    assert data_of(event) == data


@pytest.mark.parametrize("chunks", [[b"x" * 11], [b"x" * 6] * 2, [b"x" * 8, b"xx\n\n"], [b"x" * 9 + b"\n\n"]])
def test_an_event_without_end_is_refused(chunks: list[bytes]) -> None:
    """Over the bound, whether or not the end is in sight; the bound itself passes."""
    splitter = EventSplitter(max_event_bytes=10)
    assert splitter.feed(b"x" * 8 + b"\n\n") == [b"x" * 8 + b"\n\n"]
    with pytest.raises(EngineBroken, match="more than 10 bytes"):
        for chunk in chunks:
            splitter.feed(chunk)
