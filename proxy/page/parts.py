"""What the page is put together from: tables, bars, times, owners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from proxy.page.text import NONE, ago, cut, esc, name
from proxy.page.view import Owner


def table(caption: str, heads: Sequence[str], rows: Iterable[str]) -> str:
    """A table whose roles are written out: narrow screens show its rows as cards, which takes them away."""
    columns = "".join(f'<th scope="col" role="columnheader">{head}</th>' for head in heads)
    return (
        f'<table role="table"><caption>{caption}</caption><thead role="rowgroup"><tr role="row">{columns}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(rows)}</tbody></table>'
    )


def row(key: str, cells: Iterable[tuple[str, str]]) -> str:
    """One row; `cells`: heading and HTML of each. `key` finds it again when the table changes."""
    inner = "".join(
        f'<td role="cell" data-label="{label}"{" class=none" if html == NONE else ""}><div>{html}</div></td>'
        for label, html in cells
    )
    return f'<tr role="row" id="{esc(key)}">{inner}</tr>'


def bar(parts: Sequence[tuple[str, int]], total: int, label: str) -> str:
    """A bar of `total` units; each part has a class for its colour. What is left is free."""
    rects, x = [], 0.0
    for kind, amount in parts:
        width = round(100 * min(max(0, amount), total) / max(1, total), 2)
        rects.append(f'<rect class="{kind}" x="{x:g}" width="{min(width, 100 - x):g}" height="1"/>')
        x = round(min(100.0, x + width), 2)
    return (
        f'<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f'<rect class="free" width="100" height="1"/>{"".join(rects)}</svg>'
    )


def legend(*kinds: tuple[str, str]) -> str:
    """What the colours of a bar mean: class and word of each."""
    keys = (
        '<span><svg class="key" viewBox="0 0 1 1" aria-hidden="true">'
        f'<rect class="{kind}" width="1" height="1"/></svg> {word}</span>'
        for kind, word in kinds
    )
    return f'<p class="legend">{" ".join(keys)}</p>'


def moment(at: float, now: float, text: str | None = None) -> str:
    """A time, as an age."""
    when = datetime.fromtimestamp(min(max(at, 0), 2**33), UTC).isoformat(timespec="seconds")
    return f'<time datetime="{when}" title="{when}">{text or ago(now - at)}</time>'


def owned(owner: Owner) -> str:
    """Whose it is: kind and name of the conversation, its tenant below."""
    if not owner.line:
        return name(owner.tenant) if owner.tenant else "nobody"
    kind = f'<span class="tag">{esc(owner.kind)}</span> ' if owner.kind else ""
    called = name(owner.name) if owner.name else f"<code>{esc(cut(owner.line, 16))}</code>"
    return f'{kind}{called}<span class="sub">{name(owner.tenant)}</span>'


def sentence(text: str) -> str:
    """A sentence that may quote others."""
    return name(text, 300)
