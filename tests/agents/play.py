"""One agent's session: its home as the README makes it, a scratch repository, its processes one after another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.agents.agents import Agent, commands
from tests.agents.readme import Block
from tests.agents.script import BEFORE

PATIENCE = 300.0  # seconds for one process of an agent
KEPT = ("PATH", "LANG", "LC_ALL", "USER", "LOGNAME", "SSL_CERT_FILE")
GIT = {"GIT_AUTHOR_NAME": "Ada", "GIT_AUTHOR_EMAIL": "ada@example.org"}
GIT |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in GIT.items()}


class AgentFailed(Exception):
    """An agent's process did not end well; says where its output lies."""


@dataclass(frozen=True)
class Room:
    """Everything an agent sees of the machine."""

    folder: Path

    @property
    def home(self) -> Path:
        """Its home directory."""
        return self.folder / "home"

    @property
    def repository(self) -> Path:
        """The scratch repository."""
        return self.folder / "repository"

    def files(self) -> dict[str, str]:
        """Name -> text of the repository's files."""
        return {p.name: p.read_text() for p in self.repository.iterdir() if p.is_file()}

    def environment(self, programs: Path, agent: Agent) -> dict[str, str]:
        """Nothing of the caller's own but what a process needs."""
        kept = {k: v for k, v in os.environ.items() if k in KEPT}
        kept["PATH"] = f"{programs}{os.pathsep}{kept.get('PATH', os.defpath)}"
        return kept | GIT | {"HOME": str(self.home), "TMPDIR": str(self.folder / "tmp"), "TERM": "dumb", **agent.quiet}

    def furnish(self, block: Block) -> None:
        """Home with the README's files, repository with one commit."""
        for path, content in block.files:
            file = self.home / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        for folder in (self.home, self.repository, self.folder / "tmp"):
            folder.mkdir(parents=True, exist_ok=True)
        (self.repository / "greet.py").write_text(BEFORE)
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), **GIT}
        for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "Greet")):
            subprocess.run(("git", *words), cwd=self.repository, env=environment, check=True)


async def play(agent: Agent, block: Block, programs: Path, room: Room) -> None:
    """The whole session. Raises AgentFailed."""
    room.furnish(block)
    environment = room.environment(programs, agent)
    for number, (script, told) in enumerate(commands(agent, block.shell)):
        await _run(script, told, environment, room, room.folder / f"said-{number}.log")


async def _run(script: str, told: str, environment: dict[str, str], room: Room, log: Path) -> None:
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *("sh", "-ec", script),
            cwd=room.repository,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=out,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(PATIENCE):
            await process.communicate(told.encode())
    except TimeoutError:
        raise AgentFailed(f"not done within {PATIENCE:.0f} s: {log}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it left in the background, too
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        raise AgentFailed(f"exit code {process.returncode}: {log}\n{log.read_text()[-2000:]}")
