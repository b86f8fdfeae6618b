"""llama-server's flags: what we choose, what a person gave after `--`, and how the two become one command line.

Sources: `llama-server --help` of commit 0c1e57098, common/arg.cpp of the same tree (underscores in long flags read as
dashes, no `--flag=value` form), and /work/shared/llama-server.md for why each flag of ours is there.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamacpp.errors import EngineSetupError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


Kind = Literal["auto", "embedded", "binary"]

# The proxy cannot do its work, or cannot keep the engine private, when somebody else sets these (contract.md; the
# rest change the address, the protocol or the number of models behind it).
RESERVED = _names(
    "--host --port --reuse-port --slot-save-path --api-key --api-key-file --no-slots --slots --api-prefix "
    "--ssl-key-file --ssl-cert-file --models-dir --models-preset --cors-origins --cors-credentials"
)

# The same settings by environment: taken out of what the child inherits.
RESERVED_ENVIRONMENT = _names(
    "LLAMA_ARG_HOST LLAMA_ARG_PORT LLAMA_ARG_REUSE_PORT LLAMA_ARG_API_PREFIX LLAMA_ARG_SSL_KEY_FILE "
    "LLAMA_ARG_SSL_CERT_FILE LLAMA_ARG_ENDPOINT_SLOTS LLAMA_ARG_NO_ENDPOINT_SLOTS LLAMA_ARG_MODELS_DIR "
    "LLAMA_ARG_MODELS_PRESET LLAMA_ARG_CORS_ORIGINS LLAMA_ARG_CORS_CREDENTIALS LLAMA_SERVER_ROUTER_PORT"
)

# Speculative decoding of any kind: `speculative` in GET /slots, and a slot file does not hold the drafter's state.
DRAFT_FLAGS = _names(
    "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf --spec-default "
    "--fim-qwen-7b-spec --fim-qwen-14b-spec"
)
MODEL_FLAGS = _names(
    "-m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo --fim-qwen-1.5b-default "
    "--fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default "
    "--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default "
    "--embd-gemma-default"
)

# `.invalid` belongs to nobody (RFC 2606), so no page can have this origin. Left alone, llama-server echoes any Origin.
NO_ORIGIN = "https://no-origin.invalid"


class UsageError(EngineSetupError):
    """The person asked for something that cannot be (exit code 2)."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of llama-server: every spelling of it (positive and negative), and how many values follow."""

    names: tuple[str, ...]
    arity: int


@dataclass(frozen=True, slots=True)
class Given:
    """One option as it was written, with its values."""

    flag: Flag
    spelling: str
    values: tuple[str, ...]

    def argv(self) -> tuple[str, ...]:
        return (self.spelling, *self.values)


