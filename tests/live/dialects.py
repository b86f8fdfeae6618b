"""One question in three dialects, put by the official SDKs; every answer is held to its dialect's published schema."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import orjson
from anthropic import AsyncAnthropic
from anthropic.types import Message
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from tests import anthropic_events
from tests.proxy import responses_parser

Json = dict[str, Any]
DIALECTS = ("chat", "messages", "responses")
MODEL = "dense"
_STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "completed": "stop",
    "max_output_tokens": "length",
}


@dataclass
class Ask:
    """A question that every dialect can put.

    turns: ("user", text), ("image", base64 of a PNG), ("assistant", text), ("thought", text), ("call", (id, name,
    arguments)), ("result", (id, text)), in order. tools: name -> schema of the parameters. more: llama-server's own
    fields.
    """

    turns: list[tuple[str, Any]]
    system: str | None = None
    tools: dict[str, Json] = field(default_factory=dict)
    must_call: bool = False
    stop: list[str] = field(default_factory=list)
    schema: Json | None = None
    n: int = 12
    more: Json = field(default_factory=dict)


@dataclass
class Said:
    """An answer, whatever its dialect. `n_in`: tokens of the whole prompt, `n_cached` of them from the cache."""

    text: str = ""
    thought: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    stop: str = ""
    word: str | None = None
    n_in: int = 0
    n_cached: int = 0
    n_out: int = 0

    @property
    def content(self) -> tuple[str, str, list[tuple[str, str]]]:
        """What was said."""
        return self.text, self.thought, self.calls


# --- asking ----------------------------------------------------------------------------------------------------------


def chat_body(ask: Ask) -> Json:
    """Chat Completions."""
    messages: list[Json] = [{"role": "system", "content": ask.system}] if ask.system else []
    for kind, what in ask.turns:
        if kind == "thought":
            messages.append({"role": "assistant", "content": "", "reasoning_content": what})
        elif kind == "call":
            function = {"name": what[1], "arguments": what[2]}
            call = {"id": what[0], "type": "function", "function": function}
            if messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "result":
            messages.append({"role": "tool", "tool_call_id": what[0], "content": what[1]})
        elif kind == "image":
            url = {"url": f"data:image/png;base64,{what}"}
            messages.append({"role": "user", "content": [{"type": "image_url", "image_url": url}]})
        elif kind == "assistant" and messages[-1].get("reasoning_content"):
            messages[-1]["content"] = what
        else:
            messages.append({"role": kind, "content": what})
    body: Json = {"messages": messages, "max_tokens": ask.n, "stop": ask.stop or None}
    body["tools"] = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in ask.tools.items()]
    if ask.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": ask.schema}}
    body["tool_choice"] = "required" if ask.must_call else None
    return body


def messages_body(ask: Ask) -> Json:
    """Anthropic's Messages: consecutive blocks of one role stand in one message."""
    messages: list[Json] = []
    for kind, what in ask.turns:
        role = "assistant" if kind in ("assistant", "thought", "call") else "user"
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        messages[-1]["content"].append(_block(kind, what))
    body: Json = {"messages": messages, "max_tokens": ask.n, "system": ask.system, "stop_sequences": ask.stop}
    body["tools"] = [{"name": name, "input_schema": parameters} for name, parameters in ask.tools.items()]
    if ask.schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": ask.schema}}
    body["tool_choice"] = {"type": "any"} if ask.must_call else None
    return body


def _block(kind: str, what: Any) -> Json:
    if kind == "thought":
        return {"type": "thinking", "thinking": what, "signature": ""}
    if kind == "call":
        return {"type": "tool_use", "id": what[0], "name": what[1], "input": json.loads(what[2])}
    if kind == "result":
        return {"type": "tool_result", "tool_use_id": what[0], "content": what[1]}
    if kind == "image":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": what}}
    return {"type": "text", "text": what}


