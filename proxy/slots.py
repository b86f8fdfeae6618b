"""The slot table of one engine: what each slot holds, who holds its lease, who waits.

Everything that decides or changes the table is a plain `def`: no await can come between looking and taking. Nobody
touches a slot without its lease (design.md, rule 4); `release` is the only way back and is given once per lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from policies.checkpoints import Checkpoints
from policies.placement import place
from policies.prefix import common_prefix, n_tokens
from policies.queue import MAX_BYPASSED, Waiting, order
from policies.slot_state import SlotEvent, SlotState, is_free_to_lease, step
from policies.types import Abilities, Action, Match, Place, Question, SlotFacts, SnapshotFacts
from proxy.errors import Busy, WaitedTooLong
from proxy.lines import Line
from proxy.runner import Runner


@dataclass(slots=True, eq=False)
class Slot:
    """One slot as we believe it to be. `tokens`: the part of its content that is known exactly, packed.

    `n_tokens`: cells in use by the engine's own count; `body`: the newest chat body that runs here, `base` its base's
    digest; `is_rendered`: its tokens are known; `saved`: tokens that a snapshot holds.
    """

    id: int
    state: SlotState = SlotState.EMPTY
    line: str | None = None
    tenant: str | None = None
    n_tokens: int = 0
    tokens: bytes = b""
    body: bytes | None = None
    base: bytes = b""
    is_rendered: bool = True
    n_prompt: int | None = None
    """Tokens of the owner's newest prompt, the reply after it left out; None: of all that it holds."""
    n_left: int | None = None
    """Tokens that a guest left of the owner's content (it may have replaced the end of a reply); None: all."""
    boundary: int | None = None
    """Tokens up to which the engine can go back at once: the newest prompt's end, of which it keeps a checkpoint."""
    replies_return: bool = False
    """The line's last reply came back token for token."""
    saved: int = 0
    snapshot: str | None = None
    """Id of the snapshot that holds the first `saved` tokens."""
    rigid: int = 0
    """Its first tokens that can only be kept together (policies/types.SlotFacts)."""
    checkpoints: Checkpoints = ()
    """Where the engine can go back to (policies/checkpoints)."""
    was_restored: bool = False
    """Its content came from a file and no request has run on it since: GET /slots does not count it."""
    is_purged: bool = False
    """Its snapshots were purged, and no request has run on it since: it is not to be saved."""
    last_used: float = 0.0
    runner: Runner | None = None

    def apply(self, event: SlotEvent) -> None:
        """One step of policies/slot_state."""
        self.state = step(self.state, event)

    def file_done(self, during: SlotState) -> bool:
        """A save or restore has ended; False when the engine was lost meanwhile, and the slot with it."""
        if self.state is not during:
            return False
        self.apply(SlotEvent.FILE_DONE)
        return True

    def clear(self) -> None:
        """Its content is gone."""
        self.line = self.tenant = self.body = self.snapshot = self.n_left = None
        self.is_rendered, self.n_prompt, self.boundary, self.replies_return = True, None, None, False
        self.n_tokens, self.saved, self.rigid, self.checkpoints = 0, 0, 0, ()
        self.tokens, self.was_restored, self.is_purged = b"", False, False

    def clear_owner(self) -> None:
        """What it holds is nobody's; its cells are not free yet."""
        n_tokens = self.n_tokens
        self.clear()
        self.n_tokens = n_tokens

    @property
    def is_idle(self) -> bool:
        """Free to lease."""
        return is_free_to_lease(self.state)

    @property
    def n_owned(self) -> int:
        """Tokens that the owner finds again."""
        return self.n_tokens if self.n_left is None else min(self.n_tokens, self.n_left)

    @property
    def claims(self) -> int:
        """Cells of the pool that must be kept for it."""
        return max(self.n_tokens, self.runner.need if self.runner else 0)


@dataclass(slots=True, eq=False)
class Want:
    """A request for a slot. `tokens`: its prompt, packed, when rendered; `is_hot`: unrendered, it can only continue.
    `most`: tokens that it may share with what its own line left, where it does not go on behind the reply there.
    `n_most`: what an estimated `n_prompt` may come to at most."""

    line: Line
    match: Match
    n_prompt: int
    reserve: int
    stop: Callable[[], None]
    tokens: bytes | None = None
    stem: str | None = None
    fresh: bool = False
    snapshots: Callable[[], tuple[SnapshotFacts, ...]] = tuple
    is_hot: bool = False
    most: int | None = None
    n_most: int = 0

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.line.who.tenant


MOST_TENANTS = 1024
"""Tenants whose last turn is remembered; a salt makes a tenant of its own, so they have no natural bound."""


class NeedsTokens(Exception):
    """A prompt that was to continue in its line's slot cannot, or may overflow the pool there: it must be rendered."""

    def __init__(self, place_in_line: int) -> None:
        super().__init__()
        self.place_in_line = place_in_line


