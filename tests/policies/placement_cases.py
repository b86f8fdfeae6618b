"""Any question that the slot table could ask, and what is read off the answer."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, event
from hypothesis import strategies as st

from policies.checkpoints import Memory
from policies.placement import SAVE_AT_LEAST, SMALL_TAIL, place
from policies.types import Abilities, Action, Place, Question, SlotFacts, SnapshotFacts

IN_PLACE = (Action.CONTINUE, Action.GUEST)
SIZES = st.one_of(st.sampled_from([0, SMALL_TAIL, SAVE_AT_LEAST, 300, 800, 2000, 5000, 9000]), st.integers(0, 1000))
OFTEN = st.sampled_from([True, True, True, False])
SELDOM = OFTEN.map(lambda often: not often)
ABILITIES = st.builds(
    Abilities,
    save=OFTEN,
    restore=OFTEN,
    rewind=OFTEN,
    rewind_files=OFTEN,
    memory=st.sampled_from([Memory(), Memory(window=128), Memory(recurrent=True)]),
    file_checkpoints=st.booleans(),
    save_cost=st.sampled_from([0.05, 0.0, 0.9, 3.0]),
    restore_cost=st.sampled_from([0.02, 0.0, 2.0]),
).map(lambda a: a if a.memory.rewinds else replace(a, rewind=False, rewind_files=False))


@st.composite
def slots(draw: st.DrawFn, number: int, n_prompt: int) -> SlotFacts:
    """One slot that can be. What is foreign may share tokens, too: they must not matter."""
    tokens = draw(st.one_of(st.just(0), SIZES))
    foreign = tokens > 0 and draw(SELDOM)
    ownerless = foreign and draw(st.booleans())
    part = st.one_of(st.just(tokens), st.integers(0, tokens))
    idle = draw(OFTEN) or draw(OFTEN)
    return SlotFacts(
        id=number,
        tokens=tokens,
        common=min(draw(part), n_prompt),
        idle=idle,
        family=not foreign and tokens > 0 and draw(SELDOM),
        foreign=foreign,
        ownerless=ownerless,
        saved=tokens if ownerless else draw(st.just(0) | part),
        last_used=float(draw(st.integers(0, 3))),
        settling=not idle and draw(st.booleans()),
        prompt=draw(st.none() | part),
        rigid=draw(st.just(0) | st.just(0) | part),
        checkpoints=(tokens // 3, tokens - 4) if tokens > 8 and draw(SELDOM) else (),
    )


@st.composite
def questions(draw: st.DrawFn, own_idle: bool | None = None, new: bool = False) -> Question:
    """Any question the slot table could ask.

    `own_idle`: its line has a slot, idle or busy as said, and `fresh` is off. `new`: it has none, but an empty slot is
    there and room for it beside all that is idle.
    """
    n_prompt = draw(SIZES) + 1
    table = [draw(slots(i, n_prompt)) for i in range(draw(st.integers(1, 5)))]
    ours = [s.id for s in table if not s.foreign and s.tokens and draw(SELDOM)]
    own = ours[0] if ours and not new else None
    if own_idle is not None:
        own = len(table)
        tokens = draw(SIZES) + 1
        table.append(
            SlotFacts(own, tokens, min(n_prompt, tokens), own_idle, settling=not own_idle and draw(st.booleans()))
        )
        table.append(SlotFacts(own + 1, 0))
    if new:
        table.append(SlotFacts(len(table), 0))
    if own is not None:
        table[own] = replace(table[own], mine=True, family=True)
    sizes = draw(st.lists(SIZES.map(lambda n: n + 1), max_size=3))
    busy = sum(s.tokens for s in table if not s.idle)
    reserved = busy + (draw(SIZES) if any(not s.idle for s in table) else 0)
    reserve = draw(SIZES)
    room = draw(st.none() | st.integers(0, 12_000))
    if new and room is not None:
        room = sum(s.tokens for s in table if s.idle) + n_prompt + reserve + draw(st.integers(0, 400))
    return Question(
        n_prompt=n_prompt,
        reserve=reserve,
        slots=tuple(table),
        snapshots=tuple(
            SnapshotFacts(f"s{i}", n, min(n_prompt, draw(st.one_of(st.just(n), st.integers(0, n)))))
            for i, n in enumerate(sizes)
        ),
        reserved=reserved,
        capacity=None if room is None else max(1, reserved + room),
        abilities=draw(ABILITIES),
        fresh=own_idle is None and draw(SELDOM),
        extends=own is not None,
    )


def slot_of(q: Question, number: int) -> SlotFacts:
    """The slot of that id."""
    return next(s for s in q.slots if s.id == number)


def placed(q: Question) -> tuple[Place, SlotFacts]:
    """The placement and its target; questions that have to wait are passed over."""
    decision = place(q)
    assume(isinstance(decision, Place))
    assert isinstance(decision, Place)
    event(decision.action)
    return decision, slot_of(q, decision.slot)


def claim(q: Question, p: Place) -> int:
    """Cells that the target may come to hold: prompt and reserve, or more where more is moved into it."""
    moved = slot_of(q, p.slot).tokens if p.action in IN_PLACE else 0
    if p.source is not None:
        moved = p.cut or slot_of(q, p.source).tokens
    if p.snapshot is not None:
        moved = next(s.tokens for s in q.snapshots if s.id == p.snapshot)
    assert q.capacity is not None
    return min(q.capacity, max(q.n_prompt + q.reserve, moved))


def used(q: Question, p: Place, evicted: set[int]) -> int:
    """Cells in use or promised once `p` runs and `evicted` are empty."""
    return q.reserved + claim(q, p) + sum(s.tokens for s in q.slots if s.idle and s.id not in evicted | {p.slot})
