"""The official SDKs on a real proxy and engine: what is asked in one dialect is answered as in the others, and as by
llama-server's own endpoints where those do the same."""

from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.conftest import StartProxy
from tests.live.dialects import DIALECTS, MODEL, Ask, Said, Sdks, arguments, sdks
from tests.live.talk import CHATML, FOX, KEY, engine_state
from tests.servers import ProxyServer

DATA = Path(__file__).parent.parent / "data"
THINK = ("--jinja", "--chat-template-file", str(DATA / "think.jinja"))
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
PATH = {
    "type": "object",
    "properties": {"path": {"enum": ["a.txt", "b.txt"]}},
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS = {"read": PATH, "write": PATH}
GREEDY = {"temperature": 0, "seed": 1, "cache_prompt": False}
HELLO = ("user", "hello there, what is it?")
HISTORY = [
    HELLO,
    ("assistant", "Let me look."),
    ("call", ("c1", "read", '{"path":"a.txt"}')),
    ("call", ("c2", "write", '{"path":"b.txt"}')),
    ("result", ("c1", "It is a file.")),
    ("result", ("c2", "Done.")),
    ("user", "And now?"),
]


def calls(seed: int, **more: Any) -> Ask:
    """A question that random weights answer with calls: the first one's beginning is put into their mouth."""
    sampled = {"temperature": 1, "seed": seed, "cache_prompt": False, "parallel_tool_calls": True} | more
    return Ask([HELLO, ("assistant", '<tool_call>{"name": ')], tools=TOOLS, must_call=True, n=120, more=sampled)


TABLE: dict[str, tuple[Ask, tuple[str, ...]]] = {
    "text": (Ask([HELLO], system="Be kind.", more=GREEDY), DIALECTS),
    "one token": (Ask([HELLO], n=1, more=GREEDY), DIALECTS),
    "stop words": (Ask([HELLO], stop=["e", "a", "o"], n=60, more=GREEDY), DIALECTS),
    "tools in a history": (Ask(HISTORY, system="Be kind.", tools=TOOLS, more=GREEDY), DIALECTS),
    # llama-server's /v1/messages drops the seed, both of its other dialects drop the schema
    "sampled": (Ask([HELLO], n=40, more=GREEDY | {"temperature": 1, "seed": 7}), ("chat", "responses")),
    "structure": (Ask([HELLO], schema=PATH, n=200, more=GREEDY), ("chat",)),
    **{f"calls {seed}": (calls(seed), ("chat", "responses")) for seed in (1, 2, 3, 6)},
    "no parallel calls": (calls(1, parallel_tool_calls=False), ("chat", "responses")),
}
"""Question, and in which dialects llama-server itself does the same."""


async def started(proxy_server: StartProxy, *, template: tuple[str, ...] = CHATML, **options: Any) -> ProxyServer:
    """A proxy whose engine can be asked by the tests, too."""
    words = ("--parallel", "3", "--ctx-size", "4096")
    return await proxy_server(*words, model=MODEL, engine_flags=template, environment=KEY, **options)


async def engine_url(proxy: ProxyServer) -> str:
    """Where the engine itself listens."""
    return str((await engine_state(proxy))["url"])


async def agree(ours: Sdks, theirs: Sdks, ask: Ask, same: tuple[str, ...]) -> Any:
    """The answer that all dialects give, streamed and whole."""
    own = await theirs.ask("chat", ask, stream=False)
    for dialect in same:
        assert (await theirs.ask(dialect, ask, stream=False)).content == own.content, dialect
    for dialect in DIALECTS:
        for stream in (False, True):
            said = await ours.ask(dialect, ask, stream=stream)
            where = (dialect, stream)
            assert said.content[:2] == own.content[:2], where
            # Of a call that was cut llama-server itself tells more in a stream, and no arguments in Messages.
            whole = -1 if own.calls and own.stop == "length" else None
            assert said.calls[:whole] == own.calls[:whole], where
            assert len(said.calls) == len(own.calls) == len(set(said.ids)), where
            assert (said.n_in, said.n_out, said.stop) == (own.n_in, own.n_out, own.stop), where
            if dialect == "messages" and own.stop == "stop" and ask.stop:
                assert said.word in ask.stop
    return own


async def test_the_same_answer_in_each_dialect(proxy_server: StartProxy) -> None:
    """Text, stop words, tools, parallel calls, structure: content, usage and the reason of the end."""
    proxy = await started(proxy_server)
    seen = {}
    async with sdks(proxy.url) as ours, sdks(await engine_url(proxy), "engine-key", is_strict=False) as theirs:
        for name, (ask, same) in TABLE.items():
            seen[name] = await agree(ours, theirs, ask, same)
    assert (seen["text"].stop, seen["text"].n_out, seen["one token"].n_out) == ("length", 12, 1)
    assert seen["stop words"].stop == "stop"
    assert seen["structure"].text.lstrip().startswith("{") and "path" in seen["structure"].text
    assert max(len(said.calls) for said in seen.values()) >= 2
    assert any(said.stop == "tool_calls" for said in seen.values())
    assert len(seen["no parallel calls"].calls) == 1
    assert "Traceback" not in proxy.said()


async def test_the_beginning_of_an_answer(proxy_server: StartProxy) -> None:
    """A last assistant message is gone on with. llama-server repeats it in whole chat answers; Messages and Responses
    say what it says in a stream, as a client puts the two together (engine A repeats it there, too)."""
    proxy = await started(proxy_server)
    ask = Ask([HELLO, ("assistant", "It is")], stop=["never said"], more=GREEDY)
    async with sdks(proxy.url) as ours, sdks(await engine_url(proxy), "engine-key", is_strict=False) as theirs:
        own = {stream: await theirs.ask("chat", ask, stream=stream) for stream in (False, True)}
        assert own[False].text.startswith("It is") and own[False].text.endswith(own[True].text)
        for stream in (False, True):
            assert await ours.ask("chat", ask, stream=stream) == own[stream]
            for dialect in ("messages", "responses"):
                said = await ours.ask(dialect, ask, stream=stream)
                assert (said.text, said.n_in, said.n_out) == (own[True].text, own[True].n_in, own[True].n_out)


async def test_reasoning(proxy_server: StartProxy) -> None:
    """Thinking blocks and reasoning items; sent back, they are the same prompt in each dialect."""
    proxy = await started(proxy_server, template=THINK)
    back = [HELLO, ("thought", "Hm, a fox."), ("assistant", "A fox."), ("user", "Sure?")]
    async with sdks(proxy.url) as ours, sdks(await engine_url(proxy), "engine-key", is_strict=False) as theirs:
        said = await agree(ours, theirs, Ask([HELLO], more=GREEDY), DIALECTS)
        await agree(ours, theirs, Ask(back, more=GREEDY), DIALECTS)
        longer = await ours.ask("messages", Ask(back, more=GREEDY), stream=False)
        without = await ours.ask("messages", Ask(back[:1] + back[2:], more=GREEDY), stream=False)
    assert (said.text, said.n_out) == ("", 12) and said.thought
    assert longer.n_in > without.n_in


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_usage_of_a_conversation(proxy_server: StartProxy, dialect: str) -> None:
    """A turn goes on where the last one ended; each dialect tells the engine's own figures."""
    proxy = await started(proxy_server)
    async with sdks(proxy.url) as ours:
        turns: list[tuple[str, Any]] = [HELLO]
        held = 0
        for stream in (False, True, False):
            said = await ours.ask(dialect, Ask(turns, system="Be kind.", tools=TOOLS, more=FOX), stream=stream)
            record = (await proxy.client.get("/slotkeeper/requests")).json()["requests"][0]
            assert (record["cache_n"], record["prompt_n"]) == (said.n_cached, said.n_in - said.n_cached)
            assert record["placement"] == ("continue" if held else "cold")
            assert said.n_cached >= held, "a token was computed twice"
            held = said.n_in
            turns += [("assistant", said.text), ("user", "And then?")]


async def test_tokens_are_counted_as_they_are_charged(proxy_server: StartProxy) -> None:
    """count_tokens is the sum of the three input figures of the real request, and takes no slot."""
    proxy = await started(proxy_server)
    asks = [ask for ask, _ in TABLE.values() if ask.schema is None]
    async with sdks(proxy.url) as ours:
        for ask in asks:
            given = arguments("messages", ask)
            for name in ("max_tokens", "stop_sequences"):
                given.pop(name, None)
            found = await ours.anthropic.messages.count_tokens(**given)
            said = await ours.ask("messages", ask, stream=False)
            assert found.input_tokens == said.n_in
        before = (await proxy.client.get("/slotkeeper/requests")).json()["requests"]
        await ours.anthropic.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "never asked"}])
        assert (await proxy.client.get("/slotkeeper/requests")).json()["requests"] == before


