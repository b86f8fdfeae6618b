"""What a client's dialect is made of: a reader that turns its body into one for the engine, and a writer that turns the
engine's answer back. Both are pure: JSON in, JSON or bytes out.

A reader is `read(body: Json, headers: Mapping[str, str]) -> Translated` in `read_<dialect>.py`; it raises
proxy.errors.BadRequest for what the dialect's server would refuse with status 400, whatever JSON it is given. The same
history gives the same bytes every turn, and the messages of a history that only grows are only appended to.
A `write_<dialect>.py` holds the writer and `error_body(error: SlotkeeperError) -> bytes`, the dialect's error JSON with
`source`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from proxy.errors import SlotkeeperError

Json = dict[str, Any]


class Writer(Protocol):
    """One answer, from the engine's chat completion to the client's dialect."""

    def feed(self, chunk: Json) -> bytes:
        """Whole events for one parsed chat.completion.chunk, b"" when it says nothing.

        Raises llamacpp.errors.EngineBroken for a chunk that no llama-server sends.
        """
        ...

    def alive(self, chunk: Json) -> bytes:
        """Events that say nothing but that the prompt is being processed, from a progress chunk; the first ones open
        the answer."""
        ...

    def end(self) -> bytes:
        """The closing events, after the chunks with the finish_reason and the usage or timings were fed."""
        ...

    def whole(self, answer: Json) -> Json:
        """The whole answer's JSON, from an assembled chat.completion."""
        ...

    def error(self, error: SlotkeeperError) -> bytes:
        """The dialect's error event, inside a stream that has begun."""
        ...


@dataclass(frozen=True, slots=True)
class Translated:
    """A client's request as the engine is to get it.

    body: for /v1/chat/completions: messages, tools, sampling fields, `stream` as the client asked; without `id_slot`
    and other fields about slots. writer: makes a fresh writer, one an answer. dropped: names of the client's fields
    that have no effect on the engine, to be logged once and counted. session, agent, parent: identity found in the
    body.
    """

    body: Json
    writer: Callable[[], Writer]
    dropped: tuple[str, ...] = ()
    session: str | None = None
    agent: str | None = None
    parent: str | None = None
