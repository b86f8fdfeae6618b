"""A conversation that no longer fits its slot: counted, summed up on its own warm prefix, sent on with the summary.

What is replaced, and by what, is decided in policies/compaction; here the model is asked, and the answer is put into
the line's ledger, where it stays (proxy/ledger.Ledger.replaced).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import orjson
import structlog

from policies.compaction import LEAST_FREED, Budget, Compact, Replacement, plan, reserve_of, source_end
from policies.compaction_text import digest_of, fault, finished, instruction, short_instruction
from policies.layout import Value, change_note, line_note
from policies.types import Match, digest
from proxy.api.read import CHAT_PATH, ModelRequest, folded
from proxy.aside import Ask
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


@dataclass(frozen=True, slots=True)
class _Case:
    """What is replaced in which prompt: in `whole`, as the slot holds it, and in `prepared`, as it is to be sent, with
    the messages of both; characters that a summary may have; tokens that the prompt is expected to have then."""

    whole: Prepared
    held: Sequence[Json]
    prepared: Prepared
    messages: Sequence[Json]
    decided: Compact
    n_chars: int
    expected: int


class Compaction:
    """At most one for a request of `line`. `asked`: as the client sent it; `ask`: asks a question of ours, and says
    whether it is sure already that the request will fit, so that its client may be told that there is life."""

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
        self._is_refused = False
        """By the engine, which counted more than we did: what we count is not sure to fit."""

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
        self._is_refused = True
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
        if ledger is None or ledger.sent is None or whole.ledger is None or whole.ledger.sent is None:
            return None
        messages = [orjson.loads(blob) for blob in ledger.sent]
        held = messages if whole is prepared else [orjson.loads(blob) for blob in whole.ledger.sent]
        tokens, n_base = _tokens(prepared, n_prompt)
        n_chars = int(self._budget.n_summary * (sum(r.prompt.sizes) + _n_tools(r)) / max(1, n_prompt))
        old_end = ledger.replaced[-1].end if ledger.replaced else 0
        room, excess = self._room(whole)[1], 0
        shown = sum(1 for total in accumulate(_tokens(whole, self._n_whole)[0]) if total <= room)
        for _ in range(ROUNDS):
            decided = plan(
                messages, tokens, r.prompt.n_leading, n_base + excess, self._budget, old_end=old_end, shown=shown
            )
            if not isinstance(decided, Compact):
                return None
            case = _Case(whole, held, prepared, messages, decided, n_chars, max(0, n_prompt - decided.freed))
            spare = await self._finished(case, None)
            counted = await render(self._engine, self._with(prepared, messages, spare).request, self._line)
            n_spare = counted.n_tokens if counted is not None else case.expected
            if not self._budget.cannot_run(n_spare):
                is_sure = counted is not None and not counted.n_media and not self._is_refused
                return await self._summed_up(case, spare, n_spare, is_sure=is_sure)
            excess += max(1, n_spare - case.expected)
        return None

    async def _summed_up(
        self, case: _Case, chosen: Replacement, n_after: int, *, is_sure: bool
    ) -> tuple[Prepared, CompactionOutcome, int]:
        """With the model's summary; with the digest (`chosen`, with which the prompt has `n_after` tokens, counted if
        that is sure) when there is none that is fit, or when it would be too long."""
        outcome: CompactionOutcome = "digest"
        if is_sure and (tell := getattr(self._asked.writer, "progress", None)) is not None:
            tell(n_after, 0)  # figures that go with a first sign of life
        said = await self._summary(case, is_sure=is_sure)
        if said is not None:
            better = await self._finished(case, said)
            n_better = await self._count(self._with(case.prepared, case.messages, better)) or case.expected
            if not self._budget.cannot_run(n_better):
                chosen, n_after, outcome = better, n_better, "summary"
        assert case.prepared.ledger is not None
        self._record.compaction["messages"] = [chosen.start, chosen.end]
        self._line.chosen = Chosen(chosen, tuple(case.prepared.ledger.raw[: chosen.end]), outcome)
        return self._with(case.prepared, case.messages, chosen), outcome, n_after

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

    async def _finished(self, case: _Case, said: str | None) -> Replacement:
        """What takes the span's place: what the model `said`, or a digest."""
        ledger, decided, messages, n_chars = case.whole.ledger, case.decided, case.held, case.n_chars
        assert ledger is not None
        old = ledger.replaced[-1] if ledger.replaced else None
        kept = set(decided.pinned)
        first = [{"role": "user", "content": old.text}] if old is not None else []
        begin = old.end if old is not None else decided.start
        pinned = [] if old is None else [messages[i] for i in old.pinned if i not in kept]
        span = [*pinned, *(messages[i] for i in range(begin, decided.end) if i not in kept)]
        # A span may be as long as a body: what looks through it must not hold the loop.
        if said is None:
            said = old.text[: n_chars // 2] + "\n" if old is not None else ""
            said += await asyncio.to_thread(digest_of, span, n_chars - len(said))
        text = await asyncio.to_thread(finished, said, [*first, *span], n_chars, _notes(ledger, decided))
        return Replacement(decided.start, decided.end, decided.pinned, text)

    async def _summary(self, case: _Case, *, is_sure: bool) -> str | None:
        """The model's, None when it gave none that is fit."""
        most = case.n_chars + case.n_chars // 2
        for instruct, temperature in TRIES:
            asked = instruct(self._budget.n_summary)
            question = self._question(case, asked, temperature)
            if question is None:
                return None
            answer = await self._ask(question, is_sure)
            self._record.compaction.setdefault("requests", []).append(answer.record.id if answer.record else "")
            message = answer.choice.get("message") or {}
            text = message.get("content") or ""
            why = fault(
                text,
                has_calls=bool(message.get("tool_calls")),
                is_cut=answer.choice.get("finish_reason") == "length" or len(text) > most,
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

    def _question(self, case: _Case, text: str, temperature: float) -> Prepared | None:
        """The history as it lies in the slot, and one instruction (`text`) as the newest message."""
        whole, messages, decided = case.whole, case.held, case.decided
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
        body |= {"temperature": temperature, "seed": SEED, "stream": True}
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
    """What was told of changed values in the span has to be told again, of lines as what stands before it left them."""
    told: dict[str, str] = {}
    before = ledger.told_before(decided.start)
    for at, values in ledger.told:
        if decided.start <= at < decided.end and at not in decided.pinned:
            told |= values
    moved = [Value(name, text, "move") for name, text in told.items() if name[:1] != "="]
    lines = [(before.get(name, name[1:]), text) for name, text in told.items() if name[:1] == "="]
    return [*([change_note(moved)] if moved else []), *(line_note(old, new) for old, new in lines if old != new)]


def resent(service: Service, r: ModelRequest, messages: Sequence[Json], ledger: Ledger) -> ModelRequest:
    """The request with the ledger's newest summary in it."""
    body = folded({**r.body, "messages": ledger.composed(messages)}, template_of(service.engines, r.model))
    return replace(r, body=body, prompt=replace(r.prompt, sizes=ledger.sizes()))
