"""A client's body becomes a ModelRequest: checked, reduced to what decides its prefix, rid of fields that are ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, cast, get_args

import orjson
import xxhash

from llamacpp.capabilities import TemplateFacts
from llamacpp.wire import Kind, is_one_prompt, must_be_whole, streamed
from policies.compaction import compacts_itself
from policies.message_parts import only_reminders, size_of
from policies.system_text import fold
from policies.types import Prompt, digest
from proxy.api import read_messages, read_responses
from proxy.api.dialect import Writer
from proxy.api.read_chat import checked
from proxy.errors import BadRequest, Dialect, too_deep
from proxy.kept_json import kept_json
from proxy.lines import Identity
from proxy.normals import Normals

Json = dict[str, Any]
Door = Literal["chat", "completion", "native", "infill"]
Mode = Literal["observe", "repair", "strict"]
"""observe: the model reads exactly what the client sent; repair: prompts are kept append-only; strict: those that do
not extend their conversation are refused."""

CHAT_PATH = "/v1/chat/completions"
SLOT_FIELDS = ("id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse")
OURS = (*SLOT_FIELDS, "cache_prompt", "n", "n_cmpl")
"""Fields that decide about slots, which is our business (contract.md, "HTTP"); SLOT_FIELDS have no effect at all."""
RENDERING = (
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning_format",
    "enable_thinking",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "json_schema",
    "add_generation_prompt",
    "continue_final_message",
    "functions",
    "lora",
)
"""Fields that change what the template prints or how KV is computed (server-common.cpp, oaicompat_chat_params)."""
LEADING = ("system", "developer")
TEXT_BLOCK = 1024
"""Characters of a plain prompt that make one entry of its chain: longer prompts extend shorter ones block by block."""
AGENT_SESSION_HEADERS = ("x-claude-code-session-id", "x-session-id", "session-id", "x-session-affinity")
SESSION_HEADERS = ("x-slotkeeper-session", *AGENT_SESSION_HEADERS)
AGENT_HEADERS = ("x-claude-code-agent-id",)
PARENT_HEADERS = ("x-parent-session-id",)
MOST_CHOICES = 32
"""Choices (`n`) of one request: each is a request of its own here."""


READERS = {"messages": read_messages.read, "responses": read_responses.read}
"""Dialects that are translated into chat completions."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model request. `body` is the client's without the fields of OURS; `max_tokens` None when it names none."""

    door: Door
    path: str
    body: Json
    who: Identity
    prompt: Prompt
    first_user: bytes
    model: str | None
    max_tokens: int | None
    n_choices: int
    n_prompts: int
    fresh: bool
    dialect: Dialect
    mode: Mode = "observe"
    writer: Writer | None = None
    """Says the answer in the client's dialect, where that is not the engine's own."""
    blobs: tuple[bytes, ...] = ()
    """Each message of a chat as JSON; `raws` their digests, `normals` those of their normal forms."""
    raws: tuple[bytes, ...] = ()
    normals: tuple[bytes, ...] = ()
    compacts: bool = False
    """We may put a summary in the place of old messages; `has_own`: its client is known to do that by itself."""
    has_own: bool = False
    is_named: bool = False
    """An agent asks, which gives its sessions names by itself."""

    def is_answered(self, n_shared: int) -> bool:
        """Whether the model's answer may follow the first `n_shared` messages: not in a repeated prompt, nor before
        another message of the client."""
        if n_shared >= len(self.prompt.chain):
            return False
        messages = self.body.get("messages")
        if not isinstance(messages, list) or len(messages) != len(self.prompt.chain):
            return True
        return messages[n_shared].get("role") not in ("user", "tool", "system", "developer")

    @property
    def shapes(self) -> Kind:
        """Whose shapes the answer has."""
        return "native" if self.door == "infill" else self.door

    @property
    def n_answers(self) -> int:
        """Answers that are wanted: choices of each prompt."""
        return self.n_choices * self.n_prompts

    @property
    def stream(self) -> bool:
        """The client wants events."""
        return self.body.get("stream") is True

    @property
    def is_unseen(self) -> bool:
        """The engine has to be asked for the answer whole: nobody sees it grow."""
        if self.stream:
            return False
        # A writer reads of `__verbose` only what a stream's last chunk has, too; asked for whole, nobody could leave.
        asked = self.body if self.writer is None else {**self.body, "verbose": False}
        return must_be_whole(asked, self.shapes) is not None

    @property
    def chat(self) -> bytes | None:
        """The body by which the engine's template can be asked; None for what is no chat."""
        return kept_json(self.body) if self.door == "chat" else None

    def sent(self, slot: int, *, may_reuse: bool) -> Json:
        """The body for the engine: pinned, and streamed with progress where that is possible."""
        ours = {"id_slot": slot, "cache_prompt": may_reuse}
        if self.is_unseen:
            return {**self.body, **ours}
        body = {**streamed(self.body, self.shapes), **ours}
        if self.writer is not None:
            options = body.get("stream_options")
            body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
            if "echo" not in self.body:
                body.pop("echo", None)  # other dialects do not repeat the beginning of an answer that they were given
        return body

    @property
    def kind(self) -> Literal["main", "subagent"]:
        """Label `kind` of contract.md, as far as one request shows it."""
        return "subagent" if self.who.parent or self.who.agent else "main"


