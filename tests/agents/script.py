"""What the model answers: a function of the request alone, so that side requests and retries change nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
TASKS = (
    "Make greet() in greet.py greet in German, then run it.",
    "Write the line 'greet() speaks German.' into notes.md.",
)
BEFORE = 'def greet(name: str) -> str:\n    return f"Hello, {name}."\n\n\nprint(greet("Ada"))\n'
AFTER = BEFORE.replace("Hello", "Hallo")
NOTE = "greet() speaks German.\n"
TOOLLESS = "*SEARCH/REPLACE block*"
"""Stands in what aider sends for an edit, and in nothing else: it works without tools."""
DONE = ("greet() greets in German now, and it runs.", "The line is in notes.md.")


@dataclass(frozen=True)
class Call:
    """One tool call; arguments in the order the model writes them."""

    name: str
    arguments: Json


@dataclass(frozen=True)
class Answer:
    """One answer of the model."""

    text: str
    call: Call | None = None

    def deltas(self, number: int) -> list[Json]:
        """The deltas of its stream (chat dialect); `number` makes the call's id, nine alphanumerics."""
        found: list[Json] = [{"content": self.text[i : i + 12]} for i in range(0, len(self.text), 12)]
        if self.call is not None:
            arguments = json.dumps(self.call.arguments)
            opening = {"index": 0, "id": f"call{number:05}", "type": "function"}
            found.append({"tool_calls": [opening | {"function": {"name": self.call.name, "arguments": ""}}]})
            found += [
                {"tool_calls": [{"index": 0, "function": {"arguments": arguments[i : i + 16]}}]}
                for i in range(0, len(arguments), 16)
            ]
        return found

    @property
    def finish(self) -> str:
        """The finish reason."""
        return "stop" if self.call is None else "tool_calls"


Steps = tuple[tuple[Answer, ...], ...]
"""For each task, the answers up to its end."""


def with_tools(read: Call, edit: Call, write: Call, shell: Call) -> Steps:
    """An agent's steps: read, edit, run, done; write, done."""
    first = Answer("I will look first.", read), Answer("Now the change.", edit), Answer("", shell), Answer(DONE[0])
    return first, (Answer("A short note, then.", write), Answer(DONE[1]))


def without_tools() -> Steps:
    """aider's: search-and-replace blocks in the text."""
    old, new = (text.splitlines()[1] for text in (BEFORE, AFTER))
    return (Answer(DONE[0] + _block("greet.py", old, new)),), (Answer(DONE[1] + _block("notes.md", "", NOTE.rstrip())),)


def _block(file: str, old: str, new: str) -> str:
    inside = f"<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE".replace("\n\n", "\n")
    return f"\n\n{file}\n```\n{inside}\n```\n"


def is_main(body: Json) -> bool:
    """Whether a request, in any dialect, is a turn of the conversation rather than a title or a commit message."""
    return bool(body.get("tools")) or TOOLLESS in json.dumps(body)


def answer(body: Json, steps: Steps) -> Answer:
    """The answer to a chat request; side requests get a short text, as JSON where they want that."""
    if not is_main(body):
        return Answer('{"title": "Greet in German"}' if body.get("response_format") else "Greet in German")
    task, number = place(body)
    return steps[task][min(number, len(steps[task]) - 1)]


def place(body: Json) -> tuple[int, int]:
    """(which task, how many calls were made for it so far) of a main chat request."""
    task, number = 0, 0
    for message in body["messages"]:
        if message["role"] == "user" and (named := _task_in(message)) is not None:
            task, number = named, 0
        elif message.get("tool_calls"):
            number += 1
    return task, number


def _task_in(message: Json) -> int | None:
    text = json.dumps(message.get("content"))
    return next((i for i, task in reversed(list(enumerate(TASKS))) if task in text), None)
