"""One agent on a scripted engine, on engine B through Slotkeeper, and its requests on engine B alone."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from llamacpp.engines import EngineSpec
from tests.agents.agents import Agent
from tests.agents.checks import wrong
from tests.agents.engines import ALIAS, Puppet, ScriptedLlama
from tests.agents.play import AgentFailed, Room, play
from tests.agents.readme import Block, Row
from tests.agents.replay import replay
from tests.agents.tap import Seen, Tap
from tests.live.talk import CHATML
from tests.servers import ONE_THREAD, LiveEngine, start_engine, start_proxy

DEFAULTS = ("--cache-ram", "8192", "--cache-idle-slots")
"""What llama-server does by itself (`--help`), and Slotkeeper switches off in its own engines."""
SESSIONS = 2
MOST_TOLD = 40
"""Requests that are listed when something is wrong."""
_PROCESSED = re.compile(r"^llamacpp:prompt_tokens_total (\d+)", re.MULTILINE)


class Wrong(Exception):
    """Something is not as it must be; a sentence for each thing."""


async def scripted(agent: Agent, block: Block, programs: Path, folder: Path) -> list[Seen]:
    """The tool loop on a fake engine. Raises Wrong."""
    async with ScriptedLlama(agent.steps) as fake:
        return await through(agent, block, programs, folder, fake.url, folder / "state")


async def real(agent: Agent, block: Block, programs: Path, folder: Path, model: Path) -> Row:
    """Two sessions on engine B, then their requests again without Slotkeeper. Raises Wrong.

    Before the second one, in another home and repository, engine and proxy are started anew.
    """
    sessions, processed, alone = [], 0, 0
    for number in range(SESSIONS):
        async with engine_b(model, folder / "engine") as engine:
            async with Puppet(engine.child.base_url, engine.child.api_key, agent.steps) as puppet:
                upstream, room = f"{puppet.url},slots={engine.slot_dir}", folder / f"session-{number}"
                seen = await through(agent, block, programs, room, upstream, folder / "state")
            processed += await processed_by(engine)
        sessions.append([s for s in seen if s.is_model_request])
    for asked in sessions:
        async with engine_b(model, folder / "alone", *DEFAULTS) as engine, client_of(engine) as client:
            await replay(asked, client)
            alone += await processed_by(engine)
    return _row(agent, sessions, processed, alone)


def _row(agent: Agent, sessions: list[list[Seen]], processed: int, alone: int) -> Row:
    later = [s for asked in sessions for s in [t for t in asked if t.is_main][1:]]
    continued = sum(s.placement == "continue" for s in later)
    aside = sum(not s.is_main for asked in sessions for s in asked)
    counts = sum(map(len, sessions)), aside, len(later), continued
    return Row(agent.name, agent.version, *counts, processed, alone)


async def through(agent: Agent, block: Block, programs: Path, folder: Path, upstream: str, state: Path) -> list[Seen]:
    """One session through Slotkeeper in front of `upstream`, checked; `state`: its state directory."""
    is_later = state.exists()
    proxy = await start_proxy(("--upstream", upstream), state)
    room = Room(folder)
    try:
        await proxy.ready()
        async with Tap(proxy.url) as tap:
            try:
                await play(agent, block, programs, room)
            except AgentFailed as error:
                raise Wrong(f"{error}\n{_told(tap.seen)}") from error
        (folder / "requests.json").write_bytes((await proxy.client.get("/slotkeeper/requests?last=200")).content)
    finally:
        await proxy.stop()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "proxy.log").write_text(proxy.said())
    placements = ("continue", "restore") if is_later else ("continue",)
    found = wrong(tap.seen, room.files(), sum(map(len, agent.steps)), placements)
    found += ["Slotkeeper logged a traceback"] * ("Traceback" in proxy.said())
    if found:
        raise Wrong("\n".join([*found, _told(tap.seen), f"logs: {folder}"]))
    return tap.seen


def _told(seen: list[Seen]) -> str:
    return "\n".join(
        f"  {s.method} {s.path} {s.status} {'turn' if s.is_main else 'aside'} {s.placement} {s.line}"
        for s in seen[:MOST_TOLD]
    )


@asynccontextmanager
async def engine_b(model: Path, folder: Path, *flags: str) -> AsyncIterator[LiveEngine]:
    """An embedded engine with a template that shows tools, ended with the body."""
    (folder / "slots").mkdir(parents=True, exist_ok=True)
    extra = (*ONE_THREAD, *CHATML, *flags)
    spec = EngineSpec(
        model, "embedded", parallel=4, ctx_size=65_536, slot_dir=folder / "slots", extra=extra, alias=ALIAS
    )
    engine = await start_engine(spec, folder)
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def client_of(engine: LiveEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the engine itself; connections are not used again, since it closes idle ones."""
    headers, limits = {"authorization": f"Bearer {engine.child.api_key}"}, httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=engine.child.base_url, headers=headers, timeout=600, trust_env=False, limits=limits
    ) as client:
        yield client


async def processed_by(engine: LiveEngine) -> int:
    """Prompt tokens that it has computed, by its own metric."""
    async with client_of(engine) as client:
        match = _PROCESSED.search((await client.get("/metrics")).text)
    assert match is not None
    return int(match[1])
