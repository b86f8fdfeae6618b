"""Exact prompt tokens of a chat request: the engine's own template and tokeniser, and only new text tokenised again.

A chat request's prompt is what `/apply-template` returns, tokenised with `add_special` and `parse_special`
(`tokenize_input_prompts(vocab, mctx, prompt, true, true)` in tools/server/server-context.cpp; the template code has
removed a BOS or EOS text that the tokeniser adds again, common/chat.cpp). So BOS and EOS are a fixed frame around the
text's tokens.

llama.cpp cuts a text at its special tokens first (`tokenizer_st_partition`, longest first, left to right) and
tokenises the pieces apart: what stands left of a special token does not depend on what follows. Two texts that share
everything up to MARGIN characters behind a special token have the same tokens before it; that is where we go on from.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import orjson

from llamacpp.errors import EngineBroken, EngineRefused
from llamacpp.packed import pack

MARGIN = 256
"""No special token's text is longer (characters; the longest known are about 60), so none that begins before a shared
special token's end can reach beyond the shared text and change how it is cut."""
MAX_CANDIDATES = 64
"""Strings tried per engine; chat templates use fewer than ten."""
SCAN_HEAD, SCAN_TAIL = 32_768, 4_096
"""Characters searched for special tokens: turn markers stand at both ends of every rendering."""

_SPECIAL_LOOKING = re.compile(
    r"<\|[^<>|\s]{1,48}\|>|<｜[^<>｜\s]{1,48}｜>|<\|?(?:start|end|eot|bos|eos)[a-z_]{0,24}\|?>|\[/?[A-Z_]{2,24}\]|</?s>"  # noqa: RUF001
)
_MEDIA_PARTS = ("image_url", "input_audio", "input_video", "image", "audio", "video")
_SEPARATOR = -1  # LLAMA_TOKEN_NULL: /tokenize passes numbers through, and no text gives it
_JSON = {"content-type": "application/json"}
_FIRST_USER = ("a", "\n\n7")
"""Two first user messages that share no first character, one of which would merge with a template's line break."""


