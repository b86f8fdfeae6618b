"""The prompt as it will be sent: laid out, spelled as its line's ledger, with what the client dropped put back.

Nothing here decides about correctness of the cache: the engine compares tokens itself. What is decided is what the
model reads, so only what policies/append_only knows to be equivalent is respelled; the rest is the client's edit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import orjson
import structlog

from policies.append_only import Repaired, diff_kinds, reconcile
from policies.compaction import asks_for_summary
from policies.layout import change_note, first_note, line_note, with_note
from policies.message_parts import only_reminders, reminders, without_reminders
from policies.reminders import moved_reminders, new_reminders, overtaken
from policies.types import Match
from proxy.answers import answered, given_back, own_thoughts
from proxy.api.read import ModelRequest, folded
from proxy.errors import BrokenLine
from proxy.kept_json import kept_json
from proxy.layouts import LaidBase
from proxy.ledger import Ledger, seal_of
from proxy.lines import Found, Line
from proxy.metrics import Kind
from proxy.recognise import Recognition
from proxy.service import Service
from proxy.serving import of_its_model, template_of, wake
from proxy.template_clock import clock_values, with_clock

log = structlog.get_logger(__name__)

Json = dict[str, Any]

PRUNE_AT = 0.85
"""Share of the usable context that a prompt fills before the client's deferred prunes are done (issue 4)."""
MOST_RESPELLED = 1024
"""Messages that one request may spell otherwise than its ledger; beyond it they are sent as they come. Each costs a
fraction of a millisecond of the event loop, and no local context holds so many that an agent respells at once."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """`request` as it is sent; the line that it belongs to; `ledger`: what that line's will be once this was sent."""

    request: ModelRequest
    found: Found
    ledger: Ledger | None = None
    repairs: tuple[str, ...] = ()
    kind: Kind = "main"
    line: Line | None = None
    """Where a question of ours is asked (proxy/compact): that line's ledger stays what it is."""


async def prepare(service: Service, request: ModelRequest, *, prunes: bool = False) -> Prepared:
    """Raises BrokenLine in mode strict when the request does not extend its line. `prunes`: what the client pruned is
    no longer put off."""
    await wake(service.engines, request.model, request.door)
    request = of_its_model(service.engines, request)
    if request.door != "chat" or request.mode == "observe":
        found = service.lines.find(request.who, request.prompt, request.first_user)
        kind = _kind(service, request)
        return Prepared(_folded(service, request), _apart(found, kind), kind=kind)
    repair = _Repair(service, request, prunes=prunes)
    prepared = await repair.run()
    kind = _kind(service, request)
    found = _apart(prepared.found, kind)
    prepared = replace(prepared, found=found, kind=kind)
    if request.mode == "strict" and found.match in (Match.EDITED, Match.BASE) and not (prunes or repair.declines):
        line = found.line.id if found.line is not None else ""
        raise BrokenLine(
            f"This request does not extend its conversation: {_where(found, request)}, and --mode strict refuses that. "
            "Send the history unchanged, or use mode repair.",
            await asyncio.to_thread(service.explainer.diverged, line, prepared.request.body),
        )
    service.metrics.repaired(prepared.repairs)
    return prepared


def _kind(service: Service, request: ModelRequest) -> Kind:
    """Label `kind`: a client's request for a summary is a compaction; one without tools, in a session that has them, is
    a title or the like. So is an agent's question without tools that follows no answer: agents that name their sessions
    give every turn its tools (agents.md, section 1), and opencode asks for its title before the first."""
    if request.door != "chat":
        return request.kind
    messages = request.body["messages"]
    if asks_for_summary(messages):
        return "compaction"
    is_first = request.is_named and not any(m.get("role") == "assistant" for m in messages)
    if not request.body.get("tools") and (is_first or service.lines.has_tools(request.who)):
        return "side"
    return request.kind


def _apart(found: Found, kind: Kind) -> Found:
    """A question on the side with a base of its own is no later state of the main line, and must not take its place."""
    is_aside = kind in ("side", "compaction") and found.match is Match.BASE
    return Found(None, Match.NEW) if is_aside else found


def _where(found: Found, request: ModelRequest) -> str:
    if found.match is not Match.EDITED:
        return "its system text or its tools differ from what was sent before"
    if found.shared >= len(request.body["messages"]):
        return f"it ends before message {found.shared}, which was sent before"
    return f"message {found.shared} differs from what was sent before"


def _folded(service: Service, request: ModelRequest) -> ModelRequest:
    body = folded(request.body, template_of(service.engines, request.model))
    if request.door == "chat":
        body = with_clock(service.engines, body)
    return request if body is request.body else replace(request, body=body)


