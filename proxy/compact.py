"""A conversation that no longer fits its slot: counted, summed up on its own warm prefix, sent on with the summary.

What is replaced, and by what, is decided in policies/compaction; here the model is asked, and the answer is put into
the line's ledger, where it stays (proxy/ledger.Ledger.replaced).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
import structlog

from policies.compaction import LEAST_FREED, Budget, Compact, Replacement, plan, reserve_of, source_end
from policies.compaction_text import digest_of, fault, finished, instruction, short_instruction
from policies.layout import Value, change_note, line_note
from policies.types import Match, digest
from proxy.api.read import CHAT_PATH, ModelRequest, folded
from proxy.engine import Engine
from proxy.errors import SlotkeeperError
from proxy.ledger import Ledger
from proxy.lines import Chosen, Found, Line
from proxy.metrics import CompactionOutcome
from proxy.prepare import Prepared, prepare
from proxy.rendering import render
from proxy.service import Service
from proxy.serving import template_of
from proxy.settle import Record

log = structlog.get_logger(__name__)

Json = dict[str, Any]

TRIES = ((instruction, 0.0), (short_instruction, 0.7))
"""What is asked, at which temperature: what ran in circles once is asked for more simply, and with some chance."""
SEED = 1
"""The same history has the same summary, as far as the engine computes the same."""
ROUNDS = 2
"""Spans that are tried: what is kept may have more tokens for its bytes than the whole, so that not enough went."""
THINKING = 4
"""A model that thinks may take so many times a summary's tokens for both."""
THOUGHT = b'"reasoning_content":"'
MARGIN = 64
"""Tokens by which estimates of a part of a prompt may be short."""
MOST_REPLACED = 3
"""Summaries that a ledger remembers: the newest, and what it goes back to if the client returns to before it."""
ASKED_ALIKE = (
    "model",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning_format",
    "lora",
)
"""Fields of the client's request that the summary's shares: they decide the prompt's beginning, or who answers."""


class Collected:
    """An answer that is read here (proxy.relay.Out)."""

    def __init__(self) -> None:
        self.started = False
        self.parts: list[bytes] = []
        self.error: SlotkeeperError | None = None
        self.record: Record | None = None

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Nobody is told."""
        self.started = True

    async def write(self, data: bytes) -> None:
        """A piece of the answer."""
        self.parts.append(data)

    async def end(self) -> None:
        """It is whole."""

    async def fail(self, error: SlotkeeperError, headers: Mapping[str, str]) -> None:
        """There is none."""
        self.error = error

    @property
    def choice(self) -> Json:
        """The answer's choice; empty when there is none."""
        try:
            found = orjson.loads(b"".join(self.parts))["choices"][0]
        except (orjson.JSONDecodeError, LookupError, TypeError):
            return {}
        return found if isinstance(found, dict) else {}


Ask = Callable[[Prepared], Awaitable[Collected]]


async def ask_aside(exchange: Callable[..., Any], service: Service, prepared: Prepared) -> Collected:
    """Runs a question of ours on a line's own slot. `exchange`: the class, which cannot be imported here."""
    out, r = Collected(), prepared.request
    record = Record(f"req_{secrets.token_hex(8)}", r.who.tenant, r.dialect, prepared.kind, time.time())
    await exchange(service, r, out, record, prepared=prepared).run()
    out.record = record
    return out


