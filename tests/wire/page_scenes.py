"""What a status page may have to show: conversations that go well, hostile names, repairs, a waiting line."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from proxy.store_types import Snapshot
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.wire.wire import CHAT, Wire, chat

SCRIPT = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
TURNED = "\u202egnp.exe\u202c \u05e9\u05dc\u05d5\u05dd \u200f\u2067end"
HOSTILE = f"{SCRIPT} {TURNED} \x00\x1b[31m"


async def hostile_talk(wire: Wire) -> None:
    """A session whose name and prompts are attacks, and one whose system prompt changes."""
    await wire.post(CHAT, chat(HOSTILE), headers={"x-slotkeeper-session": "<b onmouseover=alert(1)>'\"&amp;</b>"})
    tools = [{"type": "function", "function": {"name": f"t{i}", "parameters": {}}} for i in range(3)]
    system = {"role": "system", "content": "You are a careful agent. " * 40}
    for turn in range(4):
        body = chat(*[f"message {i} of a longer talk about slots" for i in range(2 * turn + 1)], tools=tools)
        body["messages"].insert(0, system)
        if turn == 3:
            body["messages"][2]["content"] += " \n"
            body["tools"] = tools[::-1]
        await wire.post(CHAT, body, headers={"x-slotkeeper-session": "ses_61f0b2c4"})
    body["messages"][4]["content"] = f"edited {HOSTILE}"
    await wire.post(CHAT, body | {"tools": tools[::-1]}, headers={"x-slotkeeper-session": "ses_61f0b2c4"})
    body["messages"][0] = {"role": "system", "content": "You are a careless agent. " * 40}
    await wire.post(CHAT, body, headers={"x-slotkeeper-session": "ses_61f0b2c4"})
    await wire.recorded(7)


@asynccontextmanager
async def crowd(wire: Wire, fake: FakeLlama, n: int = 4) -> AsyncIterator[None]:
    """While the body runs, both slots are busy and the others wait."""
    gate = asyncio.Event()
    fake.cues.extend(Cue(hold_before=gate) for _ in range(n))
    sent = [asyncio.create_task(wire.post(CHAT, chat(f"crowd {i} " * 20))) for i in range(n)]
    await wire.waiting(n - len(fake.slots))
    try:
        yield
    finally:
        gate.set()
        await asyncio.gather(*sent)


def snapshot(number: int, **more: Any) -> Snapshot:
    """A snapshot as the index holds it."""
    now = 1_700_000_000.0
    values: dict[str, Any] = {
        "id": f"{number:016x}",
        "file": f"abcd-{number:032x}.bin",
        "dir": Path("/nowhere"),
        "fingerprint": "abcd",
        "tenant": "local",
        "model": f"model-{number}",
        "kind": "line",
        "line": f"{number:016x}",
        "n_tokens": 6000 * number,
        "bytes": 139_000_000 * number,
        "created": now,
        "last_used": now + number,
        "reason": "idle",
    }
    return Snapshot(**values | more)
