"""Which conversation does a prompt belong to? Lines, their ledgers, and how a prompt relates to them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from llamacpp.tokens import Estimator
from policies.causes import Cause
from policies.compaction import Replacement
from policies.prefix import shared_entries
from policies.types import DIGEST_BYTES, Match, Prompt, digest
from proxy.ledger import Ledger
from proxy.metrics import CompactionOutcome
from proxy.store_types import LedgerRecord


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks: never crosses tenants. `session` is what the client names its conversation, if it names it.

    `agent` is a sub-agent's own id within a session; `parent` the session that started this one.
    """

    tenant: str
    session: str | None = None
    agent: str | None = None
    parent: str | None = None


NO_TOOLS = frozenset({digest(b"null"), digest(b"[]"), digest()})
"""Digests of the tools of a base that has none."""
TEMPLATE_TOKENS = 32
"""Role markers and line ends that a template puts around a few new messages."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A summary that was made for a line's messages up to its end; `raws`: their digests, as the client sent them."""

    replacement: Replacement
    raws: tuple[bytes, ...]
    outcome: CompactionOutcome


@dataclass(slots=True, eq=False)
class Line:
    """A series of prompts of which each extends the one before, and what is known of its tokens.

    `n_tokens`: tokens of the newest prompt. `lost`: why the slot that held it no longer does.
    """

    id: str
    who: Identity
    prompt: Prompt
    first_user: bytes
    n_tokens: int = 0
    estimator: Estimator = field(default_factory=Estimator)
    """Tokens by bytes of this line's messages."""
    lost: Cause | None = None
    kind: str = "main"
    n_requests: int = 0
    day: str = ""
    """When its newest prompt was processed."""
    n_before: int = 0
    """Entries that its prompt before the newest one had."""
    running: int = 0
    """Requests of this line that wait or run; it is not forgotten meanwhile."""
    compacts: bool = False
    """Its newest request may be compacted by us."""
    has_own: bool = False
    """Its client compacts by itself: nothing is prepared for it."""
    compacting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a summary is made for it: whoever else needs one waits, and takes the same."""
    chosen: Chosen | None = None
    """The newest summary that was made for it, sent or not."""
    ledger: Ledger | None = None
    """What was sent for it, message by message; None where prompts go as they come (mode observe, completions)."""

    def to_record(self) -> LedgerRecord:
        """For state.db: hashes, sizes and counts, no text."""
        p = self.prompt
        return LedgerRecord(
            line=self.id,
            tenant=self.who.tenant,
            session=self.who.session or "",
            agent=self.who.agent or "",
            parent=self.who.parent,
            base=p.system + p.tools + p.params,
            chain=p.chain,
            n_tokens=self.n_tokens,
            updated=time.time(),
            extra={
                "sizes": p.sizes,
                "n_leading": p.n_leading,
                "first_user": self.first_user.hex(),
                "kind": self.kind,
                "n_before": self.n_before,
                "day": self.day,
                "tokens_per_byte": self.estimator.ratio,
                "ledger": self.ledger.to_extra() if self.ledger is not None else None,
            },
        )

    @classmethod
    def from_record(cls, record: LedgerRecord) -> Line:
        """A line as it was before a restart; raises ValueError for a record that is not whole."""
        try:
            extra, size = record.extra, DIGEST_BYTES
            system, tools, params = (record.base[i : i + size] for i in (0, size, 2 * size))
            sizes, n_leading, ratio = tuple(map(int, extra["sizes"])), int(extra["n_leading"]), extra["tokens_per_byte"]
            if len(record.base) != 3 * size or len(sizes) != len(record.chain) or not float(ratio) > 0:
                raise ValueError("its base, sizes or ratio are not those of a line")
            prompt = Prompt(system, tools, params, record.chain, sizes, n_leading)
            who = Identity(record.tenant, record.session or None, record.agent or None, record.parent)
            line = cls(
                record.line, who, prompt, bytes.fromhex(extra["first_user"]), record.n_tokens, kind=extra["kind"]
            )
            line.day = str(extra.get("day", ""))
            line.n_before = int(extra.get("n_before", len(record.chain)))
            line.estimator, line.lost = Estimator(float(ratio)), Cause.ENGINE_RESTART
            if (ledger := extra.get("ledger")) is not None:
                line.ledger = Ledger.from_extra(ledger)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a line: {error}") from error
        return line

    @property
    def has_tools(self) -> bool:
        """Its base holds tool definitions."""
        return self.prompt.tools not in NO_TOOLS

    def tokens_of(self, n_bytes: int) -> int:
        """Tokens that so many bytes of messages seldom exceed, the template's own around them included."""
        return self.estimator.at_most(n_bytes) + TEMPLATE_TOKENS


