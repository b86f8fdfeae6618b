"""Rendering: incremental tokens equal whole ones, whatever the texts; live: equal to what a chat request processes."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamacpp import render
from llamacpp.render import Rendered, Renderer, common_prefix, has_media
from llamacpp.slot_files import read_header
from tests.conftest import StartEngine
from tests.servers import LiveEngine

DATA = Path(__file__).parent.parent / "data"
TRACES = Path(os.environ.get("SLOTKEEPER_TRACES", "/work/shared/traces"))
TEMPLATE = ("--jinja", "--chat-template-file", str(DATA / "chatml-tools.jinja"))
SPECIALS = {"<|im_end|>\n<|im_start|>tool": 4, "<|im_start|>system": 3, "<|im_start|>": 1, "<|im_end|>": 2}
"""Longest first, as llama.cpp sorts them; the first two hide others in them."""
BOS, EOS, WORD = 901, 902, 1000


class ToyEngine:
    """ChatML; special tokens cut first; a piece's other tokens are threes of characters counted from its *end*, so that
    any change of a piece changes all of its tokens. Notes how many characters it tokenised."""

    def __init__(self, *, framed: bool = True) -> None:
        self.framed = framed
        self.characters = 0

    async def apply_template(self, body: bytes) -> str:
        messages = json.loads(body)["messages"]
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return f"{turns}<|im_start|>assistant\n"

    async def tokenize(self, text: str, *, add_special: bool = False) -> bytes:
        self.characters += len(text)
        return array("i", self.ids(text, add_special=add_special)).tobytes()

    async def request(
        self, method: str, path: str, *, content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        assert (method, path, content is None) == ("POST", "/tokenize", False)
        asked = json.loads(content or b"")
        ids: list[int] = []
        for part in asked["content"]:
            ids += self.ids(part, parse=asked["parse_special"]) if isinstance(part, str) else [part]
        return httpx.Response(200, json={"tokens": ids})

    def ids(self, text: str, *, add_special: bool = False, parse: bool = True) -> list[int]:
        pieces: list[str | int] = [text]
        for special, token in SPECIALS.items() if parse else ():
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int):
                    cut.append(piece)
                    continue
                first, *rest = piece.split(special)
                cut += [first, *(part for other in rest for part in (token, other))]
            pieces = cut
        ids = [token for piece in pieces for token in (self._words(piece) if isinstance(piece, str) else [piece])]
        return [BOS, *ids, EOS] if add_special and self.framed else ids

    @staticmethod
    def _words(piece: str) -> list[int]:
        start = len(piece) % 3
        words = [piece[:start], *(piece[at : at + 3] for at in range(start, len(piece), 3))]
        return [WORD + sum(ord(c) * 7**n for n, c in enumerate(word)) % 10**6 for word in words if word]


def chat(*messages: tuple[str, str], **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in messages], **more}).encode()


async def whole(engine: ToyEngine, body: bytes) -> bytes:
    return await engine.tokenize(await engine.apply_template(body), add_special=True)


FRAGMENTS = st.sampled_from(
    ["a", "bc", "\n", " ", "<|im_start|>", "<|im_end|>", "<|im_", "start|>", "system", "sys", "tool", "é"]
)
TEXTS = st.lists(FRAGMENTS, max_size=6).map("".join)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "tool", "system"]), TEXTS), max_size=4)


@given(TURNS, TURNS, TURNS, st.booleans())
@example([("user", "a")], [("user", "x")], [("tool", "x")], True)  # a longer special token behind the shared text
@example([("user", "a<|im_start|>sys")], [], [("user", "x")], False)
async def test_incremental_tokens_equal_whole_ones(
    shared: list[tuple[str, str]], one: list[tuple[str, str]], other: list[tuple[str, str]], framed: bool
) -> None:
    """Also when texts contain special tokens, parts of them, or a special token that another one begins with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "MARGIN", max(map(len, SPECIALS)))  # so that short texts are cut at all
        engine = ToyEngine(framed=framed)
        renderer = Renderer(engine)
        known = await renderer.tokens_of(chat(*shared, *one))
        body = chat(*shared, *other)
        assert (await renderer.tokens_of(body, known)).tokens == await whole(engine, body)


async def test_only_new_text_is_tokenised() -> None:
    engine = ToyEngine()
    renderer = Renderer(engine)
    turns = [("system", "s" * 50_000), ("user", "u" * 1000)]
    known = await renderer.tokens_of(chat(*turns))
    engine.characters = 0
    body = chat(*turns, ("assistant", "x" * 500), ("user", "y" * 500))
    grown = await renderer.tokens_of(body, known)
    assert engine.characters < 3000
    assert grown.tokens == await whole(engine, body)


async def test_same_text_asks_for_no_tokens() -> None:
    engine = ToyEngine()
    renderer = Renderer(engine)
    known = await renderer.tokens_of(chat(("user", "hello")))
    engine.characters = 0
    assert await renderer.tokens_of(chat(("user", "hello")), known) == known
    assert engine.characters == 0


async def test_known_of_another_engine_is_not_believed_where_its_marks_do_not_fit() -> None:
    """Fewer special tokens than special texts: the known tokens are not of this text, or text was not parsed."""
    engine = ToyEngine()
    turns = [("user", "x" * 1000), ("user", "y" * 1000)]
    text = await engine.apply_template(chat(*turns))
    body = chat(*turns, ("user", "z"))
    rendered = await Renderer(engine).tokens_of(body, Rendered(text, array("i", [7, 8, 9]).tobytes()))
    assert rendered.tokens == await whole(engine, body)


