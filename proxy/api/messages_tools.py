"""The tools of an Anthropic Messages request: which the engine lists, how deferred ones are announced and called.

A tool with `defer_loading` is not part of the prompt until a `tool_reference` announces it (Claude Code's ToolSearch).
Were it put into the engine's `tools` then, everything behind the tool list would be processed again; the engine's
grammar, however, lets the model call listed tools only. So one constant tool stands for all deferred ones, from the
first request on, and an announcement is the tool's definition as text, where the reference stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.api.dialect import Json
from proxy.errors import BadRequest

PLACEHOLDER = "DeferredToolPlaceholder"
"""Claude Code lists it, deferred, while no deferred tool has been announced (agents.md, finding 5)."""
GENERIC = "call_deferred_tool"
MOST_DROPPED, LONGEST_NAME = 32, 64
"""Dropped fields that are told of one request, and characters of a name: both are the client's to choose."""
_GENERIC_DESCRIPTION = (
    "Calls a tool that is not in this list but was announced, with its definition, earlier in this conversation. "
    "Nothing else can be called with it."
)
_GENERIC_PARAMETERS: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "The name of the announced tool"},
        "arguments": {"type": "object", "description": "The arguments, as the announced tool's own definition asks"},
    },
    "required": ["name", "arguments"],
}
_TOOL_FIELDS = frozenset(
    ("name", "description", "input_schema", "type", "cache_control", "defer_loading", "eager_input_streaming")
)
_SERVER_TOOLS = tuple(
    """web_search_ web_fetch_ code_execution_ tool_search_tool_ mcp_toolset advisor_ computer_toolset_
    browser_toolset_""".split()
)
"""Tools that Anthropic's own servers run or unfold; nobody would here."""


class Dropped:
    """Names of client fields that have no effect on the engine: each once, in order, bounded."""

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Notes `name`; those beyond MOST_DROPPED are not told."""
        if len(self._names) < MOST_DROPPED:
            self._names[name[:LONGEST_NAME]] = None

    def add_unknown(self, found: Json, known: frozenset[str], where: str) -> None:
        """Notes the fields of `found` that are not `known`."""
        if not known.issuperset(found):
            for key in found:
                if key not in known:
                    self.add(f"{where}.{key}")

    def names(self) -> tuple[str, ...]:
        """All noted names."""
        return tuple(self._names)


@dataclass(frozen=True, slots=True)
class Tools:
    """listed: the engine's `tools`. definitions: function objects of all tools by name. generic: the constant tool's
    name; None when the request defers nothing."""

    listed: list[Json] = field(default_factory=list)
    definitions: Mapping[str, Json] = field(default_factory=dict)
    direct: frozenset[str] = frozenset()
    generic: str | None = None

    def echoed(self, name: str, arguments: str) -> tuple[str, str]:
        """A client's tool_use as the model called it: only listed tools can have been called by their own name."""
        if self.generic is None or name in self.direct or name == self.generic:
            return name, arguments
        return self.generic, f'{{"name":{dumps(name, "name")},"arguments":{arguments}}}'

    def called(self, name: str, arguments: str) -> tuple[str, str]:
        """The engine's call as the client is to see it; a generic call that names no tool stays as it is."""
        if self.generic is None or name != self.generic:
            return name, arguments
        call = parsed(arguments)
        inner = call.get("name") if call else None
        if call is None or not isinstance(inner, str) or not inner:
            return name, arguments
        given = call.get("arguments")
        if isinstance(given, str):
            given = parsed(given)
        elif given is None:
            given = {}
        return (inner, orjson.dumps(given).decode()) if isinstance(given, dict) else (name, arguments)

    def announcement(self, name: str) -> str:
        """What a tool_reference says to the model."""
        text = f"The tool {name} is now available."
        if self.generic is None or name in self.direct:
            return text
        if (definition := self.definitions.get(name)) is not None:
            text += f" Its definition:\n{dumps(definition, 'tools')}\n"
        call = f'{{"name":{dumps(name, "name")},"arguments":{{...}}}}'
        return f"{text.rstrip()}\nIt is not in the list of tools: call it with {self.generic}, as {call}."

    def with_definition(self, function: Json) -> Tools:
        """The same with a tool that a message defines (`tool_addition` with `tool_definition`)."""
        return Tools(self.listed, {**self.definitions, function["name"]: function}, self.direct, self.generic)


