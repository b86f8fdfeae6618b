"""The agents: what is installed, which words make them run headless, and the tool calls that they know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tests.agents.script import AFTER, BEFORE, NOTE, TASKS, Call, Steps, with_tools, without_tools

NODE = "node@22.23.3"
"""Several agents need Node 22; npm has it as a package."""
SHELL = "python3 greet.py"
OLD, NEW = (text.splitlines()[1].strip() for text in (BEFORE, AFTER))


@dataclass(frozen=True)
class Agent:
    """One agent. `first` and `next` follow the README's last shell line: a task of a new session, of the same one.

    `together`: all tasks in one process, on its standard input. `quiet`: environment that keeps it from calling home.
    """

    name: str
    registry: Literal["npm", "python"]
    package: str
    version: str
    first: str
    next: str
    steps: Steps
    together: bool = False
    quiet: Mapping[str, str] = field(default_factory=dict)


def quoted(task: str) -> str:
    """A task as one word of the shell."""
    return "'" + task.replace("'", "'\\''") + "'"


OPENCODE = Agent(
    name="opencode",
    registry="npm",
    package="opencode-ai",
    version="1.18.33",
    first="run --auto {task}",
    next="run --auto -c {task}",
    steps=with_tools(
        Call("read", {"filePath": "greet.py"}),
        Call("edit", {"newString": NEW, "filePath": "greet.py", "oldString": OLD}),
        Call("write", {"content": NOTE, "filePath": "notes.md"}),
        Call("bash", {"description": "Run it", "command": SHELL}),
    ),
    quiet={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_SHARE": "1"},
)
CODEX = Agent(
    name="Codex",
    registry="npm",
    package="@openai/codex",
    version="0.171.0",
    first="exec --dangerously-bypass-approvals-and-sandbox {task}",
    next="exec --dangerously-bypass-approvals-and-sandbox resume --last {task}",
    steps=with_tools(
        Call("exec_command", {"cmd": "cat greet.py"}),
        Call("exec_command", {"yield_time_ms": 1000, "cmd": "sed -i s/Hello/Hallo/ greet.py"}),
        Call("exec_command", {"cmd": f"printf '%s' '{NOTE}' > notes.md"}),
        Call("exec_command", {"cmd": SHELL}),
    ),
)
PI = Agent(
    name="pi",
    registry="npm",
    package="@earendil-works/pi-coding-agent",
    version="1.6.0",
    first="-p {task}",
    next="-p -c {task}",
    steps=with_tools(
        Call("read", {"path": "greet.py"}),
        Call("edit", {"edits": [{"newText": NEW, "oldText": OLD}], "path": "greet.py"}),
        Call("write", {"content": NOTE, "path": "notes.md"}),
        Call("bash", {"command": SHELL}),
    ),
    quiet={"PI_OFFLINE": "1"},
)
AIDER = Agent(
    name="aider",
    registry="python",
    package="aider-chat",
    version="0.86.2",
    first="--yes-always --no-show-model-warnings --no-check-update --no-pretty --no-fancy-input --edit-format diff "
    "--map-tokens 1024 greet.py",
    next="",
    steps=without_tools(),
    together=True,
    quiet={"AIDER_ANALYTICS": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
)
CLAUDE = Agent(
    name="Claude Code",
    registry="npm",
    package="@anthropic-ai/claude-code",
    version="2.1.332",
    first="-p --dangerously-skip-permissions {task}",
    next="-p --dangerously-skip-permissions -c {task}",
    steps=with_tools(
        Call("Read", {"file_path": "greet.py"}),
        Call("Edit", {"new_string": NEW, "old_string": OLD, "file_path": "greet.py"}),
        Call("Write", {"content": NOTE, "file_path": "notes.md"}),
        Call("Bash", {"description": "Run it", "command": SHELL}),
    ),
    # Not all of its traffic is switched off: what it asks besides the model is part of what a user's does.
    quiet={"DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"},
)
AGENTS = (OPENCODE, CODEX, PI, AIDER, CLAUDE)


def commands(agent: Agent, shell: str) -> list[tuple[str, str]]:
    """(shell script, its standard input), one for each process: the README's lines, then `agent`'s words."""
    lines = shell.rstrip().splitlines()
    if agent.together:
        return [("\n".join([*lines[:-1], f"{lines[-1]} {agent.first}"]), "\n".join([*TASKS, "/exit", ""]))]
    words = [agent.first, *[agent.next] * (len(TASKS) - 1)]
    return [
        ("\n".join([*lines[:-1], f"{lines[-1]} {word.format(task=quoted(task))}"]), "")
        for word, task in zip(words, TASKS, strict=True)
    ]
