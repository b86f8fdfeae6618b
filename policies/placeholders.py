"""Placeholders in what the model says, turned back into what they stand for before the client sees them.

The base says `[[env:cwd]]` where a directory stood (policies/layout); a model may say `[[env:cwd]]/a.py` in an answer
or in a call. The client never heard of `[[env:cwd]]`, so its value is put in; what the model really said stays in the
ledger. Brackets without `env:` are the model's own (R, wikis, TOML) and stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
Channel = tuple[int, str, int]
"""(choice, field, tool call)."""

TEXTS = ("content", "reasoning_content")


class Resolver:
    """One answer, chunk by chunk. `values`: placeholder, brackets included -> what it stands for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._held: dict[Channel, str] = {}

    @property
    def is_holding(self) -> bool:
        """The beginning of what may be a placeholder is held back."""
        return bool(self._held)

    def message(self, message: Json) -> Json:
        """A whole assistant message with values in place; the same object when it names no placeholder."""
        return resolved(message, self._values)

    def chunk(self, found: Json) -> Json:
        """A chat.completion.chunk with values in place; the same object, changed. Any JSON is taken."""
        choices = found.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and isinstance(delta := choice.get("delta"), dict):
                self._delta(choice.get("index", 0), delta, is_last=choice.get("finish_reason") is not None)
        return found

    def _delta(self, index: Any, delta: Json, *, is_last: bool) -> None:
        number = index if isinstance(index, int) else 0
        for field in TEXTS:
            channel = number, field, 0
            if isinstance(text := delta.get(field), str) or (is_last and channel in self._held):
                delta[field] = self._text(channel, text or "", is_last=is_last, quoted=False)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
                at = call.get("index", 0)
                channel = number, "arguments", at if isinstance(at, int) else 0
                function["arguments"] = self._text(channel, text, is_last=is_last, quoted=True)
        if is_last:
            self._flush_calls(number, delta)

    def _flush_calls(self, number: int, delta: Json) -> None:
        for channel in [c for c in self._held if c[:2] == (number, "arguments")]:
            held = self._held.pop(channel)
            delta["tool_calls"] = [*(delta.get("tool_calls") or []), _rest_of_call(channel[2], held)]

    def _text(self, channel: Channel, text: str, *, is_last: bool, quoted: bool) -> str:
        text = self._held.pop(channel, "") + text
        if "[" not in text:
            return text
        text = _replaced(text, self._values, quoted=quoted)
        cut = len(text) if is_last else self._cut(text)
        if cut < len(text):
            self._held[channel] = text[cut:]
        return text[:cut]

    def _cut(self, text: str) -> int:
        """Where a placeholder may begin that has not come to its end."""
        start = text.rfind("[")
        if start > 0 and text[start - 1] == "[":
            start -= 1
        tail = text[start:]
        return start if start >= 0 and any(mark.startswith(tail) for mark in self._values) else len(text)


def _rest_of_call(index: int, text: str) -> Json:
    return {"index": index, "function": {"arguments": text}}


def _replaced(text: str, values: Mapping[str, str], *, quoted: bool) -> str:
    for mark, value in values.items():
        if mark in text:
            text = text.replace(mark, json.dumps(value, ensure_ascii=False)[1:-1] if quoted else value)
    return text


def resolved(message: Json, values: Mapping[str, str]) -> Json:
    """A whole assistant message with values in place; the same object when it names no placeholder."""
    changed: Json = {
        field: new
        for field in TEXTS
        if isinstance(text := message.get(field), str) and (new := _replaced(text, values, quoted=False)) != text
    }
    calls = message.get("tool_calls")
    if isinstance(calls, list) and (new_calls := [_resolved_call(call, values) for call in calls]) != calls:
        changed["tool_calls"] = new_calls
    return {**message, **changed} if changed else message


def _resolved_call(call: Any, values: Mapping[str, str]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _replaced(text, values, quoted=True)}}
