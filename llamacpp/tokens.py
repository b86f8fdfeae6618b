"""Token counts without asking the engine: estimates by bytes, and tokenisers built from a GGUF's own vocabulary.

The engine's own /tokenize is the truth (`render.py`); these serve where it would cost a round trip, or where there is
no engine. Nothing is downloaded: tiktoken is given its ranks and its pattern, llama_cpp (extra `native`) the model's
file. Pre-tokeniser patterns are those of llama.cpp 0c1e57098 (`llm_tokenizer_bpe`, src/llama-vocab.cpp).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from pathlib import Path

import tiktoken

from llamacpp.errors import EngineSetupError
from llamacpp.gguf import GGUFHeader

FIRST_RATIO = 0.5
"""Tokens a byte before anything was seen. Requests of coding agents have 0.27 to 0.38 (twelve recorded traces with
SmolLM2's vocabulary), Chinese 0.56 with it: too many tokens make a request wait, too few overflow the pool."""
WEIGHT = 0.25
"""How much one full observation counts against the past."""
FULL_BYTES = 2048
"""Observations of fewer bytes count for proportionally less: a ratio of ten bytes is noise."""
DEVIATIONS = 2.0
"""Margin of an estimate in mean deviations (as TCP's retransmission timer takes four of them)."""
PIECE = 65_536
"""Characters given to tiktoken at a time when the whole overflows its regex engine (a run of a million spaces)."""
NO_TOKEN = -1
"""Stands for a byte that the vocabulary lacks: llama.cpp leaves it out, tiktoken must have one."""
CONTROL, USER_DEFINED, UNKNOWN = 3, 4, 2
"""Token types (llama.h) that `parse_special` takes out of a text before its words are looked at."""

_SUFFIXES = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Two expressions in llama.cpp, first each digit by itself, then _GPT2 between them: white space ends a part there too
_DIGITS = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_LLAMA3 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN35 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL
_SEED = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _TAIL
_UPPER, _LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_TEKKEN = _CASED % ("", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
_GPT4O = _CASED % (_SUFFIXES + "?", _SUFFIXES + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL

_NAMES = {
    _GPT2: "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en "
    "jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4",
    _DIGITS: "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    _LLAMA3: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe "
    "chatglm-bpe glm4 glm5",
    _QWEN2: "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan megrez solar-open grok-2",
    _QWEN35: "qwen35",
    _SEED: "seed-coder",
    _TEKKEN: "tekken",
    _GPT4O: "gpt-4o llama4 kanana2 talkie minimax-m2",
}
PATTERNS = {name: pattern for pattern, names in _NAMES.items() for name in names.split()}
"""`tokenizer.ggml.pre` to the one expression that cuts as llama.cpp does; names that need several are left out."""

Tokenizer = Callable[[str], bytes]
"""Text to packed tokens, special tokens parsed, no BOS or EOS added."""


class Estimator:
    """Tokens by bytes, learned from what was really counted; one for each line, since a line's text is of one kind."""

    def __init__(self, ratio: float = FIRST_RATIO) -> None:
        self.ratio = ratio
        self.deviation = 0.0
        self._seen = False

    def observe(self, n_bytes: int, n_tokens: int) -> None:
        """Learn that n_bytes of text were n_tokens. Without effect when either is not positive."""
        if n_bytes <= 0 or n_tokens <= 0:
            return
        ratio = n_tokens / n_bytes
        if not self._seen:
            self.ratio, self.deviation, self._seen = ratio, ratio / 8, True
            return
        weight = WEIGHT * min(1.0, n_bytes / FULL_BYTES)
        self.deviation += weight * (abs(ratio - self.ratio) - self.deviation)
        self.ratio += weight * (ratio - self.ratio)

    def expected(self, n_bytes: int) -> int:
        """The likely number of tokens in n_bytes, rounded up."""
        return math.ceil(max(0, n_bytes) * self.ratio)

    def at_most(self, n_bytes: int) -> int:
        """A number of tokens that n_bytes seldom exceed: for reserves and budgets. Never more than n_bytes."""
        return min(max(0, n_bytes), math.ceil(max(0, n_bytes) * (self.ratio + DEVIATIONS * self.deviation)))


class GGUFEncoding:
    """A byte-pair vocabulary in tiktoken; holds about 350 bytes a token. `encoding` is tiktoken's, `encode` ours."""

    def __init__(self, encoding: tiktoken.Encoding, ids: array[int]) -> None:
        self.encoding = encoding
        self._ids = ids  # rank -> token id

    def encode(self, text: str) -> bytes:
        """Packed tokens of a text, special tokens parsed, no BOS or EOS added."""
        try:
            ranks = self.encoding.encode(text, allowed_special="all")
        except ValueError:  # its regex engine's stack: cut the text, at worst one token off at each cut
            pieces = (text[at : at + PIECE] for at in range(0, len(text), PIECE))
            ranks = [rank for piece in pieces for rank in self.encoding.encode(piece, allowed_special="all")]
        return array("i", [token for rank in ranks if (token := self._ids[rank]) != NO_TOKEN]).tobytes()

    __call__ = encode


def gguf_encoding(header: GGUFHeader) -> GGUFEncoding | None:
    """The tokeniser of a GGUF's own vocabulary; None where one expression does not say how its text is cut into words.

    Merges are ranked as the file lists them. Where a vocabulary lists no merge for a pair that spells a token, tiktoken
    still merges it: vocabularies trained as BPE have no such pair. Raises NotGGUF when the vocabulary cannot be read.
    """
    pattern = PATTERNS.get(header.text("tokenizer.ggml.pre") or "")
    needed = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    if header.text("tokenizer.ggml.model") != "gpt2" or pattern is None or not all(k in header.arrays for k in needed):
        return None
    tokens = [str(token) for token in header.array("tokenizer.ggml.tokens")]
    types = _types(header)
    special = {
        i for i, kind in zip(range(len(tokens)), types, strict=False) if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    }
    ranks, ids = _ranks(tokens, [str(merge) for merge in header.array("tokenizer.ggml.merges")], special)
    specials = {tokens[token]: len(ids) + n for n, token in enumerate(sorted(special)) if tokens[token]}
    all_ids = array("i", [*ids, *sorted(special)])
    encoding = tiktoken.Encoding(header.path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    return GGUFEncoding(encoding, all_ids)


def native_tokenizer(path: Path) -> Tokenizer | None:
    """llama.cpp's own tokeniser for a GGUF, exact for every vocabulary; None without the extra `native`.

    Loads the vocabulary only. Raises EngineSetupError when llama.cpp cannot load the file.
    """
    try:
        import llama_cpp
    except (ImportError, OSError):  # not installed, or its library does not load here
        return None
    try:
        model = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    except (ValueError, RuntimeError) as error:
        raise EngineSetupError(
            f"llama.cpp cannot read the vocabulary of {path} ({error}); is it a GGUF model?"
        ) from error

    def encode(text: str) -> bytes:
        return array("i", model.tokenize(text.encode("utf-8", "surrogatepass"), add_bos=False, special=True)).tobytes()

    return encode


def _types(header: GGUFHeader) -> list[object]:
    try:
        return list(header.array("tokenizer.ggml.token_type"))
    except KeyError:
        return []


def _ranks(tokens: list[str], merges: list[str], special: set[int]) -> tuple[dict[bytes, int], list[int]]:
    """tiktoken's ranks by bytes, single bytes first, then each merge in its order; and the token id of each rank."""
    spelled = {token: i for i, token in enumerate(tokens) if i not in special}
    letters = _byte_letters()
    ranks: dict[bytes, int] = {}
    ids: list[int] = []
    for text in [*letters, *(merge[:1] + merge[1:].replace(" ", "", 1) for merge in merges)]:
        token = spelled.get(text, NO_TOKEN)
        if not all(letter in letters for letter in text) or (token == NO_TOKEN and len(text) > 1):
            continue
        data = bytes(letters[letter] for letter in text)
        if data not in ranks:
            ranks[data] = len(ids)
            ids.append(token)
    return ranks, ids


def _byte_letters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on (`unicode_byte_to_utf8`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
