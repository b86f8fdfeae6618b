"""Which line does a request belong to, and which base is it sent with?

The base is laid out before lines are compared, so that a date or another order of tools does not hide the line. Two
sessions of one agent may begin with the same words and differ in nothing but such a value, their directory for example:
then the values, and the answer that the history echoes, tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import orjson
import structlog

from policies.append_only import normal
from policies.layout import changed_lines
from policies.message_parts import only_reminders, reminders, role_of
from policies.normal_form import Defaults
from policies.placeholders import resolved
from policies.replay import has_other_thoughts
from policies.types import Match, Prompt, digest
from proxy.api.read import ModelRequest, chained
from proxy.errors import StoreError
from proxy.layouts import NO_RULES, LaidBase, opening_of, text_of
from proxy.ledger import seal_of
from proxy.lines import Found, Line
from proxy.realign import GONE, Realigned, realigned
from proxy.service import Service

log = structlog.get_logger(__name__)

Json = dict[str, Any]


MOST_ASIDE = 2048
"""Messages behind the first that differs, among which those that say nothing are looked for, on the event loop."""
DOUBT = 10
"""Taken from how well a line fits that was told another directory: the session may have moved, or be another."""


class Recognition:
    """One chat request among the lines of its tenant. `line_changes`: text lines of its base, as they were sent and as
    they read now; `repairs`: what was done on the way; `request`: with the positions of its line's ledger, by
    `beside` where the client's own were others."""

    def __init__(self, service: Service, request: ModelRequest) -> None:
        self._service, self._tenant = service, request.who.tenant
        self.repairs: list[str] = []
        self.line_changes: list[tuple[str, str]] = []
        self.beside: Realigned | None = None
        self._take(request)

    def _take(self, request: ModelRequest) -> None:
        self.request = request
        self._messages: list[Json] = request.body["messages"]
        self._n, self._n_leading = len(self._messages), request.prompt.n_leading
        users = [i for i, m in enumerate(self._messages) if m.get("role") == "user"]
        telling = (i for i in users if not only_reminders(self._messages[i]))
        self.first_user = next(telling, users[0] if users else None)
        self.opening = opening_of(self._messages, self.first_user)

    async def run(self) -> tuple[LaidBase, Found]:
        """The base as it is to be sent, and the line."""
        laid, found = self._look_up(self._n_learned())
        if found.match is Match.BASE:
            laid, found = await self._with_its_base(laid, found)
        if found.match in (Match.BASE, Match.EDITED):
            found = await self._realigned(laid, found)
        if found.match in (Match.BASE, Match.NEW):
            laid, found = self._met(laid, found)
        return laid, found

    async def _realigned(self, laid: LaidBase, found: Found) -> Found:
        """The line that goes on but for messages that say nothing: they are laid beside the ledger's."""
        line = found.line
        if line is None or (line.prompt.system, line.prompt.tools) != (laid.system, laid.tools_digest):
            return found
        sent, ledger, request = await self.texts(line), line.ledger, self.request
        if sent is None or ledger is None:
            return found
        if max(len(sent), self._n) - max(found.shared, self._n_leading) > MOST_ASIDE:
            self.repairs.append("gave_up")
            return found
        beside = realigned(request, ledger, sent, found.shared, self.defaults())
        if beside is None:
            return found
        self._take(beside.request)
        again = self._find(laid)
        if again.line is not line or again.shared <= found.shared:
            self._take(request)
            return found
        self.beside = beside
        self.repairs.append("reminder")
        return again

    def _n_learned(self) -> int:
        return NO_RULES if self.first_user is None else self._service.layouts.n_learned(self._tenant)

    def _lay_out(self, n_learned: int) -> LaidBase:
        p = self.request.prompt
        leading, opening = self._messages[: self._n_leading], [self._messages[i] for i in self.opening]
        raw = digest(p.system, p.tools, *(self.request.raws[i] for i in self.opening))
        return self._service.layouts.lay_out(
            self._tenant, leading, self.request.body.get("tools"), raw, n_learned, opening
        )

    def prompt(self, laid: LaidBase) -> Prompt:
        p, r = self.request.prompt, self.request
        entries = [*(laid.system,) * self._n_leading, *r.normals[self._n_leading :]]
        for i, message in zip(self.opening, laid.opening, strict=True):
            entries[i] = digest(orjson.dumps(message))
        chain = chained(digest(laid.system, laid.tools_digest, p.params), entries)
        return Prompt(laid.system, laid.tools_digest, p.params, chain, p.sizes, p.n_leading)

    def _find(self, laid: LaidBase) -> Found:
        r = self.request
        return self._service.lines.find(r.who, self.prompt(laid), r.first_user, lambda *at: self._fits(laid, *at))

    def _fits(self, laid: LaidBase, line: Line, shared: int) -> int | None:
        """A line that was told another directory is another session's, unless an answer in the history is its own;
        without a session's name one that was told another learned value, or that opened with other reminders, is, too.
        Of several lines the one whose answer comes back."""
        if line.ledger is None:
            return 0
        told = line.ledger.told_before(shared)
        differs = any(v.action == "path" and told.get(v.name, v.text) != v.text for v in laid.values)
        learned = any(v.name.startswith("value_") and told.get(v.name, v.text) != v.text for v in laid.values)
        echo = self._echoes(line, shared)
        has_answers = any(m.get("role") == "assistant" for m in self._messages[self._n_leading : shared])
        reminded = self._opens_otherwise(line.ledger.raw[:shared])
        is_first = not any(m.get("role") == "assistant" for m in self._messages)
        is_other = differs or ((learned or (reminded and is_first)) and self.request.who.session is None)
        if is_other and not has_answers and echo is not True:
            return None
        return {True: 2, None: 1, False: 0}[echo] - (DOUBT if differs or learned or reminded else 0)

    def _opens_otherwise(self, raws: Sequence[bytes]) -> bool:
        """Whether what comes before the first answer has other reminders than these messages: agents that begin with a
        word alone tell their folder and their files there."""
        opening = takewhile(lambda i: role_of(self._messages[i]) != "assistant", range(self._n_leading, len(raws)))
        return any(raws[i] != self.request.raws[i] != GONE and bool(reminders(self._messages[i])) for i in opening)

    def _echoes(self, line: Line, shared: int) -> bool | None:
        """Whether the message behind the line's newest prompt is the answer to it; None where that cannot be told."""
        ledger = line.ledger
        reply = ledger.reply.message if ledger is not None and shared == len(ledger.raw) < self._n else None
        if reply is None or ledger is None or self._messages[shared].get("role") != "assistant":
            return None
        said, echo, defaults = resolved(reply, ledger.values), self._messages[shared], self.defaults()
        return normal(said, defaults) == normal(echo, defaults) and not has_other_thoughts(said, echo)

    def _look_up(self, n_learned: int) -> tuple[LaidBase, Found]:
        laid = self._lay_out(n_learned)
        return laid, self._find(laid)

    async def _with_its_base(self, laid: LaidBase, found: Found) -> tuple[LaidBase, Found]:
        """The line's base may have been laid out before more was learned, or differ in volatile spans alone."""
        if self.first_user is None:
            return laid, found
        r = self.request
        lines = [line for line in self._service.lines.starting(r.who, r.first_user) if line.ledger is not None]
        learned = {line.ledger.n_learned for line in lines if line.ledger is not None}
        ways = [self._look_up(n) for n in learned]
        again = [way for way in ways if way[1].match in (Match.EXTENDS, Match.EDITED)]
        if again:
            return max(again, key=lambda way: (way[1].match is Match.EXTENDS, way[1].shared))
        for line in sorted(filter(self._continues, lines), key=lambda line: -len(line.prompt.chain)):
            adopted = await self._adopted(line)
            if adopted is not None:
                return adopted, self._find(adopted)
        return laid, found

    def _continues(self, line: Line) -> bool:
        """Whether the history is the line's own, whatever the base: agents begin with the same words, so that without a
        session's name the answer has to be the line's, too."""
        ledger, r = line.ledger, self.request
        if ledger is None or line.prompt.n_leading != self._n_leading or len(ledger.normal) > self._n:
            return False
        n = len(ledger.normal)
        if tuple(ledger.normal[self._n_leading :]) != r.normals[self._n_leading : n]:
            return False
        has_answers = any(m.get("role") == "assistant" for m in self._messages[self._n_leading : n])
        return r.who.session is not None or has_answers or self._echoes(line, n) is True

    async def _adopted(self, line: Line) -> LaidBase | None:
        """The line's base as it was sent, where this request's differs from it in volatile spans alone."""
        sent, ledger = await self.texts(line), line.ledger
        if sent is None or ledger is None:
            return None
        own = self._lay_out(ledger.n_learned)
        leading = tuple(map(orjson.loads, sent[: self._n_leading]))
        texts = tuple(map(text_of, leading))
        changes = changed_lines(texts, own.texts) if line.prompt.tools == own.tools_digest else None
        if not changes:
            return None
        self.line_changes.extend(changes)
        self._service.layouts.teach(self._tenant, texts, own.texts)
        return replace(own, leading=leading, texts=texts, system=line.prompt.system)

    def _met(self, laid: LaidBase, found: Found) -> tuple[LaidBase, Found]:
        """A new base: does it differ from a known one in volatile spans alone?"""
        layouts = self._service.layouts
        if laid.n_learned != NO_RULES and layouts.meet(self._tenant, laid):
            laid, found = self._look_up(layouts.n_learned(self._tenant))
            layouts.meet(self._tenant, laid)
        self.repairs.extend(laid.changes)
        return laid, found

    def defaults(self) -> Defaults:
        """Schema defaults of the request's tools."""
        return self._service.normals.defaults(self.request.body.get("tools"))[1]

    async def texts(self, line: Line) -> list[bytes] | None:
        """The messages of the line's ledger, from state.db where they are not in memory; None when they are lost."""
        ledger = line.ledger
        if ledger is None or ledger.sent is not None:
            return ledger.sent if ledger else None
        try:
            found = await self._service.store.load_texts(line.id)
        except StoreError as error:
            log.warning("ledger_not_read", line=line.id, error=str(error))
            found = []
        found = found[: len(ledger.raw)]  # a proxy that was killed in a turn has kept that turn's texts
        if len(found) != len(ledger.raw) or (ledger.seal and seal_of(found) != ledger.seal):
            self.repairs.append("gave_up")
            return None
        if ledger.sent is None:
            ledger.sent = found
            self._service.texts.hold(line.id, ledger)
        return ledger.sent
