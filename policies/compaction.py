"""When a conversation no longer fits its slot: what is replaced by a summary, rarely, and in one large step.

A little trimming on every turn recomputes the history on every turn. So nothing happens until the prompt and its reply
do not fit; then at least half of what lies after the base goes at once, and what takes its place stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from policies.layout import with_note
from policies.message_parts import Message, as_dict, as_list, plain, role_of, texts_of

KEPT_EXCHANGES = 2
"""Newest exchanges that stay word for word (issue 6)."""
LEAST_FREED = 0.5
"""Share of what lies after the base that a compaction has to free, else it would soon be needed again (issue 6)."""
CLOSE = 0.9
"""Share of a limit from which on an estimate is not good enough and tokens are counted (issue 6)."""
RESERVE_PART = 4
"""A reply reserves at most this part of the window: agents ask for 8,192 or 32,000 tokens whatever the window
(agents.md). All of --reply-reserve would be half of a slot of 8,192: a base of 3,000 tokens would leave 1,000 for the
conversation, and a compaction every few turns. A longer reply ends at the window, as it does without us."""
SUMMARY_PART = 32
"""A summary may have this part of the window: 256 tokens of 8,192, 1,024 of 32,768."""
LEAST_SUMMARY, MOST_SUMMARY = 192, 2048
"""Bounds of a summary, in tokens."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A slot's window and what a reply needs of it, in tokens. `at`: share of the window that may be used."""

    n_ctx: int
    reserve: int
    at: float = 1.0

    def is_close(self, n_prompt: int) -> bool:
        """An estimate is too near to the limit to be trusted."""
        return n_prompt + self.reserve >= CLOSE * self.at * self.n_ctx

    def is_over(self, n_prompt: int) -> bool:
        """Prompt and reserve do not fit."""
        return n_prompt + self.reserve > self.at * self.n_ctx

    def cannot_run(self, n_prompt: int) -> bool:
        """The engine refuses it: not one token of a reply would fit (server-context.cpp)."""
        return n_prompt >= self.n_ctx

    @property
    def n_summary(self) -> int:
        """Tokens that a summary may have."""
        return max(LEAST_SUMMARY, min(MOST_SUMMARY, self.n_ctx // SUMMARY_PART))


def reserve_of(asked: int | None, usual: int, n_ctx: int) -> int:
    """Tokens kept free for a reply. `asked`: the request's own limit; `usual`: --reply-reserve."""
    return min(usual if asked is None else asked, usual, n_ctx // RESERVE_PART)


@dataclass(frozen=True, slots=True)
class Keep:
    """Nothing is replaced, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Compact:
    """A summary takes the place of messages [start, end). Those of `pinned` in it stay, behind the summary: the user's
    newest message, where a long tool loop follows it. `freed`: tokens, the summary's own taken off."""

    start: int
    end: int
    pinned: tuple[int, ...] = ()
    freed: int = 0


Plan = Keep | Compact


def plan(
    messages: Sequence[Message],
    tokens: Sequence[int],
    n_leading: int,
    n_base: int,
    budget: Budget,
    *,
    old_end: int = 0,
    shown: int | None = None,
) -> Plan:
    """What to replace. `tokens`: of each message as it is sent now (0 for what a summary already stands for; its own
    are counted where it begins); `n_base`: of the tools; `old_end`: where such a summary ends; `shown`: how many of the
    messages, as the slot holds them, the model can be shown: a span that ends there can be summed up.

    Deterministic. The head (all before the first answer), the newest two exchanges and the user's newest message stay.
    Only a prompt that could not run at all goes below two exchanges, or frees less than half.
    """
    if shown is not None:
        found = _plan(messages, tokens, n_leading, n_base, budget, range(old_end + 1, shown + 1))
        if isinstance(found, Compact):
            return _pinned(messages, found)
    return _pinned(messages, _plan(messages, tokens, n_leading, n_base, budget, range(old_end + 1, len(messages))))


def _pinned(messages: Sequence[Message], found: Plan) -> Plan:
    if isinstance(found, Keep):
        return found
    return replace(found, pinned=tuple(i for i in _newest_request(messages) if found.start <= i < found.end))


def _plan(
    messages: Sequence[Message], tokens: Sequence[int], n_leading: int, n_base: int, budget: Budget, within: range
) -> Plan:
    start = head_end(messages, n_leading)
    n_prompt = n_base + sum(tokens)
    begins = _exchanges(messages, start)
    ends = _spans(messages, tokens, start, budget.n_summary, within)
    behind = sum(tokens[n_leading:])
    best: Plan = Keep("nothing lies between the first message and the newest ones")
    for kept in range(KEPT_EXCHANGES, -1, -1):
        last = _last_end(messages, begins, kept)
        allowed = [c for c in ends if c.end <= last]
        enough = [c for c in allowed if c.freed >= LEAST_FREED * behind and c.freed > 0]
        turns = [c for c in enough if role_of(messages[c.end]) == "user"]
        if turns or enough:
            best = (turns or enough)[-1]
            if not budget.cannot_run(n_prompt - best.freed):
                return best
        if not budget.cannot_run(n_prompt):
            return (
                best if isinstance(best, Compact) else Keep("it would free less than half of what lies after the base")
            )
        small = [c for c in allowed if c.freed > 0 and not budget.cannot_run(n_prompt - c.freed)]
        if small:
            return small[-1]
    return best if isinstance(best, Keep) else Keep("what has to stay does not fit")


def _spans(
    messages: Sequence[Message], tokens: Sequence[int], start: int, n_summary: int, within: range
) -> list[Compact]:
    """Every span that may be replaced, the shortest first, and what it frees (its pins are not told yet). Linear:
    histories may have 100,000 messages."""
    totals, newest = [0, *accumulate(tokens)], _newest_request(messages)
    found = []
    for end in (p for p in boundaries(messages, start) if p in within):
        kept = max(0, totals[min(end, newest.stop)] - totals[max(start, newest.start)])
        found.append(Compact(start, end, freed=totals[end] - totals[start] - kept - n_summary))
    return found


def head_end(messages: Sequence[Message], n_leading: int) -> int:
    """Where the first answer or result stands: what is before it (the first user message) is never replaced."""
    found = (i for i in range(n_leading, len(messages)) if role_of(messages[i]) in ("assistant", "tool"))
    return next(found, len(messages))


def boundaries(messages: Sequence[Message], start: int) -> list[int]:
    """Positions behind `start` where a cut parts no call from its result: a question or an answer begins there."""
    inside: set[int] = set()
    for first, last in _pairs(messages):
        inside.update(range(first + 1, last + 1))
    places = range(start + 1, len(messages))
    return [p for p in places if p not in inside and role_of(messages[p]) in ("user", "assistant")]


def _pairs(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """(call, result) positions; a result whose call is unknown belongs to the answer before it."""
    calls: dict[str, int] = {}
    answer: int | None = None
    for i, message in enumerate(messages):
        if role_of(message) == "assistant":
            answer = i
            calls |= {str(as_dict(call).get("id")): i for call in as_list(message.get("tool_calls"))}
        elif role_of(message) == "tool":
            asked = calls.get(str(message.get("tool_call_id")), answer)
            yield (asked if asked is not None else max(0, i - 1)), i


def _exchanges(messages: Sequence[Message], start: int) -> list[int]:
    """Where each exchange begins: a question with its answer, or a further step of a tool loop with its results."""
    answers = [i for i, message in enumerate(messages) if role_of(message) == "assistant"]
    places = [p for p in [start, *boundaries(messages, start)] if answers and p <= answers[-1]]
    return [p for p in places if p == start or role_of(messages[p - 1]) != "user"]


def _last_end(messages: Sequence[Message], begins: Sequence[int], kept: int) -> int:
    """The last position at which a span may end so that so many exchanges, and what is not answered yet, stay."""
    if kept:
        return begins[-kept] if len(begins) >= kept else 0
    n = len(messages)
    while n and role_of(messages[n - 1]) == "user":
        n -= 1
    return n if n < len(messages) else (begins[-1] if begins else 0)


def _newest_request(messages: Sequence[Message]) -> range:
    """The user's newest message: the last user messages in a row."""
    last = next((i for i in range(len(messages) - 1, -1, -1) if role_of(messages[i]) == "user"), None)
    if last is None:
        return range(0)
    first = last
    while first and role_of(messages[first - 1]) == "user":
        first -= 1
    return range(first, last + 1)


def source_end(
    messages: Sequence[Message], tokens: Sequence[int], end: int, warm: int, room: int, *, can_rewind: bool = True
) -> int | None:
    """How many messages the model is shown when it is asked for the summary: as many as lie in the slot (`warm`) and
    fit `room` tokens, at least the span up to `end`; None when even that does not fit.

    Where memory cannot be rewound (`can_rewind`), an earlier prompt's end is preferred: there are checkpoints.
    """
    totals = [0, *accumulate(tokens)]
    clean = [p for p in [*boundaries(messages, 0), len(messages)] if p <= max(warm, end)]
    asked = [p for p in clean if p >= end and (p == warm or role_of(messages[p]) == "assistant")]
    if not can_rewind and any(totals[p] <= room for p in asked):
        clean = asked
    fitting = [p for p in clean if totals[p] <= room]
    return fitting[-1] if fitting and fitting[-1] >= end else None


# --- what takes the place of the span ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replacement:
    """A span of the client's messages and the text that is sent instead: fixed once chosen."""

    start: int
    end: int
    pinned: tuple[int, ...]
    text: str


def applied(messages: Sequence[Message], r: Replacement) -> list[tuple[int, Message]]:
    """The messages as they are sent, each with the position that it stands for; the summary has the span's first.

    Where a question follows, the summary is an answer; where an answer follows (a tool loop goes on), it stands at the
    end of the first user message. So user and assistant go on taking turns.
    """
    kept = [(i, messages[i]) for i in range(r.start)]
    rest = [(i, messages[i]) for i in (*r.pinned, *range(r.end, len(messages)))]
    if kept and role_of(kept[-1][1]) == "user" and (not rest or role_of(rest[0][1]) != "user"):
        at, message = kept[-1]
        return [*kept[:-1], (at, with_note(message, r.text, front=False)), *rest]
    has_question = any(role_of(message) == "user" for _, message in kept)
    role = "assistant" if has_question and rest and role_of(rest[0][1]) == "user" else "user"
    return [*kept, (r.start, {"role": role, "content": r.text}), *rest]


# --- clients that do it themselves ------------------------------------------------------------------------------------

_AGENTS = re.compile(r"claude-cli|claude-code|codex|opencode|kilo-?code|gemini-cli", re.I)
"""User agents that compact by the usage they are told (agents.md, section 7)."""
_ASKED = re.compile(
    r"<analysis>[^<]{0,200}<summary>|</?conversation>|<state_snapshot>|context checkpoint"
    r"|summar\w{1,6}\b[^\n]{0,80}\bconversation",
    re.I,
)
LEAST_ASKED = 600
"""Characters: agents' instructions for a summary are longer (Codex 600, opencode 2,000, Claude Code 6,300)."""


def compacts_itself(user_agent: str) -> bool:
    """A client that is known to compact before its window is full, if it knows the window."""
    return _AGENTS.search(user_agent[:200]) is not None


def asks_for_summary(messages: Sequence[Message]) -> bool:
    """The newest message asks for a summary of the conversation: the client's own compaction, by its shape."""
    if not messages or role_of(messages[-1]) != "user":
        return False
    text = "\n".join(map(plain, texts_of(messages[-1])))
    return len(text) >= LEAST_ASKED and (_ASKED.search(text[:2000]) or _ASKED.search(text[-2000:])) is not None
