"""POST /v1/responses: an OpenAI Responses body becomes a chat completion's.

llama-server's own conversion (server-chat.cpp, server_chat_convert_responses_to_chatcmpl) keeps every field that it
does not know, so sampling parameters, grammars and template arguments pass; so they do here. Its losses are made good:
namespaces, `text.format`, wanted logprobs. What has no effect on the engine is named in `Translated.dropped`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.api.dialect import Json, Translated
from proxy.api.messages_tools import MOST_DROPPED
from proxy.api.responses_items import messages_of
from proxy.api.responses_tools import MOST_LISTED, Tools, read_choice, read_tools
from proxy.api.write_responses import Asked, ResponsesWriter
from proxy.errors import BadRequest

_TYPES: Final[dict[str, tuple[type | tuple[type, ...], str]]] = {
    "model": (str, "a text"),
    "instructions": (str, "a text"),
    "stream": (bool, "true or false"),
    "stream_options": (dict, "an object"),
    "tools": (list, "a list of tools"),
    "parallel_tool_calls": (bool, "true or false"),
    "max_output_tokens": (int, "a whole number"),
    "max_tool_calls": (int, "a whole number"),
    "temperature": ((int, float), "a number"),
    "top_p": ((int, float), "a number"),
    "top_logprobs": (int, "a whole number"),
    "reasoning": (dict, "an object"),
    "text": (dict, "an object"),
    "include": (list, "a list of texts"),
    "metadata": (dict, "an object of texts"),
    "client_metadata": (dict, "an object"),
    "store": (bool, "true or false"),
    "background": (bool, "true or false"),
    "truncation": (str, "a text"),
    "service_tier": (str, "a text"),
    "user": (str, "a text"),
    "safety_identifier": (str, "a text"),
    "prompt_cache_key": (str, "a text"),
}
"""Types of the API's own fields (OpenAI API reference, "Create a model response"). null is absence."""
_REFUSED: Final = {
    "previous_response_id": "no responses are stored here: send the whole history in 'input'",
    "conversation": "no conversations are stored here: send the whole history in 'input'",
    "prompt": "no prompt templates are stored here: send the text in 'instructions' and 'input'",
}
_WITHOUT_EFFECT: Final[dict[str, tuple[object, ...]]] = {
    "background": (False,),
    "context_management": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
    "user": (),
}
"""Fields that the engine can do nothing for, with the values that ask for nothing."""
_TRANSLATED: Final = frozenset(
    "input instructions tools tool_choice max_output_tokens reasoning text include metadata client_metadata "
    "prompt_cache_key stream_options top_logprobs messages".split()
)
_SLOTS: Final = tuple("id_slot slot_id n_keep n_discard n_cache_reuse n n_cmpl".split())
"""Our business (contract.md, "HTTP"), and one answer is all that the API knows. `cache_prompt: false` stays in: it asks
for a slot of its own."""
_NOT_SENT: Final = _TRANSLATED.union(_REFUSED, _WITHOUT_EFFECT, _SLOTS)
_ECHOED: Final[dict[str, object]] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": None,
    "top_logprobs": None,
    "top_p": None,
    "user": None,
}
"""What the answer repeats of the request, with what stands there when the request is silent."""
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The efforts that the API has; a template may know others, which reach it, too."""
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = (_LOGPROBS, "reasoning.encrypted_content")


def read(body: Json, headers: Mapping[str, str]) -> Translated:
    """`headers` are looked at by proxy.api.read.identity. Raises BadRequest, whatever the JSON in `body`."""
    del headers
    _check(body)
    tools = read_tools(body.get("tools") or [])
    dropped: dict[str, None] = dict.fromkeys(tools.dropped)
    sent: Json = {key: value for key, value in body.items() if key not in _NOT_SENT and value is not None}
    _note_idle(body, dropped)
    _add_settings(body, tools, sent, dropped)
    echo = _echo(body, tools, sent)
    asked = _encoded(echo, tools, sent)
    messages = messages_of(body.get("input"), tools, dropped)
    if (instructions := body.get("instructions")) is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise BadRequest("'input' is empty. Send at least one item.", param="input")
    return Translated(
        body={"messages": messages, **sent},
        writer=lambda: ResponsesWriter(asked),
        dropped=tuple(dropped)[:MOST_DROPPED],
        **_identity(body),
    )


def _check(body: Json) -> None:
    for name, why in _REFUSED.items():
        if body.get(name):
            raise BadRequest(f"'{name}' is not supported: {why}.", param=name)
    for name, (kind, wanted) in _TYPES.items():
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise BadRequest(f"'{name}' has to be {wanted}, not a {type(value).__name__}.", param=name)
    if not all(isinstance(name, str) for name in body.get("include") or ()):
        raise BadRequest("'include' has to be a list of texts.", param="include")
    if not all(isinstance(value, str) for value in (body.get("metadata") or {}).values()):
        raise BadRequest("'metadata' has to be an object of texts.", param="metadata")


def _note_idle(body: Json, dropped: dict[str, None]) -> None:
    """Names what has no effect; a value that asks for nothing is no loss."""
    for name, nothing in _WITHOUT_EFFECT.items():
        value = body.get(name)
        if value is not None and value not in nothing:
            dropped[name] = None
    for name in (*_SLOTS, "messages"):
        if body.get(name) not in (None, 1):
            dropped[name] = None
    for name in body.get("include") or ():
        if name not in _INCLUDED:
            dropped[f"include.{name[:MOST_LISTED]}"] = None


def _add_settings(body: Json, tools: Tools, sent: Json, dropped: dict[str, None]) -> None:
    if tools.chat:
        sent["tools"] = tools.chat
    if (choice := read_choice(body.get("tool_choice"), dropped)) is not None:
        sent["tool_choice"] = choice
    if (most := body.get("max_output_tokens")) is not None:
        sent["max_tokens"] = most
    _add_reasoning(body.get("reasoning") or {}, sent, dropped)
    _add_format(body.get("text") or {}, sent, dropped)
    _add_logprobs(body, sent, dropped)
    _add_stream_options(body, sent, dropped)


def _add_reasoning(reasoning: Json, sent: Json, dropped: dict[str, None]) -> None:
    for key, value in reasoning.items():
        if value is None:
            continue
        if key != "effort":
            dropped[f"reasoning.{key[:MOST_LISTED]}"] = None
        elif isinstance(value, str):
            sent["reasoning_effort"] = value
        else:
            raise BadRequest("'reasoning.effort' is not a text.", param="reasoning.effort")


def _add_format(text: Json, sent: Json, dropped: dict[str, None]) -> None:
    """`text.format` says what chat's `response_format` says, one level flatter."""
    for key, value in text.items():
        if key != "format" and value is not None:
            dropped[f"text.{key[:MOST_LISTED]}"] = None
    wanted = text.get("format")
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if isinstance(wanted, dict) and kind == "json_schema":
        if not isinstance(wanted.get("schema"), dict):
            raise BadRequest("'text.format.schema' is missing or not an object.", param="text.format.schema")
        schema = {key: value for key, value in wanted.items() if key != "type" and value is not None}
        for key, wants in (("name", str), ("description", str), ("strict", bool)):
            if not isinstance(schema.get(key, wants()), wants):
                at = f"text.format.{key}"
                raise BadRequest(f"'{at}' is a {type(schema[key]).__name__}; send a {wants.__name__}.", param=at)
        sent["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind == "json_object":
        sent["response_format"] = {"type": "json_object"}
    elif wanted is not None and kind != "text":
        raise BadRequest(
            "'text.format' is not one of the types text, json_object and json_schema.", param="text.format"
        )


def _add_logprobs(body: Json, sent: Json, dropped: dict[str, None]) -> None:
    """The API gives logprobs when `include` asks; the engine, when `logprobs` does, and refuses a number without."""
    wanted, most = _LOGPROBS in (body.get("include") or ()), body.get("top_logprobs")
    if wanted:
        sent["logprobs"] = True
    if most and sent.get("logprobs"):
        sent["top_logprobs"] = most
    elif most:
        dropped["top_logprobs"] = None


def _add_stream_options(body: Json, sent: Json, dropped: dict[str, None]) -> None:
    """The closing event tells the usage, which a chat stream carries only when asked."""
    options: Json = dict(body.get("stream_options") or {})
    if options.pop("include_obfuscation", None):
        dropped["stream_options.include_obfuscation"] = None
    if body.get("stream") is True:
        sent["stream_options"] = {**options, "include_usage": True}


def _echo(body: Json, tools: Tools, sent: Json) -> Json:
    """What the answer says of the request: what had effect, in values that a strict client can read. Nothing is stored
    or cut, whatever was asked."""
    echo: Json = {name: silent if (value := body.get(name)) is None else value for name, silent in _ECHOED.items()}
    asked = (body.get("text") or {}).get("format") or {"type": "text"}
    # A client's own `response_format`, chat's field, may hold anything and is the engine's to judge.
    schema = sent["response_format"]["json_schema"] if asked["type"] == "json_schema" else None
    effort = sent.get("reasoning_effort")
    return echo | {
        "reasoning": {"effort": effort} if effort in _EFFORTS else None,
        "text": {"format": {"type": asked["type"]} | ({"name": ""} | schema if schema else {})},
        "tool_choice": sent.get("tool_choice", "auto"),
        "tools": tools.echo,
        "background": False,
        "previous_response_id": None,
        "truncation": "disabled",
    }


def _encoded(echo: Json, tools: Tools, sent: Json) -> Asked:
    """orjson reads 1,024 levels and writes 254; all but plain texts is in `echo` and `sent`. Raises BadRequest."""
    try:
        orjson.dumps(sent)
        return Asked.of(echo, tools.inner)
    except TypeError:
        raise BadRequest("The body is nested too deep to be sent on. Send a flatter one.") from None


def _identity(body: Json) -> dict[str, str | None]:
    """Codex: a session's threads share `session_id` and `prompt_cache_key`; a sub-agent's thread has another id than
    its session and names its parent (agents.md, section 4)."""
    told: dict[str, Any] = body.get("client_metadata") or {}
    session = _word(told.get("session_id")) or _word(body.get("prompt_cache_key"))
    thread = _word(told.get("thread_id"))
    return {
        "session": session,
        "agent": thread if session is not None and thread != session else None,
        "parent": _word(told.get("x-codex-parent-thread-id")) or _word(told.get("parent_thread_id")),
    }


def _word(value: object) -> str | None:
    return value[:256] if isinstance(value, str) and value else None
