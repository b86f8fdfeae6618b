"""Exact tokens of prompts, only where they are needed: for a prompt that continues nothing, for the slots that it is
compared with, and for bases. Everything here fails open: without tokens a prompt is placed cold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import orjson
import structlog

from llamacpp.errors import EngineError
from policies.message_parts import MEDIA_MARKS, MEDIA_TOKENS
from policies.prefix import common_prefix, n_tokens
from policies.slot_state import SlotState
from proxy.api.read import LEADING, RENDERING, ModelRequest
from proxy.engine import Engine
from proxy.kept_json import kept_json
from proxy.lines import Line
from proxy.slots import Slot, Want

log = structlog.get_logger(__name__)

MOST_KNOWN = 8
"""Renderings and bases remembered per engine: a few agents' bases, a few hundred kilobytes each."""
BASE_AT_LEAST = 256
"""Tokens of a base below which a snapshot of its own is not worth a file; agents' bases are 1,000 to 25,000."""
STARTS_SUBAGENTS = frozenset({"task"})
"""Tools that an agent's sub-agents lack, while their system text is the same (agents.md: opencode's)."""
V = TypeVar("V")
Key = tuple[str, bytes]
"""A tenant and the digest of a base."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt's packed tokens. With media they are those of the text around it, which no slot can be compared by."""

    tokens: bytes
    n_media: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt, an estimate for each piece of media included."""
        return n_tokens(self.tokens) + self.n_media * MEDIA_TOKENS


async def render(engine: Engine, request: ModelRequest, line: Line) -> Tokens | None:
    """A request's prompt in tokens; None when the engine refuses to render it (the request will say why)."""
    try:
        if request.door == "chat":
            return await render_chat(engine, request.who.tenant, request.prompt.base, orjson.dumps(request.body))
        if request.door == "infill":
            return None
        found = await engine.renderer.tokens_of_prompt(request.body.get("prompt"))
        return None if found is None else Tokens(found)
    except (
        EngineError,
        OverflowError,
        TypeError,
    ) as error:  # the latter two: no token ids; the engine will refuse them
        log.info("render_failed", engine=engine.name, line=line.id, error=type(error).__name__)
        return None


async def render_chat(engine: Engine, tenant: str, base: bytes, body: bytes) -> Tokens:
    """A chat body in tokens; `base`: digest of its base, by which earlier renderings are found. Raises EngineError."""
    # A tenant's own: how soon a text is tokenised says whether somebody rendered its beginning (design.md, rule 3).
    mine = [rendered for (whose, _), rendered in engine.known.items() if whose == tenant]
    known = engine.known.get((tenant, base)) or (mine[-1] if mine else None)
    rendered = await engine.renderer.tokens_of(body, known)
    if rendered.has_media:
        n_media = sum(body.count(mark) for mark in MEDIA_MARKS)
        return Tokens(rendered.tokens, max(1, n_media))
    if n_tokens(rendered.tokens) <= engine.n_ctx:  # others run nowhere, and may be as large as the largest body
        _remember(engine.known, (tenant, base), rendered)
    return Tokens(rendered.tokens)


async def render_pending(engine: Engine, tenant: str) -> None:
    """Renders what a tenant's idle slots hold, where that is not known yet."""
    for slot in engine.table.slots:
        if not slot.is_rendered and slot.tenant == tenant and slot.state is SlotState.IDLE:
            await render_slot(engine, slot)


async def render_slot(engine: Engine, slot: Slot) -> None:
    """Renders one slot's newest prompt; nothing changes when the slot was used again meanwhile."""
    body = slot.body
    if body is None or slot.is_rendered:
        return
    try:
        rendered = await render_chat(engine, slot.tenant or "", slot.base, body)
        tokens = None if rendered.n_media else rendered.tokens
    except EngineError as error:
        log.info("render_failed", engine=engine.name, slot=slot.id, error=type(error).__name__)
        tokens = None
    if slot.body is body:
        slot.is_rendered = True
        if tokens is not None:
            slot.tokens = tokens[: 4 * slot.n_tokens]


