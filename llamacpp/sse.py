"""Cuts a byte stream of server-sent events into whole events, byte for byte as received."""

from llamacpp.errors import EngineBroken

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""A bound, not a format rule: an event that echoes a prompt is smaller than the largest body the proxy takes, 64 MB."""


class EventSplitter:
    """Feed chunks as they arrive, get whole events: `b"".join(all events) + rest()` is what was fed.

    An event ends with a blank line: `\\n\\n` or `\\r\\n\\r\\n`, cut anywhere. Comments (`:` lines) count as events.
    """

    __slots__ = ("_held", "_held_bytes", "_max", "_tail")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._held: list[bytes] = []  # pieces of the unfinished event; joined once, so a huge event costs linear time
        self._held_bytes = 0
        self._tail = b""  # last 3 bytes held, to see a blank line that is cut by a chunk border
        self._max = max_event_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the events that `chunk` completes. Raises EngineBroken when one event outgrows `max_event_bytes`."""
        if not self._held and chunk.endswith(b"\n\n") and chunk.find(b"\n\n") == len(chunk) - 2 and b"\r" not in chunk:
            return self._bounded(chunk)  # the usual case: one chunk is one event
        return self._cut(chunk)

    def rest(self) -> bytes:
        """What was received after the last whole event (empty at the end of a healthy stream)."""
        return b"".join(self._held)

    def _bounded(self, event: bytes) -> list[bytes]:
        self._check(len(event))
        return [event]

    def _check(self, size: int) -> None:
        if size > self._max:
            raise EngineBroken(
                f"llama-server sent a stream event of more than {self._max} bytes; the request was ended. "
                "Check that the upstream URL leads to a llama-server."
            )

    def _cut(self, chunk: bytes) -> list[bytes]:
        events: list[bytes] = []
        start = 0
        if self._held:
            start = _end_of_first(self._tail + chunk) - len(self._tail)
            if start < 0:
                self._hold(chunk)
                return events
            self._check(self._held_bytes + start)
            events.append(b"".join(self._held) + chunk[:start])
            self._held, self._held_bytes, self._tail = [], 0, b""
        while (end := _end_of_first(chunk, start)) >= 0:
            self._check(end - start)
            events.append(chunk[start:end])
            start = end
        if start < len(chunk):
            self._hold(chunk[start:])
        return events

    def _hold(self, piece: bytes) -> None:
        self._check(self._held_bytes + len(piece))
        self._held.append(piece)
        self._held_bytes += len(piece)
        self._tail = (self._tail + piece[-3:])[-3:]


def _end_of_first(data: bytes, start: int = 0) -> int:
    """Index after the first blank line in `data` from `start`; -1 when there is none."""
    plain = data.find(b"\n\n", start)
    crlf = data.find(b"\r\n\r\n", start, plain + 2 if plain >= 0 else len(data))
    if crlf >= 0:
        return crlf + 4
    return plain + 2 if plain >= 0 else -1


def data_of(event: bytes) -> bytes | None:
    """The `data:` lines of one whole event, joined by newlines; None when it has none (a comment, a bare `event:`).

    Rules: WHATWG HTML, "Interpreting an event stream" (one space after the colon is not data).
    """
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]  # the usual case: one data line
    lines = [
        line[5:].removeprefix(b" ") for line in event.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None
