"""A client of the preparing part alone: requests go through it, turn by turn, without an engine."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import orjson

from proxy.api.read import Mode, Told, read
from proxy.layouts import Layouts
from proxy.ledger import Reply, TextBudget
from proxy.lines import Identity, LineBook, new_line
from proxy.metrics import Metrics
from proxy.normals import Normals
from proxy.prepare import Prepared, keep, prepare
from proxy.service import Service

Json = dict[str, Any]
N_CTX = 100_000


class Texts:
    """The store's part that ledgers need."""

    def __init__(self) -> None:
        self.texts: dict[str, list[bytes]] = {}

    def put_texts(self, line: str, start: int, messages: list[bytes]) -> None:
        self.texts[line] = [*self.texts.get(line, [])[:start], *messages]

    async def load_texts(self, line: str) -> list[bytes]:
        return self.texts.get(line, [])


@dataclass
class FakeEngine:
    """What preparing asks an engine for."""

    n_ctx: int
    ready: bool = True
    wake: None = None
    template: None = None
    clock_values: tuple[tuple[str, str], ...] = ()
    clock_arguments: tuple[tuple[str, str], ...] = ()

    def clock_told(self, *, has_system: bool, has_tools: bool) -> tuple[tuple[str, str], ...]:
        return self.clock_values


def new_service(n_ctx: int = N_CTX) -> Service:
    return cast(
        Service,
        SimpleNamespace(
            lines=LineBook(100),
            layouts=Layouts(),
            normals=Normals(),
            texts=TextBudget(),
            store=Texts(),
            metrics=Metrics(),
            explainer=SimpleNamespace(diverged=lambda line, body: {"message": 2} if line else None),
            engines=SimpleNamespace(all=[FakeEngine(n_ctx)]),
        ),
    )


@dataclass
class Talk:
    """One client of a service; `send` does what an exchange does around an answer."""

    service: Service = field(default_factory=new_service)
    session: str | None = None
    mode: Mode = "repair"
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, messages: list[Json], tools: list[Json] | None = None, mode: Mode | None = None) -> Prepared:
        body = {"messages": copy.deepcopy(messages), **({"tools": tools} if tools is not None else {})}
        told = Told(self.headers, mode or self.mode, self.service.normals)
        request = read("chat", "/v1/chat/completions", orjson.dumps(body), Identity("local", self.session), told)
        return asyncio.run(prepare(self.service, request))

    def send(
        self,
        messages: list[Json],
        tools: list[Json] | None = None,
        reply: Json | None = None,
        n_tokens: int | None = None,
    ) -> Prepared:
        prepared = self.ask(messages, tools)
        r, found = prepared.request, prepared.found
        same = found.line is not None and found.is_same_line
        line = found.line if same and found.line is not None else new_line(r.who, r.prompt, r.first_user, prepared.kind)
        self.service.lines.advance(line, r.prompt, n_tokens or r.prompt.n_bytes // 4)
        if prepared.ledger is not None:
            prepared.ledger.reply = Reply(message=reply)
            keep(self.service, line, prepared.ledger)
        return prepared


def sent(prepared: Prepared) -> list[Json]:
    return cast(list[Json], prepared.request.body["messages"])


def text(prepared: Prepared) -> str:
    return orjson.dumps(prepared.request.body).decode()


def is_prefix(before: Prepared, after: Prepared) -> bool:
    n = len(sent(before))
    tools = [p.request.body.get("tools") for p in (before, after)]
    return sent(after)[:n] == sent(before) and tools[0] == tools[1]


def system(date: str = "Sun Nov 29 2026", cwd: str = "/home/u/repo") -> Json:
    return {"role": "system", "content": f"You help.\nToday's date: {date}\nWorking directory: {cwd}\nBe kind."}


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def answer(content: str = "Well.", **more: Any) -> Json:
    return {"role": "assistant", "content": content, **more}


def call(arguments: str = '{"path": "a.py", "n": 1}', id_: str = "c1") -> Json:
    function = {"name": "look", "arguments": arguments}
    return answer("", tool_calls=[{"id": id_, "type": "function", "function": function}])


def result(content: str, id_: str = "c1") -> Json:
    return {"role": "tool", "tool_call_id": id_, "content": content}


def tool(name: str, **defaults: Any) -> Json:
    properties = {key: {"type": "string", "default": value} for key, value in defaults.items()}
    return {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": properties}},
    }
