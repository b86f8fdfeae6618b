"""Which slot runs a prompt, and where its tokens come from: by cost, in tokens, never by ratio.

Every idle slot is a possible target. The prompt's tokens come from what the target holds (in place), from a snapshot
loaded into it, from another slot copied into it through a file (fork), or from nowhere. The cost of a choice is the
prefill that is left, the price of the files it moves, and what it destroys, all in prefill tokens; the cheapest wins.
llama-server's own rule (get_available_slot: common prefix / new prompt length > 0.10, else least recently used) lets a
new conversation overwrite the tail of an old one while three slots are empty; that is what this replaces.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import nsmallest

from policies import checkpoints
from policies.types import (
    Abilities,
    Action,
    Decision,
    Eviction,
    Place,
    Question,
    SlotFacts,
    SnapshotFacts,
    Wait,
)

SMALL_TAIL = 16
"""A lost tail of so few tokens is not worth a thought: a reply's last tokens are tokenised again anyway."""
SAVE_AT_LEAST = 64
"""Tokens below which a file is neither written nor read: a prefill of this size costs less than the stop."""
GUEST_AT_MOST = 2048
"""Prompt tokens and reserve beyond the owner's end that a guest may bring; more is a conversation of its own."""
WAIT_WORTH = 4096
"""Tokens that waiting for the line's own busy slot must spare. One reply of some hundred tokens takes about as long as
this prefill (decode runs at 1/10 to 1/40 of the speed of prefill on CPUs and GPUs alike)."""
FAMILY_RETURNS = 0.1
"""How likely an abandoned branch of the same conversation is asked for again."""
MOST_SNAPSHOTS = 8
"""Snapshots that are weighed for one prompt, each with every slot."""


@dataclass(frozen=True, slots=True)
class _Choice:
    cost: float
    place: Place
    destroys: bool


def place(q: Question) -> Decision:
    """Where to run the prompt of `q`, or why it has to wait. Deterministic; touches nothing."""
    own = next((s for s in q.slots if s.mine), None)
    idle = [s for s in q.slots if s.idle]
    if not idle:
        return Wait("every slot is busy")
    if own is not None and own.idle and _goes_on(q, own):
        return _with_room(q, _in_place(q, own), own) or Wait("the pool has no room beside the running requests")
    choices = sorted(_choices(q, idle), key=_rank)
    if own is not None and not own.idle and q.extends and not q.fresh:
        best = choices[0].place.predicted_cache_n if choices else 0
        if own.settling or _reusable(q, own) - best >= WAIT_WORTH:
            return Wait("the slot of its line is busy", by_choice=bool(choices))
    if not choices:
        return Wait("the pool has no room beside the running requests")
    return choices[0].place


def _rank(c: _Choice) -> tuple[bool, float, int, int, str]:
    p = c.place
    return c.destroys, c.cost, p.slot, -1 if p.source is None else p.source, p.snapshot or ""


def most_useful(a: Abilities, n_prompt: int, snapshots: Iterable[SnapshotFacts]) -> tuple[SnapshotFacts, ...]:
    """The MOST_SNAPSHOTS that spare a prompt of `n_prompt` tokens most, best first. Where memory cannot be rewound the
    longest common prefix is worth nothing in a file that goes on otherwise, so what is reused counts."""
    q = Question(n_prompt, 0, (), abilities=a)
    return tuple(nsmallest(MOST_SNAPSHOTS, snapshots, key=lambda s: (_load_price(q, s) - _reusable_file(q, s), s.id)))


def is_worth_saving(q: Question, slot: SlotFacts) -> bool:
    """A snapshot of the slot costs less than processing what it alone holds."""
    a = q.abilities
    return a.save and slot.at_stake >= SAVE_AT_LEAST and a.save_cost * slot.tokens < slot.at_stake


def _choices(q: Question, idle: list[SlotFacts]) -> Iterator[_Choice]:
    has_empty = any(s.is_empty for s in idle)
    for target in idle:
        for base, destroys in _ways(q, target, idle):
            roomy = _with_room(q, base, target)
            if roomy is None:
                continue
            left = q.n_prompt - base.predicted_cache_n
            cost = left + _file_price(q, base) + _loss_price(q, target, in_place=base.action in _IN_PLACE)
            cost += sum(_loss_price(q, _slot(q, e.slot), in_place=False) for e in roomy.evictions)
            yield _Choice(cost, roomy, (destroys or _loses_others(q, roomy)) and has_empty)


