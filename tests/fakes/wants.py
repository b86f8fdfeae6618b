"""Wants, and a slot table to ask with them, without an engine."""

from __future__ import annotations

import asyncio

from policies.types import Abilities, Match, Prompt, digest
from proxy.lines import Identity, Line
from proxy.slots import Grant, Slot, SlotTable, Want

LONG = 1000.0
"""Seconds that no test waits."""


def packed(*tokens: int) -> bytes:
    """Packed little-endian int32."""
    return b"".join(t.to_bytes(4, "little") for t in tokens)


def line_of(name: str, tenant: str = "local") -> Line:
    """A line of that id."""
    return Line(name, Identity(tenant), Prompt(b"", b"", b"", (), ()), b"")


def want(name: str = "a", n: int = 100, reserve: int = 10, tenant: str = "local", **fields: object) -> Want:
    """A new conversation that shares nothing with any other."""
    tokens = packed(*(int.from_bytes(digest(name.encode())[:2], "little") * 1000 + i for i in range(n)))
    made = Want(line_of(name, tenant), Match.NEW, n, reserve, lambda: None, tokens=tokens)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def table(n_slots: int = 2, capacity: int | None = None, **fields: object) -> SlotTable:
    """Of an engine without slot files, unless said otherwise."""
    made = SlotTable(n_slots, capacity, Abilities(save=False, restore=False), clock=lambda: 0.0)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def answered(t: SlotTable, grant: Grant, w: Want, n_more: int = 0) -> None:
    """The request was answered with `n_more` tokens: its slot holds it, and is given back."""
    slot = grant.target
    slot.line, slot.tenant, slot.tokens = w.line.id, w.tenant, w.tokens or slot.tokens
    slot.n_tokens = w.n_prompt + n_more
    t.release(slot)


async def turn(n: int = 5) -> None:
    """Lets every task run on as far as it can."""
    for _ in range(n):
        await asyncio.sleep(0)


async def put(t: SlotTable, slot: int, w: Want, n_more: int = 0) -> Slot:
    """A line lies in that slot, idle."""
    for other in t.slots[:slot]:
        t.lease(other)
    grant = await t.acquire(w, LONG)
    assert grant.target.id == slot
    answered(t, grant, w, n_more)
    for other in t.slots[:slot]:
        t.release(other)
    return grant.target
