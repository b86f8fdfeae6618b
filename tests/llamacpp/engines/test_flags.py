"""llama-server's flags: reading its help, refusing what we live on, theirs over ours. Pure."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.engines.flags import (
    NEEDED,
    EngineSpec,
    UsageError,
    argv_for_binary,
    missing_flags,
    parse_extra,
    parse_help,
    refuse_reserved,
)

# Lines of `llama-server --help` (commit 0c1e57098), one of every form that occurs.
HELP = """----- common params -----

-h,    --help, --usage                  print usage and exit
-t,    --threads N                      number of CPU threads to use during generation (default: -1)
                                        (env: LLAMA_ARG_THREADS)
--cpu-strict <0|1>                      use strict CPU placement (default: 0)
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
--swa-full                              use full-size SWA cache (default: false)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
-kvo,  --kv-offload, -nkvo, --no-kv-offload
                                        whether to enable KV cache offloading (default: enabled)
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
--control-vector-layer-range START END
-m,    --model FNAME                    model path to load
-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers to store in VRAM, either an exact number,
-s,    --seed SEED                      RNG seed (default: -1, use random seed for -1)
--spec-draft-model, -md, --model-draft FNAME
--spec-type none,draft-simple,draft-eagle3,ngram-simple
-ctxcp, --ctx-checkpoints, --swa-checkpoints N
-cram, --cache-ram N                    set the maximum cache size in MiB (default: 8192, -1 - no limit, 0 -
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
--cache-idle-slots, --no-cache-idle-slots
-np,   --parallel N                     number of server slots (default: -1, -1 = auto)
-a,    --alias STRING                   set model name aliases, comma-separated (to be used by API)
--host HOST                             IP addresses to listen on, comma-separated, or UNIX socket paths
--port PORT                             port to listen (default: 8080)
--cors-origins ORIGINS                  comma-separated list of allowed origins for CORS (default: *)
--cors-credentials, --no-cors-credentials
--metrics                               enable prometheus compatible metrics endpoint (default: disabled)
--slots, --no-slots                     expose slots monitoring endpoint (default: enabled)
--slot-save-path PATH                   path to save slot kv cache (default: disabled)
--jinja, --no-jinja                     whether to use jinja template engine for chat (default: enabled)
--ui,  --webui, --no-ui, --no-webui     whether to enable the Web UI (default: enabled)
"""
GRAMMAR = parse_help(HELP)
MODEL = Path("/models/m.gguf")


def argv(*extra: str, **changes: object) -> list[str]:
    spec = EngineSpec(MODEL, extra=extra, **changes)  # type: ignore[arg-type]
    return argv_for_binary(spec, HELP, 9000)


def value_of(name: str, words: list[str]) -> str:
    assert words.count(name) == 1
    return words[words.index(name) + 1]


@pytest.mark.parametrize(
    ("name", "arity"),
    [
        ("--usage", 0),
        ("-t", 1),
        ("--cpu-strict", 1),
        ("--swa-full", 0),
        ("-fa", 1),
        ("--no-kv-offload", 0),
        ("-ot", 1),
        ("--control-vector-layer-range", 2),
        ("--n-gpu-layers", 1),
        ("-md", 1),
        ("--spec-type", 1),
        ("--swa-checkpoints", 1),
        ("-no-kvu", 0),
        ("--no-webui", 0),
    ],
)
def test_help_tells_every_spelling_and_its_values(name: str, arity: int) -> None:
    assert name in GRAMMAR[name].names
    assert GRAMMAR[name].arity == arity


def test_help_of_something_else_has_no_flags() -> None:
    assert missing_flags(parse_help("usage: ls [OPTION]... [FILE]...\n  -a, --all   do not ignore entries\n")) == list(
        NEEDED
    )
    assert missing_flags(GRAMMAR) == []


def test_what_a_child_always_gets() -> None:
    words = argv(parallel=3, ctx_size=2048, slot_dir=Path("/s"), alias="name")
    assert value_of("--host", words) == "127.0.0.1"
    assert value_of("--port", words) == "9000"
    assert value_of("--model", words) == str(MODEL)
    assert value_of("--parallel", words) == "3"
    assert value_of("--ctx-size", words) == "2048"
    assert value_of("--slot-save-path", words) == "/s"
    assert value_of("--cache-ram", words) == "0"
    assert value_of("--alias", words) == "name"
    assert value_of("--cors-origins", words).endswith(".invalid")
    assert {"--kv-unified", "--no-cache-idle-slots", "--metrics", "--jinja", "--no-ui"} <= set(words)
    assert not any("key" in word for word in words)


def test_what_an_older_build_does_not_know_is_left_out_with_its_value() -> None:
    old = "\n".join(line for line in HELP.splitlines() if "cors" not in line and "-np," not in line)
    words = argv_for_binary(EngineSpec(MODEL), old, 9000)
    assert not {"--cors-origins", "https://no-origin.invalid", "--no-cors-credentials", "--parallel"} & set(words)
    assert value_of("--model", words) == str(MODEL)


@pytest.mark.parametrize(
    ("extra", "gone", "kept"),
    [
        (("-c", "64"), "--ctx-size", ["-c", "64"]),
        (("--ctx_size", "64"), "", ["--ctx-size", "64"]),
        (("-np", "7"), "--parallel", ["-np", "7"]),
        (("--cache-ram", "512"), "", ["--cache-ram", "512"]),
        (("--cache-idle-slots",), "--no-cache-idle-slots", ["--cache-idle-slots"]),
        (("-no-kvu",), "--kv-unified", ["-no-kvu"]),
        (("-m", "/other.gguf"), "--model", ["-m", "/other.gguf"]),
        (("-a", "x"), "--alias", ["-a", "x"]),
        (("--no-jinja",), "--jinja", ["--no-jinja"]),
    ],
)
def test_a_flag_after_the_dashes_replaces_ours(extra: tuple[str, ...], gone: str, kept: list[str]) -> None:
    words = argv(*extra, ctx_size=2048, alias="name")
    assert gone not in words
    assert words[-len(kept) :] == kept
    assert words.count(kept[0]) == 1


def test_a_model_named_in_another_way_replaces_ours() -> None:
    hub = HELP + "-hf,   -hfr, --hf-repo <user>/<model>[:quant]\n"
    words = argv_for_binary(EngineSpec(MODEL, extra=("-hf", "a/b")), hub, 9000)
    assert "--model" not in words
    assert words[-2:] == ["-hf", "a/b"]


def test_what_the_proxy_chose_can_be_overridden_too() -> None:
    assert value_of("--ctx-checkpoints", argv(chosen=("--swa-full", "--ctx-checkpoints", "64"))) == "64"
    words = argv("-ctxcp", "3", chosen=("--swa-full", "--ctx-checkpoints", "64"))
    assert "--ctx-checkpoints" not in words
    assert "--swa-full" in words


@pytest.mark.parametrize(
    "extra",
    [
        ("--host", "0.0.0.0"),
        ("--port", "1"),
        ("--port=1",),
        ("--slot-save-path", "/x"),
        ("--slot_save_path", "/x"),
        ("--api-key", "k"),
        ("--api_key=k",),
        ("--api-key-file", "f"),
        ("--no-slots",),
        ("--ssl-key-file", "f"),
        ("--cors-origins", "*"),
        ("--no-cors-credentials",),
        ("-t", "1", "--port", "1"),
    ],
)
def test_what_the_proxy_lives_on_is_refused(extra: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"^--\S+ cannot stand after --: .*Leave it out"):
        refuse_reserved(extra)
    with pytest.raises(UsageError):
        argv(*extra)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (("--ctx-sise", "1"), "llama-server does not know the flag --ctx-sise. Did you mean --ctx-size?"),
        (("--qqqq",), "llama-server does not know the flag --qqqq."),
        (("-t",), "-t after -- needs a value. Write `-t VALUE`."),
        (("-t", "1", "2"), "'2' after -- is neither a flag nor the value of one. See `llama-server --help`."),
        (("--threads=2",), "--threads=2 after --: llama-server takes no `=`. Write `--threads VALUE`."),
    ],
)
def test_wrong_flags_are_named(extra: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        argv(*extra)
    assert str(caught.value) == sentence


def test_negative_numbers_are_values() -> None:
    given_flags = parse_extra(["--seed", "-1", "-ngl", "-1"], GRAMMAR, "it")
    assert [g.values for g in given_flags] == [("-1",), ("-1",)]


@pytest.mark.parametrize(
    ("extra", "draft"),
    [
        ((), False),
        (("-md", "d.gguf"), True),
        (("--spec_draft_model", "d.gguf"), True),
        (("--spec-type", "none"), False),
        (("--spec-type", "ngram-simple"), True),
        (("-t", "1"), False),
    ],
)
def test_speculative_decoding_keeps_the_ram_cache(extra: tuple[str, ...], draft: bool) -> None:
    spec = EngineSpec(MODEL, extra=extra)
    assert spec.has_draft is draft
    assert ("--cache-ram" not in argv(*extra)) is draft
    assert ("--no-cache-idle-slots" not in argv(*extra)) is draft


@given(st.lists(st.sampled_from(sorted(set(GRAMMAR) - {"--help", "-h", "--usage"}))))
def test_no_setting_stands_twice_unless_the_person_wrote_it_twice(names: list[str]) -> None:
    extra = [word for name in names for word in (name, *["1"] * GRAMMAR[name].arity)]
    try:
        refuse_reserved(extra)
    except UsageError:
        return
    words = argv(*extra, ctx_size=1, alias="x", slot_dir=Path("/s"))
    assert words[len(words) - len(extra) :] == extra
    ours = {flag for word in words[: len(words) - len(extra)] if (flag := GRAMMAR.get(word))}
    assert ours.isdisjoint(GRAMMAR[name] for name in names)