def today() -> str:
    """The date as templates print it, by their local clock."""
    return time.strftime("%Y-%m-%d")


def new_line(who: Identity, prompt: Prompt, first_user: bytes, kind: str) -> Line:
    """A line of its own; the book finds it once `advance` was told of a first answer."""
    return Line(secrets.token_hex(8), who, prompt, first_user, kind=kind)


@dataclass(frozen=True, slots=True)
class Found:
    """The line that a prompt belongs to or stems from. `shared`: messages in common; `held`: tokens, estimated.

    `is_twin`: nobody's name on it, and nothing in it that the line had not left behind: another one's beginning.
    """

    line: Line | None
    match: Match
    shared: int = 0
    is_twin: bool = False

    @property
    def is_same_line(self) -> bool:
        """The line goes on, if from the prompt before its newest: that one was a question in between (a suggestion, a
        summary) whose answer the client did not keep."""
        if self.line is None or self.match is Match.NEW or self.match is Match.BASE or self.is_twin:
            return False
        return self.match is Match.EXTENDS or self.shared >= self.line.n_before > self.line.prompt.n_leading

    @property
    def held(self) -> int:
        """Tokens of the line's newest prompt that this prompt had in common with it, estimated from bytes."""
        if self.line is None:
            return 0
        if self.match is Match.EXTENDS:
            return self.line.n_tokens
        total = self.line.prompt.n_bytes or 1
        return int(self.line.n_tokens * sum(self.line.prompt.sizes[: self.shared]) / total)


MOST_COMPARED = 16
"""Lines with the same first message that a prompt is compared with, newest first: a conversation and its titles,
summaries and retries are fewer; a thousand that begin with "hello" must not cost time."""


Fits = Callable[["Line", int], int | None]
"""How well a line fits a prompt that agrees with its first so many messages; below 0: only if no other does; None: it
is another conversation's."""


class _Index:
    """Ids of lines by key, newest last: several lines may share a key, and none hides another for good."""

    def __init__(self) -> None:
        self._ids: dict[_Key, dict[str, None]] = {}

    def add(self, key: _Key, line_id: str) -> None:
        ids = self._ids.setdefault(key, {})
        ids.pop(line_id, None)
        ids[line_id] = None

    def drop(self, key: _Key, line_id: str) -> None:
        ids = self._ids.get(key, {})
        ids.pop(line_id, None)
        if not ids:
            self._ids.pop(key, None)

    def newest(self, key: _Key) -> Iterator[str]:
        return reversed(self._ids.get(key, {}))


