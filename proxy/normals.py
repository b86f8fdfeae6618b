"""Digests of messages: as they are spelled, and of their normal form, each computed once per spelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from policies.append_only import Defaults, defaults_of, normal
from policies.types import digest

Json = dict[str, Any]

MOST_KNOWN = 65_536
"""Spellings remembered: a hundred long conversations, a few megabytes."""
MOST_TOOLS = 64
"""Tool lists whose defaults are remembered."""


class Normals:
    """A cache by content, of each tenant its own (design.md, rule 3: not even timing crosses tenants)."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes, bytes], bytes] = {}
        self._defaults: dict[bytes, tuple[bytes, Defaults]] = {}

    def of(self, tenant: str, messages: Sequence[Json], raws: Sequence[bytes], tools: object) -> tuple[bytes, ...]:
        """Digests of the messages' normal forms. `raws`: of their spelling. Safe from any thread."""
        name, defaults = self.defaults(tools)
        if len(self._known) > MOST_KNOWN:
            self._known = {}
        known, normals = self._known, []
        for raw, message in zip(raws, messages, strict=True):
            found = known.get((tenant, name, raw))
            if found is None:
                found = known[tenant, name, raw] = digest(normal(message, defaults))
            normals.append(found)
        return tuple(normals)

    def defaults(self, tools: object) -> tuple[bytes, Defaults]:
        """(a name for them, schema defaults per tool and parameter)."""
        key = digest(orjson.dumps(tools))
        if key not in self._defaults:
            if len(self._defaults) >= MOST_TOOLS:
                self._defaults = {}
            found = defaults_of(tools if isinstance(tools, list) else [])
            # Tools without defaults are all alike here, so that a title request knows the messages of its session.
            name = digest(orjson.dumps(found, option=orjson.OPT_SORT_KEYS)) if any(found.values()) else b""
            self._defaults[key] = (name, found)
        return self._defaults[key]
