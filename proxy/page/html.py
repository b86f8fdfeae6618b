"""The status page as HTML. Everything that others wrote goes through `proxy.page.text`; bars are SVG, because a strict
content security policy takes no style attributes. Whatever is here reads well without a script and without a style."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from proxy.page.parts import bar, legend, moment, owned, row, sentence, table
from proxy.page.requests import requests_table
from proxy.page.text import NONE, esc, name, size, span
from proxy.page.view import EngineView, Owner, SlotView, View, WaitingView
from proxy.store_types import Snapshot

SECTIONS = {
    "overview": "Overview",
    "slots": "Slots",
    "waiting": "Waiting line",
    "requests": "Last requests",
    "snapshots": "Snapshots",
}
"""Ids of the parts that change, and their headings, in the order of the page."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Slotkeeper</title>
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="page.css">
<script src="page.js" defer></script>
</head>
<body>
<a class="skip" href="#main">Skip to the figures</a>
<header>
<h1>Slotkeeper</h1>
<p class="about">{about}</p>
<p class="live"><span id="live" role="status" class="state-static">As of {clock}</span>
<button id="pause" type="button" hidden>Pause</button></p>
<noscript><p>Without JavaScript nothing here changes by itself. <a href=".">Load the page again</a></p></noscript>
</header>
<main id="main" tabindex="-1">
{sections}
</main>
<footer><p>As JSON: <a href="state">state</a>, <a href="requests">requests</a>. Why a prompt was processed again:
<code>slotkeeper explain</code></p></footer>
</body>
</html>
"""


def page(view: View) -> bytes:
    """The whole document."""
    parts = sections(view)
    return _PAGE.format(
        about=f"{esc(view.version)} · mode {esc(view.mode)}"
        + (" · <strong>stopping</strong>" if view.stopping else ""),
        clock=moment(view.now, view.now, datetime.fromtimestamp(view.now, UTC).strftime("%H:%M:%S UTC")),
        sections="\n".join(
            f'<section aria-labelledby="h-{key}"><h2 id="h-{key}" tabindex="-1">{title}</h2>'
            f'<div id="{key}">{parts[key]}</div></section>'
            for key, title in SECTIONS.items()
        ),
    ).encode("utf-8", "replace")


def sections(view: View) -> dict[str, str]:
    """What lies under each heading: the unit in which changes are sent."""
    return {
        "overview": _overview(view),
        "slots": "".join(_engine(e) for e in view.engines),
        "waiting": _waiting(view.engines),
        "requests": requests_table(view),
        "snapshots": _snapshots(view),
    }


def _overview(view: View) -> str:
    answered = [r.record for r in view.requests if r.record.cache_n + r.record.prompt_n]
    cached, whole = sum(r.cache_n for r in answered), sum(r.cache_n + r.prompt_n for r in answered)
    again = sum(r.reprocessed for r in answered)
    slots = [s for e in view.engines for s in e.slots]
    busy = sum(s.state not in ("empty", "idle") for s in slots)
    tiles = [
        (f"From the cache, last {len(answered)} requests", f"{cached / whole:.1%}" if whole else NONE),
        ("Processed again, of these", f"{again:,} <small>tokens</small>"),
        ("Slots in use", f"{busy} <small>of {len(slots)}</small>"),
        ("Waiting", f"{sum(e.n_waiting for e in view.engines)}"),
        ("Snapshots", f"{size(view.snapshot_bytes)} <small>of {size(view.budget)}</small>"),
    ]
    return '<dl class="tiles">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in tiles) + "</dl>"


def _engine(e: EngineView) -> str:
    state = '<span class="ok">ready</span>' if e.ready else f'<span class="bad">not ready</span> {sentence(e.why_not)}'
    head = f'<h3>{name(e.model)}</h3><p class="engine">{name(e.name)}, {esc(e.kind)}: {state}</p>'
    pool = ""
    if e.capacity:
        text = f"{e.used:,} of {e.capacity:,} tokens taken or promised"
        pool = f'<div class="pool">{bar([("line", e.used)], e.capacity, text)}<p>Context: {text}</p></div>'
    lacks = "".join(f"<li>{sentence(m)}</li>" for m in e.missing)
    notes = f'<ul class="notes">{lacks}</ul>' if lacks else ""
    heads = ("Slot", "State", "Owner", "Held", "Tokens")
    rows = (_slot(e, s) for s in e.slots)
    colours = legend(("base", "base"), ("line", "line"), ("free", "free"))
    return f"<div>{head}{pool}{table(f'Slots of {name(e.name)}', heads, rows)}{colours}{notes}</div>"


def _slot(e: EngineView, s: SlotView) -> str:
    base, free = s.n_base or 0, max(0, s.room - s.n_used)
    about = "" if s.is_counted else "about "
    parts = f"base {about}{base:,}, line {s.n_used - base:,}" if s.n_base is not None else f"{s.n_used:,} held"
    figure = bar([("base", base), ("line", s.n_used - base)], s.room, f"{parts}, free {free:,} tokens")
    runs = f'<span class="sub"><code>{esc(s.request)}</code>, {span(s.seconds)}</span>' if s.request else ""
    saved = f'<span class="sub">{s.n_saved:,} saved</span>' if s.n_saved else ""
    return row(
        f"slot-{e.name}-{s.id}",
        [
            ("Slot", str(s.id)),
            ("State", f'<span class="tag state-{s.state}">{s.state}</span>{runs}'),
            ("Owner", owned(s.owner) if s.owner is not None else NONE),
            ("Held", f'{figure}<span class="sub">{parts}, free {free:,}</span>'),
            ("Tokens", f"{s.n_used:,}{saved}"),
        ],
    )


def _waiting(engines: Sequence[EngineView]) -> str:
    rows = [_waiter(e, i, w) for e in engines for i, w in enumerate(e.waiting, 1)]
    if not rows:
        return "<p>Nobody waits.</p>"
    return table("Requests that wait for a slot", ("Place", "Engine", "Owner", "Prompt", "Waits"), rows)


def _waiter(e: EngineView, place: int, w: WaitingView) -> str:
    return row(
        f"wait-{e.name}-{place}",
        [
            ("Place", str(place)),
            ("Engine", name(e.name)),
            ("Owner", owned(w.owner)),
            ("Prompt", f"about {w.n_prompt:,} tokens"),
            ("Waits", span(w.seconds)),
        ],
    )


def _snapshots(view: View) -> str:
    text = f"{size(view.snapshot_bytes)} of {size(view.budget)}"
    figure = bar([("line", view.snapshot_bytes)], view.budget, text)
    more = view.n_snapshots - len(view.snapshots)
    head = f'<div class="pool">{figure}<p>Disk: {text}, {view.n_snapshots} on disk</p></div>'
    if not view.snapshots:
        return head + ("<p>Nothing is stored yet.</p>" if view.persist else "<p>Persistence is switched off.</p>")
    heads = ("Snapshot", "Owner", "Model", "Tokens", "Size", "Saved", "Last used", "Kept")
    body = table("Slot files on disk, the last used first", heads, (_snapshot(view, *x) for x in view.snapshots))
    return f"{head}{body}" + (f"<p>{more} more: <code>slotkeeper snapshots ls</code></p>" if more else "")


def _snapshot(view: View, s: Snapshot, owner: Owner) -> str:
    kept = '<span class="tag pinned">pinned</span>' if s.pinned else "within the budget"
    worth = '<span class="sub">restoring it did not help</span>' if s.effective is False else ""
    return row(
        f"snap-{s.id}",
        [
            ("Snapshot", f'<code>{esc(s.id)}</code><span class="sub">{esc(s.kind)}</span>'),
            ("Owner", owned(owner)),
            ("Model", name(s.model)),
            ("Tokens", f"{s.n_tokens:,}"),
            ("Size", size(s.bytes)),
            ("Saved", f'{moment(s.created, view.now)}<span class="sub">{esc(s.reason)}</span>'),
            ("Last used", moment(s.last_used, view.now)),
            ("Kept", kept + worth),
        ],
    )
