"""The slot table under random series of requests, answers, cancellations and losses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.placement import place
from policies.queue import MAX_BYPASSED
from policies.slot_state import IllegalStep, SlotEvent, SlotState
from policies.types import Abilities, Action, Match, Place, Prompt, SnapshotFacts, Wait
from proxy.errors import Busy, WaitedTooLong
from proxy.lines import Identity, Line
from proxy.slots import Grant, NeedsTokens, Slot, SlotTable, Want

MAX_WAITING = 4
TENANTS = ("a", "b")
PICK = st.integers(0, 99)


def text(seed: int, n: int) -> bytes:
    """Packed tokens; seeds of the same tens share a base of 150, all of one seed are prefixes of each other."""
    shared, own = min(n, 150), max(0, n - 150)
    tokens = [seed // 10] * shared + [1000 + seed] * own
    return b"".join(t.to_bytes(4, "little") for t in tokens)


@dataclass(eq=False)
class Request:
    """A task that asks for a slot, and what it got. `late`: its time is up at once if it has to wait."""

    task: asyncio.Task[Grant]
    want: Want
    late: bool = False
    left: bool = False


@dataclass(eq=False)
class Held:
    """A grant that somebody holds."""

    grant: Grant
    want: Want


class SlotTableMachine(RuleBasedStateMachine):
    """Who holds what is kept here a second time; the table has to agree after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.lines: dict[tuple[str, int], Line] = {}
        self.waiting: list[Request] = []
        self.held: list[Held] = []
        self.kept: list[Slot] = []
        """Slots that the keeper has leased."""
        self.admitted: set[int] = set()

    @initialize(
        n_slots=st.integers(1, 4),
        capacity=st.none() | st.integers(200, 2500),
        files=st.booleans(),
        rewind=st.booleans(),
    )
    def start(self, n_slots: int, capacity: int | None, files: bool, rewind: bool) -> None:
        abilities = Abilities(save=files, restore=files, rewind=rewind)
        self.table = SlotTable(n_slots, capacity, abilities, lambda: self.now, MAX_WAITING)

    def turn(self) -> None:
        """Lets every task run on as far as it can, and takes note of what became of it.

        Again and again: the victims that a grant gives back may be the next grant.
        """
        while True:
            for _ in range(6):
                self.loop.call_soon(self.loop.stop)
                self.loop.run_forever()
            done = [r for r in self.waiting if r.task.done()]
            if not done:
                return
            for request in done:
                self.waiting.remove(request)
                self._ended(request)

    def _ended(self, request: Request) -> None:
        if request.task.cancelled():
            assert request.left
            return
        error = request.task.exception()
        if error is None:
            self._granted(Held(request.task.result(), request.want))
        elif isinstance(error, WaitedTooLong):
            assert request.late
        else:
            assert isinstance(error, NeedsTokens)
            assert request.want.is_hot

    def _granted(self, held: Held) -> None:
        """A slot is leased to one at a time; victims and source are given back at once, as carry_out does."""
        g = held.grant
        mine = [g.target, *([g.source] if g.source else []), *g.victims]
        assert not {s.id for s in mine} & {s.id for s in self.leased()}
        assert all(s.state is SlotState.LEASED for s in mine)
        self.held.append(held)
        for victim in g.victims:
            victim.clear()
            self.table.release(victim)
        if g.source is not None:
            self.table.release(g.source)
        if g.place.erase_first:
            g.target.clear()
        assert g.target.runner is not None
        assert g.target.runner.order not in self.admitted  # several grants of one turn are seen in any order
        self.admitted.add(g.target.runner.order)

    def leased(self) -> list[Slot]:
        """Slots that somebody is known to hold."""
        return [h.grant.target for h in self.held] + self.kept

    def ask(self, want: Want, late: bool) -> None:
        """A request comes in."""
        full = self.table.n_waiting >= MAX_WAITING
        task = self.loop.create_task(self.table.acquire(want, 0.0 if late else 1e6))
        if full:
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            if isinstance(task.exception(), Busy):
                assert isinstance(place(self.table.question(want)), Wait) or want.is_hot
                return
            assert task.exception() is not None or task.result().target.runner
        self.waiting.append(Request(task, want, late))

    # --- steps ---

    @rule(
        tenant=st.sampled_from(TENANTS),
        seed=st.sampled_from([10, 11, 12, 20, 21]),
        n=st.integers(1, 900),
        reserve=st.integers(0, 600),
        late=st.integers(0, 4).map(lambda n: n == 0),
        fresh=st.integers(0, 5).map(lambda n: n == 0),
        hot=st.booleans(),
        snapshot=st.none() | st.integers(1, 900),
    )
    def acquire(
        self, tenant: str, seed: int, n: int, reserve: int, late: bool, fresh: bool, hot: bool, snapshot: int | None
    ) -> None:
        """Any prompt: of a known line or a new one, rendered or not, in time or not."""
        line = self.lines.setdefault(
            (tenant, seed), Line(f"{tenant}{seed}", Identity(tenant), Prompt(b"", b"", b"", (), ()), b"")
        )
        slot = self.table.holding(line.id)
        want = Want(line, Match.NEW, n, reserve, lambda: None, text(seed, n), fresh=fresh)
        if snapshot is not None:
            facts = (SnapshotFacts("s", snapshot, min(n, snapshot)),)
            want.snapshots = lambda: facts
        if slot is not None:
            want.match, want.n_prompt = Match.EXTENDS, slot.n_tokens + n
            want.tokens, want.is_hot = text(seed, want.n_prompt), hot and not fresh
            if want.is_hot:
                want.tokens = None
        self.ask(want, late)
        self.turn()

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK)
    def client_leaves(self, pick: int) -> None:
        request = self.waiting[pick % len(self.waiting)]
        request.left = True
        request.task.cancel()
        self.turn()

    @precondition(lambda self: self.held)
    @rule(pick=PICK, share=st.floats(0, 1))
    def answered(self, pick: int, share: float) -> None:
        self._answer(self.held[pick % len(self.held)], share)
        self.turn()

    def _answer(self, held: Held, share: float) -> None:
        """The slot holds the prompt and a part of the reply that was reserved; the lease comes back."""
        self.held.remove(held)
        slot, w = held.grant.target, held.want
        if slot.state is SlotState.BUSY:
            slot.apply(SlotEvent.ANSWERED)
        slot.n_tokens = w.n_prompt + int(share * w.reserve)
        if self.table.capacity is not None:
            slot.n_tokens = min(slot.n_tokens, self.table.capacity)
        if held.grant.place.action is not Action.GUEST or slot.line is None:
            slot.line = w.line.id
        slot.tenant, slot.tokens = w.tenant, w.tokens if w.tokens is not None else slot.tokens
        self.now += 1
        slot.last_used = self.now
        self.table.release(slot)

    @precondition(lambda self: self.held and self.waiting)
    @rule(pick=PICK, which=PICK, cancel_first=st.booleans())
    def client_leaves_in_the_moment_of_the_grant(self, pick: int, which: int, cancel_first: bool) -> None:
        """Both in one turn of the loop, in either order."""
        request = self.waiting[which % len(self.waiting)]
        request.left = True
        if cancel_first:
            request.task.cancel()
        self._answer(self.held[pick % len(self.held)], 0.5)
        if not cancel_first:
            request.task.cancel()
        self.turn()

    @precondition(lambda self: any(h.grant.target.state is SlotState.LEASED for h in self.held))
    @rule(pick=PICK)
    def send(self, pick: int) -> None:
        ready = [h for h in self.held if h.grant.target.state is SlotState.LEASED]
        ready[pick % len(ready)].grant.target.apply(SlotEvent.SEND)

    @precondition(lambda self: self.held)
    @rule(pick=PICK, n=st.integers(0, 900))
    def client_leaves_a_running_request(self, pick: int, n: int) -> None:
        """What the slot holds is in doubt until the engine reports it."""
        held = self.held.pop(pick % len(self.held))
        slot = held.grant.target
        slot.apply(SlotEvent.CANCELLED)
        self.turn()
        assert slot.state is SlotState.UNKNOWN
        slot.clear()
        slot.n_tokens = min(n, slot.claims, self.table.capacity or n)
        slot.tenant = held.want.tenant if slot.n_tokens else None
        self.table.release(slot)
        self.turn()

    @precondition(lambda self: any(s.is_idle for s in self.table.slots))
    @rule(pick=PICK)
    def keeper_leases(self, pick: int) -> None:
        idle = [s for s in self.table.slots if s.is_idle]
        slot = idle[pick % len(idle)]
        self.table.lease(slot)
        self.kept.append(slot)

    @precondition(lambda self: self.kept)
    @rule(pick=PICK)
    def keeper_releases(self, pick: int) -> None:
        self.table.release(self.kept.pop(pick % len(self.kept)))
        self.turn()

    @precondition(lambda self: any(s.is_idle for s in self.table.slots))
    @rule(pick=PICK, share=st.floats(0, 1))
    def engine_corrects(self, pick: int, share: float) -> None:
        idle = [s for s in self.table.slots if s.is_idle]
        slot = idle[pick % len(idle)]
        before = slot.line
        assert self.table.correct(slot, int(share * slot.n_tokens)) == ([before] if before else [])
        self.turn()

    @rule()
    def engine_restarts(self) -> None:
        """Leases stay, content goes; whoever waits goes on waiting."""
        content = {s.id: (s.line, s.n_tokens) for s in self.table.slots if s.n_tokens}
        assert self.table.lose_all() == list(content.values())
        assert not any(s.n_tokens or s.line or s.tokens for s in self.table.slots)
        self.table.pump()
        self.turn()

    @precondition(lambda self: any(s.is_idle for s in self.table.slots))
    @rule(pick=PICK)
    def nobody_gives_back_what_is_free(self, pick: int) -> None:
        idle = [s for s in self.table.slots if s.is_idle]
        with pytest.raises(IllegalStep):
            self.table.release(idle[pick % len(idle)])

    # --- what must hold after each ---

    @invariant()
    def every_lease_has_one_holder(self) -> None:
        """No slot is lost, none is held twice."""
        leased = [s.id for s in self.leased()]
        assert sorted(leased) == [s.id for s in self.table.slots if not s.is_idle]
        assert {s.id for s in self.table.runners()} == {h.grant.target.id for h in self.held}

    @invariant()
    def the_pool_is_not_promised_twice(self) -> None:
        if self.table.capacity is not None and len(self.held) > 1:
            assert sum(s.claims for s in self.table.slots if not s.is_idle) <= self.table.capacity

    @invariant()
    def the_line_is_those_who_wait(self) -> None:
        assert self.table.n_waiting == len(self.waiting) <= MAX_WAITING
        assert len(self.table.waiting()) == len(self.waiting)

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        """Whoever may be tried cannot be placed; one that was bypassed often enough holds up the others."""
        starved = [w for w in self.table._waiters.values() if w.bypassed >= MAX_BYPASSED]
        assert all(w.bypassed <= MAX_BYPASSED for w in self.table._waiters.values())
        tried = [min(starved, key=lambda w: w.key).want] if starved else [request.want for request in self.waiting]
        assert all(isinstance(place(self.table.question(want)), Wait) for want in tried)

    @invariant()
    def foreign_tokens_are_never_seen(self) -> None:
        for tenant in TENANTS:
            line = Line("probe", Identity(tenant), Prompt(b"", b"", b"", (), ()), b"")
            for facts in self.table.question(Want(line, Match.NEW, 300, 0, lambda: None, text(10, 300))).slots:
                assert facts.common == 0 or self.table.slots[facts.id].tenant == tenant

    def teardown(self) -> None:
        """The loop is closed whatever is found: an open one is reported in some later test."""
        try:
            if hasattr(self, "table"):
                self.end_all()
        finally:
            self.loop.close()

    def end_all(self) -> None:
        """All clients leave and all leases come back: nothing is left, and any prompt finds a place."""
        for request in self.waiting:
            request.left = True
            request.task.cancel()
        self.turn()
        while self.held:
            self._answer(self.held[0], 1.0)
            self.turn()
        while self.kept:
            self.table.release(self.kept.pop())
        assert (self.waiting, self.table.n_waiting, self.table.runners()) == ([], 0, [])
        assert all(s.is_idle for s in self.table.slots)
        line = Line("last", Identity("c"), Prompt(b"", b"", b"", (), ()), b"")
        assert isinstance(place(self.table.question(Want(line, Match.NEW, 5000, 5000, lambda: None))), Place)
        self.table.lose_all()
        assert self.table.used() == 0


TestSlotTable = SlotTableMachine.TestCase
TestSlotTable.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