async def base_tokens(engine: Engine, tenant: str, base: bytes, body: bytes) -> bytes:
    """Packed tokens of the base of a chat body; empty when it has none or cannot be rendered."""
    key = tenant, base
    if key not in engine.bases:
        try:
            _remember(engine.bases, key, await engine.renderer.base_of(body))
        except EngineError as error:
            log.info("base_unknown", engine=engine.name, error=type(error).__name__)
            return b""
    return engine.bases[key]


async def base_cuts(engine: Engine, slot: Slot, request: ModelRequest, want: Want) -> list[tuple[bytes, bool]]:
    """Packed prefixes of a prompt that are to be processed one by one in its leased slot and kept, shortest first,
    and whether each is its whole base: where memory cannot be cut back to them later.

    They are its base, and what another base shares with it, or a sub-agent's will: that is where the next such base
    will go on. Each would be processed anyway: the price is the file and 1-4 tokens (llama-server.md, "Slot files").
    """
    if request.door != "chat" or not engine.can_save or want.tokens is None:
        return []
    body = orjson.dumps(request.body)
    base = await base_tokens(engine, want.tenant, request.prompt.base, body)
    size, held = n_tokens(base), n_tokens(slot.tokens) if slot.was_restored else 0
    if size < BASE_AT_LEAST or common_prefix(base, want.tokens) < size or held >= size:
        return []
    shared = max((n for n in _shared(engine, slot, want.tenant, base) if n < size), default=0)
    if size - shared >= BASE_AT_LEAST:
        shared = max(shared, await _shared_with_subagents(engine, base, body))
    is_apart = size - shared >= BASE_AT_LEAST
    cuts = [n for n, is_worth in ((shared, is_apart), (size, True)) if is_worth and n - held >= BASE_AT_LEAST]
    cost = engine.table.abilities.save_cost
    kept = [base[: 4 * n] for n in cuts if cost * n < n - held]
    return [(tokens, n_tokens(tokens) == size) for tokens in kept if not has_base(engine, want.tenant, tokens)]


def _shared(engine: Engine, slot: Slot, tenant: str, base: bytes) -> Iterator[int]:
    """Tokens that other slots and snapshots of a tenant share with a base."""
    yield from (common_prefix(s.tokens, base) for s in engine.table.slots if s is not slot and s.tenant == tenant)
    if engine.fingerprint is not None:
        found = engine.store.candidates(tenant, engine.fingerprint)
        yield from (common_prefix(engine.store.tokens(s), base) for s in found)


async def _shared_with_subagents(engine: Engine, base: bytes, body: bytes) -> int:
    """Tokens of a base that its sub-agents' will share: same system text, no tool that starts sub-agents. 0 where there
    is no such tool, or nothing is known."""
    found = orjson.loads(base_body(body))
    tools = found.get("tools") or []
    found["tools"] = [t for t in tools if not (isinstance(t, dict) and _name_of(t) in STARTS_SUBAGENTS)]
    if len(found["tools"]) == len(tools):
        return 0
    try:
        return common_prefix(base, await engine.renderer.base_of(orjson.dumps(found)))
    except EngineError as error:
        log.info("render_failed", engine=engine.name, error=type(error).__name__)
        return 0


def _name_of(tool: dict[str, object]) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def base_body(body: bytes) -> bytes:
    """The chat body of a base: what a chat's prompt begins with, and a first user message."""
    found = orjson.loads(body)
    messages = found.get("messages") or []
    n_leading = next((i for i, m in enumerate(messages) if m.get("role") not in LEADING), len(messages))
    kept = {name: found[name] for name in ("tools", *RENDERING) if name in found}
    return kept_json({"messages": [*messages[:n_leading], {"role": "user", "content": "hi"}], **kept})


def has_base(engine: Engine, tenant: str, base: bytes) -> bool:
    """A snapshot that ends exactly at this base is there."""
    if engine.fingerprint is None:
        return False
    found = engine.store.candidates(tenant, engine.fingerprint)
    return any(s.n_tokens == n_tokens(base) and engine.store.tokens(s) == base for s in found)


def _remember(known: OrderedDict[Key, V], key: Key, value: V) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > MOST_KNOWN:
        known.popitem(last=False)
