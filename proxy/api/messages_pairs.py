"""Every call has its result and every result its call: what Anthropic's API refuses with status 400 otherwise."""

from __future__ import annotations

from typing import Any

from proxy.api.dialect import Json
from proxy.errors import BadRequest


def require_pairs(messages: list[Json]) -> None:
    """Raises BadRequest for a tool_result without its tool_use before it, and for a tool_use that the user's next turn
    has no tool_result for. Several messages of one role in a row are one turn, as for Anthropic; system messages in
    between count for nothing. Messages were read before, so their shapes are right."""
    waiting: dict[str, int] = {}
    before = ""
    for i, message in enumerate(messages):
        role = message.get("role")
        if role == "assistant":
            if before == "user":
                _require_none(waiting)
            waiting |= {block["id"]: i for block in _blocks(message, "tool_use") if isinstance(block.get("id"), str)}
        elif role == "user":
            for block in _blocks(message, "tool_result"):
                if waiting.pop(call := str(block.get("tool_use_id")), None) is None:
                    raise BadRequest(
                        f"messages.{i}: no tool_use with the id {call[:80]!r} waits for this tool_result. Send each "
                        "result once, in the turn behind its call.",
                        param=f"messages.{i}",
                    )
        before = role if role in ("assistant", "user") else before
    if before == "user":
        _require_none(waiting)


def _require_none(waiting: dict[str, int]) -> None:
    for call, i in waiting.items():
        raise BadRequest(
            f"messages.{i}: the tool_use {call[:80]!r} has no tool_result in the turn behind it. Send one per call.",
            param=f"messages.{i}",
        )


def _blocks(message: Json, kind: str) -> list[dict[Any, Any]]:
    content = message.get("content")
    return [b for b in content if isinstance(b, dict) and b.get("type") == kind] if isinstance(content, list) else []