class Choice(BaseModel):
    """What the model has to answer."""

    path: Literal["a.txt", "b.txt"]


async def test_structured_output_by_the_sdks_own_parsers(proxy_server: StartProxy) -> None:
    """Each SDK makes the schema of a class, and an object of the answer."""
    proxy = await started(proxy_server)
    ask: Any = {"model": MODEL, "extra_body": {"temperature": 0, "seed": 1}}
    hello: Any = [{"role": "user", "content": "hello there, what is it?"}]
    async with sdks(proxy.url) as ours:
        chat = await ours.openai.chat.completions.parse(messages=hello, max_tokens=300, response_format=Choice, **ask)
        message = await ours.anthropic.messages.parse(messages=hello, max_tokens=300, output_format=Choice, **ask)
        async with ours.openai.responses.stream(
            input=hello, max_output_tokens=300, text_format=Choice, **ask
        ) as stream:
            response = await stream.get_final_response()
    found = [chat.choices[0].message.parsed, message.parsed_output, response.output_parsed]
    assert found[0] is not None and found == [found[0]] * 3


async def test_calls_come_back_with_their_results(proxy_server: StartProxy) -> None:
    """The agent's loop: calls, results, the next turn placed where the last one ended."""
    proxy = await started(proxy_server)
    async with sdks(proxy.url) as ours:
        for dialect in DIALECTS:
            ours.headers = {"x-slotkeeper-salt": dialect}
            said = await several_calls(ours, dialect)
            made = [("call", (i, name, given)) for i, (name, given) in zip(said.ids, said.calls, strict=True)]
            results = [("result", (i, f"result {n}")) for n, i in enumerate(said.ids)]
            turns = [HELLO, *made, *results]
            second = await ours.ask(dialect, Ask(turns, tools=TOOLS, more=FOX), stream=True)
            third = await ours.ask(
                dialect,
                Ask([*turns, ("assistant", second.text), ("user", "Go on.")], tools=TOOLS, more=FOX),
                stream=False,
            )
            assert third.n_cached >= second.n_in
            records = (await proxy.client.get("/slotkeeper/requests")).json()["requests"]
            assert records[0]["placement"] == "continue"