BASE = [("system", "You help.\nBe brief.")]


@given(TEXTS, TURNS)
async def test_base_begins_every_conversation(first: str, rest: list[tuple[str, str]]) -> None:
    engine = ToyEngine()
    base = await Renderer(engine).base_of(chat(*BASE, ("user", "anything")))
    conversation = await whole(engine, chat(*BASE, ("user", first), *rest))
    assert conversation.startswith(base)
    assert array("i", base)[-1] == SPECIALS["<|im_start|>"]


async def test_base_does_not_depend_on_the_conversation() -> None:
    renderer = Renderer(ToyEngine())
    short = await renderer.base_of(chat(*BASE, ("user", "a")))
    assert short == await renderer.base_of(chat(*BASE, ("user", "b"), ("assistant", "c"), ("system", "later")))
    assert short != await renderer.base_of(chat(("system", "Other."), ("user", "a")))


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"messages": 3}', b'{"messages": ["x"]}'])
async def test_body_without_messages_has_no_base(body: bytes) -> None:
    assert await Renderer(ToyEngine()).base_of(body) == b""
    assert not has_media(body)


async def test_prompts_of_completions() -> None:
    engine = ToyEngine()
    renderer = Renderer(engine)
    assert await renderer.tokens_of_prompt("abc") == await engine.tokenize("abc", add_special=True)
    assert await renderer.tokens_of_prompt([5, 6]) == array("i", [5, 6]).tobytes()
    assert await renderer.tokens_of_prompt([5, "<|im_end|>"]) == array("i", [5, 2]).tobytes()
    for several in (["a", "b"], [[1], [2]], [], {"prompt_string": "x"}, None, [True, 1.5]):
        assert await renderer.tokens_of_prompt(several) is None


@pytest.mark.parametrize(
    ("content", "media"),
    [
        ('an "image_url" in text', False),
        ([{"type": "text", "text": '"image_url"'}], False),
        ([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}], True),
        ([{"type": "input_audio", "input_audio": {}}], True),
    ],
)
def test_media_parts_are_seen(content: object, media: bool) -> None:
    assert has_media(json.dumps({"messages": [{"role": "user", "content": content}]}).encode()) is media


@given(st.text(max_size=50), st.text(max_size=50), st.text(max_size=50))
def test_common_prefix(shared: str, a: str, b: str) -> None:
    length = common_prefix(shared + a, shared + b)
    assert length >= len(shared)
    assert (shared + a)[:length] == (shared + b)[:length]
    assert (shared + a)[length : length + 1] != (shared + b)[length : length + 1] or (shared + a) == (shared + b)


def bodies(path: Path) -> list[bytes]:
    """The chat bodies of a trace."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [row["body"] for row in rows if row["path"].endswith("/chat/completions") and row["body"]]
    return [json.dumps(body).encode() for body in found]


async def check_trace(engine: LiveEngine, path: Path) -> int:
    """Incremental and base tokens against whole ones for every request of a trace; the number of requests."""
    renderer = Renderer(engine.client)
    known: Rendered | None = None
    for body in bodies(path):
        text = await engine.client.apply_template(body)
        expected = await engine.client.tokenize(text, add_special=True)
        known = await renderer.tokens_of(body, known)
        assert known.tokens == expected
        base = await renderer.base_of(body)
        assert len(base) > 400
        assert expected.startswith(base)
    return len(bodies(path))


@pytest.mark.live
async def test_live_slot_holds_exactly_what_was_rendered(live_engine: StartEngine) -> None:
    """A chat request's slot, saved and read, begins with the rendered tokens and nothing else."""
    engine = await live_engine("dense", extra=TEMPLATE)
    assert await check_trace(engine, DATA / "pi-cut.jsonl") == 3
    await slot_holds_rendered(engine)


@pytest.mark.native
async def test_native_slot_holds_exactly_what_was_rendered_with_bos(live_engine: StartEngine) -> None:
    """A vocabulary that adds BOS (here `<|im_start|>`): the engine takes it off the text and adds it as a token."""
    engine = await live_engine("dense", extra=(*TEMPLATE, "--override-kv", "tokenizer.ggml.add_bos_token=bool:true"))
    assert await check_trace(engine, DATA / "pi-cut.jsonl") == 3
    rendered = await slot_holds_rendered(engine)
    assert rendered.text.startswith("system\n")
    assert rendered.tokens.startswith(await engine.client.tokenize("<|im_start|>"))


async def slot_holds_rendered(engine: LiveEngine) -> Rendered:
    body = json.loads(bodies(DATA / "pi-cut.jsonl")[-1])
    rendered = await Renderer(engine.client).tokens_of(json.dumps(body).encode())
    one_token = {**body, "stream": False, "max_completion_tokens": 1, "id_slot": 0}
    answer = await engine.client.request("POST", "/v1/chat/completions", content=json.dumps(one_token).encode())
    timings = answer.json()["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == len(rendered.tokens) // 4
    await engine.client.save_slot(0, "turn.bin")
    assert read_header(engine.slot_dir / "turn.bin").tokens[: len(rendered.tokens)] == rendered.tokens
    return rendered


@pytest.mark.live
@pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded traces here (SLOTKEEPER_TRACES)")
async def test_live_recorded_traces(live_engine: StartEngine) -> None:
    engine = await live_engine("dense", ctx_size=512, extra=TEMPLATE)
    counts = [await check_trace(engine, TRACES / f"{name}-run1.jsonl") for name in ("opencode", "cline", "pi")]
    assert min(counts) >= 5