def _loses_others(q: Question, p: Place) -> bool:
    """Making room for it throws away another line's tokens that no snapshot holds, and that were worth a file."""
    victims = ((e, _slot(q, e.slot)) for e in p.evictions)
    return any(not e.save and not s.family and s.at_stake >= SAVE_AT_LEAST for e, s in victims)


_IN_PLACE = (Action.CONTINUE, Action.GUEST)


def _ways(q: Question, target: SlotFacts, idle: list[SlotFacts]) -> Iterator[tuple[Place, bool]]:
    """Each source of tokens for one target, and whether it destroys the tail of somebody else's line."""
    others = not target.is_empty and not target.family and not target.mine
    here = _in_place(q, target)
    keeps = target.is_empty or (q.abilities.rewind and target.common >= max(target.owner_end, target.rigid))
    short = q.n_prompt + q.reserve - target.common <= GUEST_AT_MOST
    yield here, others and not (keeps and not target.foreign and short)
    if q.fresh:
        return
    for snapshot in q.snapshots if q.abilities.restore else ():
        reused = _reusable_file(q, snapshot)
        if reused >= SAVE_AT_LEAST:
            yield _onto(q, target, Action.RESTORE, reused, "a snapshot holds its prefix", snapshot=snapshot.id), others
    if q.abilities.save and q.abilities.restore:
        for source in idle:
            reused, cut = (0, 0) if source.foreign else _copied(q, source)
            if source.id != target.id and reused >= SAVE_AT_LEAST:
                copy = _onto(q, target, Action.FORK, reused, "another slot holds its prefix", source=source.id)
                yield replace(copy, cut=cut), others


def _goes_on(q: Question, own: SlotFacts) -> bool:
    """It continues its line where that is; not behind a file that it departs from, whose window lacks what is needed
    there, and of which an engine that keeps windows whole would not know."""
    return q.extends and own.mine and not q.fresh and (own.common >= own.rigid or not q.abilities.rewind)


def _reusable(q: Question, slot: SlotFacts) -> int:
    """Tokens of the common prefix that are really reused in place: all where memory can be rewound."""
    a = q.abilities
    if q.fresh or slot.foreign:
        return 0
    if a.rewind or a.memory.rewinds:
        return _whole(q, slot.common, slot.tokens, slot.rigid)
    is_file = slot.tokens == slot.rigid
    return checkpoints.reused(a.memory, slot.tokens, slot.common, q.n_prompt, slot.checkpoints, from_file=is_file)


def _whole(q: Question, common: int, held: int, rigid: int) -> int:
    """The same where nothing is known of checkpoints."""
    if q.fresh or common < rigid or (not q.abilities.rewind and common < held):
        return 0
    return max(0, min(common, q.n_prompt - 1))


def _reusable_file(q: Question, file: SnapshotFacts | SlotFacts) -> int:
    """Tokens reused of a file, or of the one that a slot would make. The engine always processes a prompt's last token
    again, so for one that ends with the file it has to go back by one."""
    a = q.abilities
    if q.fresh:
        return 0
    if not (a.rewind or a.memory.rewinds):
        kept = file.checkpoints if a.file_checkpoints else ()
        return checkpoints.reused(a.memory, file.tokens, file.common, q.n_prompt, kept, from_file=True)
    if not (a.rewind_files or a.step_back_files) and file.tokens >= q.n_prompt:
        return 0
    return _whole(q, file.common, file.tokens, 0 if a.rewind_files else file.tokens)


def _copied(q: Question, source: SlotFacts) -> tuple[int, int]:
    """Tokens reused of a copy of a slot, and where it has to be cut before it is copied (0: nowhere).

    A slot that can be rewound, whose files cannot: its file serves up to where it ends alone.
    """
    a = q.abilities
    cut = min(source.common, q.n_prompt - 1)
    if a.rewind and not a.rewind_files and source.rigid <= cut < source.tokens and not q.fresh:
        return cut, cut
    return _reusable_file(q, source), 0


def _in_place(q: Question, slot: SlotFacts) -> Place:
    if _goes_on(q, slot):
        # The engine keeps checkpoints of its own for this slot, so the line's end is taken at its word.
        return Place(Action.CONTINUE, slot.id, max(0, min(slot.common, q.n_prompt - 1)), "it continues its line")
    reused = _reusable(q, slot)
    if reused <= SMALL_TAIL or (reused < SAVE_AT_LEAST and slot.common < slot.owner_end):
        return _onto(
            q, slot, Action.COLD, 0, "a cold start is cheapest" if slot.is_empty else "cheapest slot to give up"
        )
    # Where memory cannot be rewound the owner never gets its end back: that is no guest, it takes the slot over.
    is_guest = q.abilities.rewind and not slot.mine and not slot.family
    action = Action.GUEST if is_guest else Action.CONTINUE
    save = _lost(q, slot, in_place=True) > SMALL_TAIL and is_worth_saving(q, slot)
    reason = "its conversation branches here" if slot.mine or slot.family else "it extends what the slot holds"
    return Place(action, slot.id, reused, reason, save_first=save)