class LineBook:
    """The newest `max_lines` lines of all tenants, least recently used out first."""

    def __init__(self, max_lines: int) -> None:
        self._max = max_lines
        self._lines: OrderedDict[str, Line] = OrderedDict()
        self._by_tail = _Index()
        self._by_start = _Index()
        self._forgotten: list[str] = []

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Line]:
        return iter(tuple(self._lines.values()))

    def has_tools(self, who: Identity) -> bool:
        """Whether a line of the same session has tools: then a request without them is a question on the side."""
        named = who.session is not None
        return named and any(
            (line.who.tenant, line.who.session) == (who.tenant, who.session) and line.has_tools for line in self
        )

    def get(self, line_id: str | None) -> Line | None:
        """The line of that id, if it is still known."""
        return self._lines.get(line_id) if line_id else None

    def find(self, who: Identity, prompt: Prompt, first_user: bytes, fits: Fits = lambda *_: 0) -> Found:
        """The longest ledger that the prompt extends; else the one that it edits; else one with another base."""
        doubtful: Found | None = None
        for position in range(len(prompt.chain) - 1, max(prompt.n_leading, 0) - 1, -1):
            ids = islice(self._by_tail.newest(_key(who, prompt.chain[position])), MOST_COMPARED)
            score, fittest = _fittest([self._lines[line_id] for line_id in ids], position + 1, fits)
            if fittest is not None and score >= 0:
                return Found(fittest, Match.EXTENDS, position + 1)
            doubtful = doubtful or (Found(fittest, Match.EXTENDS, position + 1) if fittest else None)
        if doubtful is not None:
            return doubtful
        best, shared = None, -1
        for line in self.starting(who, first_user):
            in_common = shared_entries(line.prompt.chain, prompt.chain)
            if in_common > shared and (in_common <= prompt.n_leading or fits(line, in_common) is not None):
                best, shared = line, in_common
        if best is None:
            return Found(None, Match.NEW)
        if shared > prompt.n_leading:
            return Found(best, Match.EDITED, shared, who.session is None and shared == len(prompt.chain))
        # A first message alone ("hello") says nothing: another base needs a session's name, or a history, to be one.
        is_same = who.session is not None or len(prompt.chain) - prompt.n_leading > 1
        return Found(best, Match.BASE, shared) if is_same else Found(None, Match.NEW)

    def starting(self, who: Identity, first_user: bytes) -> list[Line]:
        """Lines that begin with the same first message, newest first, up to MOST_COMPARED."""
        return [self._lines[i] for i in islice(self._by_start.newest(_key(who, first_user)), MOST_COMPARED)]

    def advance(self, line: Line, prompt: Prompt, n_tokens: int) -> None:
        """The line's newest prompt was processed: it is what the next one has to extend."""
        self._unlink(line)
        known = len(line.prompt.chain)
        is_longer = prompt.chain[:known] == line.prompt.chain and prompt.sizes[:known] == line.prompt.sizes
        if line.n_tokens and is_longer:
            line.estimator.observe(sum(prompt.sizes[known:]), n_tokens - line.n_tokens)
        line.n_before = min(known, shared_entries(line.prompt.chain, prompt.chain)) if line.n_requests else 0
        line.prompt, line.n_tokens, line.lost = prompt, n_tokens, None
        line.n_requests += 1
        line.day = today()
        self.keep(line)

    def keep(self, line: Line) -> None:
        """Makes a line findable (again); the oldest line beyond the bound that nobody uses is forgotten."""
        self._lines[line.id] = line
        self._lines.move_to_end(line.id)
        if line.prompt.chain:
            self._by_tail.add(_key(line.who, line.prompt.chain[-1]), line.id)
        self._by_start.add(_key(line.who, line.first_user), line.id)
        excess = max(0, len(self._lines) - self._max)
        for old in list(islice((old for old in self._lines.values() if not old.running), excess)):
            self.forget(old)
            self._forgotten.append(old.id)

    def forget(self, line: Line) -> None:
        """Drops a line and its ledger."""
        self._unlink(line)
        self._lines.pop(line.id, None)

    def take_forgotten(self) -> list[str]:
        """Ids of lines that were dropped for the bound since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _unlink(self, line: Line) -> None:
        self._by_start.drop(_key(line.who, line.first_user), line.id)
        if line.prompt.chain:
            self._by_tail.drop(_key(line.who, line.prompt.chain[-1]), line.id)


def _fittest(lines: list[Line], shared: int, fits: Fits) -> tuple[int, Line | None]:
    """The line that fits best, and how well; None when each is another conversation's. Of equals one that has no answer
    running (a twin that asks at the same moment has taken it), and of those the newest."""
    found = ((fits(line, shared), not line.running, -i) for i, line in enumerate(lines))
    scores = [(score, *rest) for score, *rest in found if score is not None]
    return (max(scores)[0], lines[-max(scores)[-1]]) if scores else (0, None)


_Key = tuple[str, str | None, str | None, bytes]


def _key(who: Identity, entry: bytes) -> _Key:
    """Lines are found within one tenant, session and agent only (design.md, "line")."""
    return who.tenant, who.session, who.agent, entry
