"""Tool calls and their results belong together: what Anthropic's API refuses of a history where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from proxy.api.dialect import Json
from proxy.errors import BadRequest


def check_pairs(messages: list[Any]) -> None:
    """Raises BadRequest for a tool result without its call in the turn before, or a call without its result in the
    turn behind. `messages`: a client's, whose shapes were checked.

    Messages of one role in a row are one turn, as with Anthropic's API; system messages between turns end none. Ids
    that come twice are let through: some templates have the model count its calls anew.
    """
    turns = list(_turns(messages))
    calls: set[str] = set()
    for role, blocks in turns:
        if role == "user":
            _check_results(blocks, calls)
        calls = {block["id"] for _, block in blocks if block["type"] == "tool_use"} if role == "assistant" else set()
    for (_, blocks), (_, behind) in pairwise([*turns, ("user", [])]):
        _check_calls(blocks, {block["tool_use_id"] for _, block in behind if block["type"] == "tool_result"})


def _check_results(blocks: list[tuple[str, Json]], calls: set[str]) -> None:
    for at, block in blocks:
        if block["type"] == "tool_result" and block["tool_use_id"] not in calls:
            raise BadRequest(
                f"{at}: unexpected `tool_use_id` found in `tool_result` blocks: {block['tool_use_id'][:64]}. Each "
                "`tool_result` block must have a corresponding `tool_use` block in the previous message.",
                param=at,
            )


def _check_calls(blocks: list[tuple[str, Json]], results: set[str]) -> None:
    missing = [(at, block["id"]) for at, block in blocks if block["type"] == "tool_use" and block["id"] not in results]
    if missing:
        at = missing[0][0].rpartition(".content")[0]
        raise BadRequest(
            f"{at}: `tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(found[:64] for _, found in missing[:8])}. Each `tool_use` block must have a corresponding "
            "`tool_result` block in the next message.",
            param=at,
        )


def _turns(messages: list[Any]) -> Iterator[tuple[str, list[tuple[str, Json]]]]:
    """The turns: whose it is, and its blocks with their places."""
    last, blocks = "", list[tuple[str, Json]]()
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if role == "system":
            continue
        if role != last and last:
            yield last, blocks
            blocks = []
        last = role
        if isinstance(content, list):
            blocks = blocks + [(f"messages.{i}.content.{k}", block) for k, block in enumerate(content)]
    if last:
        yield last, blocks