@dataclass(slots=True, eq=False)
class Grant:
    """Leases on a target slot and on all slots that carrying out the placement touches."""

    place: Place
    target: Slot
    source: Slot | None
    victims: list[Slot]


@dataclass(slots=True, eq=False)
class _Waiter:
    key: int
    want: Want
    granted: asyncio.Future[Grant]
    since: float
    bypassed: int = 0


@dataclass(eq=False)
class SlotTable:
    """Slots, leases and waiting line of one engine instance. `capacity`: cells of the shared pool, or None if split."""

    n_slots: int
    capacity: int | None
    abilities: Abilities
    clock: Callable[[], float]
    max_waiting: int = 64
    is_kept: Callable[[str], bool] = lambda _: True
    """Whether the snapshot of that id still exists."""
    slots: list[Slot] = field(init=False)
    waits: int = 0
    watch: Callable[[], None] = lambda: None
    """Called when a runner has outgrown its reserve, at each further token."""
    _waiters: dict[int, _Waiter] = field(default_factory=dict)
    _served: dict[str, int] = field(default_factory=dict)
    _next: int = 0

    def __post_init__(self) -> None:
        self.slots = [Slot(i) for i in range(self.n_slots)]

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        """Requests in the waiting line."""
        return len(self._waiters)

    def waiting(self) -> list[tuple[Want, float]]:
        """The waiting line in the order of arrival, and since when each waits, by `clock`."""
        return [(w.want, w.since) for _, w in sorted(self._waiters.items())]

    def holding(self, line_id: str) -> Slot | None:
        """The slot that holds the most of a line."""
        return max((s for s in self.slots if s.line == line_id), key=lambda s: s.n_tokens, default=None)

    def runners(self) -> list[Slot]:
        """Slots with a request, oldest admission first."""
        return sorted((s for s in self.slots if s.runner), key=lambda s: s.runner.order if s.runner else 0)

    def used(self) -> int:
        """Cells that are taken or promised."""
        return sum(s.claims for s in self.slots)

    def saved_of(self, slot: Slot) -> int:
        """Tokens of a slot that need not be saved: a snapshot that still exists holds them, or they are not wanted."""
        if slot.line is None or slot.is_purged:
            return slot.n_tokens
        return slot.saved if slot.snapshot is not None and self.is_kept(slot.snapshot) else 0

    def question(self, want: Want) -> Question:
        """What placement has to know, as of now."""
        own = self.holding(want.line.id) if want.match is Match.EXTENDS else None
        return Question(
            n_prompt=want.n_prompt,
            reserve=want.reserve,
            slots=tuple(self._facts(s, want, s is own) for s in self.slots),
            snapshots=want.snapshots(),
            reserved=sum(s.claims for s in self.slots if not s.is_idle),
            capacity=self.capacity,
            abilities=self.abilities,
            fresh=want.fresh,
            extends=own is not None,
        )

    def _facts(self, slot: Slot, want: Want, mine: bool) -> SlotFacts:
        # Content whose owner is unknown may be anybody's (design.md, rule 3).
        foreign = slot.n_tokens > 0 and slot.tenant != want.tenant
        return SlotFacts(
            id=slot.id,
            tokens=slot.n_tokens,
            common=0 if foreign else _common(slot, want, mine),
            idle=slot.is_idle,
            mine=mine,
            family=not foreign and slot.line is not None and slot.line in (want.line.id, want.stem),
            foreign=foreign,
            ownerless=slot.line is None,
            saved=self.saved_of(slot),
            last_used=slot.last_used,
            prompt=slot.n_prompt,
            rigid=slot.rigid,
            checkpoints=slot.checkpoints,
            settling=slot.state is SlotState.UNKNOWN,
        )

    # --- taking and giving back -------------------------------------------------------------------------------------

    async def acquire(self, want: Want, seconds: float, *, place_in_line: int | None = None) -> Grant:
        """Waits its turn for a placement and the leases it needs; raises Busy when the line is full, WaitedTooLong.

        `place_in_line`: where it stood before it had to be rendered (NeedsTokens). A cancelled wait leaves nothing
        behind, also when the grant came in the same moment."""
        self._next += 1
        waiter = _Waiter(place_in_line or self._next, want, asyncio.Future(), self.clock())
        self._waiters[waiter.key] = waiter
        try:
            self.pump()
            if not waiter.granted.done():
                if len(self._waiters) > self.max_waiting:
                    raise self._full()
                self.waits += 1
            async with asyncio.timeout(seconds):
                return await waiter.granted
        except TimeoutError:
            self._give_up(waiter)
            raise WaitedTooLong(f"No slot became free in {seconds:.0f} s; try again, or serve more slots.") from None
        except BaseException:
            self._give_up(waiter)
            raise

    def require_place(self, n_requests: int) -> None:
        """Raises Busy for one more beside `n_requests`, before it is rendered: that costs the engine time, too."""
        if n_requests >= self.n_slots + self.max_waiting:
            raise self._full()

    def _full(self) -> Busy:
        return Busy(f"The waiting line is full ({self.max_waiting}); try again when some requests are done.")

    def pump(self) -> None:
        """Grants what can be granted, in the order of policies/queue."""
        aside: set[int] = set()
        while self._pump(aside):
            pass

    def _pump(self, aside: set[int]) -> bool:
        """One pass without those that wait `aside` by choice; True when it stopped at one more of them."""
        # One that was cancelled stays in the line until its task runs again; a grant would be lost with it.
        waiting = tuple(w for w in self._waiters.values() if not w.granted.done() and w.key not in aside)
        tried = order(tuple(Waiting(w.key, w.want.tenant, w.bypassed) for w in waiting), self._served)
        passed: list[_Waiter] = []
        for key in tried:
            if any(earlier.bypassed >= MAX_BYPASSED for earlier in passed):
                return False
            waiter = self._waiters[key]
            decision = place(self.question(waiter.want))
            if not isinstance(decision, Place):
                if decision.by_choice:
                    aside.add(key)
                    if waiter.bypassed >= MAX_BYPASSED:
                        return True
                else:
                    passed.append(waiter)
                continue
            if waiter.want.is_hot and (decision.action is not Action.CONTINUE or self._is_tight(waiter.want)):
                del self._waiters[key]
                waiter.granted.set_exception(NeedsTokens(key))
                continue
            for earlier in passed:
                earlier.bypassed += earlier.key < key
            del self._waiters[key]
            waiter.granted.set_result(self._lease(waiter, decision))
        return False

    def _is_tight(self, want: Want) -> bool:
        """An estimate is not good enough: if it is as wrong as it may be, it and those who run overflow the pool."""
        reserved = sum(s.claims for s in self.slots if not s.is_idle)
        return self.capacity is not None and reserved > 0 and reserved + want.n_most + want.reserve > self.capacity

    def lease(self, slot: Slot) -> None:
        """Takes an idle slot for work of our own (the keeper); raises IllegalStep when it is not idle."""
        slot.apply(SlotEvent.LEASE)

    def release(self, slot: Slot) -> None:
        """Gives a lease back; whoever waits is served. The slot's counts must be right before."""
        slot.apply(SlotEvent.RELEASE_FULL if slot.n_tokens else SlotEvent.RELEASE_EMPTY)
        slot.runner = None
        if not slot.n_tokens:
            slot.clear()
        self.pump()

    def lose_all(self) -> list[tuple[str | None, int]]:
        """The engine restarted: every slot is empty; leases stay with their holders. Returns lines that lost a slot."""
        lost = [(s.line, s.n_tokens) for s in self.slots if s.n_tokens]
        for slot in self.slots:
            slot.clear()
            slot.apply(SlotEvent.LOST)
        return lost

    def lose_idle(self) -> list[str]:
        """The engine unloaded its model: idle slots are empty. Returns the lines that lost one."""
        return [line for slot in self.slots if slot.is_idle and slot.n_tokens for line in self.correct(slot, 0)]

    def correct(self, slot: Slot, n_real: int) -> list[str]:
        """An idle slot does not hold what we believed: what it holds is nobody's. Returns the line that lost it."""
        self.lease(slot)
        lost = [slot.line] if slot.line else []
        slot.clear()
        slot.n_tokens = n_real
        self.release(slot)
        return lost

    def refuse_waiting(self, error: Exception) -> None:
        """Nobody can be served any more: each waiting request gets `error`."""
        for waiter in list(self._waiters.values()):
            if not waiter.granted.done():
                waiter.granted.set_exception(error)
        self._waiters.clear()

    def _lease(self, waiter: _Waiter, decision: Place) -> Grant:
        target, want = self.slots[decision.slot], waiter.want
        source = self.slots[decision.source] if decision.source is not None else None
        victims = [self.slots[e.slot] for e in decision.evictions]
        for slot in [target, *([source] if source else []), *victims]:
            slot.apply(SlotEvent.LEASE)
        self._next += 1
        self._served.pop(want.tenant, None)
        self._served[want.tenant] = self._next
        if len(self._served) > MOST_TENANTS:
            del self._served[next(iter(self._served))]
        target.runner = Runner(self._next, want.n_prompt, want.reserve, want.stop, watch=self.watch)
        return Grant(decision, target, source, victims)

    def _give_up(self, waiter: _Waiter) -> None:
        self._waiters.pop(waiter.key, None)
        if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
            grant = waiter.granted.result()
            for slot in [grant.target, *([grant.source] if grant.source else []), *grant.victims]:
                self.release(slot)
        else:
            self.pump()


def _common(slot: Slot, want: Want, mine: bool) -> int:
    own = slot.n_owned if want.most is None else min(slot.n_owned, want.most)
    if want.tokens is None:
        return own if mine else 0
    shared = common_prefix(slot.tokens, want.tokens)
    if mine and shared == n_tokens(slot.tokens):
        return min(own, n_tokens(want.tokens))
    return min(shared, slot.n_tokens)