def responses_body(ask: Ask) -> Json:
    """OpenAI's Responses; the API knows no stop words, llama-server's `stop` passes."""
    body: Json = {"input": [_item(kind, what) for kind, what in ask.turns], "max_output_tokens": ask.n}
    body |= {"instructions": ask.system, "stop": ask.stop or None}
    body["tools"] = [{"type": "function", "name": name, "parameters": p} for name, p in ask.tools.items()]
    if ask.schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "output", "schema": ask.schema}}
    body["tool_choice"] = "required" if ask.must_call else None
    return body


def _item(kind: str, what: Any) -> Json:
    if kind == "thought":
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": what}]}
    if kind == "call":
        return {"type": "function_call", "call_id": what[0], "name": what[1], "arguments": what[2]}
    if kind == "result":
        return {"type": "function_call_output", "call_id": what[0], "output": what[1]}
    if kind == "image":
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{what}", "detail": "auto"}
        return {"role": "user", "content": [image]}
    part = {"type": "output_text" if kind == "assistant" else "input_text", "text": what}
    return {"type": "message", "role": kind, "content": [part]}


BODIES: dict[str, Callable[[Ask], Json]] = {
    "chat": chat_body,
    "messages": messages_body,
    "responses": responses_body,
}
KNOWN = {
    "chat": "messages max_tokens stop tools tool_choice response_format".split(),
    "messages": "messages max_tokens stop_sequences system tools tool_choice output_config".split(),
    "responses": "input instructions max_output_tokens tools tool_choice text".split(),
}
"""What an SDK takes by name; the rest is its `extra_body`."""


def arguments(dialect: str, ask: Ask) -> Json:
    """A body as an SDK's method takes it, without what is empty."""
    body = {name: value for name, value in BODIES[dialect](ask).items() if value not in (None, [])}
    extra = {name: body.pop(name) for name in list(body) if name not in KNOWN[dialect]}
    return {"model": MODEL, **body, "extra_body": {**extra, **ask.more}}


# --- the SDKs --------------------------------------------------------------------------------------------------------