class Compaction:
    """At most one for a request of `line`. `asked`: as the client sent it; `ask`: asks a question of ours."""

    def __init__(
        self, service: Service, engine: Engine, line: Line, asked: ModelRequest, record: Record, ask: Ask
    ) -> None:
        self._service, self._engine, self._line = service, engine, line
        self._asked, self._record, self._ask = asked, record, ask
        usual = service.settings.reply_reserve
        self._budget = Budget(
            engine.n_ctx, reserve_of(asked.max_tokens, usual, engine.n_ctx), service.settings.compact_at
        )
        self._n_whole = 0
        """Tokens of the prompt before anything was tried; 0: nothing was."""

    async def fitted(self, prepared: Prepared) -> Prepared:
        """The request as it fits, or as it was when it does, or when nothing helps."""
        self._line.compacts = prepared.request.compacts
        self._line.has_own |= prepared.request.has_own or prepared.kind == "compaction"
        if not _may(prepared) or not self._budget.is_close(self._estimate(prepared)):
            return prepared
        n_prompt = await self._count(prepared)
        # The client's own request for a summary is to see what it is to sum up.
        is_over = self._budget.cannot_run if prepared.kind == "compaction" else self._budget.is_over
        if n_prompt is None or not is_over(n_prompt):
            return prepared
        async with self._line.compacting:
            shared = await self._as_chosen(prepared, n_prompt, is_over)
            return shared or await self._compacted(prepared, n_prompt) or prepared

    async def forced(self, prepared: Prepared, error: SlotkeeperError) -> Prepared:
        """The same for a prompt that was refused. Raises the refusal when that cannot be helped."""
        if not _may(prepared) or self._n_whole:
            raise error  # once: what was tried did not help enough
        n_prompt = await self._count(prepared)
        async with self._line.compacting:
            found = await self._compacted(prepared, max(n_prompt or 0, self._engine.n_ctx))
        if found is None:
            raise error
        return found

    async def ahead(self, whole: Prepared, n_prompt: int) -> tuple[Prepared, int] | None:
        """The same before it is needed, for what a slot holds (proxy/compact_ahead); and the tokens that it will have.
        Prunes stay put off: only the client's next request says what it wants instead."""
        self._n_whole = n_prompt
        async with self._line.compacting:
            found = await self._replaced(whole, whole, n_prompt)
        if found is None:
            return None
        replaced, outcome, n_after = found
        return self._told(replaced, outcome, n_prompt, n_after), n_after

    def _estimate(self, prepared: Prepared) -> int:
        """Tokens that the prompt seldom exceeds."""
        p, found, line = prepared.request.prompt, prepared.found, self._line
        if found.match is Match.EXTENDS and found.line is line and line.n_tokens:
            return line.n_tokens + line.tokens_of(sum(p.sizes[found.shared :]))
        return line.tokens_of(p.n_bytes + _n_tools(prepared.request))

    async def _count(self, prepared: Prepared) -> int | None:
        rendered = await render(self._engine, prepared.request, self._line)
        return rendered.n_tokens if rendered is not None else None

    # --- in one step ------------------------------------------------------------------------------------------------

    async def _compacted(self, prepared: Prepared, n_prompt: int) -> Prepared | None:
        """Prunes that were put off first; then, unless that was enough, the summary."""
        whole, n_now, self._n_whole = prepared, n_prompt, n_prompt
        if prepared.ledger is not None and prepared.ledger.deferred:
            prepared = await prepare(self._service, self._asked, prunes=True)
            n_now = await self._count(prepared) or n_prompt
            n_base = n_prompt - sum(_tokens(whole, n_prompt)[0][whole.request.prompt.n_leading :])
            if not self._budget.is_over(n_now) and n_prompt - n_now >= LEAST_FREED * (n_prompt - n_base):
                return self._told(prepared, "pruned", n_prompt, n_now)
        found = await self._replaced(whole, prepared, n_now)
        if found is not None:
            replaced, outcome, n_after = found
            return self._told(replaced, outcome, n_prompt, n_after)
        if prepared is not whole and self._budget.cannot_run(n_prompt) and not self._budget.cannot_run(n_now):
            return self._told(prepared, "pruned", n_prompt, n_now)
        self._service.metrics.compacted("impossible")
        return None

    def _told(self, prepared: Prepared, outcome: CompactionOutcome, before: int, after: int) -> Prepared:
        self._record.compaction |= {"outcome": outcome, "before": before, "after": after}
        self._service.metrics.compacted(outcome, before, after)
        log.info("compacted", request=self._record.id, line=self._line.id, outcome=outcome, before=before, after=after)
        return prepared

    async def _replaced(
        self, whole: Prepared, prepared: Prepared, n_prompt: int
    ) -> tuple[Prepared, CompactionOutcome, int] | None:
        """`whole`: as the slot holds it; `prepared`: what is to be sent, its prunes done."""
        ledger, r = prepared.ledger, prepared.request
        if ledger is None or ledger.sent is None:
            return None
        messages = [orjson.loads(blob) for blob in ledger.sent]
        tokens, n_base = _tokens(prepared, n_prompt)
        n_chars = int(self._budget.n_summary * (sum(r.prompt.sizes) + _n_tools(r)) / max(1, n_prompt))
        old_end = ledger.replaced[-1].end if ledger.replaced else 0
        room, excess = self._room(whole)[1], 0
        for _ in range(ROUNDS):
            decided = plan(
                messages, tokens, r.prompt.n_leading, n_base + excess, self._budget, old_end=old_end, room=room
            )
            if not isinstance(decided, Compact):
                return None
            text, outcome = await self._text(whole, decided, n_chars)
            chosen = Replacement(decided.start, decided.end, decided.pinned, text)
            sent = self._with(prepared, messages, chosen)
            expected = max(0, n_prompt - decided.freed)
            n_after = await self._count(sent) or expected
            if not self._budget.cannot_run(n_after):
                self._record.compaction["messages"] = [chosen.start, chosen.end]
                self._line.chosen = Chosen(chosen, tuple(ledger.raw[: chosen.end]), outcome)
                return sent, outcome, n_after
            excess += max(1, n_after - expected)
        return None

    def _with(self, prepared: Prepared, messages: Sequence[Json], chosen: Replacement) -> Prepared:
        """The request with that summary in it."""
        assert prepared.ledger is not None
        ledger = replace(prepared.ledger, replaced=[*prepared.ledger.replaced, chosen][-MOST_REPLACED:])
        at = min(chosen.start, prepared.found.shared or chosen.start)
        found = Found(prepared.found.line or self._line, Match.EDITED, at)
        sent = resent(self._service, prepared.request, messages, ledger)
        return replace(prepared, request=sent, found=found, ledger=ledger)

    async def _as_chosen(self, prepared: Prepared, n_prompt: int, is_over: Callable[[int], bool]) -> Prepared | None:
        """The request with the summary that another one of the line has got meanwhile, or got and was left."""
        chosen, ledger = self._line.chosen, prepared.ledger
        if chosen is None or ledger is None or ledger.sent is None:
            return None
        end = chosen.replacement.end
        known = ledger.replaced[-1].end if ledger.replaced else 0
        if end <= known or tuple(ledger.raw[:end]) != chosen.raws:
            return None
        sent = self._with(prepared, [orjson.loads(blob) for blob in ledger.sent], chosen.replacement)
        n_after = await self._count(sent)
        if n_after is None or is_over(n_after):
            return None
        messages = [chosen.replacement.start, end]
        told = {"outcome": chosen.outcome, "messages": messages, "before": n_prompt, "after": n_after}
        self._record.compaction |= told
        return sent

    # --- the summary ------------------------------------------------------------------------------------------------

    async def _text(self, whole: Prepared, decided: Compact, n_chars: int) -> tuple[str, CompactionOutcome]:
        """What takes the span's place, and whether the model said it."""
        ledger = whole.ledger
        assert ledger is not None and ledger.sent is not None
        messages = [orjson.loads(blob) for blob in ledger.sent]
        old = ledger.replaced[-1] if ledger.replaced else None
        kept = set(decided.pinned)
        first = [{"role": "user", "content": old.text}] if old is not None else []
        begin = old.end if old is not None else decided.start
        pinned = [] if old is None else [messages[i] for i in old.pinned if i not in kept]
        span = [*pinned, *(messages[i] for i in range(begin, decided.end) if i not in kept)]
        outcome: CompactionOutcome = "summary"
        text = await self._summary(whole, messages, decided, n_chars)
        if text is None:
            outcome, text = "digest", old.text[: n_chars // 2] + "\n" if old is not None else ""
            text += await asyncio.to_thread(digest_of, span, n_chars - len(text))
        # A span may be as long as a body: what looks through it must not hold the loop.
        return await asyncio.to_thread(finished, text, [*first, *span], n_chars, _notes(ledger, decided)), outcome

    async def _summary(self, whole: Prepared, messages: Sequence[Json], decided: Compact, n_chars: int) -> str | None:
        """The model's, None when it gave none that is fit."""
        for instruct, temperature in TRIES:
            asked = instruct(self._budget.n_summary)
            question = self._question(whole, messages, decided, asked, temperature)
            if question is None:
                return None
            answer = await self._ask(question)
            self._record.compaction.setdefault("requests", []).append(answer.record.id if answer.record else "")
            message = answer.choice.get("message") or {}
            text = message.get("content") or ""
            why = fault(
                text,
                has_calls=bool(message.get("tool_calls")),
                is_cut=answer.choice.get("finish_reason") == "length" or len(text) > n_chars + n_chars // 2,
                asked=asked,
            )
            if why is None:
                return str(text)
            log.info("summary_unfit", line=self._line.id, why=answer.error.code if answer.error else why)
            if answer.error is not None:
                return None
        return None

    def _room(self, whole: Prepared) -> tuple[int, int]:
        """Tokens that the answer may have, and those that are left for the messages before the instruction."""
        n_summary = self._budget.n_summary
        thinks = whole.ledger is not None and any(THOUGHT in blob for blob in whole.ledger.sent or ())
        n_answer = n_summary * (THINKING if thinks else 1)
        n_instruction = self._line.tokens_of(len(instruction(n_summary)))
        return n_answer, self._engine.n_ctx - _tokens(whole, self._n_whole)[1] - n_answer - n_instruction - MARGIN

    def _question(
        self, whole: Prepared, messages: Sequence[Json], decided: Compact, text: str, temperature: float
    ) -> Prepared | None:
        """The history as it lies in the slot, and one instruction (`text`) as the newest message."""
        r, ledger = whole.request, whole.ledger
        assert ledger is not None
        tokens, _ = _tokens(whole, self._n_whole)
        n_answer, room = self._room(whole)
        warm = whole.found.shared if whole.found.match is not Match.NEW else len(messages)
        if warm < len(messages) and messages[warm].get("role") == "assistant":
            warm += not messages[warm].get("tool_calls")
        end = source_end(messages, tokens, decided.end, warm, room, can_rewind=self._engine.can_rewind)
        if end is None:
            return None
        shown = replace(ledger, replaced=[x for x in ledger.replaced if x.end <= end]).composed(messages[:end])
        body = {name: r.body[name] for name in ASKED_ALIKE if name in r.body}
        body |= {"messages": [*shown, {"role": "user", "content": text}], "max_tokens": n_answer}
        body |= {"temperature": temperature, "seed": SEED}
        if body.get("tools"):
            body["tool_choice"] = "none"  # the template prints the same prompt, the answer is not read for calls
        p = r.prompt
        chain = (*p.chain[:end], digest(p.chain[end - 1], text.encode()))
        request = replace(
            r,
            path=CHAT_PATH,
            body=folded(body, template_of(self._service.engines, body.get("model"))),
            prompt=replace(p, chain=chain, sizes=(*p.sizes[:end], len(text))),
            max_tokens=n_answer,
            dialect="chat",
            writer=None,
            compacts=False,
        )
        # Where memory cannot be rewound only its own slot has the checkpoints, of which placement does not know.
        is_held = not self._engine.can_rewind and self._engine.table.holding(self._line.id) is not None
        match = Match.EXTENDS if is_held else Match.EDITED
        return Prepared(request, Found(self._line, match, end), kind="compaction", line=self._line)


def _may(prepared: Prepared) -> bool:
    return prepared.request.compacts and prepared.ledger is not None and not prepared.request.fresh


def _n_tools(r: ModelRequest) -> int:
    """Bytes of the tools, of which no message tells."""
    return len(orjson.dumps(r.body.get("tools"))) if r.body.get("tools") else 0


def _tokens(prepared: Prepared, n_prompt: int) -> tuple[list[int], int]:
    """The prompt's tokens shared out by bytes: to each message, and to the tools."""
    sizes, n_tools = prepared.request.prompt.sizes, _n_tools(prepared.request)
    per_byte = n_prompt / max(1, sum(sizes) + n_tools)
    return [round(size * per_byte) for size in sizes], round(n_tools * per_byte)


def _notes(ledger: Ledger, decided: Compact) -> list[str]:
    """What was told of changed values in the span has to be told again."""
    told: dict[str, str] = {}
    for at, values in ledger.told:
        if decided.start <= at < decided.end and at not in decided.pinned:
            told |= values
    moved = [Value(name, text, "move") for name, text in told.items() if name[:1] != "="]
    lines = [line_note(name[1:], text) for name, text in told.items() if name[:1] == "="]
    return [*([change_note(moved)] if moved else []), *lines]


def resent(service: Service, r: ModelRequest, messages: Sequence[Json], ledger: Ledger) -> ModelRequest:
    """The request with the ledger's newest summary in it."""
    body = folded({**r.body, "messages": ledger.composed(messages)}, template_of(service.engines, r.model))
    return replace(r, body=body, prompt=replace(r.prompt, sizes=ledger.sizes()))
