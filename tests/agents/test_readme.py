"""The README's settings are found as they stand, and its table has the form that `make test-agents` writes."""

import json
import tomllib

import pytest

from tests.agents.agents import AGENTS, CODEX, OPENCODE, Agent, commands
from tests.agents.readme import BEGIN, END, HEAD, README, Block, Row, blocks, is_row, table, with_table
from tests.agents.script import TASKS

ROW = Row("pi", "1.6.0", 6, 0, 5, 5, 1878, 12_798)
TEXT = f"""## Agents

**pi** (`npm install one`), `~/.one/settings.json`:

```json
{{"a": 1}}
```

```sh
export KEY=none
one
```

**Claude Code**:

```sh
two --model m
```

## Else

```sh
not an agent's
```
{BEGIN}
{END}
"""


@pytest.mark.parametrize("agent", AGENTS, ids=lambda a: a.name)
def test_every_agent_has_settings(agent: Agent) -> None:
    """Its files can be read as what they are, and something points at Slotkeeper."""
    block = blocks(README.read_text())[agent.name]
    for path, content in block.files:
        (tomllib if path.endswith(".toml") else json).loads(content)
    assert "http://127.0.0.1:8484" in block.shell + "".join(content for _, content in block.files)
    assert "your-model" in block.shell + "".join(content for _, content in block.files)


def test_nothing_else_is_taken_for_settings() -> None:
    """The README names the agents that are run, and no other."""
    assert set(blocks(README.read_text())) == {agent.name for agent in AGENTS}


def test_blocks() -> None:
    """Files by the path before them, shell lines as they are, up to the next heading."""
    one = Block(((".one/settings.json", '{"a": 1}\n'),), "export KEY=none\none\n")
    assert blocks(TEXT) == {"pi": one, "Claude Code": Block((), "two --model m\n")}


def test_the_readme_has_a_row_for_each_agent() -> None:
    """Between the markers: the head, then a row for each agent, at the version that is installed."""
    head, rule, *rows = table(README.read_text())
    assert head == HEAD
    assert rule.count("|") == head.count("|")
    assert [row for row in rows if not is_row(row)] == []
    assert [row.split("|")[1].strip() for row in rows] == [f"{agent.name} {agent.version}" for agent in AGENTS]


def test_rows_are_replaced_and_kept() -> None:
    """Writing measures of one agent leaves the others'; writing twice is writing once."""
    other = Row("Claude Code", "2.1.332", 7, 1, 5, 5, 20_000, 30_000)
    text = with_table(with_table(TEXT, [other, ROW]), [ROW])
    assert table(text)[2:] == [ROW.line(), other.line()]
    assert with_table(text, [other, ROW]) == text
    assert text.replace("\n".join(table(text)) + "\n", "") == TEXT
    assert all(map(is_row, table(text)[2:]))


@pytest.mark.parametrize("line", [HEAD, ROW.line() + " ", ROW.line().replace("1.6.0", "latest"), "| pi | 6 |"])
def test_what_is_no_row(line: str) -> None:
    """A version, whole numbers, the number of cells."""
    assert not is_row(line)


def test_commands_follow_the_last_line() -> None:
    """Everything of the README first, as it stands; a process for each task, the task one word."""
    first, second = commands(CODEX, "export SLOTKEEPER_KEY=none\ncodex\n")
    assert first == (
        f"export SLOTKEEPER_KEY=none\ncodex {CODEX.first.format(task=f'{chr(39)}{TASKS[0]}{chr(39)}')}",
        "",
    )
    assert "resume --last" in second[0]
    aider = next(a for a in AGENTS if a.together)
    [(script, told)] = commands(aider, "aider\n")
    assert script.startswith("aider --yes-always")
    assert told.splitlines() == [*TASKS, "/exit"]
    assert "opencode run --auto -c" in commands(OPENCODE, "opencode\n")[1][0]