class TokenSource(Protocol):
    """The part of `llamacpp.client.LlamaClient` that is used here; its errors pass through."""

    async def apply_template(self, body: bytes) -> str: ...

    async def tokenize(self, text: str, *, add_special: bool = False) -> bytes: ...

    async def request(
        self, method: str, path: str, *, content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response: ...


@dataclass(frozen=True)
class Rendered:
    """A prompt as the engine processes it: its text, its packed tokens, and whether it held images or audio.

    With has_media the tokens are those of the text with placeholders, not what is processed: do not restore by them.
    """

    text: str
    tokens: bytes
    has_media: bool = False


@dataclass(frozen=True)
class _Frame:
    """Packed tokens that the engine puts before (BOS) and after (EOS) every text; known False: tokenise whole."""

    before: bytes = b""
    after: bytes = b""
    known: bool = True


class Renderer:
    """Renders for one engine with one model; make a new one when the engine was restarted with another."""

    def __init__(self, client: TokenSource) -> None:
        self._client = client
        self._frame: _Frame | None = None
        self._anchors: dict[str, int] = {}  # special token's text -> id
        self._tried: set[str] = set()

    async def tokens_of(self, body: bytes, known: Rendered | None = None) -> Rendered:
        """The prompt of a chat body (JSON); `known` is an earlier rendering by the same engine, of any related body.

        Raises what the client raises: EngineRefused when the template refuses the messages.
        """
        text = await self._client.apply_template(body)
        return Rendered(text, await self.tokens_of_text(text, known), has_media(body))

    async def tokens_of_text(self, text: str, known: Rendered | None = None) -> bytes:
        """Packed tokens of a prompt given as text (`/completion`, or rendered before), BOS and EOS included."""
        if known is None:
            return await self._client.tokenize(text, add_special=True)
        if text == known.text:
            return known.tokens
        shared = common_prefix(text, known.text)
        await self._find_anchors(text)
        frame = await self._frame_of_engine()
        cut = _last_cut(self._anchors, known, shared - MARGIN) if frame.known else None
        if cut is None:
            return await self._client.tokenize(text, add_special=True)
        at, kept = cut
        return known.tokens[:kept] + await self._client.tokenize(text[at:]) + frame.after

    async def tokens_of_prompt(self, prompt: object) -> bytes | None:
        """Packed tokens of the `prompt` of `/completion` or `/v1/completions`: text, token ids, or both mixed.

        None for other shapes (several prompts, multimodal objects): the engine decides on those.
        """
        if isinstance(prompt, str):
            return await self.tokens_of_text(prompt)
        if not isinstance(prompt, list) or not prompt or not any(_is_id(part) for part in prompt):
            return None
        if all(_is_id(part) for part in prompt):
            return pack(prompt)
        if all(_is_id(part) or isinstance(part, str) for part in prompt):
            return pack(await self._tokenize_parts(prompt, add_special=True))
        return None

    async def base_of(self, body: bytes) -> bytes:
        """Packed tokens that every conversation with this body's system messages, tools and arguments begins with.

        The common prefix of its renderings with two different first user messages, cut back behind the last special
        token in it, since the text behind that one may merge with a message's first characters. Empty when there is
        none. Raises what the client raises.
        """
        one, two = (with_first_user(body, text) for text in _FIRST_USER)
        if one is None or two is None:
            return b""
        first = await self.tokens_of(one)
        second = await self.tokens_of(two, first)
        await self._find_anchors(first.text)
        shared = array("i", first.tokens[: common_prefix_bytes(first.tokens, second.tokens) // 4 * 4])
        specials = set(self._anchors.values())
        end = next((i + 1 for i in range(len(shared) - 1, -1, -1) if shared[i] in specials), max(0, len(shared) - 2))
        return shared[:end].tobytes()

    async def _frame_of_engine(self) -> _Frame:
        if self._frame is None:
            bare = await self._client.tokenize("a")
            framed = await self._client.tokenize("a", add_special=True)
            at = framed.find(bare)
            self._frame = _Frame(framed[:at], framed[at + len(bare) :]) if bare and at >= 0 else _Frame(known=False)
        return self._frame

    async def _find_anchors(self, text: str) -> None:
        """Learn which strings of the text are special tokens: one token when parsed, something else when not.

        That holds of control tokens only (`tokenizer_st_partition` skips them without `parse_special`), never of a word
        that happens to be one token.
        """
        found = _SPECIAL_LOOKING.findall(text[:SCAN_HEAD]) + _SPECIAL_LOOKING.findall(text[-SCAN_TAIL:])
        new = [s for s in dict.fromkeys(found) if s not in self._tried][: MAX_CANDIDATES - len(self._tried)]
        if not new:
            return
        parsed = await self._tokenize_apart(new, parse_special=True)
        plain = await self._tokenize_apart(new, parse_special=False)
        self._tried.update(new)
        for string, one, other in zip(new, parsed, plain, strict=True):
            if len(one) == 1 and other != one and not _overlaps_itself(string):
                self._anchors[string] = one[0]

    async def _tokenize_apart(self, strings: Sequence[str], *, parse_special: bool) -> list[list[int]]:
        """Token ids of each string by itself, in one question."""
        parts: list[object] = []
        for string in strings:
            parts += [string, _SEPARATOR]
        groups: list[list[int]] = [[]]
        for token in await self._tokenize_parts(parts, parse_special=parse_special):
            if token == _SEPARATOR:
                groups.append([])
            else:
                groups[-1].append(token)
        if len(groups) != len(strings) + 1:
            raise EngineBroken("llama-server's /tokenize lost a part of a mixed prompt; check the engine's version.")
        return groups[:-1]

    async def _tokenize_parts(
        self, parts: Sequence[object], *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        body = orjson.dumps({"content": parts, "add_special": add_special, "parse_special": parse_special})
        answer = await self._client.request("POST", "/tokenize", content=body, headers=_JSON)
        if answer.status_code != httpx.codes.OK:
            raise EngineRefused(answer.status_code, answer.content, "llama-server refused POST /tokenize.")
        try:
            return [int(token) for token in orjson.loads(answer.content)["tokens"]]
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise EngineBroken("The answer to POST /tokenize is not what llama-server sends.") from error


def common_prefix(a: str, b: str) -> int:
    """Characters that both texts begin with."""
    return _bisect(a, b)


def common_prefix_bytes(a: bytes, b: bytes) -> int:
    """Bytes that both begin with."""
    return _bisect(a, b)


def has_media(body: bytes) -> bool:
    """Whether a chat body (JSON) holds image, audio or video parts. False for what is not JSON."""
    if not any(f'"{part}"'.encode() in body for part in _MEDIA_PARTS):
        return False  # the common case, without parsing a long body
    try:
        messages = orjson.loads(body)["messages"]
        parts = [part for m in messages if isinstance(m.get("content"), list) for part in m["content"]]
        return any(isinstance(part, dict) and part.get("type") in _MEDIA_PARTS for part in parts)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return False


def with_first_user(body: bytes, text: str) -> bytes | None:
    """The chat body with its leading system and developer messages and one user message; None without messages."""
    try:
        parsed: Any = orjson.loads(body)
        messages = parsed["messages"]
        count = next((i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer")), len(messages))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    return orjson.dumps({**parsed, "messages": [*messages[:count], {"role": "user", "content": text}]})


def _last_cut(anchors: Mapping[str, int], known: Rendered, end: int) -> tuple[int, int] | None:
    """The last special token of the known text that ends before `end`: its offset in characters and in token bytes.

    The n-th occurrence of its text is the n-th of its id, provided that there are as many of each.
    """
    tokens = array("i", known.tokens)
    places = ((known.text.rfind(string, 0, max(end, 0)), string, token) for string, token in anchors.items())
    for at, string, token in sorted(places, reverse=True):
        if at < 0:
            return None
        if known.text.count(string) != tokens.count(token):
            continue
        index = -1
        for _ in range(known.text.count(string, 0, at) + 1):
            index = tokens.index(token, index + 1)
        return at, 4 * index
    return None


def _bisect(a: Any, b: Any) -> int:
    """Common prefix by comparing slices: 20 block compares instead of a loop over every character."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_id(part: object) -> bool:
    return isinstance(part, int) and not isinstance(part, bool)


def _overlaps_itself(string: str) -> bool:
    return any(string[:n] == string[-n:] for n in range(1, len(string)))
