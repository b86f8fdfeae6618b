"""Bases as they are sent: a tenant's first-seen spellings of tools, their orders, and spans learned to be volatile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import structlog

from policies.layout import Laid, Learned, Value, described, lay_out, learn, order_tools, tool_key
from policies.layout_rules import RULES, Rule
from policies.layout_text import lines_of
from policies.types import digest

log = structlog.get_logger(__name__)

Json = dict[str, Any]

REPAIRS = (
    "learned",
    "tool_order",
    "moved_to_newest",
    "prune_deferred",
    "pruned",
    "gave_up",
    "placeholder",
    "content_form",
    "whitespace",
    "reminder",
    "arguments",
    "reasoning",
    "extra_keys",
)
"""Label values of `slotkeeper_repairs_total` beside the names of layout rules."""
NO_RULES = -1
"""Learned spans of a base that is left as it is but for the order of its tools: nobody is there to be told values."""
MOST_LAID = 32
"""Laid-out bases remembered by the digest of the client's own, over all tenants: a few agents and their sub-agents."""
MOST_ORDERS = 256
MOST_TOOLS = 2048
"""Tool lists and definitions per tenant; an agent has a handful of lists of 4 to 40 tools."""
MOST_BASES = 16
"""System texts per tenant that a new one is compared with."""
EVIDENT = 5
"""Versions of a span of plain words after which it is volatile. A person edits an instruction once or twice."""
MOST_LEARNED = 64
"""Spans per tenant that were found to change; more of them is an agent that no rule can help."""


@dataclass(frozen=True, slots=True)
class LaidBase:
    """A base as it is sent. `texts`: of the leading messages; `described`: of the tools; `system`, `tools_digest`: what
    decides the prefix.

    `opening`: system messages right behind the first user message (Claude Code's environment), laid out with it.
    """

    leading: tuple[Json, ...]
    tools: list[Json] | None
    values: tuple[Value, ...]
    changes: tuple[str, ...]
    texts: tuple[str, ...]
    system: bytes
    tools_digest: bytes
    n_learned: int
    opening: tuple[Json, ...] = ()
    described: str = ""


@dataclass(slots=True)
class _Tenant:
    """What one tenant's agents have sent so far. `learned` only grows: a line remembers how many it was laid out by."""

    orders: list[tuple[bytes, ...]] = field(default_factory=list)
    spelled: dict[bytes, Json] = field(default_factory=dict)
    bases: list[tuple[str, ...]] = field(default_factory=list)
    learned: tuple[Learned, ...] = ()


