"""Log lines never hold prompt text, and an exception is one line."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
import structlog

from llamacpp.errors import EngineRefused, EngineUnreachable
from proxy import logs
from proxy.errors import Busy


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    """JSON lines into a buffer; the former configuration comes back."""
    root, stream = logging.getLogger(), io.StringIO()
    before = root.handlers[:], root.level
    logs.configure("json", "info", stream)
    yield stream
    structlog.reset_defaults()
    root.handlers[:], root.level = before


def last(out: io.StringIO) -> dict[str, object]:
    """The newest line."""
    entry = json.loads(out.getvalue().splitlines()[-1])
    assert isinstance(entry, dict)
    return entry


@pytest.mark.parametrize("name", sorted(logs.WITHHELD))
def test_text_is_withheld(out: io.StringIO, name: str) -> None:
    """Under each name that could hold text only a length is written."""
    structlog.get_logger().info("x", **{name: "secret"})
    assert last(out)[name] == "<6 withheld>"
    assert "secret" not in out.getvalue()


def test_a_foreign_exception_keeps_its_message_to_itself(out: io.StringIO) -> None:
    """Type and place are written; the message could quote a prompt."""
    try:
        raise ValueError("secret")
    except ValueError:
        structlog.get_logger().exception("failed")
    entry = last(out)
    assert entry["error"] == "ValueError"
    assert "test_logs.py" in str(entry["where"])
    assert "secret" not in out.getvalue()
    assert "Traceback" not in out.getvalue()


def test_an_engines_words_are_not_shown() -> None:
    """A template's or a parser's error quotes the prompt."""
    assert logs.describe(EngineRefused(500, b"", "secret")) == "EngineRefused: HTTP status 500"


@pytest.mark.parametrize("error", [Busy("the line is full"), EngineUnreachable("no engine there")])
def test_our_own_messages_are_shown(error: Exception) -> None:
    """They are written by us and hold no prompt."""
    assert logs.describe(error).endswith(str(error))


def test_os_errors_name_their_file() -> None:
    """What the system said, about which file."""
    assert logs.describe(FileNotFoundError(2, "No such file", "/x")) == "FileNotFoundError: No such file: /x"


def test_libraries_log_through_us(out: io.StringIO) -> None:
    """A standard library logger's error is one JSON line too, without a traceback."""
    try:
        raise KeyError("secret")
    except KeyError:
        logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=True)
    assert last(out)["event"] == "Exception in ASGI application"
    assert last(out)["level"] == "error"
    assert "secret" not in out.getvalue()


def test_levels(out: io.StringIO) -> None:
    """What is below the level is not written."""
    structlog.get_logger().debug("quiet")
    assert out.getvalue() == ""


def test_console_is_readable(out: io.StringIO) -> None:
    """One line with its fields, no colours into a pipe."""
    logs.configure("console", "info", out)
    structlog.get_logger().info("listening", port=1)
    assert "listening" in out.getvalue()
    assert "port=1" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_line_for_people() -> None:
    """Fields in the order they were given, without those that are not known; scripts get all of them."""
    for kind, said in (("console", True), ("json", False)):
        out = io.StringIO()
        logs.configure(kind, out=out)  # type: ignore[arg-type]
        structlog.get_logger().info("answered", zeta=1, cause=None, flags="", alpha=2)
        line = out.getvalue()
        assert line.index("zeta") < line.index("alpha")
        assert ("cause" not in line) is said
        assert ("flags" not in line) is said
        assert bool(re.match(r"[-\d]{10} [:\d]{8} \[info", line)) is said, "people need no microseconds"


def test_a_sentence_for_people() -> None:
    """It stands alone on the console; scripts get the fields and not the sentence."""
    said = {}
    for kind in ("console", "json"):
        out = io.StringIO()
        logs.configure(kind, out=out)  # type: ignore[arg-type]
        structlog.get_logger().info("fine", sentence="All is well.", port=1)
        said[kind] = out.getvalue()
    assert said["console"] == "All is well.\n"
    assert json.loads(said["json"]).keys() == {"event", "port", "level", "timestamp"}
