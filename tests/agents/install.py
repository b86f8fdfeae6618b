"""Agents from the package registries, by the ordinary clients, each in a folder of its own in the cache directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from llamacpp.engines.cache import cache_dir, locked
from tests.agents.agents import NODE, Agent

Command = tuple[str, ...]


def installed(agent: Agent) -> Path:
    """The folder of its programs; installed first where it is not there. Raises CalledProcessError."""
    place = cache_dir() / "agents" / f"{agent.name.lower().replace(' ', '-')}-{agent.version}"
    with locked(place.with_name(f"{place.name}.lock")):
        if not (place / "whole").exists():
            place.mkdir(parents=True, exist_ok=True)
            for command in commands(agent, place):
                subprocess.run(command, check=True, cwd=place, stdin=subprocess.DEVNULL)
            (place / "whole").touch()
    return programs(agent, place)


def programs(agent: Agent, place: Path) -> Path:
    """Where its programs lie."""
    return place / ("bin" if agent.registry == "python" else "node_modules/.bin")


def commands(agent: Agent, place: Path) -> list[Command]:
    """What installs it into `place`, at its version."""
    if agent.registry == "python":
        pip = (str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-qq")
        pinned = f"{agent.package}=={agent.version}"
        return [(sys.executable, "-m", "venv", str(place)), (*pip, "install", pinned)]
    npm = ("npm", "install", "--prefix", str(place), "--save-exact", "--no-audit", "--no-fund", "--loglevel", "error")
    return [(*npm, NODE, f"{agent.package}@{agent.version}")]