def keep(service: Service, line: Line, ledger: Ledger) -> None:
    """The prompt was sent: this is what the line's next one has to agree with."""
    old = line.ledger.sent if line.ledger is not None else None
    new = ledger.sent or []
    start = next((i for i, (a, b) in enumerate(zip(old or (), new, strict=False)) if a != b), len(old or ()))
    service.store.put_texts(line.id, min(start, len(new)), new[start:])
    ledger.seal = seal_of(new)
    line.ledger = ledger
    service.texts.hold(line.id, ledger)


class _Repair:
    """One request on its way through layout, its line's ledger and replay."""

    def __init__(self, service: Service, request: ModelRequest, *, prunes: bool) -> None:
        self._service, self._prunes = service, prunes
        self._said: list[Json] = request.body["messages"]
        self._recognition = Recognition(service, request)
        self._repairs, self._line_changes = self._recognition.repairs, self._recognition.line_changes
        self._deferred: set[int] = set()
        self.declines = False
        """The client's history extends what it sent, but the request is to go without the summary that was in it."""

    def _take(self, request: ModelRequest) -> None:
        self._request = request
        self._messages: list[Json] = request.body["messages"]
        self._n, self._n_leading = len(self._messages), request.prompt.n_leading
        self._first_user, self._opening = self._recognition.first_user, self._recognition.opening

    async def run(self) -> Prepared:
        laid, found = await self._recognition.run()
        self._take(self._recognition.request)
        if found.match is Match.EDITED:
            found = await self._reconciled(found)
        if found.match in (Match.EXTENDS, Match.EDITED):
            found = self._pruned(found)
        if self._first_user is not None:
            laid = replace(laid, values=(*laid.values, *clock_values(self._service.engines, self._request.body)))
        return await self._spelled(laid, found)

    # --- where it departs from its ledger -----------------------------------------------------------------------------

    async def _reconciled(self, found: Found) -> Found:
        """An edit that only prunes old results is put off: what is still sent stays."""
        line = found.line
        if line is None or line.ledger is None or self._n < len(line.ledger.normal) or self._is_full(line):
            return found
        ledger, normals = line.ledger, self._request.normals
        known = range(self._n_leading, len(ledger.normal))
        differing = {i for i in known if ledger.normal[i] != normals[i]}
        if not differing or any(self._messages[i].get("role") != "tool" for i in differing):
            return found
        if len(differing) > MOST_RESPELLED:
            self._repairs.append("gave_up")
            return found
        sent = await self._recognition.texts(line)
        if sent is None or line.ledger is not ledger:
            return found
        before = [orjson.loads(sent[i]) if i in differing else self._messages[i] for i in known]
        verdict = reconcile(before, self._messages[self._n_leading :], self._recognition.defaults())
        if not isinstance(verdict, Repaired) or verdict.n_shared != len(before):
            return found
        self._deferred = {at + self._n_leading for at in verdict.deferred}
        self._repairs.append("prune_deferred")
        return Found(line, Match.EXTENDS, len(ledger.normal))

    def _pruned(self, found: Found) -> Found:
        """All prunes that were put off are done at once when the context runs full."""
        line = found.line
        if line is None or line.ledger is None or not line.ledger.deferred or not self._is_full(line):
            return found
        self._repairs.append("pruned")
        return Found(line, Match.EDITED, min(found.shared, *line.ledger.deferred))

    def _is_full(self, line: Line) -> bool:
        if self._request.compacts:
            return self._prunes  # in the same step as a compaction, when even so the prompt has to change
        n_ctx = min((e.n_ctx for e in self._service.engines.all if e.ready), default=0)
        new = sum(self._request.prompt.sizes[len(line.prompt.chain) :])
        return n_ctx > 0 and line.n_tokens + line.tokens_of(new) >= PRUNE_AT * n_ctx

    # --- how it is spelled ------------------------------------------------------------------------------------------

    async def _spelled(self, laid: LaidBase, found: Found) -> Prepared:
        old = found.line.ledger if found.line is not None and found.match is not Match.BASE else None
        is_edit = found.match is Match.EDITED
        known = 0 if old is None else len(old.raw) if found.match is Match.EXTENDS else found.shared
        raws = self._request.raws
        if old is not None and known == self._n and raws[-1] != old.raw[known - 1]:
            known -= 1  # asked again in other words: the newest message is the client's to say
        agreed = known
        if old is not None:
            known, found = self._bounded(old, self._with_room(old, known, laid), found)
        if found.line is not None and old is not None and self._needs_text(old, known):
            sent = await self._recognition.texts(found.line)
            if sent is None:
                old, known = None, 0
            elif (at := own_thoughts(self._request, old, known)) is not None:
                known, found, is_edit = at, Found(found.line, Match.EDITED, at), True
                self._deferred = {i for i in self._deferred if i < at}
        if old is not None and found.match is Match.EXTENDS and known < len(old.raw):
            found = Found(found.line, Match.EDITED, known)
        full, old = old, old.branch(known) if old is not None else None
        messages = [*laid.leading, *self._messages[self._n_leading :]]
        for i, message in zip(self._opening, laid.opening, strict=True):
            messages[i] = message
        altered = {i for i in (*range(self._n_leading), *self._opening) if messages[i] != self._messages[i]}
        if old is not None:
            altered |= self._from_ledger(old, messages, is_cut=full is not None and known < len(full.raw))
        if full is not None:
            altered |= self._given_back(full, known, agreed, messages, is_edit=is_edit)
        told = self._noted(old, known, laid, messages, altered)
        return self._finish(laid, found, old, messages, altered, told)

    def _with_room(self, old: Ledger, known: int, laid: LaidBase) -> int:
        """Fewer known messages where values have changed and no new message could say so (the same asked again)."""
        at = self._newest_asking(0)
        return (
            at if at is not None and at < known and any(old.changed(known, laid.values, self._line_changes)) else known
        )

    def _bounded(self, old: Ledger, known: int, found: Found) -> tuple[int, Found]:
        """Fewer known messages where the client spells too many of them otherwise."""
        raws = self._request.raws
        differing = (i for i in range(self._n_leading, known) if old.raw[i] != raws[i])
        at = next(islice(differing, MOST_RESPELLED, None), None)
        if at is None:
            return known, found
        self._repairs.append("gave_up")
        return at, Found(found.line, Match.EDITED, at)

    def _needs_text(self, old: Ledger, known: int) -> bool:
        start, raws = self._n_leading, self._request.raws
        return any(i >= start for i in old.altered) or old.raw[start:known] != list(raws[start:known])

    def _from_ledger(self, old: Ledger, messages: list[Json], *, is_cut: bool) -> set[int]:
        """Known positions in the spelling that was sent; those of them that the client spells otherwise. `is_cut`: what
        was told behind them is told no more."""
        altered, changed = set(), []
        returned: set[str] = set()
        for i in range(self._n_leading, len(old.raw)):
            is_same = old.raw[i] == self._request.raws[i]
            if (is_same and i not in old.altered) or old.sent is None:
                continue
            sent = orjson.loads(old.sent[i])
            if not is_same:
                self._repairs.extend(diff_kinds(sent, messages[i]))
                was, now = reminders(sent), reminders(messages[i])
                returned.update(now if was == now else set(now) - set(was))
            if not is_same or is_cut:
                changed.append(i)
            if sent != messages[i]:
                altered.add(i)
            messages[i] = sent
        if (changed or is_cut or self._recognition.beside) and old.sent is not None:
            altered |= self._remind(old.sent, messages, changed, returned, is_cut=is_cut)
        return altered

    def _remind(
        self, sent: list[bytes], messages: list[Json], changed: list[int], returned: set[str], *, is_cut: bool
    ) -> set[int]:
        """Finds the reminders to be told again; new positions from which one is left out."""
        beside, before = self._recognition.beside, [orjson.loads(blob) for blob in sent]
        n = len(before)
        moved = beside.moved if beside and not is_cut else moved_reminders(before, self._messages, n)
        altered = self._told_already(moved, n, messages)
        told = [*before, *messages[n:]]
        new = new_reminders(told, [*(self._messages[i] for i in changed), *(beside.left_out if beside else ())])
        blocks = [block for message in told for block in reminders(message)]
        said = [block for message in self._said for block in reminders(message)]
        lost = set(said) - {*blocks, *new}  # whatever else went wrong
        new = (*new, *(block for block in dict.fromkeys(said) if block in lost))
        self._reminders = [*new, *overtaken([*blocks, *new], said, returned)]
        return altered

    def _told_already(self, moved: Sequence[str], n_known: int, messages: list[Json]) -> set[int]:
        """Leaves out reminders that the client has moved to a new message, and that are still told where they were."""
        left, altered = Counter(moved), set()
        for i in range(n_known, self._n) if left else ():
            bare = without_reminders(messages[i], left.elements())
            if bare is not messages[i] and bare["content"]:
                left -= Counter(reminders(messages[i])) - Counter(reminders(bare))
                messages[i] = bare
                altered.add(i)
                self._repairs.append("reminder")
        return altered

    _reminders: Sequence[str] = ()

    def _given_back(self, full: Ledger, known: int, agreed: int, messages: list[Json], *, is_edit: bool) -> set[int]:
        """Answers that the client echoes in other words, or without what the model thought, as the model gave them."""
        places = answered(full, self._request.normals, known, agreed, is_edit=is_edit)
        defaults = self._recognition.defaults()
        altered, repairs = given_back(full, self._request, places, messages, defaults, MOST_RESPELLED)
        self._repairs.extend(repairs)
        return altered

    def _noted(
        self, old: Ledger | None, known: int, laid: LaidBase, messages: list[Json], altered: set[int]
    ) -> list[tuple[int, dict[str, str]]]:
        """Tells volatile values: first ones in the first user message (or its opening), changed ones in the newest."""
        if self._first_user is None:
            return []
        first = self._opening[-1] if self._opening else self._first_user
        if old is None or (first >= known and not old.told_before(known)):
            if laid.values:
                messages[first] = with_note(messages[first], first_note(laid.values), front=not self._opening)
                altered.add(first)
            told = [(first, {v.name: v.text for v in laid.values})]
            notes = [line_note(b, n) for b, n in self._line_changes]
            at = self._append(messages, altered, [*notes, *self._reminders], first)
            now = {f"={b}": n for b, n in self._line_changes}
            return [*told, (at, now)] if at is not None and now else told
        tell, lines, back = old.changed(known, laid.values, self._line_changes)
        known_values = old.told_before(known)
        notes = [change_note(tell, known_values)] if tell else []
        notes += [line_note(n, b) for n, b in back] + [line_note(known_values.get(f"={b}", b), n) for b, n in lines]
        at = self._append(messages, altered, [*notes, *self._reminders], known)
        if at is None or not (tell or lines or back):
            return old.told
        values = {v.name: v.text for v in tell} | {f"={b}": n for b, n in lines} | {f"={b}": b for _, b in back}
        return [*old.told, (at, values)]

    def _newest_asking(self, start: int) -> int | None:
        """The newest message from `start` on that may bear a note; one of reminders only may go, so another first,
        unless reminders are to be told."""
        asking = [i for i in range(self._n - 1, start - 1, -1) if self._messages[i].get("role") in ("user", "tool")]
        if self._reminders:
            return asking[0] if asking else None  # behind all others, which may say otherwise
        lasting = (i for i in asking if not only_reminders(self._messages[i]))
        return next(lasting, asking[0] if asking else None)

    def _append(self, messages: list[Json], altered: set[int], notes: Sequence[str], start: int) -> int | None:
        """The notes behind the newest message that may bear one, if need be before `start`; its position, None when
        there is none."""
        if not notes:
            return None
        at = self._newest_asking(start)
        at = self._newest_asking(self._n_leading) if at is None else at
        if at is not None:
            messages[at] = with_note(messages[at], "\n".join(notes), front=False)
            altered.add(at)
            self._repairs.append("moved_to_newest")
        return at

    def _finish(
        self,
        laid: LaidBase,
        found: Found,
        old: Ledger | None,
        messages: list[Json],
        altered: set[int],
        told: list[tuple[int, dict[str, str]]],
    ) -> Prepared:
        r = self._request
        sent = [kept_json(messages[i]) if i in altered else blob for i, blob in enumerate(r.blobs)]
        if old is not None and old.sent is not None:
            sent[: len(old.sent)] = [b if a != b else a for a, b in zip(old.sent, sent, strict=False)]
        deferred = self._deferred | (old.deferred if old is not None else set())
        ledger = Ledger(list(r.raws), list(r.normals), sent, altered, deferred, told, laid.n_learned)
        replaced = old.replaced if old is not None else []
        if r.compacts:
            ledger.replaced = replaced
        elif replaced:
            self.declines = found.match is Match.EXTENDS
            found = Found(found.line, Match.EDITED, replaced[-1].start)
        prompt = replace(self._recognition.prompt(laid), sizes=ledger.sizes())
        body = r.body
        if altered or ledger.replaced:
            body = {**body, "messages": ledger.composed(messages)}
        if laid.tools is not None and laid.tools != body.get("tools"):
            body = {**body, "tools": laid.tools}
        body = folded(body, template_of(self._service.engines, self._request.model))
        return Prepared(replace(r, body=body, prompt=prompt), found, ledger, tuple(self._repairs))
