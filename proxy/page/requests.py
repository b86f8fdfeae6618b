"""The table of the last requests: where each was placed, what it found in the cache, and why it did not find more."""

from __future__ import annotations

from typing import Any

from proxy.page.parts import bar, legend, moment, owned, row, sentence, table
from proxy.page.text import NONE, count, cut, esc, name, prose, span, took
from proxy.page.view import RequestView, View
from proxy.settle import Record

HEADS = ("Ended", "Owner", "Placement", "Prompt", "Cause", "Diverged", "Repairs", "Outcome")


def requests_table(view: View) -> str:
    """The newest requests, newest first."""
    if not view.requests:
        return "<p>No request has ended yet.</p>"
    rows = "".join(_rows(view, r) for r in view.requests)
    colours = legend(("cached", "from the cache"), ("processed", "processed"))
    more = view.n_requests - len(view.requests)
    rest = f'<p>{more:,} earlier: <a href="requests?last=1000">as JSON</a></p>' if more > 0 else ""
    return table("Requests that have ended, the newest first", HEADS, [rows]) + colours + rest


def _rows(view: View, r: RequestView) -> str:
    x = r.record
    main = row(
        x.id,
        [
            ("Ended", moment(x.started + x.seconds, view.now) + f'<span class="sub">{esc(x.dialect)}</span>'),
            ("Owner", owned(r.owner)),
            ("Placement", _placement(x)),
            ("Prompt", _prompt(x)),
            ("Cause", _cause(x)),
            ("Diverged", where(x.divergence)),
            ("Repairs", ", ".join(esc(rule) for rule in x.repairs) or NONE),
            ("Outcome", _outcome(x)),
        ],
    )
    more = f'<details><summary>{esc(x.id)}</summary><div class="more">{_more(r)}</div></details>'
    return main + f'<tr role="row" class="details" id="more-{esc(x.id)}"><td role="cell" colspan="8">{more}</td></tr>'


def _placement(x: Record) -> str:
    if not x.placement:
        return NONE
    waited = f", waited {span(x.waited_ms / 1000)}" if x.waited_ms >= 1000 else ""
    return f'<span class="tag">{esc(x.placement)}</span><span class="sub">slot {x.slot}{waited}</span>'


def _prompt(x: Record) -> str:
    whole = x.cache_n + x.prompt_n
    if not whole:
        return NONE
    text = f"{x.cache_n:,} cached, {x.prompt_n:,} processed"
    figure = bar([("cached", x.cache_n), ("processed", x.prompt_n)], whole, f"{text} tokens")
    return f'{figure}<span class="sub">{text}</span>'


def _cause(x: Record) -> str:
    if x.cause is None:
        return NONE
    again = f'<span class="sub">{count(x.reprocessed, "token")} again</span>' if x.reprocessed else ""
    return f"{esc(x.cause)}{again}"


def _outcome(x: Record) -> str:
    mark = "ok" if x.outcome == "ok" else "bad"
    error = f" ({esc(cut(str(x.error), 40))})" if x.error else ""
    spent = f'<span class="sub">{x.predicted_n:,} generated, {took(x.seconds)}</span>'
    return f'<span class="{mark}">{esc(x.outcome)}</span>{error}{spent}'


def where(d: dict[str, Any]) -> str:
    """The position of a divergence: token and message, and what changed there."""
    if not d:
        return NONE
    token, estimate, message = d.get("token"), d.get("token_estimate"), d.get("message")
    at = f"token {token:,}" if isinstance(token, int) else ""
    at = at or (f"about token {estimate:,}" if isinstance(estimate, int) else "")
    role = f" ({esc(cut(str(d['role']), 20))})" if d.get("role") else ""
    place = f"message {message}{role}" if isinstance(message, int) else esc(cut(str(d.get("section") or ""), 20))
    path = f" {name(str(d['path']), 40)}" if d.get("path") else ""
    kind = f'<span class="sub">changed: {esc(cut(str(d["kind"]), 40))}</span>' if d.get("kind") else ""
    return ", ".join(x for x in (at, f"{place}{path}") if x.strip()) + kind


def _more(r: RequestView) -> str:
    """What only whoever looks for it wants to see."""
    x = r.record
    facts = [
        ("Line", f"<code>{esc(x.line)}</code>" if x.line else NONE),
        ("Engine", f"{name(x.engine)}, {name(x.model)}" if x.engine else NONE),
        ("Placed because", sentence(x.reason) if x.reason else NONE),
        ("Predicted from the cache", count(x.predicted_cache_n, "token")),
        ("Prompt, answer", f"{took(x.prompt_ms / 1000)}, {took(x.predicted_ms / 1000)}"),
        *(("Avoid it", sentence(text)) for text in r.advice),
        *((f"Text: {esc(what)}", prose(text)) for what, text in r.texts),
        ("All of it", f'<a href="requests/{esc(x.id)}">as JSON</a>'),
    ]
    return "<dl>" + "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in facts) + "</dl>"