def _onto(
    q: Question,
    target: SlotFacts,
    action: Action,
    reused: int,
    reason: str,
    *,
    source: int | None = None,
    snapshot: str | None = None,
) -> Place:
    """A placement that replaces whatever the target holds."""
    save = not target.is_empty and is_worth_saving(q, target)
    erase = not target.is_empty and (target.foreign or q.fresh or action is not Action.COLD)
    return Place(action, target.id, reused, reason, source, snapshot, save, erase)


def _file_price(q: Question, p: Place) -> float:
    a = q.abilities
    if p.source is not None:
        source = _slot(q, p.source)
        whole = (a.restore_cost + (a.save_cost if source.at_stake else 0)) * source.tokens
        return whole + (a.restore_cost + a.save_cost) * p.cut
    if p.snapshot is not None:
        return _load_price(q, next(s for s in q.snapshots if s.id == p.snapshot))
    return 0.0


def _load_price(q: Question, snapshot: SnapshotFacts) -> float:
    return q.abilities.restore_cost * snapshot.tokens


def _loss_price(q: Question, slot: SlotFacts, *, in_place: bool) -> float:
    """What giving up a slot's content (or, in place, what lies beyond the common prefix) will cost its owner."""
    lost = _lost(q, slot, in_place=in_place)
    if lost <= SMALL_TAIL or slot.ownerless:
        return 0.0
    a, weight = q.abilities, FAMILY_RETURNS if slot.family else _recency(q, slot)
    if is_worth_saving(q, slot):
        return a.save_cost * slot.tokens + weight * a.restore_cost * slot.tokens
    if a.restore and slot.at_stake < lost:
        return weight * (a.restore_cost * slot.tokens + slot.at_stake)
    return weight * lost


def _lost(q: Question, slot: SlotFacts, *, in_place: bool) -> int:
    """Tokens that its owner no longer finds there."""
    a = q.abilities
    if not in_place:
        return slot.tokens
    if a.rewind or a.memory.rewinds:
        return slot.tokens - (slot.common if a.rewind and slot.common >= slot.rigid else 0)
    return slot.tokens - _reusable(q, slot)


def _recency(q: Question, slot: SlotFacts) -> float:
    """1 for the slot used last, 1/2 for the one before, ...: how likely its owner comes back."""
    return 1 / (1 + sum(s.last_used > slot.last_used for s in q.slots))


def _with_room(q: Question, p: Place, target: SlotFacts) -> Place | None:
    """The placement with the idle slots that must be emptied so that prompt and reserve fit the pool, or None."""
    if q.capacity is None:
        return p
    moved = target.tokens if p.action in _IN_PLACE else 0
    if p.source is not None:
        moved = p.cut or _slot(q, p.source).tokens
    elif p.snapshot is not None:
        moved = next(s.tokens for s in q.snapshots if s.id == p.snapshot)
    need = min(q.capacity, max(q.n_prompt + q.reserve, moved))
    if q.reserved and q.reserved + need > q.capacity:
        return None
    keep = {target.id, p.source}
    idle = [s for s in q.slots if s.idle and s.id not in keep and not s.is_empty]
    used = q.reserved + need + sum(s.tokens for s in idle)
    if p.source is not None:
        used += _slot(q, p.source).tokens
    evictions: list[SlotFacts] = []
    for victim in sorted(idle, key=lambda s: (_loss_price(q, s, in_place=False) / s.tokens, s.last_used, s.id)):
        if used <= q.capacity:
            break
        used -= victim.tokens
        evictions.append(victim)
    if used > q.capacity:
        return None
    for victim in reversed(evictions):  # a large last one may have made earlier ones unnecessary
        if used + victim.tokens <= q.capacity:
            used += victim.tokens
            evictions.remove(victim)
    return replace(p, evictions=tuple(Eviction(v.id, is_worth_saving(q, v)) for v in evictions))


def _slot(q: Question, slot: int) -> SlotFacts:
    return next(s for s in q.slots if s.id == slot)
