"""Text that others wrote, made fit for a terminal: no control characters, no markup, one line."""

import json
import unicodedata
from typing import Any

from rich.markup import escape
from rich.text import Text

_NAMED = {"\n": "\u21b5", "\t": "\u2192"}
"""Line ends and tabulators are shown as arrows: they are part of what differs."""
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Categories of characters that move the cursor, turn the direction of text or cannot be written."""


def clean(text: str) -> str:
    """The text on one line, without characters that a terminal would obey; those are shown as U+FFFD."""
    return "".join(_NAMED.get(c) or ("\ufffd" if unicodedata.category(c) in _HIDDEN else c) for c in text)


def escaped(text: str) -> str:
    """Clean text for rich, whose markup in it is no markup."""
    return escape(clean(text))


def plain(text: str, style: str = "") -> Text:
    """Clean text for rich that is never read as markup."""
    return Text(clean(text), style=style)


def lines(text: str) -> Text:
    """Clean text for rich, its line ends kept."""
    return Text("\n").join(map(plain, text.split("\n")))


def print_json(value: Any) -> None:
    """JSON in ASCII, which no terminal obeys."""
    print(json.dumps(value, indent=2))