Grammar = Mapping[str, Flag]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One child engine, as asked for.

    `ctx_size` is in tokens (None: llama-server's own default for the model); `chosen` are further flags that the proxy
    chose (llama-server's spellings); `extra` is what stood after `--` and wins over everything chosen.
    """

    model: Path | None
    kind: Kind = "auto"
    llama_server: Path | None = None
    parallel: int = 4
    ctx_size: int | None = None
    slot_dir: Path | None = None
    port: int | None = None
    extra: tuple[str, ...] = ()
    log_file: Path | None = None
    alias: str | None = None
    chosen: tuple[str, ...] = ()

    @property
    def has_draft(self) -> bool:
        """True when the flags ask for speculative decoding: slot files cannot be restored then."""
        return has_draft(self.extra) or has_draft(self.chosen)

    @property
    def names_model(self) -> bool:
        """True when a flag after `--` names the model."""
        return any(spelled(token) in MODEL_FLAGS for token in self.extra)


def spelled(token: str) -> str:
    """The token as llama-server looks it up: underscores of a long flag are dashes (common/arg.cpp)."""
    return token.replace("_", "-") if token.startswith("--") else token


def has_draft(tokens: Sequence[str]) -> bool:
    """True when `tokens` switch any kind of speculative decoding on."""
    names = [spelled(token) for token in tokens]
    if DRAFT_FLAGS.intersection(names):
        return True
    kinds = [tokens[i + 1] for i, name in enumerate(names[:-1]) if name == "--spec-type"]
    return any(kind != "none" for kind in kinds)


def refuse_reserved(extra: Iterable[str]) -> None:
    """Raises UsageError when `extra` sets what the proxy lives on."""
    for token in extra:
        name = spelled(token.partition("=")[0])
        if name in RESERVED or (name.startswith("--no-") and "--" + name[5:] in RESERVED):
            raise UsageError(
                f"{token} cannot stand after --: Slotkeeper sets it itself, or could not work with it. Leave it out"
                + (" and use --engine-port." if name == "--port" else ".")
            )


def parse_help(text: str) -> dict[str, Flag]:
    """Every spelling that a `--help` text lists -> its Flag. Unreadable lines are skipped."""
    grammar: dict[str, Flag] = {}
    for line in text.splitlines():
        if (flag := _help_line(line)) is not None:
            grammar.update(dict.fromkeys(flag.names, flag))
    return grammar


_NAMES = re.compile(r"(?:-{1,2}[A-Za-z][\w.-]*,\s+)*-{1,2}[A-Za-z][\w.-]*")


def _help_line(line: str) -> Flag | None:
    """`-c,    --ctx-size N      size of ...`: names, then values after one space, then two spaces and the text."""
    match = _NAMES.match(line)
    if match is None:
        return None
    names = tuple(re.split(r",\s+", match.group()))
    rest = line[match.end() :]
    if not re.match(r" \S", rest):
        return Flag(names, 0)
    arity = 2 if re.match(r" START END(\s|$)", rest) else 1
    return Flag(names, arity)


def parse_extra(extra: Sequence[str], grammar: Grammar, who: str) -> list[Given]:
    """`extra` split into options by `grammar`; `who` names the engine in the error texts.

    Raises UsageError for a reserved flag, a flag that `grammar` does not hold, or one whose value is missing.
    """
    refuse_reserved(extra)
    given: list[Given] = []
    rest = list(extra)
    while rest:
        token = rest.pop(0)
        flag = grammar.get(spelled(token))
        if flag is None:
            raise UsageError(_unknown(token, grammar, who))
        if len(rest) < flag.arity:
            raise UsageError(f"{token} after -- needs a value. Write `{token} VALUE`.")
        given.append(Given(flag, spelled(token), tuple(rest[: flag.arity])))
        del rest[: flag.arity]
    return given


def _unknown(token: str, grammar: Grammar, who: str) -> str:
    if not token.startswith("-"):
        return f"{token!r} after -- is neither a flag nor the value of one. See `llama-server --help`."
    name, equals, _ = spelled(token).partition("=")
    if equals and name in grammar:
        return f"{token} after --: llama-server takes no `=`. Write `{name} VALUE`."
    close = difflib.get_close_matches(name, grammar, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{who} does not know the flag {token}.{hint}"


def merge(chosen: Sequence[Given], extra: Sequence[Given]) -> list[Given]:
    """Ours then theirs; of ours what theirs set again is left out, so that no flag stands twice."""
    theirs = {name for given in extra for name in given.flag.names}
    return [given for given in chosen if theirs.isdisjoint(given.flag.names)] + list(extra)


def our_flags(spec: EngineSpec, port: int) -> list[str]:
    """What we choose for a child engine, in llama-server's spelling; the key is not among it (environment)."""
    flags = ["--host", "127.0.0.1", "--port", str(port), "--cors-origins", NO_ORIGIN, "--no-cors-credentials"]
    flags += ["--slots", "--metrics", "--jinja", "--no-ui", "--parallel", str(spec.parallel)]
    if spec.model is not None and not spec.names_model:  # -hf beside --model: llama-server would take ours
        flags += ["--model", str(spec.model)]
    if spec.slot_dir is not None:
        flags += ["--slot-save-path", str(spec.slot_dir)]
    if spec.ctx_size is not None:
        flags += ["--ctx-size", str(spec.ctx_size)]
    if spec.alias is not None:
        flags += ["--alias", spec.alias]
    return [*flags, *cache_flags(spec.has_draft), *spec.chosen]


def cache_flags(has_draft: bool) -> list[str]:
    """One pool for all slots, and idle slots keep their KV: with the RAM cache on, llama-server clears them.

    With a draft model files cannot be restored, so the RAM cache is the only second home of a slot: it stays on.
    """
    return ["--kv-unified"] if has_draft else ["--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0"]


# Without these a child cannot be fenced or used; everything else of `our_flags` is left out when a build lacks it.
NEEDED = ("--slot-save-path", "--metrics", "--jinja", "--kv-unified", "--no-cache-idle-slots", "--cache-ram")


def missing_flags(grammar: Grammar) -> list[str]:
    """Which flags that we cannot do without `grammar` lacks."""
    return [name for name in NEEDED if name not in grammar]


def argv_for_binary(spec: EngineSpec, help_text: str, port: int) -> list[str]:
    """The arguments (without the program) for a llama-server whose `--help` is `help_text`.

    Raises UsageError for flags after `--` that it does not know.
    """
    grammar = parse_help(help_text)
    extra = parse_extra(spec.extra, grammar, str(spec.llama_server or "llama-server"))
    ours = parse_ours(our_flags(spec, port), grammar)
    return [word for given in merge(ours, extra) for word in given.argv()]


def parse_ours(tokens: Sequence[str], grammar: Grammar) -> list[Given]:
    """Our own flags as Given; one that this build does not know is left out together with its value."""
    given: list[Given] = []
    i = 0
    while i < len(tokens):
        j = i + 1
        while j < len(tokens) and not _looks_like_flag(tokens[j]):
            j += 1
        flag = grammar.get(tokens[i])
        if flag is not None:
            given.append(Given(flag, tokens[i], tuple(tokens[i + 1 : j])))
        i = j
    return given


def _looks_like_flag(token: str) -> bool:
    return bool(re.match(r"-{1,2}[A-Za-z]", token))
