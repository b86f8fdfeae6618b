"""Messages of the Anthropic dialect as chat messages, in the order in which their content stands.

llama-server's own converter (server-chat.cpp, server_chat_convert_anthropic_to_oai) puts the texts of a user message
before its tool results, so that a history that was only appended to is not a longer prompt (agents.md, finding 4).
Everything else is converted as it does, so that the engine renders the same prompt.
"""

from __future__ import annotations

from typing import Any

from proxy.api.dialect import Json
from proxy.api.messages_tools import Dropped, Tools, dumps, function_of
from proxy.errors import BadRequest

ROLES = ("user", "assistant", "system")
"""`system`: in mid-conversation, as Claude Code sends it (agents.md, finding 1)."""
REFERENCES = ("tool_reference", "tool_addition")
_UNTOLD = frozenset(
    """redacted_thinking server_tool_use web_search_tool_result web_fetch_tool_result code_execution_tool_result
    bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result advisor_tool_result
    container_upload mcp_tool_use mcp_tool_result mcp_tool_listing fallback browser_state""".split()
)
"""Blocks that only Anthropic's own servers make or understand: accepted, not told to the model, listed as dropped."""
_MESSAGE_FIELDS = frozenset(("role", "content"))
_BLOCK_FIELDS = {
    kind: frozenset(("type", "cache_control", *fields.split()))
    for kind, fields in {
        "text": "text citations",
        "image": "source",
        "document": "source title context",
        "search_result": "title source content",
        "tool_reference": "tool_name",
        "tool_result": "tool_use_id content is_error",
        "tool_addition": "tool",
        "tool_removal": "tool",
        "thinking": "thinking signature",
        "tool_use": "id name input caller",
        "compaction": "content signature",
    }.items()
}
"""Fields of a block that are used, or that say nothing to a model."""
_SOURCE_FIELDS = frozenset(("type", "media_type", "data", "url", "content"))
_TOOL_FIELDS = frozenset(("type", "name", "definition"))


