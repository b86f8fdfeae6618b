"""`make test-agents`: real agents, installed at pinned versions, run headless against Slotkeeper as the README says.

Prints a row for each agent; exit code 1 when one is not as it must be. `--write` puts the rows into the README.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import socket
import sys
from pathlib import Path

from llamacpp.engines.cache import cache_dir
from llamacpp.engines.models import fetch_demo
from tests.agents.agents import AGENTS, CLAUDE, Agent
from tests.agents.install import installed
from tests.agents.measure import Wrong, real, scripted
from tests.agents.readme import HEAD, README, Block, Row, blocks, with_table
from tests.agents.tap import PORT
from tests.models import make_tiny_models


def main() -> int:
    """The exit code: 0 all well, 1 not, 2 the README's port is taken."""
    options = _parser().parse_args()
    if not is_free(PORT):
        print(f"Port {PORT} is taken; the README's settings name it. Stop what listens there.", file=sys.stderr)
        return 2
    known = blocks(README.read_text())
    names = options.agents or [a.name for a in AGENTS if a is not CLAUDE or options.claude]
    model = make_tiny_models(fetch_demo(cache_dir() / "models"))["dense"]
    rows, folder = [], fresh_folder()
    for agent in (a for a in AGENTS if a.name in names):
        try:
            rows.append(asyncio.run(one(agent, known[agent.name], folder / agent.name.replace(" ", "-"), model)))
            print(rows[-1].line(), flush=True)
        except Wrong as error:
            print(f"{agent.name}: {error}", file=sys.stderr)
    print("\n".join(["", HEAD, *(row.line() for row in rows)]))
    if options.write:
        README.write_text(with_table(README.read_text(), rows))
    return 0 if len(rows) == len(names) else 1


async def one(agent: Agent, block: Block, folder: Path, model: Path) -> Row:
    """Installs it and plays both sessions. Raises Wrong."""
    programs = installed(agent)
    print(f"{agent.name} {agent.version}: scripted engine", flush=True)
    await scripted(agent, block, programs, folder / "scripted")
    print(f"{agent.name} {agent.version}: engine B", flush=True)
    return await real(agent, block, programs, folder / "real", model)


def fresh_folder() -> Path:
    """Where this run keeps homes, repositories and logs; outside the clone. The last run's is gone."""
    folder = cache_dir() / "agents" / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def is_free(port: int) -> bool:
    """Whether nobody listens on a loopback port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", help=f"of {', '.join(a.name for a in AGENTS)}; else all but Claude Code")
    parser.add_argument("--claude", action="store_true", help="Claude Code, too")
    parser.add_argument("--write", action="store_true", help="put the rows into the README")
    return parser


if __name__ == "__main__":
    sys.exit(main())