def identity(tenant: str, headers: Mapping[str, str]) -> Identity:
    """Who asks, by the headers that agents send (agents.md, "session identity"); a salt makes a tenant of its own."""
    salt = headers.get("x-slotkeeper-salt")
    return Identity(
        tenant=f"{tenant}\x1f{digest(salt.encode()).hex()[:16]}" if salt else tenant,
        session=_first(headers, SESSION_HEADERS),
        agent=_first(headers, AGENT_HEADERS),
        parent=_first(headers, PARENT_HEADERS),
    )


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((headers[name][:256] for name in names if headers.get(name)), None)


def parse(raw: bytes) -> Json:
    """The body as a JSON object; raises BadRequest."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}. Send one JSON object.") from None
    if not isinstance(body, dict):
        raise BadRequest(f"The body is a JSON {type(body).__name__}, not an object. Send one JSON object.")
    return body


def read(dialect: Dialect | Door, path: str, raw: bytes, who: Identity, told: Told | None = None) -> ModelRequest:
    """Raises BadRequest for what no engine could answer; everything else is the engine's to judge."""
    told = told or Told()
    try:
        if dialect == "messages" or dialect == "responses":  # noqa: PLR1714 (mypy follows only this form)
            return _translated(dialect, parse(raw), who, told)
        body = parse(raw)
        told.dropped.extend(name for name in SLOT_FIELDS if body.get(name) is not None)
        return _request(dialect, path, body, who, told)
    except orjson.JSONEncodeError as error:
        raise too_deep(error) from error


@dataclass(frozen=True, slots=True)
class Told:
    """What a reader is told besides the body: request headers, the mode; where to leave dropped names."""

    headers: Mapping[str, str] = field(default_factory=dict)
    mode: Mode = "observe"
    normals: Normals = field(default_factory=Normals)
    dropped: list[str] = field(default_factory=list)
    compaction: bool = False


def mode_of(headers: Mapping[str, str], usual: Mode) -> Mode:
    """The mode that a request asks for by header, else the usual one. Raises BadRequest for one that does not exist."""
    asked = headers.get("x-slotkeeper-mode", usual)
    if asked not in get_args(Mode):
        raise BadRequest(f"'x-slotkeeper-mode' is '{asked[:40]}'; it may be observe, repair or strict.")
    return cast(Mode, asked)


def wants_compaction(headers: Mapping[str, str], *, usual: bool) -> bool:
    """Whether a summary may take the place of old messages; a request may only say no. Raises BadRequest for a word
    that says neither."""
    asked = headers.get("x-slotkeeper-compaction", "on").lower()
    if asked not in ("on", "off"):
        raise BadRequest(f"'x-slotkeeper-compaction' is '{asked[:40]}'; it may be off (or on, as without it).")
    return usual and asked == "on"


def folded(body: Json, facts: TemplateFacts | None) -> Json:
    """The body with system text where the template takes it; the same object when nothing has to move."""
    messages = body.get("messages")
    if facts is None or facts.takes_anything or not isinstance(messages, list):
        return body
    fits = fold(
        messages,
        late_system=facts.late_system,
        several_leading=facts.several_leading,
        must_alternate=facts.must_alternate,
    )
    return body if fits is messages else {**body, "messages": fits}


def _translated(dialect: Literal["messages", "responses"], body: Json, who: Identity, told: Told) -> ModelRequest:
    """A request of another dialect as a chat request, with the writer that turns the answer back."""
    t = READERS[dialect](body, told.headers)
    told.dropped.extend(t.dropped)
    found = replace(who, session=who.session or t.session, agent=who.agent or t.agent, parent=who.parent or t.parent)
    request = _request("chat", CHAT_PATH, t.body, found, told)
    return replace(request, dialect=dialect, writer=t.writer())


def one_by_one(request: ModelRequest) -> list[ModelRequest]:
    """A request for several prompts and choices (`n`) as requests for one each, in the order of the answer's indices.

    A fixed seed would make all choices alike; server-task.h, add_child, adds the child's number.
    """
    ones = []
    for text in _prompts(request.body, request.door):
        for choice in range(request.n_choices):
            body = request.body if text is None else {**request.body, "prompt": text}
            seed = body.get("seed")
            if choice and isinstance(seed, int) and seed >= 0:
                body = {**body, "seed": seed + choice}
            if text is None:
                ones.append(replace(request, body=body, n_choices=1, n_prompts=1))
                continue
            ones.append(replace(_request(request.door, request.path, body, request.who), fresh=request.fresh))
    return ones


def _prompts(body: Json, door: Door) -> list[Any]:
    """The prompts of a text request; [None] for one, whatever its shape (server-common.cpp, tokenize_input_prompts)."""
    given = body.get("prompt")
    if door not in ("completion", "native") or not isinstance(given, list) or is_one_prompt(given):
        return [None]
    return given if all(given) else [None]


