"""What recorded requests would have cost, and why: hit rates, bases, divergences. Offline, in one pass over a file."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.advice import advice, agent_of
from policies.divergence import Divergence, first_divergence
from policies.flatten import Piece, flatten
from policies.prefix import common
from policies.types import digest
from proxy.api.read import identity
from proxy.audit_parts import Steadiness, shape_of
from proxy.recorded import Dialect, Json, Recorded, echoed

CHARACTERS_PER_TOKEN = 3.8
"""Without a vocabulary (agents.md: measured over fourteen agents)."""
MOST_TEXTS = 4096
"""Texts whose token counts are remembered: messages come again with every request."""
MOST_LISTED = 20
"""Bases and divergences that are reported."""
START = 60
"""Characters of a system prompt's beginning by which its kind is known (main, title, sub-agent ...)."""
BILLING = "x-anthropic-billing-header:"

Encode = Callable[[str], bytes]
Sent = Callable[[Recorded], Json | None]
"""The body that a request becomes by repair; None where it cannot be read."""


class Tokens:
    """Counts tokens of texts: by an encoding, else by their characters."""

    def __init__(self, encode: Encode | None = None) -> None:
        self._encode = encode
        self._known: OrderedDict[str, int] = OrderedDict()

    def of(self, text: str) -> float:
        """Tokens of one text, remembered."""
        if self._encode is None:
            return len(text) / CHARACTERS_PER_TOKEN
        if text not in self._known:
            self._known[text] = len(self._encode(text.encode("utf-8", "replace").decode())) // 4
            if len(self._known) > MOST_TEXTS:
                self._known.popitem(last=False)
        self._known.move_to_end(text)
        return self._known[text]

    def within(self, pieces: Iterable[Piece], n_characters: int) -> float:
        """Tokens of the first characters of a prompt; pieces are tokenised apart, as templates' marks part them."""
        count, left = 0.0, n_characters
        for piece in pieces:
            if left <= 0:
                break
            count += self.of(piece.text[:left])
            left -= len(piece.text)
        return count


@dataclass(slots=True)
class Prompt:
    """One earlier prompt. `text`: what a cache would hold, the answer behind it included; the prompt are its first `n`
    characters. `group`: its agent and kind; `conversation`: a name for it."""

    text: str
    n: int
    body: Json
    group: str
    conversation: str
    number: int


class Prompts:
    """Earlier prompts in order of their text: the two neighbours of a prompt share the most with it."""

    def __init__(self) -> None:
        self._sorted: list[Prompt] = []

    def nearest(self, text: str) -> tuple[Prompt | None, int]:
        """The earlier prompt with the longest common prefix, and its characters."""
        at = bisect_left(self._sorted, text, key=lambda prompt: prompt.text)
        near = self._sorted[max(0, at - 1) : at + 1]
        shared = [(common(prompt.text, text), prompt.number, prompt) for prompt in near]
        if not shared:
            return None, 0
        longest, _, prompt = max(shared, key=lambda found: found[:2])
        return prompt, longest

    def add(self, prompt: Prompt) -> None:
        """One more; those that it extends say nothing more than it does, and go."""
        at = bisect_left(self._sorted, prompt.text, key=lambda known: known.text)
        self._sorted.insert(at, prompt)
        while at and prompt.text.startswith(self._sorted[at - 1].text):
            at -= 1
            del self._sorted[at]


@dataclass(slots=True)
class Base:
    """One base: system text and tools."""

    digest: bytes
    agent: str
    n_tools: int
    characters: int
    tokens: float
    requests: int = 0


@dataclass(slots=True)
class Place:
    """Divergences at one place. `lost`: tokens that an earlier prompt held behind it."""

    found: Divergence
    agent: str
    numbers: list[int] = field(default_factory=list)
    lost: float = 0.0