class Layouts:
    """Lays out bases; what it learns on the way is handed to `keep` (tenant, blob)."""

    def __init__(self, rules: Sequence[Rule] = RULES, keep: Callable[[str, bytes], None] = lambda *_: None) -> None:
        self._rules, self._keep = tuple(rules), keep
        self._tenants: dict[str, _Tenant] = {}
        self._laid: OrderedDict[tuple[str, bytes, int], LaidBase] = OrderedDict()

    def load(self, tenant: str, blob: bytes) -> None:
        """What an earlier run kept; a blob that is not whole is dropped."""
        try:
            self._tenants[tenant] = _from_blob(blob)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("layout_dropped", tenant=tenant, error=type(error).__name__)

    @property
    def rule_names(self) -> set[str]:
        """Names of the rules that bases are laid out by."""
        return {rule.name for rule in self._rules}

    def forget(self) -> None:
        """Everything that was learned."""
        self._tenants.clear()
        self._laid.clear()

    def n_learned(self, tenant: str) -> int:
        """Spans that a new line of this tenant is laid out by."""
        known = self._tenants.get(tenant)
        return len(known.learned) if known else 0

    def lay_out(
        self,
        tenant: str,
        leading: Sequence[Json],
        tools: object,
        raw: bytes,
        n_learned: int,
        opening: Sequence[Json] = (),
    ) -> LaidBase:
        """The base of a request. `raw`: digest of the client's own; `n_learned`: how many learned spans count."""
        key = tenant, raw, n_learned
        if key not in self._laid:
            self._laid[key] = self._lay_out(tenant, leading, tools, n_learned, opening)
            if len(self._laid) > MOST_LAID:
                self._laid.popitem(last=False)
        self._laid.move_to_end(key)
        return self._laid[key]

    def _lay_out(
        self, tenant: str, leading: Sequence[Json], tools: object, n_learned: int, opening: Sequence[Json]
    ) -> LaidBase:
        known = self._tenants.setdefault(tenant, _Tenant())
        given = tools if isinstance(tools, list) and all(isinstance(t, dict) for t in tools) else None
        is_told = n_learned != NO_RULES
        rules, learned = (self._rules, known.learned[:n_learned]) if is_told else ((), ())
        laid = lay_out([*leading, *opening], given, rules=rules, learned=learned)
        own, behind = laid.leading[: len(leading)], laid.leading[len(leading) :]
        ordered, reordered = self._ordered(tenant, known, laid)
        if given is None and tools is not None:
            ordered = tools  # nothing that we understand; the engine will say what it thinks of it
        return LaidBase(
            leading=own,
            opening=behind,
            tools=ordered,
            values=laid.values,
            changes=(*(c if c in self.rule_names else "learned" for c in laid.changes), *["tool_order"] * reordered),
            texts=tuple(map(text_of, own)),
            system=digest(*map(orjson.dumps, own)),
            tools_digest=digest(orjson.dumps(ordered)),
            n_learned=n_learned,
            described=described(laid.tools),
        )

    def _ordered(self, tenant: str, known: _Tenant, laid: Laid) -> tuple[Any, bool]:
        """The tools in their first-seen order and spelling, and whether that changed anything."""
        if not laid.tools:
            return laid.tools, False
        keys = [tool_key(tool) for tool in laid.tools]
        order = order_tools(keys, known.orders)
        new = {key: tool for key, tool in zip(keys, laid.tools, strict=True) if key not in known.spelled}
        spelled = {key: known.spelled.get(key) or new[key] for key in keys}
        if order not in known.orders and len(order) == len(set(order)):
            known.spelled |= new
            known.orders = [*known.orders[-MOST_ORDERS + 1 :], order]
            if len(known.spelled) > MOST_TOOLS:
                known.spelled = {key: known.spelled[key] for order in known.orders[-8:] for key in order}
                known.orders = known.orders[-8:]
            self._save(tenant, known)
        ordered = [spelled[key] for key in order]
        return ordered, ordered != laid.tools

    def meet(self, tenant: str, laid: LaidBase) -> bool:
        """A new session's base. True when it taught something: a known one differs only in volatile spans."""
        known = self._tenants.setdefault(tenant, _Tenant())
        texts = (*laid.texts, laid.described)
        if not any(laid.texts) or texts in known.bases:
            return False
        for other in reversed(known.bases):
            # Where the tools are others, or differ in more, the system text may still be one.
            if self._add(known, learn(other, texts, 1) or learn(other[:-1], laid.texts, 1) or ()):
                self._save(tenant, known)
                return True
        if self._add(known, _wording(known.bases, texts)):
            self._save(tenant, known)
            return True
        known.bases = [*known.bases[-MOST_BASES + 1 :], texts]
        self._save(tenant, known)
        return False

    def teach(self, tenant: str, old: tuple[str, ...], new: tuple[str, ...]) -> None:
        """Two requests of one line differed in their system texts: later lines are laid out without that."""
        known = self._tenants.setdefault(tenant, _Tenant())
        if self._add(known, learn(old, new, 1) or ()):
            self._save(tenant, known)

    def _add(self, known: _Tenant, found: Sequence[Learned]) -> bool:
        spans = {(k.prefix, k.suffix) for k in known.learned}
        fresh = [f for f in found if (f.prefix, f.suffix) not in spans][: MOST_LEARNED - len(known.learned)]
        for number, each in enumerate(fresh, len(known.learned) + 1):
            known.learned += (replace(each, name=f"value_{number}"),)
        return bool(fresh)

    def _save(self, tenant: str, known: _Tenant) -> None:
        self._keep(tenant, _to_blob(known))


def _wording(bases: Sequence[tuple[str, ...]], texts: tuple[str, ...]) -> list[Learned]:
    """Spans of words that are nobody's edit: they have EVIDENT versions in texts that are otherwise one."""
    versions: dict[Learned, set[str]] = {}
    for other in bases:
        for span in learn(other, texts, 1, wording=True) or ():
            words = {text[start:end] for text in (*other, *texts) for start, end in lines_of(text, span)}
            versions.setdefault(replace(span, name=""), set()).update(words)
    return [span for span, words in versions.items() if len(words) >= EVIDENT]


def opening_of(messages: Sequence[Json], first_user: int | None) -> range:
    """Positions of the system messages right behind the first user message; empty when there are none."""
    end = start = 0 if first_user is None else first_user + 1
    while 0 < end < len(messages) and messages[end].get("role") in ("system", "developer"):
        end += 1
    return range(start, end)


def text_of(message: Json) -> str:
    """The text of a message, its parts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


def _to_blob(known: _Tenant) -> bytes:
    return orjson.dumps(
        {
            "orders": [[key.hex() for key in order] for order in known.orders],
            "spelled": {key.hex(): tool for key, tool in known.spelled.items()},
            "bases": known.bases,
            "learned": [[span.prefix, span.suffix, span.name, span.is_words] for span in known.learned],
        }
    )


def _from_blob(blob: bytes) -> _Tenant:
    found = orjson.loads(blob)
    return _Tenant(
        orders=[tuple(bytes.fromhex(key) for key in order) for order in found["orders"]],
        spelled={bytes.fromhex(key): tool for key, tool in found["spelled"].items()},
        bases=[tuple(map(str, texts)) for texts in found["bases"]],
        learned=tuple(Learned(*entry) for entry in found["learned"]),
    )
