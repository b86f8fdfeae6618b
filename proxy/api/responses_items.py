"""Input items of a Responses request as chat messages.

What an assistant said in one answer comes back as several items (reasoning, message, function calls); they are one chat
message again, put together as llama-server does (server-chat.cpp, server_chat_convert_responses_to_chatcmpl), but for
its losses: a second piece of reasoning is added, not put in the first one's place, and reasoning without content says
nothing instead of failing. Messages depend on their own items only, so that a history that grows is only appended to.
"""

from __future__ import annotations

from typing import Final

from proxy.api.dialect import Json
from proxy.api.responses_tools import MOST_LISTED, Tools
from proxy.errors import BadRequest

_KNOWN: Final = {
    "message": frozenset(("type", "id", "status", "role", "content")),
    "function_call": frozenset(("type", "id", "status", "call_id", "name", "namespace", "arguments")),
    "function_call_output": frozenset(("type", "id", "status", "call_id", "output")),
    "reasoning": frozenset(("type", "id", "status", "summary", "content", "encrypted_content")),
}
_PART = frozenset(("type", "text", "image_url", "detail", "refusal", "annotations", "logprobs"))
"""Fields that are used, or that say nothing to a model: of items by type, of parts."""
_SAYING = ("user", "system", "developer")


def messages_of(given: object, tools: Tools, dropped: dict[str, None]) -> list[Json]:
    """`given`: the field `input`, a text or a list of items. Names of fields without effect are put into `dropped`.

    Raises BadRequest for items that the API refuses, results without their call and calls without their result.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise BadRequest(
            "'input' is missing, or neither a text nor a list of items. Send one of the two.", param="input"
        )
    history = _History(tools, dropped)
    for i, item in enumerate(given):
        history.add(item, f"input[{i}]")
    history.close()
    return history.messages


class _History:
    def __init__(self, tools: Tools, dropped: dict[str, None]) -> None:
        self.messages: list[Json] = []
        self._tools, self._dropped = tools, dropped
        self._unanswered: dict[str, str] = {}  # call id -> where the call stands
        self._calls: set[str] = set()

    def add(self, item: object, where: str) -> None:
        if not isinstance(item, dict):
            raise BadRequest(f"{where} is not an object. Send input items.", param=where)
        kind = item.get("type") or ("message" if "role" in item else None)
        known = _KNOWN.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise _unknown(kind, where)
        if not known.issuperset(item):
            self._dropped |= dict.fromkeys(f"input[].{key[:MOST_LISTED]}" for key in item if key not in known)
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._result(item, where)
        else:
            self._reasoning(item, where)

    def close(self) -> None:
        for call, where in self._unanswered.items():
            raise BadRequest(
                f"No tool output found for function call {call[:80]} ({where}). Send its function_call_output.",
                param="input",
            )

    def _message(self, item: Json, where: str) -> None:
        role = item.get("role")
        if role in _SAYING:
            self.messages.append({"role": role, "content": self._parts(item.get("content"), f"{where}.content")})
        elif role == "assistant":
            said = self._said(item.get("content"), f"{where}.content")
            self._assistant().setdefault("content", []).extend(said)
        else:
            raise BadRequest(
                f"'role' of {where} is not one of user, system, developer and assistant. Name one of these.",
                param=where,
            )

    def _call(self, item: Json, where: str) -> None:
        call, name = _text(item, "call_id", where), _text(item, "name", where)
        namespace = item.get("namespace")
        if namespace is not None and not isinstance(namespace, str):
            raise BadRequest(f"'namespace' of {where} is not a text.", param=where)
        function = {"arguments": _text(item, "arguments", where), "name": self._tools.flat(namespace, name)}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"function": function, "id": call, "type": "function"})
        self._calls.add(call)
        self._unanswered[call] = where

    def _result(self, item: Json, where: str) -> None:
        call = _text(item, "call_id", where)
        if call not in self._calls:
            raise BadRequest(
                f"No tool call found for function call output with call_id {call[:80]} ({where}). "
                "Send the function_call before its output.",
                param="input",
            )
        output = item.get("output")
        content = output if isinstance(output, str) else self._parts(output, f"{where}.output")
        self.messages.append({"content": content, "role": "tool", "tool_call_id": call})
        self._unanswered.pop(call, None)

    def _reasoning(self, item: Json, where: str) -> None:
        """Content alone is what the model said; `encrypted_content` of others cannot be read, ours is empty."""
        if item.get("encrypted_content"):
            self._dropped["input[].encrypted_content"] = None
        content = item.get("content")
        if content is not None and not isinstance(content, list):
            raise BadRequest(f"'content' of {where} is not a list of reasoning_text parts.", param=where)
        texts = []
        for i, part in enumerate(content or ()):
            at = f"{where}.content[{i}]"
            if not isinstance(part, dict) or part.get("type") not in ("reasoning_text", "text"):
                raise BadRequest(f"{at} is not a part of type 'reasoning_text'.", param=at)
            self._note(part)
            texts.append(_text(part, "text", at))
        if text := "".join(texts):
            message = self._assistant()
            message.setdefault("content", [])
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _assistant(self) -> Json:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def _parts(self, content: object, where: str) -> list[Json]:
        """What others told the model: texts and images."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise BadRequest(
                f"{where} is missing, or neither a text nor a list of parts. Send one of the two.", param=where
            )
        return [self._part(part, f"{where}[{i}]") for i, part in enumerate(content)]

    def _note(self, part: Json) -> None:
        if not _PART.issuperset(part):
            self._dropped |= dict.fromkeys(f"input[].content[].{key[:MOST_LISTED]}" for key in part if key not in _PART)

    def _part(self, part: object, where: str) -> Json:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict):
            self._note(part)
        if isinstance(part, dict) and kind == "input_text":
            return {"type": "text", "text": _text(part, "text", where)}
        if isinstance(part, dict) and kind == "input_image":
            if part.get("detail") not in (None, "auto"):
                self._dropped["input[].content[].detail"] = None
            if not isinstance(part.get("image_url"), str):
                raise BadRequest(
                    f"'image_url' of {where} is missing or not a text. Send the image as a data URL; files by id "
                    "are not stored here.",
                    param=where,
                )
            return {"type": "image_url", "image_url": {"url": part["image_url"]}}
        raise BadRequest(
            f"{where} is not a part that llama-server takes: send 'input_text' or 'input_image' "
            "(text out of files has to be sent as text).",
            param=where,
        )

    def _said(self, content: object, where: str) -> list[Json]:
        """What the assistant said: texts; a refusal is one, too, for a template knows no other."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise BadRequest(
                f"{where} is missing, or neither a text nor a list of parts. Send one of the two.", param=where
            )
        said = []
        for i, part in enumerate(content):
            at = f"{where}[{i}]"
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(part, dict) or kind not in ("output_text", "input_text", "refusal"):
                raise BadRequest(f"{at} is not a part of type 'output_text' or 'refusal'.", param=at)
            self._note(part)
            said.append({"type": "text", "text": _text(part, "refusal" if kind == "refusal" else "text", at)})
        return said


def _unknown(kind: object, where: str) -> BadRequest:
    if kind == "item_reference":
        return BadRequest(
            f"{where} is an item_reference, and no items are stored here. Send the item itself.", param=where
        )
    named = f"is of type '{kind[:80]}'" if isinstance(kind, str) else "has no type that is a text"
    return BadRequest(
        f"{where} {named}. Send items of type message, function_call, function_call_output or reasoning.", param=where
    )


def _text(holder: Json, key: str, where: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"'{key}' of {where} is missing or not a text.", param=where)
    return value