@dataclass(slots=True)
class Rate:
    """Tokens of prompts, and how many of them an unlimited prefix cache would have held."""

    prompt: float = 0.0
    cached: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Rounded; the rate is None without a prompt."""
        rate = round(self.cached / self.prompt, 4) if self.prompt else None
        processed = round(self.prompt) - round(self.cached)
        return {
            "prompt_tokens": round(self.prompt),
            "cached_tokens": round(self.cached),
            "processed_tokens": processed,
            "hit_rate": rate,
        }


class Audit:
    """Everything that is reported of a file, request by request."""

    def __init__(self, encode: Encode | None = None, sent: Sent | None = None) -> None:
        self._tokens, self._sent = Tokens(encode), sent
        self._prompts, self._repaired = Prompts(), Prompts()
        self._was, self._will = Rate(), Rate()
        self._bases: dict[bytes, Base] = {}
        self._places: dict[tuple[Any, ...], Place] = {}
        self._groups: dict[str, Steadiness] = {}
        self._newest: dict[str, Prompt] = {}
        self._conversations: dict[str, int] = {}
        self._n_requests = self._n_unread = 0

    def add(self, request: Recorded) -> None:
        """One request, after all earlier ones."""
        self._n_requests += 1
        pieces = flatten(request.body)
        text = "".join(piece.text for piece in pieces)
        base = [piece for piece in pieces if piece.section != "messages"]
        agent = agent_of(request.headers.get("user-agent", ""), base[0].text if base else "", *_first_texts(base))
        group = _group(agent, base)
        key = digest(*(piece.text.encode("utf-8", "replace") for piece in base))
        before, shared = self._prompts.nearest(text)
        known = self._bases.setdefault(key, self._base(key, agent, base))
        known.requests += 1
        self._groups.setdefault(group, Steadiness()).see(key, base)
        conversation = _conversation(request, group, pieces)
        self._conversations[conversation] = self._conversations.get(conversation, 0) + 1
        self._was.prompt += self._tokens.within(pieces, len(text))
        self._was.cached += self._tokens.within(pieces, shared)
        held = text + _answer(request, request.body, request.dialect)
        prompt = Prompt(held, len(text), request.body, group, conversation, request.number)
        if before is None or before.group != group:  # a title that shares a word more is not what it departs from
            before = self._newest.get(group)
        if before is not None:
            self._compare(before, prompt, agent, known.characters)
        self._prompts.add(prompt)
        self._newest[group] = prompt
        self._repair(request)

    def _base(self, key: bytes, agent: str, base: Sequence[Piece]) -> Base:
        n_tools = sum(piece.section == "tools" for piece in base)
        characters = sum(len(piece.text) for piece in base)
        return Base(key, agent, max(0, n_tools - 1), characters, self._tokens.within(base, characters))

    def _compare(self, before: Prompt, now: Prompt, agent: str, n_base: int) -> None:
        """Where a prompt departs from the one of its kind that it shares the most with."""
        shared = common(before.text, now.text[: now.n])
        if shared >= before.n or shared == now.n:
            return
        if shared >= n_base and before.conversation != now.conversation:
            return  # another conversation on the same base
        try:
            found = first_divergence(before.body, now.body)
        except RecursionError:
            return
        if found is None:
            return
        key = (now.group, found.section, found.kind, found.path, found.at if found.section != "messages" else None)
        place = self._places.setdefault(key, Place(found, agent))
        place.numbers.append(now.number)
        pieces, held = flatten(before.body), min(before.n, now.n)
        place.lost += max(0.0, self._tokens.within(pieces, held) - self._tokens.within(pieces, shared))

    def _repair(self, request: Recorded) -> None:
        if self._sent is None:
            return
        body = self._sent(request)
        if body is None:
            self._n_unread += 1
            body = request.body
        pieces = flatten(body)
        text = "".join(piece.text for piece in pieces)
        _, shared = self._repaired.nearest(text)
        self._will.prompt += self._tokens.within(pieces, len(text))
        self._will.cached += self._tokens.within(pieces, shared)
        held = text + _answer(request, body, "chat")
        self._repaired.add(Prompt(held, len(text), {}, "", "", request.number))

    def to_json(self) -> dict[str, Any]:
        """The report."""
        places = sorted(self._places.values(), key=lambda place: (-place.lost, place.numbers[0]))
        bases = sorted(self._bases.values(), key=lambda base: -base.requests)
        return {
            "requests": self._n_requests,
            "conversations": len(self._conversations),
            "was": self._was.to_json(),
            "repaired": self._will.to_json() if self._sent is not None else None,
            "not_repaired": self._n_unread,
            "n_bases": len(bases),
            "bases": [_base_json(base) for base in bases[:MOST_LISTED]],
            "n_divergences": len(places),
            "divergences": [_place_json(place) for place in places[:MOST_LISTED]],
            "parts": [{"group": name} | group.to_json() for name, group in self._groups.items()][:MOST_LISTED],
        }


def _answer(request: Recorded, body: Json, dialect: Dialect) -> str:
    """The recorded answer as it would follow the prompt of a body; "" where none was recorded."""
    name = "input" if isinstance(body.get("input"), list) else "messages"
    if request.reply is None or not isinstance(body.get(name), list):
        return ""
    leading = {"role": "user"}  # so that nothing of the answer is taken for a system text
    pieces = flatten({name: [leading, *echoed(dialect, request.reply)]})
    return "".join(piece.text for piece in pieces)


def _conversation(request: Recorded, group: str, pieces: Sequence[Piece]) -> str:
    """By the session that the client names, else by the first message."""
    named = identity("", request.headers).session or request.body.get("prompt_cache_key")
    if isinstance(named, str) and named:
        return named
    first = next((piece.text for piece in pieces if piece.section == "messages" and piece.text), "")
    return f"{group} {digest(first.encode('utf-8', 'replace')).hex()}"


def _first_texts(base: Sequence[Piece]) -> list[str]:
    return [piece.text for piece in base if piece.text and piece.section == "system"][:2]


def _group(agent: str, base: Sequence[Piece]) -> str:
    """Agent and kind of a request: main prompts, titles and sub-agents begin with other texts."""
    system = "".join(piece.text for piece in base if piece.section == "system" and BILLING not in piece.text[:100])
    tools = "with tools" if any(piece.section == "tools" for piece in base) else "without tools"
    start = shape_of(system.split("\n", 1)[0][:START])
    return ", ".join(filter(None, (agent or "unknown agent", tools, start)))


def _base_json(base: Base) -> dict[str, Any]:
    return {
        "digest": base.digest.hex(),
        "agent": base.agent,
        "tools": base.n_tools,
        "characters": base.characters,
        "tokens": round(base.tokens),
        "requests": base.requests,
    }


def _place_json(place: Place) -> dict[str, Any]:
    d = place.found
    return {
        "section": d.section,
        "message": d.message,
        "role": d.role,
        "path": d.path,
        "character": d.at,
        "flat_character": d.flat,
        "kind": d.kind.value,
        "times": len(place.numbers),
        "lines": place.numbers[:MOST_LISTED],
        "lost_tokens": round(place.lost),
        "shared": d.shared,
        "old": d.old,
        "new": d.new,
        "advice": advice(d.kind, place.agent),
    }
