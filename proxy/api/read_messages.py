"""A body of POST /v1/messages (Anthropic's dialect) becomes one of /v1/chat/completions.

Source of the mapping: server-chat.cpp, server_chat_convert_anthropic_to_oai, of the llama.cpp that llama-cpp-python
0.3.36 vendors; what goes beyond it is said where it stands. Shapes: the `anthropic` SDK's types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson

from proxy.api.dialect import Json, Translated
from proxy.api.messages_content import History, announces_tools
from proxy.api.messages_pairs import require_pairs
from proxy.api.messages_tools import Dropped, Tools, dumps, parsed, read_tools
from proxy.api.write_messages import MessagesWriter
from proxy.errors import BadRequest

DEFAULT_MAX_TOKENS = 4096
"""llama-server's own, where Anthropic asks for the field."""
DEFAULT_THINKING_BUDGET = 10000
"""llama-server's own, for thinking that is enabled without a budget."""
BILLING = "x-anthropic-billing-header:"
_READ = frozenset(
    """model messages system tools tool_choice stop_sequences max_tokens stream temperature top_p top_k thinking
    output_config output_format metadata cache_control""".split()
)
_PASSED = frozenset(
    """min_p top_n_sigma xtc_probability xtc_threshold typical_p dynatemp_range dynatemp_exponent repeat_last_n
    repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
    dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed min_keep samplers
    logit_bias ignore_eos n_indent t_max_predict_ms grammar json_schema response_format chat_template_kwargs
    reasoning_effort reasoning_format thinking_budget_tokens reasoning_budget_tokens reasoning_budget_message
    parallel_tool_calls cache_prompt lora""".split()
)
"""llama-server's own fields (server-schema.cpp) that an answer in this dialect can honour: handed on as they are."""
_SYSTEM_FIELDS = frozenset(("type", "text", "cache_control", "citations"))
_CHOICE_FIELDS = frozenset(("type", "name", "disable_parallel_tool_use"))
_FORMAT_FIELDS = frozenset(("type", "schema"))
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_OLD_SESSION = re.compile(r"_session_([0-9a-fA-F-]{36})$")


def read(body: Json, headers: Mapping[str, str]) -> Translated:
    """The request as the engine gets it. Raises BadRequest; `model` stays as the client named it.

    Beta headers are tolerated, whatever they name; identity headers are read for all dialects in proxy/api/read.py.
    """
    del headers
    dropped = Dropped()
    sent: Json = {}
    for name, value in body.items():
        if name in _PASSED:
            sent[name] = value
        elif name not in _READ:
            dropped.add(name)
    given = body.get("messages")
    if not isinstance(given, list):
        raise BadRequest("'messages' is missing or not a list. Send at least one message.", param="messages")
    tools = read_tools(body.get("tools"), is_announced=announces_tools(given), dropped=dropped)
    _read_fields(body, sent, dropped)
    _read_tool_choice(body.get("tool_choice"), tools, sent, dropped)
    _read_thinking(body.get("thinking"), sent, dropped)
    _read_output(body, sent, dropped)
    if tools.listed:
        sent["tools"] = tools.listed
    dumps(sent, "body")  # what cannot be sent to the engine is refused here
    sent["messages"] = _messages(body.get("system"), given, tools, dropped)
    stops = frozenset(sent.get("stop", ()))
    if stops:
        sent["verbose"] = True  # the only place where a chat completion says which stop word it met
    return Translated(
        sent, partial(MessagesWriter, tools, stops), dropped.names(), session=_session(body.get("metadata"))
    )


def _messages(system: Any, given: list[Any], tools: Tools, dropped: Dropped) -> list[Json]:
    history = History(tools, dropped)
    if (text := _system(system, dropped)) is not None:
        history.messages.append({"role": "system", "content": text})
    for i, message in enumerate(given):
        history.add(message, f"messages.{i}")
    require_pairs(given)
    if not history.messages:
        raise BadRequest("'messages' holds no content. Send at least one message.", param="messages")
    return history.messages


def _system(given: Any, dropped: Dropped) -> str | None:
    """The system text: blocks are joined without a separator, as llama-server joins them."""
    if given is None:
        return None
    if isinstance(given, str):
        return _without_cch(given)
    if not isinstance(given, list):
        raise BadRequest("'system' has to be a text or a list of text blocks.", param="system")
    texts = []
    for i, block in enumerate(given):
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise BadRequest(f"'system.{i}' has to be a text block.", param=f"system.{i}")
        dropped.add_unknown(block, _SYSTEM_FIELDS, "system")
        texts.append(_without_cch(text))
    return "".join(texts)


def _without_cch(text: str) -> str:
    """Blanks the `cch` stamp of Claude Code's billing header, which changes with each request
    (server-chat.cpp, normalize_anthropic_billing_header)."""
    if not text.startswith(BILLING) or (at := text.find("cch=", len(BILLING))) < 0:
        return text
    start, end = at + 4, at + 9
    return f"{text[:start]}fffff{text[end:]}" if text[end : end + 1] == ";" else text


