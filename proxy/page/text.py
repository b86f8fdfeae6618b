"""Text that others wrote, made fit for HTML, and numbers made fit for people."""

from __future__ import annotations

import unicodedata
from html import escape

NAME_LIMIT = 48
"""Characters of a name (session, model, tenant); the rest is cut."""
PROSE_LIMIT = 600
"""Characters of a prompt's excerpt."""
NONE = "&ndash;"
"""Shown where there is nothing to show."""
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_WRITTEN = "\n\t\u200c\u200d"
"""Of those, what text needs: line ends, tabulators, and the joiners of Persian, Hindi and emoji."""


def esc(text: str) -> str:
    """Escaped for content and for quoted attributes; characters that nobody sees are named: U+202E."""
    if text.isprintable():
        return escape(text)
    return "".join(_named(c) if _is_hidden(c) else escape(c) for c in text)


def name(text: str, limit: int = NAME_LIMIT) -> str:
    """Somebody's name: cut, escaped, and isolated so that its direction turns nothing around it."""
    return f"<bdi>{_marked(cut(text, limit))}</bdi>"


def prose(text: str, limit: int = PROSE_LIMIT) -> str:
    """A prompt's text: cut, escaped, its line ends kept, its direction its own."""
    return f'<bdi class="prose" dir="auto">{_marked(cut(text, limit), _WRITTEN)}</bdi>'


def cut(text: str, limit: int) -> str:
    """At most so many characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _marked(text: str, written: str = "") -> str:
    if text.isprintable():
        return escape(text)
    return "".join(
        f'<span class="mark">{_named(c)}</span>' if _is_hidden(c) and c not in written else escape(c) for c in text
    )


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN


def _named(character: str) -> str:
    return f"U+{ord(character):04X}"


def count(n: int, noun: str) -> str:
    """1 slot, 2 slots, 1,234 tokens."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def size(n_bytes: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def span(seconds: float) -> str:
    """A duration of which people want to know the largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def took(seconds: float) -> str:
    """A duration that was measured, as HTML: 0.04 s, 3.1 s, 2 min."""
    return span(seconds) if seconds >= 60 else f"{seconds:.{1 if seconds >= 1 else 2}f}&nbsp;s"


def ago(seconds: float) -> str:
    """An age, by the minute: what changes each second would be sent each second."""
    return "just now" if seconds < 60 else f"{span(seconds)} ago"