def read_tools(given: Any, *, is_announced: bool, dropped: Dropped) -> Tools:
    """`given`: the body's `tools`; `is_announced`: a message refers to a deferred tool. Raises BadRequest."""
    if given is None:
        given = []
    if not isinstance(given, list):
        raise BadRequest("'tools' is not a list. Send a list of tools, or none.", param="tools")
    kinds = [_check(tool, f"tools.{i}") for i, tool in enumerate(given)]
    # With Anthropic's own tool search nobody would ever announce the deferred ones: they are listed at once.
    may_defer = not any(kind.startswith("tool_search_tool_") for kind in kinds)
    listed: list[Json] = []
    definitions: dict[str, Json] = {}
    deferring = is_announced
    for i, (tool, kind) in enumerate(zip(given, kinds, strict=True)):
        if kind.startswith(_SERVER_TOOLS):
            dropped.add(f"tools.{kind}")
            continue
        function = function_of(tool, f"tools.{i}", dropped)
        definitions[function["name"]] = function
        if function["name"] == PLACEHOLDER or (may_defer and tool.get("defer_loading") is True):
            deferring = True
        else:
            listed.append({"type": "function", "function": function})
    direct = frozenset(tool["function"]["name"] for tool in listed)
    if not deferring:
        return Tools(listed, definitions, direct)
    generic = GENERIC
    while generic in definitions:
        generic += "_"
    stand_in = {"name": generic, "description": _GENERIC_DESCRIPTION, "parameters": _GENERIC_PARAMETERS}
    return Tools([*listed, {"type": "function", "function": stand_in}], definitions, direct, generic)


def _check(tool: Any, at: str) -> str:
    """The kind of one entry of `tools`; "" for a custom tool."""
    if not isinstance(tool, dict):
        raise BadRequest(f"'{at}' is not an object.", param=at)
    kind = tool.get("type")
    if kind is not None and not isinstance(kind, str):
        raise BadRequest(f"'{at}.type' is not a text.", param=f"{at}.type")
    return "" if kind in (None, "custom") else str(kind)


def function_of(tool: Json, at: str, dropped: Dropped) -> Json:
    """One tool as a chat function, as server-chat.cpp (server_chat_convert_anthropic_to_oai) makes it."""
    name, description, schema = tool.get("name"), tool.get("description"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"'{at}.name' is missing or not a text. Name the tool.", param=f"{at}.name")
    if description is not None and not isinstance(description, str):
        raise BadRequest(f"'{at}.description' is not a text.", param=f"{at}.description")
    if schema is not None and not isinstance(schema, dict):
        raise BadRequest(f"'{at}.input_schema' is not an object.", param=f"{at}.input_schema")
    dropped.add_unknown(tool, _TOOL_FIELDS, "tools")
    return {"name": name, "description": description or "", "parameters": schema or {}}


def dumps(value: Any, at: str) -> str:
    """Compact JSON, keys in the order sent; raises BadRequest for what is nested too deep (orjson: 254 levels)."""
    try:
        return orjson.dumps(value).decode()
    except (TypeError, RecursionError) as error:
        raise BadRequest(f"'{at}' cannot be written as JSON: {error}. Nest it less deep.", param=at) from None


def parsed(text: str) -> Json | None:
    """The JSON object that `text` is; None when it is something else, or not whole."""
    try:
        found = orjson.loads(text)
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        return None
    return found if isinstance(found, dict) else None
