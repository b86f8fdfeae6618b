"""`slotkeeper explain` beside a running proxy, with the engine's own tokens."""

import asyncio
import json
import sys

from tests.conftest import StartProxy
from tests.live.talk import CHATML, Conversation, foxes
from tests.servers import ProxyServer, until

FLAGS = ("--parallel", "2", "--ctx-size", "4096", "--mode", "observe")


async def explained(proxy: ProxyServer, *words: str) -> str:
    """What the command prints; it has to succeed."""
    command = (sys.executable, "-m", "proxy", "explain", *words, "--state-dir", str(proxy.state_dir))
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_a_date_that_changed(proxy_server: StartProxy) -> None:
    """The token of the divergence is where the engine's cache ended; both windows are its own text."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    talk = Conversation(proxy, f"{foxes(300)}\nToday is Sun Nov 29 2026.\n{foxes(90)}", session="s1")
    first = await talk.say("one")
    talk.messages[0]["content"] = f"{foxes(300)}\nToday is Mon Nov 30 2026.\n{foxes(90)}"
    second = await talk.say("two")
    assert 300 < second.cache_n < first.n_prompt - 90

    async def found() -> bool:
        requests = json.loads(await explained(proxy, "--json"))["requests"]
        return bool(requests and requests[0]["tokens"])

    await until(found)
    request = json.loads(await explained(proxy, "--json"))["requests"][0]
    assert request["divergence"]["token"] == second.cache_n
    assert request["divergence"]["character"] == len(f"{foxes(300)}\nToday is ")
    assert request["divergence"]["kind"] == "date"
    assert request["tokens"]["shared"].endswith("Today is")
    assert request["tokens"]["old"].startswith(" Sun Nov 2") and request["tokens"]["new"].startswith(" Mon Nov 3")
    assert f"token {second.cache_n}" in await explained(proxy, request["id"])