def _read_fields(body: Json, sent: Json, dropped: Dropped) -> None:
    """Fields that keep their meaning and, but for `stop`, their name."""
    model, stream, most = body.get("model"), body.get("stream"), body.get("max_tokens")
    if model is not None:
        if not isinstance(model, str):
            raise BadRequest("'model' is not a text.", param="model")
        sent["model"] = model
    if not isinstance(stream, bool | None):
        raise BadRequest("'stream' has to be true or false.", param="stream")
    sent["stream"] = bool(stream)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool)):
        raise BadRequest("'max_tokens' has to be a whole number.", param="max_tokens")
    sent["max_tokens"] = DEFAULT_MAX_TOKENS if most is None else most
    for name in ("temperature", "top_p", "top_k"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise BadRequest(f"'{name}' has to be a number.", param=name)
        sent[name] = value
    stops = body.get("stop_sequences")
    if stops:
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise BadRequest("'stop_sequences' has to be a list of texts.", param="stop_sequences")
        sent["stop"] = stops
    metadata = body.get("metadata")
    for name in metadata if isinstance(metadata, dict) else ():
        if name != "user_id":
            dropped.add(f"metadata.{name}")


def _read_tool_choice(given: Any, tools: Tools, sent: Json, dropped: Dropped) -> None:
    """`any` and `tool` are both `required`, as with llama-server: its grammar cannot ask for one of several tools."""
    if given is None:
        return
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise BadRequest("'tool_choice.type' has to be one of auto, any, tool, none.", param="tool_choice")
    sent["tool_choice"] = "required" if kind in ("any", "tool") else kind
    dropped.add_unknown(given, _CHOICE_FIELDS, "tool_choice")
    if kind == "tool" and len(tools.listed) > 1:
        dropped.add("tool_choice.name")
    if (alone := given.get("disable_parallel_tool_use")) is not None:
        if not isinstance(alone, bool):
            raise BadRequest("'tool_choice.disable_parallel_tool_use' has to be true or false.", param="tool_choice")
        if alone:
            sent["parallel_tool_calls"] = False


def _read_thinking(given: Any, sent: Json, dropped: Dropped) -> None:
    """Only a budget reaches the engine, as with llama-server: whether a model thinks is its template's business."""
    if given is None:
        return
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in _THINKING:
        raise BadRequest(f"'thinking.type' has to be one of {', '.join(_THINKING)}.", param="thinking")
    if kind == "enabled":
        budget = given.get("budget_tokens")
        is_number = isinstance(budget, int) and not isinstance(budget, bool)
        sent["thinking_budget_tokens"] = budget if is_number else DEFAULT_THINKING_BUDGET
    elif kind != "adaptive":
        dropped.add("thinking")
    for name in given:
        if name not in ("type", "budget_tokens"):
            dropped.add(f"thinking.{name}")


def _read_output(body: Json, sent: Json, dropped: Dropped) -> None:
    """Effort and structured output. llama-server ignores both in this dialect; chat completions know them."""
    config = body.get("output_config")
    if config is None:
        config = {}
    if not isinstance(config, dict):
        raise BadRequest("'output_config' is not an object.", param="output_config")
    if (effort := config.get("effort")) is not None:
        if not isinstance(effort, str):
            raise BadRequest("'output_config.effort' is not a text.", param="output_config.effort")
        sent["reasoning_effort"] = effort
    form = config.get("format")
    if form is None:
        form = body.get("output_format")
    if form is not None:
        schema = form.get("schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
        if not isinstance(schema, dict):
            raise BadRequest(
                "'output_config.format' has to be of type json_schema, with a schema.", param="output_config"
            )
        dropped.add_unknown(form, _FORMAT_FIELDS, "output_config.format")
        sent["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    for name in config:
        if name not in ("effort", "format"):
            dropped.add(f"output_config.{name}")


def _session(metadata: Any) -> str | None:
    """Claude Code's session: JSON in `metadata.user_id` (agents.md), in older versions the end of a plain text."""
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise BadRequest("'metadata' is not an object.", param="metadata")
    user = metadata.get("user_id")
    if user is None:
        return None
    if not isinstance(user, str):
        raise BadRequest("'metadata.user_id' is not a text.", param="metadata.user_id")
    if user.startswith("{"):
        session = (parsed(user) or {}).get("session_id")
        return session[:256] if isinstance(session, str) and session else None
    found = _OLD_SESSION.search(user)
    return found.group(1) if found else None


def count(n_tokens: int) -> bytes:
    """The answer of POST /v1/messages/count_tokens."""
    return orjson.dumps({"input_tokens": n_tokens})
