"""What the status page shows, gathered from our own tables: no engine is asked, nothing is awaited."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

from policies.prefix import n_tokens
from policies.slot_state import SlotState
from proxy import __version__
from proxy.engine import Engine
from proxy.exchange import Exchange
from proxy.explain import advices, texts_of
from proxy.lines import NO_TOOLS, Identity, Line
from proxy.service import Service, owner
from proxy.settle import Record
from proxy.slots import Slot
from proxy.store_types import Snapshot

MOST_REQUESTS = 30
MOST_SNAPSHOTS = 50
MOST_WAITING = 64
"""Rows of each table; the whole is in /slotkeeper/requests and `slotkeeper snapshots ls`."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a slot, request or snapshot is. `line`: id of the conversation; `name`: what its client calls it."""

    tenant: str
    line: str = ""
    kind: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot, in tokens; while a request runs in it, what that one has sent and got. `n_base`: of `n_used`
    those of the base; None where nothing is known of it, and an estimate unless `is_counted`.

    `request`: id of the request that runs in it, since `seconds`.
    """

    id: int
    state: str
    owner: Owner | None
    n_base: int | None
    n_used: int
    n_saved: int
    room: int
    is_counted: bool = True
    request: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WaitingView:
    """One request in the waiting line; `n_prompt` tokens, at least estimated."""

    owner: Owner
    n_prompt: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine. `used` of `capacity` tokens are taken or promised; capacity None: each slot has its own room."""

    name: str
    kind: str
    model: str
    ready: bool
    why_not: str
    slots: tuple[SlotView, ...]
    waiting: tuple[WaitingView, ...]
    n_waiting: int
    used: int
    capacity: int | None
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request that is over. `texts`: prompt text by name, with --show-prompts only."""

    record: Record
    owner: Owner
    advice: tuple[str, ...]
    texts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """Everything on the page; times in seconds since 1970."""

    now: float
    version: str
    mode: str
    stopping: bool
    engines: tuple[EngineView, ...]
    requests: tuple[RequestView, ...]
    n_requests: int
    snapshots: tuple[tuple[Snapshot, Owner], ...]
    n_snapshots: int
    snapshot_bytes: int
    budget: int
    persist: bool


def look(service: Service, now: float | None = None) -> View:
    """The page's figures as of now."""
    store, at = service.store, time.time() if now is None else now
    snapshots = sorted(store.all(), key=lambda s: -s.last_used)
    return View(
        now=at,
        version=__version__,
        mode=service.settings.mode,
        stopping=service.stopping,
        engines=tuple(_engine(service, e, at) for e in service.engines.all),
        requests=tuple(_request(service, r) for r in islice(reversed(service.records.values()), MOST_REQUESTS)),
        n_requests=len(service.records),
        snapshots=tuple((s, _owner(service, s.tenant, s.line)) for s in snapshots[:MOST_SNAPSHOTS]),
        n_snapshots=len(snapshots),
        snapshot_bytes=store.total_bytes,
        budget=store.budget,
        persist=service.settings.persist,
    )


def _engine(service: Service, e: Engine, now: float) -> EngineView:
    running = {x.record.slot: x for x in service.running if x.record.engine == e.name and x.record.slot >= 0}
    waiting = e.table.waiting()
    return EngineView(
        name=e.name,
        kind=e.kind,
        model=e.model,
        ready=e.ready,
        why_not="" if e.ready else str(e.why_not or "not ready"),
        slots=tuple(_slot(service, e, s, running.get(s.id), now) for s in e.table.slots),
        waiting=tuple(
            WaitingView(_owner_of(w.line), w.n_prompt, e.table.clock() - since) for w, since in waiting[:MOST_WAITING]
        ),
        n_waiting=len(waiting),
        used=e.table.used(),
        capacity=e.table.capacity,
        missing=tuple(e.missing),
    )


def _slot(service: Service, e: Engine, s: Slot, running: Exchange | None, now: float) -> SlotView:
    record, line, n_used = None, s.line, s.n_tokens
    whose = _owner(service, s.tenant, s.line) if s.tenant or s.line else None
    if running is not None and s.runner is not None and s.state is SlotState.BUSY:
        record = running.record
        line, n_used = record.line, s.runner.n_prompt + s.runner.n_decoded
        whose = _named(running.request.who, line, record.kind)
    base = e.bases.get((s.tenant or "", s.base)) if line is not None and line == s.line else None
    n_base = n_tokens(base) if base else _estimate(s, service.lines.get(line))
    return SlotView(
        id=s.id,
        state=s.state.value,
        owner=whose,
        n_base=min(n_base, n_used) if n_base is not None else None,
        is_counted=bool(base),
        n_used=n_used,
        n_saved=e.table.saved_of(s) if s.line is not None else 0,
        room=e.n_ctx,
        request=record.id if record is not None else "",
        seconds=now - record.started if record is not None else 0.0,
    )


def _estimate(s: Slot, line: Line | None) -> int | None:
    """Tokens of a base that nobody has counted yet, by its share of the bytes; None where it has none, or no text."""
    if line is None or not s.body or s.n_prompt is None or s.base != line.prompt.base:
        return None
    p, n_bytes = line.prompt, len(s.body)
    if not p.n_leading and p.tools in NO_TOOLS:
        return None
    return s.n_prompt * max(0, n_bytes - sum(p.sizes[p.n_leading :])) // n_bytes


def _owner(service: Service, tenant: str | None, line: str | None) -> Owner:
    found = service.lines.get(line)
    return _owner_of(found) if found is not None else Owner(owner(tenant or ""), line or "")


def _owner_of(line: Line) -> Owner:
    return _named(line.who, line.id, line.kind)


def _named(who: Identity, line: str, kind: str) -> Owner:
    return Owner(owner(who.tenant), line, kind, " / ".join(x for x in (who.session, who.agent) if x))


def _request(service: Service, r: Record) -> RequestView:
    whose = _owner(service, r.tenant, r.line)
    return RequestView(r, Owner(whose.tenant, r.line, r.kind, whose.name), tuple(advices(r)), _texts(service, r))


def _texts(service: Service, r: Record) -> tuple[tuple[str, str], ...]:
    """Prompt text, if it may be shown at all (design.md, rule 10)."""
    if not service.settings.show_prompts:
        return ()
    explained = service.explainer.get(r.id)
    texts = texts_of(explained) if explained is not None else {}
    newest = newest_text(service.body_of(r.id))
    return tuple((what, text) for what, text in (("newest message", newest), *texts.items()) if text)


def newest_text(body: Any) -> str:
    """The text of the last message of a model request, or its prompt; "" where there is none."""
    if not isinstance(body, dict):
        return ""
    for name in ("messages", "input", "prompt"):
        found = body.get(name)
        if isinstance(found, str):
            return found
        if isinstance(found, list) and found and isinstance(found[-1], dict):
            return _text_of(found[-1].get("content"))
    return ""


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [p.get("text") for p in parts if isinstance(p, dict)]
    return "\n".join(t for t in texts if isinstance(t, str))