def announces_tools(messages: list[Any]) -> bool:
    """Whether any message refers to a deferred tool, so that the generic tool is needed. Takes JSON of any shape."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            inner = block.get("content") if isinstance(block, dict) else None
            blocks = [block, *inner] if isinstance(inner, list) else [block]
            if any(isinstance(b, dict) and b.get("type") in REFERENCES for b in blocks):
                return True
    return False


class History:
    """Collects chat messages; `messages` is only appended to, and depends on nothing that comes later."""

    def __init__(self, tools: Tools, dropped: Dropped) -> None:
        self.messages: list[Json] = []
        self._tools, self._dropped = tools, dropped

    def _kind(self, block: Any, at: str) -> str:
        """The type of a block; its fields without effect are noted."""
        kind = kind_of(block, at)
        if (known := _BLOCK_FIELDS.get(kind)) is not None:
            self._dropped.add_unknown(block, known, f"content.{kind}")
        return kind

    def add(self, message: Any, at: str) -> None:
        """Takes in one message of the client's; `at`: its place, for errors. Raises BadRequest."""
        if not isinstance(message, dict):
            raise BadRequest(f"'{at}' is not an object.", param=at)
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadRequest(f"'{at}.role' has to be one of {', '.join(ROLES)}.", param=f"{at}.role")
        for key in message:
            if key not in _MESSAGE_FIELDS:
                self._dropped.add(f"messages.{key}")
        if isinstance(content, str):
            self.messages.append({"role": role, "content": content})
        elif role == "system" and content is None and isinstance(message.get("output_config"), dict):
            return  # settings for one turn, without a text
        elif not isinstance(content, list):
            raise BadRequest(f"'{at}.content' has to be a text or a list of blocks.", param=f"{at}.content")
        elif role == "assistant":
            self._assistant(content, at)
        else:
            self._turn(role, content, at)

    # --- user and system --------------------------------------------------------------------------------------------

    def _turn(self, role: str, blocks: list[Any], at: str) -> None:
        parts: list[Json] = []
        for i, block in enumerate(blocks):
            here = f"{at}.content.{i}"
            kind = self._kind(block, here)
            if kind == "tool_result" and role == "user":
                self._flush(role, parts)
                parts = []
                self._result(block, here)
            elif kind in ("tool_addition", "tool_removal"):
                parts.extend(self._tool_change(kind, block, here))
            else:
                parts.extend(self._parts(kind, block, here))
        self._flush(role, parts)

    def _flush(self, role: str, parts: list[Json]) -> None:
        """One text is sent as a plain string: agents make a list of a message only while it is their last one."""
        if parts:
            is_text = len(parts) == 1 and parts[0]["type"] == "text"
            self.messages.append({"role": role, "content": parts[0]["text"] if is_text else parts})

    def _parts(self, kind: str, block: Json, at: str) -> list[Json]:
        """A block as parts of chat content."""
        if kind == "text":
            return [_text_part(_text(block, "text", at))]
        if kind == "image":
            image = _image(block, at)
            self._dropped.add_unknown(block["source"], _SOURCE_FIELDS, "content.image.source")
            return [image]
        if kind == "document":
            return self._document(block, at)
        if kind == "search_result":
            texts = [_optional(block, "title", at), _optional(block, "source", at), *self._texts(block, at)]
            return [_text_part("\n".join(t for t in texts if t))]
        if kind == "tool_reference":
            return [_text_part(self._tools.announcement(_text(block, "tool_name", at)))]
        if kind in _UNTOLD:
            self._dropped.add(f"content.{kind}")
            return []
        raise BadRequest(f"'{at}' is a block of type '{kind[:64]}', which cannot stand here.", param=f"{at}.type")

    def _document(self, block: Json, at: str) -> list[Json]:
        """Documents of text are told whole; of others (PDF, files) the model learns that it cannot read them."""
        source = block.get("source")
        if not isinstance(source, dict):
            raise BadRequest(f"'{at}.source' is missing or not an object.", param=f"{at}.source")
        self._dropped.add_unknown(source, _SOURCE_FIELDS, "content.document.source")
        head = [text for text in (_optional(block, "title", at), _optional(block, "context", at)) if text]
        if source.get("type") == "text":
            return [_text_part("\n".join([*head, _text(source, "data", f"{at}.source")]))]
        if source.get("type") == "content":
            inner = source.get("content")
            blocks = [{"type": "text", "text": inner}] if isinstance(inner, str) else inner
            parts = self._list(blocks, f"{at}.source")
            return [_text_part("\n".join(head)), *parts] if head else parts
        self._dropped.add("content.document")
        title = f" '{head[0]}'" if head else ""
        return [_text_part(f"[A document{title} was attached here that this model cannot read: it takes text only.]")]

    def _list(self, blocks: Any, at: str) -> list[Json]:
        if not isinstance(blocks, list):
            raise BadRequest(f"'{at}.content' has to be a text or a list of blocks.", param=f"{at}.content")
        parts: list[Json] = []
        for i, block in enumerate(blocks):
            here = f"{at}.content.{i}"
            kind = self._kind(block, here)
            if kind not in ("text", "image"):
                raise BadRequest(f"'{here}' has to be a text or an image.", param=f"{here}.type")
            parts.extend(self._parts(kind, block, here))
        return parts

    def _texts(self, block: Json, at: str) -> list[str]:
        return [part["text"] for part in self._list(block.get("content"), at) if part["type"] == "text"]

    def _tool_change(self, kind: str, block: Json, at: str) -> list[Json]:
        """Tools added or removed in mid-conversation (beta of 2026-07-01): told in words, where it happens."""
        tool = block.get("tool")
        what = kind_of(tool, f"{at}.tool")
        assert isinstance(tool, dict)
        self._dropped.add_unknown(tool, _TOOL_FIELDS, f"content.{kind}.tool")
        if what == "tool_reference":
            name = _text(tool, "name", f"{at}.tool")
        elif what == "tool_definition" and kind == "tool_addition":
            definition = tool.get("definition")
            if not isinstance(definition, dict):
                raise BadRequest(f"'{at}.tool.definition' is not an object.", param=f"{at}.tool.definition")
            function = function_of(definition, f"{at}.tool.definition", self._dropped)
            self._tools, name = self._tools.with_definition(function), function["name"]
        else:
            self._dropped.add(f"content.{kind}.{what}")
            return []
        gone = f"The tool {name} is no longer available."
        return [_text_part(self._tools.announcement(name) if kind == "tool_addition" else gone)]

    # --- tool results -----------------------------------------------------------------------------------------------

    def _result(self, block: Json, at: str) -> None:
        """A tool message. Texts are joined without a separator, as llama-server joins them; parts stay for images."""
        if block.get("is_error") is True:
            self._dropped.add("tool_result.is_error")
        call, given = _text(block, "tool_use_id", at), block.get("content")
        content: str | list[Json]
        if given is None or isinstance(given, str):
            content = given or ""
        elif isinstance(given, list):
            parts: list[Json] = []
            has_images = False
            for i, inner in enumerate(given):
                here = f"{at}.content.{i}"
                kind = self._kind(inner, here)
                found = self._parts(kind, inner, here)
                if kind == "tool_reference" and parts:
                    parts.append(_text_part("\n\n"))
                parts.extend(found)
                has_images = has_images or any(part["type"] != "text" for part in found)
            content = parts if has_images else "".join(part["text"] for part in parts)
        else:
            raise BadRequest(f"'{at}.content' has to be a text or a list of blocks.", param=f"{at}.content")
        self.messages.append({"role": "tool", "tool_call_id": call, "content": content})

    # --- assistant --------------------------------------------------------------------------------------------------

    def _assistant(self, blocks: list[Any], at: str) -> None:
        """One chat message. Its texts are joined as they were generated: the writer cuts them where calls stand."""
        texts, thoughts, calls = [], [], []
        for i, block in enumerate(blocks):
            here = f"{at}.content.{i}"
            kind = self._kind(block, here)
            if kind == "text":
                texts.append(_text(block, "text", here))
            elif kind == "thinking":
                thoughts.append(_text(block, "thinking", here))
            elif kind == "tool_use":
                calls.append(self._call(block, here))
            elif kind == "compaction":
                texts.append(_optional(block, "content", here))
            elif kind in _UNTOLD:
                self._dropped.add(f"content.{kind}")
            else:
                raise BadRequest(
                    f"'{here}' is a block of type '{kind[:64]}', which no assistant message holds.",
                    param=f"{here}.type",
                )
        text, thought = "".join(texts), "".join(thoughts)
        if not texts and not calls and not thought:
            return
        message: Json = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = calls
        if thought:
            message["reasoning_content"] = thought
        self.messages.append(message)

    def _call(self, block: Json, at: str) -> Json:
        given = block.get("input", {})
        if not isinstance(given, dict):
            raise BadRequest(f"'{at}.input' is not an object.", param=f"{at}.input")
        name, arguments = self._tools.echoed(_text(block, "name", at), dumps(given, f"{at}.input"))
        function = {"name": name, "arguments": arguments}
        return {"id": _text(block, "id", at), "type": "function", "function": function}


def kind_of(block: Any, at: str) -> str:
    """The type of something that has to be an object with one. Raises BadRequest."""
    if not isinstance(block, dict):
        raise BadRequest(f"'{at}' is not an object.", param=at)
    return _text(block, "type", at)


def _text(block: Json, name: str, at: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        raise BadRequest(f"'{at}.{name}' is missing or not a text.", param=f"{at}.{name}")
    return found


def _optional(block: Json, name: str, at: str) -> str:
    return "" if block.get(name) is None else _text(block, name, at)


def _text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def _image(block: Json, at: str) -> Json:
    """An image as a chat image_url; whether it is one, and whether the model can see, the engine says."""
    source, here = block.get("source"), f"{at}.source"
    kind = kind_of(source, here)
    assert isinstance(source, dict)
    if kind == "base64":
        media = _optional(source, "media_type", here) or "image/jpeg"
        url = f"data:{media};base64,{_text(source, 'data', here)}"
    elif kind == "url":
        url = _text(source, "url", here)
    else:
        raise BadRequest(
            f"'{here}.type' is '{kind[:64]}': send the image as base64, no files are kept here.", param=f"{here}.type"
        )
    return {"type": "image_url", "image_url": {"url": url}}