async def several_calls(ours: Sdks, dialect: str) -> Said:
    """An answer of two calls or more; which seed makes one differs between engines."""
    for seed in range(1, 12):
        said = await ours.ask(dialect, calls(seed, cache_prompt=True), stream=True)
        if len(said.calls) > 1 and said.stop == "tool_calls":
            assert len(set(said.ids)) == len(said.calls) and all(said.ids)
            return said
    raise AssertionError("no seed makes several calls")


async def test_an_image_that_the_model_cannot_see(proxy_server: StartProxy) -> None:
    """The engine's own refusal, the same in each dialect, streamed or not, but as the request's fault (SDKs repeat what
    is the server's); nobody's slot is taken for it."""
    proxy = await started(proxy_server)
    ask = Ask([("image", PIXEL)], more={"temperature": 0})
    async with sdks(proxy.url) as ours, sdks(await engine_url(proxy), "engine-key", is_strict=False) as theirs:
        status, message = await refused(theirs, "chat", ask)
        assert status in (400, 500)
        for dialect in DIALECTS:
            for stream in (False, True):
                assert await refused(ours, dialect, ask, stream=stream) == (400, message)
    assert "Traceback" not in proxy.said()


async def test_too_long_a_prompt(proxy_server: StartProxy) -> None:
    """400 in llama-server's words, by which agents know that they have to compact."""
    proxy = await started(proxy_server)
    ask = Ask([("user", "fox " * 6000)], more={"temperature": 0})
    async with sdks(proxy.url) as ours:
        found = [await refused(ours, dialect, ask, stream=s) for dialect in DIALECTS for s in (False, True)]
    status, message = found[0]
    assert status == 400 and "exceeds the available context size (4096 tokens)" in message
    anthropics = f"prompt is too long: 6010 tokens > 4096 maximum: {message}"
    assert [(s, m.removeprefix(anthropics.removesuffix(message))) for s, m in found] == [found[0]] * len(found)
    assert sum(m == anthropics for _, m in found) == 2


async def test_keys(proxy_server: StartProxy, tmp_path: Path) -> None:
    """Either SDK's way of sending a key is good; a wrong one is refused in the dialect."""
    (tmp_path / "keys").write_text("alice:right\n")
    (tmp_path / "keys").chmod(0o600)
    proxy = await proxy_server("--api-key-file", str(tmp_path / "keys"), model=MODEL, engine_flags=CHATML)
    ask = Ask([HELLO], n=1, more={"temperature": 0})
    async with sdks(proxy.url, "right") as right, sdks(proxy.url, "wrong") as wrong:
        for dialect in DIALECTS:
            assert (await right.ask(dialect, ask, stream=True)).n_out == 1
            kind = anthropic.AuthenticationError if dialect == "messages" else openai.AuthenticationError
            with pytest.raises(kind, match="key"):
                await wrong.ask(dialect, ask, stream=True)


async def refused(sdk: Sdks, dialect: str, ask: Ask, *, stream: bool = False) -> tuple[int, str]:
    """Status and message of the error that the SDK raises."""
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        await sdk.ask(dialect, ask, stream=stream)
    error: Any = caught.value
    assert isinstance(error, anthropic.APIStatusError) == (dialect == "messages")
    body = error.body["error"] if dialect == "messages" else error.body
    return error.status_code, body["message"]