def _request(door: Door, path: str, body: Json, who: Identity, told: Told | None = None) -> ModelRequest:
    told = told or Told()
    n_choices, n_prompts = _choices(body), len(_prompts(body, door))
    if n_choices * n_prompts > MOST_CHOICES:
        raise BadRequest(f"{n_prompts} prompts with {n_choices} choices each are too many: {MOST_CHOICES} at most.")
    who = _with_adapters(who, body.get("lora"))
    blobs: tuple[bytes, ...] = ()
    raws, normals = blobs, blobs
    if door == "chat":
        body = checked(body)
        blobs = tuple(map(kept_json, body["messages"]))
        # Each message's bytes are hashed once, and quickly: of a long history that is most of the price. Nobody gains
        # by a collision: lines are found within one tenant and session, and the engine compares the tokens themselves.
        raws = tuple(map(xxhash.xxh3_128_digest, blobs))
        if told.mode != "observe":
            normals = told.normals.of(who.tenant, body["messages"], raws, body.get("tools"))
        prompt, first_user = _chat_prompt(body, blobs, raws, normals)
    else:
        prompt, first_user = _text_prompt(body, door)
    return ModelRequest(
        door=door,
        path=path,
        who=who,
        prompt=prompt,
        first_user=first_user,
        model=_model(body),
        max_tokens=_max_tokens(body),
        n_choices=n_choices,
        n_prompts=n_prompts,
        fresh=body.get("cache_prompt") is False,
        dialect="native" if door == "infill" else door,
        mode=told.mode,
        body={key: value for key, value in body.items() if key not in OURS},
        blobs=blobs,
        raws=raws,
        normals=normals,
        compacts=door == "chat" and told.compaction and told.mode != "observe",
        has_own=compacts_itself(told.headers.get("user-agent", "")),
        is_named=_first(told.headers, AGENT_SESSION_HEADERS) is not None,
    )


def _with_adapters(who: Identity, lora: object) -> Identity:
    """Adapters change the KV of equal tokens, and llama-server compares tokens alone: like a salt they make a tenant of
    its own, so that no slot and no file serves a prompt under other adapters (contract.md: part of the base)."""
    mark = "\x1flora-"
    if lora is None or mark in who.tenant:
        return who
    return replace(who, tenant=f"{who.tenant}{mark}{digest(orjson.dumps(lora)).hex()[:16]}")


def _chat_prompt(
    body: Json, blobs: tuple[bytes, ...], raws: tuple[bytes, ...], normals: tuple[bytes, ...]
) -> tuple[Prompt, bytes]:
    """The prompt as the client spells it, and what its first message that says something is known by: its
    normal form if there is one."""
    messages = body["messages"]
    n_leading = next((i for i, m in enumerate(messages) if m.get("role") not in LEADING), len(messages))
    system = digest(*raws[:n_leading])
    tools = digest(orjson.dumps(body.get("tools")))
    params = digest(orjson.dumps([body.get(name) for name in RENDERING]))
    telling = (i for i in range(n_leading, len(messages)) if not (normals and only_reminders(messages[i])))
    first = next(telling, n_leading)
    first_user = digest((normals or raws)[first] if first < len(blobs) else b"")
    chain = chained(digest(system, tools, params), raws)
    return Prompt(system, tools, params, chain, tuple(map(size_of, blobs)), n_leading), first_user


def chained(base: bytes, entries: Iterable[bytes]) -> tuple[bytes, ...]:
    """The digest of a base and the entries up to each (policies/types.Prompt.chain)."""
    return tuple(accumulate(entries, lambda last, entry: xxhash.xxh3_128_digest(last + entry), initial=base))[1:]


def _text_prompt(body: Json, door: Door) -> tuple[Prompt, bytes]:
    if door != "infill" and body.get("prompt") in (None, [], {}):
        raise BadRequest("'prompt' is missing or empty. Send a text or a list of tokens.", param="prompt")
    given = body.get("prompt")
    text = given if isinstance(given, str) and door != "infill" else orjson.dumps(given).decode()
    if door == "infill":
        text = orjson.dumps(
            [body.get(name) for name in ("input_extra", "input_prefix", "input_suffix", "prompt")]
        ).decode()
    ends = range(TEXT_BLOCK, len(text) + 1, TEXT_BLOCK)
    whole = [text[end - TEXT_BLOCK : end].encode("utf-8", "surrogatepass") for end in ends]
    whole = whole or [text.encode("utf-8", "surrogatepass")]
    nothing = digest()
    params = digest(orjson.dumps([door, body.get("lora")]))
    chain, last = [], digest(params)
    for block in whole:
        last = digest(last, block)
        chain.append(last)
    return Prompt(nothing, nothing, params, tuple(chain), tuple(map(len, whole))), chain[0]


def _model(body: Json) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) and model else None


def _max_tokens(body: Json) -> int | None:
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _choices(body: Json) -> int:
    n = body.get("n", body.get("n_cmpl"))
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_CHOICES:
        raise BadRequest(f"'n' has to be a whole number from 1 to {MOST_CHOICES}.", param="n")
    return n
