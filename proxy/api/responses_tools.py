"""Tools of a Responses request: functions as chat tools, namespaces flattened to functions and back.

llama-server drops every tool that is not a function (server-chat.cpp, server_chat_convert_responses_to_chatcmpl), so
Codex's sub-agents and MCP servers, which are `namespace` tools, would be lost. Here the tool t of the namespace n
becomes the function `n__t`, and a call of it goes back under the two names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from proxy.api.dialect import Json
from proxy.errors import BadRequest

_LEGAL = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Function names of the published schema (OpenAI API reference, function tools)."""
_ILLEGAL = re.compile(r"[^A-Za-z0-9_-]")
_HASHED = 53
"""Characters of a name that leave room for `_` and ten of its hash in 64."""
_NAMESPACE_KEYS = ("type", "name", "tools")
_FUNCTION_KEYS = ("type", "name", "description", "parameters", "strict")
MOST_LISTED = 40
"""Characters of a client's own word in a list of dropped fields: it goes to logs."""


@dataclass(frozen=True, slots=True)
class Tools:
    """One request's tools. chat: as the engine gets them. echo: as the answer repeats them. inner: flat name ->
    (namespace, name). dropped: names of what has no effect."""

    chat: list[Json] = field(default_factory=list)
    echo: list[Json] = field(default_factory=list)
    inner: dict[str, tuple[str, str]] = field(default_factory=dict)
    outer: dict[tuple[str, str], str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    def flat(self, namespace: str | None, name: str) -> str:
        """The engine's name for a call in the history; the same whether its tool is in this request or not, so that a
        request without tools (Codex's compaction) still says what the earlier ones said."""
        if not namespace:
            return name
        return self.outer.get((namespace, name)) or flat_name(namespace, name)


def flat_name(namespace: str, name: str, taken: Collection[str] = ()) -> str:
    """A legal function name for a tool of a namespace, other than all in `taken`.

    `namespace__name` where that can be cut only there; else a hash keeps apart what would fall together.
    """
    plain = f"{namespace}__{name}"
    clear = "__" not in name and not name.startswith("_") and not namespace.endswith("_")
    if clear and _LEGAL.fullmatch(plain) and plain not in taken:
        return plain
    stem, salt = _ILLEGAL.sub("_", plain)[:_HASHED], 0
    while True:
        mark = hashlib.sha256(f"{salt}\0{namespace}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()[:10]
        if (flat := f"{stem}_{mark}") not in taken:
            return flat
        salt += 1


def read_tools(given: list[object]) -> Tools:
    """Raises BadRequest for a tool that is no object, has no type, or is a function without what a function needs."""
    reader = _Reader()
    for i, tool in enumerate(given):
        reader.take(_object(tool, f"tools[{i}]"), f"tools[{i}]")
    chat, outer = reader.flattened()
    inner = {flat: pair for pair, flat in outer.items()}
    return Tools(chat, reader.echo, inner, outer, tuple(reader.dropped))


class _Reader:
    """Two passes: a namespace's function may get another name only when a plain function has it already."""

    def __init__(self) -> None:
        self.echo: list[Json] = []
        self.dropped: dict[str, None] = {}
        self._found: list[tuple[str | None, Json]] = []

    def take(self, tool: Json, where: str) -> None:
        kind = _text(tool, "type", where)
        if kind == "function":
            self._found.append((None, function := self._function(tool, where)))
            self.echo.append(_echoed(function))
        elif kind == "namespace":
            self._namespace(tool, where)
        else:
            self._drop(kind)

    def flattened(self) -> tuple[list[Json], dict[tuple[str, str], str]]:
        taken = {function["name"] for namespace, function in self._found if namespace is None}
        chat: list[Json] = []
        outer: dict[tuple[str, str], str] = {}
        for namespace, function in self._found:
            name = function["name"]
            if namespace is not None:
                pair = (namespace, name)
                if pair not in outer:
                    outer[pair] = flat_name(*pair, taken)
                    taken.add(outer[pair])
                name = outer[pair]
            chat.append({"type": "function", "function": {**function, "name": name}})
        return chat, outer

    def _namespace(self, tool: Json, where: str) -> None:
        namespace = _text(tool, "name", where)
        for key in tool:
            if key not in _NAMESPACE_KEYS:
                self._drop(f"namespace.{key}")
        inner = tool.get("tools")
        if not isinstance(inner, list):
            raise BadRequest(
                f"'tools' of {where} is missing or not a list. Name the namespace's functions.", param=where
            )
        kept: list[Json] = []
        for i, found in enumerate(inner):
            at = f"{where}.tools[{i}]"
            function = _object(found, at)
            kind = function.get("type", "function")
            if kind == "function":
                self._found.append((namespace, function := self._function(function, at)))
                kept.append(_echoed(function))
            else:
                self._drop(kind if isinstance(kind, str) else "unknown")
        about = tool.get("description")
        description = about if isinstance(about, str) else ""
        self.echo.append({"type": "namespace", "name": namespace, "description": description, "tools": kept})

    def _function(self, tool: Json, where: str) -> Json:
        """server-chat.cpp: `strict` is true unless said otherwise. Absent and null are the same here: the engine fails
        on a description of null (common/chat.cpp, common_chat_tools_parse_oaicompat)."""
        function: Json = {"name": _text(tool, "name", where)}
        for key, kind in (("description", str), ("parameters", dict), ("strict", bool)):
            value = tool.get(key)
            if value is not None and not isinstance(value, kind):
                raise BadRequest(
                    f"'{key}' of {where} is a {type(value).__name__}; send a {kind.__name__}.", param=where
                )
            if value is not None:
                function[key] = value
        function.setdefault("strict", True)
        for key in tool:
            if key not in _FUNCTION_KEYS:
                self.dropped[f"tools[].{key[:MOST_LISTED]}"] = None
        return function

    def _drop(self, kind: str) -> None:
        self.dropped[f"tools.{kind[:MOST_LISTED]}"] = None


def _echoed(function: Json) -> Json:
    return {"type": "function", "description": None, "parameters": None, **function}


def read_choice(given: object, dropped: dict[str, None]) -> str | None:
    """`tool_choice` as the engine knows it: auto, none or required (common/chat.cpp,
    common_chat_tool_choice_parse_oaicompat); which function is wanted it cannot be told. Raises BadRequest."""
    if given is None or given in ("auto", "none", "required"):
        return given if isinstance(given, str) else None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping) and kind == "function":
        _text(given, "name", "tool_choice")
        dropped["tool_choice.name"] = None
        return "required"
    if isinstance(given, Mapping) and kind == "allowed_tools":
        if given.get("mode") not in ("auto", "required"):
            raise BadRequest("'mode' of tool_choice has to be 'auto' or 'required'.", param="tool_choice")
        dropped["tool_choice.tools"] = None
        return str(given["mode"])
    if isinstance(kind, str):
        dropped[f"tool_choice.{kind[:MOST_LISTED]}"] = None
        return None
    raise BadRequest(
        "'tool_choice' is not one that the Responses API has. Send 'auto', 'none', 'required' or a function.",
        param="tool_choice",
    )


def _object(value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise BadRequest(f"{where} is not an object. Send a tool with a 'type'.", param=where)
    return value


def _text(holder: Mapping[str, object], key: str, where: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"'{key}' of {where} is missing or not a text.", param=where)
    return value
