"""Log lines: structlog to stderr, JSON or console. Positions, counts and hashes; never prompt text, never a traceback.

An exception is logged as its type and the places it came through; its message only where it is one of ours, because a
foreign message can quote what it could not parse (pydantic's does).
"""

import contextlib
import logging
import sys
import traceback
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Literal, TextIO, cast

import structlog

from llamacpp.errors import EngineRefused
from proxy.errors import SlotkeeperError, StoreError, UsageError

# Names under which text of a prompt or an answer could slip into a line; their values are withheld.
WITHHELD = frozenset({"arguments", "body", "content", "delta", "messages", "prompt", "system", "text", "tools"})
SENTENCE = "sentence"
"""Under this name a line can hold what people read instead of its fields; it is no field in JSON."""
_FRAMES = 4  # innermost places that a line names; enough to find the fault, short enough for one line
EventDict = MutableMapping[str, Any]


def configure(
    log_format: Literal["json", "console"] = "console", level: str = "info", out: TextIO | None = None
) -> None:
    """Send every log line of this process, the libraries' too, to `out` (stderr). Call once, at start."""
    stream = Forgiving(out or sys.stderr)
    is_json = log_format == "json"
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if is_json else "%Y-%m-%d %H:%M:%S", utc=is_json),
        withhold_text,
        name_exception,
    ]
    renderer: Any = structlog.processors.JSONRenderer(sort_keys=False) if is_json else People(stream.isatty())
    structlog.configure(
        processors=[*shared, drop_sentence if is_json else drop_unknown, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, stream)),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processors=[_drop_meta, renderer], foreign_pre_chain=shared)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING if level != "debug" else logging.INFO)
    for noisy in ("httpx", "httpcore"):  # a line for each look at an engine's health
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Forgiving:
    """A text stream whose failures (a full disk, a closed terminal) never reach who logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """What the stream takes; 0 when it takes nothing."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        """As the stream's."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        """As the stream's."""
        return self._stream.isatty()


def withhold_text(logger: object, method: str, event: EventDict) -> EventDict:
    """Replace values under names that can hold prompt text by their length."""
    for name in WITHHELD & event.keys():
        value = event[name]
        event[name] = f"<{len(value)} withheld>" if hasattr(value, "__len__") else "<withheld>"
    return event


def drop_unknown(logger: object, method: str, event: EventDict) -> EventDict:
    """Leave out what is not known, or empty: for people, who read the rest sooner."""
    return {name: value for name, value in event.items() if value is not None and value != ""}


def drop_sentence(logger: object, method: str, event: EventDict) -> EventDict:
    """Leave out SENTENCE: scripts have the fields."""
    event.pop(SENTENCE, None)
    return event


class People:
    """The console's lines: the event and its fields, or SENTENCE alone where a line has one."""

    def __init__(self, colors: bool) -> None:
        self._render = structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=structlog.dev.plain_traceback, sort_keys=False
        )

    def __call__(self, logger: object, method: str, event: EventDict) -> str:
        """One line."""
        sentence = event.get(SENTENCE)
        return str(sentence) if sentence else self._render(logger, method, event)


def name_exception(logger: object, method: str, event: EventDict) -> EventDict:
    """Turn exc_info into `error` and `where`: one line instead of a traceback."""
    info = event.pop("exc_info", None)
    error = sys.exc_info()[1] if info is True else info[1] if isinstance(info, tuple) else info
    if isinstance(error, BaseException):
        event["error"] = describe(error)
        event["where"] = places(error)
    return event


def describe(error: BaseException) -> str:
    """An exception in words that cannot quote a prompt. An engine's own words can: a template's, a parser's."""
    name = type(error).__name__
    if isinstance(error, EngineRefused):
        return f"{name}: HTTP status {error.status}"
    ours = isinstance(error, SlotkeeperError | StoreError | UsageError) or type(error).__module__.startswith(
        "llamacpp."
    )
    if ours:
        return f"{name}: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"{name}: {error.strerror}" + (f": {error.filename}" if error.filename else "")
    return name


def places(error: BaseException) -> str:
    """The innermost places that an exception came through: `file.py:12 function < file.py:80 caller`."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))


def _drop_meta(logger: object, method: str, event: EventDict) -> EventDict:
    event.pop("_record", None)
    event.pop("_from_structlog", None)
    return event