class Heard(httpx2.AsyncHTTPTransport):
    """Keeps the bytes of the last answer, for the strict parsers."""

    def __init__(self) -> None:
        super().__init__(trust_env=False)
        self.raw = bytearray()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The answer as it comes, with an ear on it."""
        answer = await super().handle_async_request(request)
        self.raw.clear()
        assert isinstance(answer.stream, httpx2.AsyncByteStream)
        answer.stream = _Tee(answer.stream, self.raw)
        return answer


class _Tee(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, raw: bytearray) -> None:
        self._inner, self._raw = inner, raw

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            self._raw.extend(chunk)
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class Sdks:
    """Both SDKs on one address."""

    def __init__(self, url: str, key: str, *, is_strict: bool = True) -> None:
        self.heard, self.is_strict = Heard(), is_strict
        http = httpx2.AsyncClient(transport=self.heard, timeout=60)
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=0)
        self.anthropic = AsyncAnthropic(base_url=url, api_key=key, http_client=http, max_retries=0)
        self.headers: Json = {}
        """Sent with every question."""

    async def ask(self, dialect: str, ask: Ask, *, stream: bool) -> Said:
        """One question; fails for an answer that the published schema does not allow."""
        given = arguments(dialect, ask) | {"extra_headers": self.headers}
        if dialect == "chat":
            return await (self._chat_stream(given) if stream else self._chat(given))
        if dialect == "messages":
            return await self._messages(given, stream=stream)
        return await self._responses(given, stream=stream)

    async def _chat(self, given: Json) -> Said:
        answer = await self.openai.chat.completions.create(**given)
        assert isinstance(answer, ChatCompletion)
        choice, usage = answer.choices[0], answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        calls = [call.to_dict() for call in choice.message.tool_calls or ()]
        return Said(
            text=choice.message.content or "",
            thought=getattr(choice.message, "reasoning_content", ""),
            calls=[_call(call["function"]) for call in calls],
            ids=[str(call["id"]) for call in calls],
            stop=choice.finish_reason,
            n_in=usage.prompt_tokens,
            n_cached=usage.prompt_tokens_details.cached_tokens or 0,
            n_out=usage.completion_tokens,
        )

    async def _chat_stream(self, given: Json) -> Said:
        stream: Any = await self.openai.chat.completions.create(
            **given, stream=True, stream_options={"include_usage": True}
        )
        said, calls = Said(), dict[int, Json]()
        async for chunk in stream:
            for choice in chunk.choices:
                said.text += choice.delta.content or ""
                said.thought += getattr(choice.delta, "reasoning_content", None) or ""
                said.stop = choice.finish_reason or said.stop
                for piece in choice.delta.tool_calls or ():
                    call = calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                    call["id"] = piece.id or call["id"]
                    call["name"] = piece.function.name or call["name"]
                    call["arguments"] += piece.function.arguments or ""
            if chunk.usage is not None:
                said.n_in, said.n_out = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                said.n_cached = chunk.usage.prompt_tokens_details.cached_tokens
        said.calls, said.ids = [_call(c) for c in calls.values()], [c["id"] for c in calls.values()]
        return said

    async def _messages(self, given: Json, *, stream: bool) -> Said:
        if not stream:
            answer = await self.anthropic.messages.create(**given)
            if self.is_strict:
                anthropic_events.strictly(Message, orjson.loads(self.heard.raw))
        else:
            async with self.anthropic.messages.stream(**given) as events:
                answer = await events.get_final_message()
            parsed = anthropic_events.read(bytes(self.heard.raw))
            assert [block.to_dict() for block in parsed.content] == [block.to_dict() for block in answer.content]
        cached = answer.usage.cache_read_input_tokens or 0
        said = Said(stop=_STOPS[answer.stop_reason or ""], word=answer.stop_sequence)
        said.n_in, said.n_cached, said.n_out = answer.usage.input_tokens + cached, cached, answer.usage.output_tokens
        for block in answer.content:
            if block.type == "text":
                said.text += block.text
            elif block.type == "thinking":
                said.thought += block.thinking
            elif block.type == "tool_use":
                said.calls.append((block.name, json.dumps(block.input)))
                said.ids.append(block.id)
        return said

    async def _responses(self, given: Json, *, stream: bool) -> Said:
        if not stream:
            answer: Any = await self.openai.responses.create(**given)
            if self.is_strict:
                responses_parser.parse_response(bytes(self.heard.raw))
            return said_by(answer)
        events: Any = await self.openai.responses.create(**given, stream=True)
        heard = [event async for event in events]
        parsed = responses_parser.parse_stream(bytes(self.heard.raw))
        assert parsed.kinds == [event.type for event in heard]
        return said_by(heard[-1].response)


def said_by(answer: Any) -> Said:
    """A response of the Responses API."""
    details = answer.incomplete_details
    said = Said(stop=_STOPS[details.reason if details is not None else answer.status])
    said.n_in, said.n_out = answer.usage.input_tokens, answer.usage.output_tokens
    said.n_cached = answer.usage.input_tokens_details.cached_tokens
    for item in answer.output:
        if item.type == "function_call":
            said.calls.append(_call(item.to_dict()))
            said.ids.append(item.call_id)
            said.stop = "tool_calls" if said.stop == "stop" else said.stop
        else:
            text = "".join(part.text for part in item.content)
            if item.type == "reasoning":
                said.thought += text
            else:
                said.text += text
    return said


def _call(function: Any) -> tuple[str, str]:
    """Name and arguments, written one way; a call that was cut keeps what there is."""
    try:
        return function["name"], json.dumps(json.loads(function["arguments"]))
    except json.JSONDecodeError:
        return function["name"], function["arguments"]


@asynccontextmanager
async def sdks(url: str, key: str = "anything", *, is_strict: bool = True) -> AsyncIterator[Sdks]:
    """The SDKs, closed at the end. `is_strict`: whole answers are held to the schema, as streams are."""
    both = Sdks(url, key, is_strict=is_strict)
    async with both.openai, both.anthropic:
        yield both
