"""The embedded engine's flags: llama-server's spellings onto CommonParams."""

import shlex
from pathlib import Path

import pytest

from llamacpp.engines.embedded import assign
from llamacpp.engines.embedded_flags import GRAMMAR, params_for_embedded
from llamacpp.engines.flags import EngineSpec, UsageError, missing_flags


def settings(extra: str = "", **changes: object) -> dict[str, object]:
    spec = EngineSpec(None, extra=tuple(shlex.split(extra)), **changes)  # type: ignore[arg-type]
    return params_for_embedded(spec, 9000)


def test_the_flags_of_the_contract_are_known() -> None:
    names = """-c -np -b -ub -t -ngl -ctk -ctv -fa --jinja --chat-template --chat-template-file --swa-full
        --ctx-checkpoints --checkpoint-min-step --cache-ram --cache-reuse --reasoning-format --metrics --no-warmup
        --alias --verbose --ctx-size --parallel --batch-size --ubatch-size --threads --n-gpu-layers --cache-type-k
        --cache-type-v --flash-attn -m --model -md --model-draft"""
    assert [name for name in names.split() if name not in GRAMMAR] == []
    assert missing_flags(GRAMMAR) == []


def test_what_a_child_always_gets(tmp_path: Path) -> None:
    got = settings(parallel=3, ctx_size=2048, slot_dir=tmp_path, alias="a, b")
    assert got["hostnames"] == ["127.0.0.1"]
    assert (got["port"], got["n_parallel"], got["n_ctx"]) == (9000, 3, 2048)
    assert (got["kv_unified"], got["cache_idle_slots"], got["cache_ram_mib"]) == (True, False, 0)
    assert (got["endpoint_slots"], got["endpoint_metrics"], got["use_jinja"], got["ui"]) == (True, True, True, False)
    assert got["slot_save_path"] == f"{tmp_path}/"
    assert got["model_alias"] == ["a", "b"]
    assert str(got["cors_origins"]).endswith(".invalid")
    assert got["cors_credentials"] is False


@pytest.mark.parametrize(
    ("extra", "name", "value"),
    [
        ("-c 64", "n_ctx", 64),
        ("--ctx_size 64", "n_ctx", 64),
        ("-ctk q8_0", "cache_type_k", 8),
        ("-ctv bf16", "cache_type_v", 30),
        ("-fa off", "flash_attn_type", 0),
        ("-fa auto", "flash_attn_type", -1),
        ("-ngl all", "n_gpu_layers", -2),
        ("-ngl -1", "n_gpu_layers", -1),
        ("-t 3", "cpuparams.n_threads", 3),
        ("-t 3", "cpuparams_batch.n_threads", 3),
        ("-t 3 -tb 2", "cpuparams_batch.n_threads", 2),
        ("--reasoning-format none", "reasoning_format", 0),
        ("--no-warmup", "warmup", False),
        ("--no-jinja", "use_jinja", False),
        ("--cache-ram 512", "cache_ram_mib", 512),
        ("--cache-idle-slots", "cache_idle_slots", True),
        ("-nkvo", "no_kv_offload", True),
        ("--verbose", "verbosity", 2147483647),
        ("--rope-scale 4", "rope_freq_scale", 0.25),
        ("--chat-template chatml", "chat_template", "chatml"),
        (
            "--chat-template-kwargs '{\"enable_thinking\": false}'",
            "default_template_kwargs",
            {"enable_thinking": "false", "preserve_reasoning": "true"},
        ),
        (
            "--chat-template-kwargs '{\"preserve_reasoning\": false}'",
            "default_template_kwargs",
            {"preserve_reasoning": "false"},
        ),
        ("--seed -1", "sampling.seed", 4294967295),
        ("--spec-type ngram-simple,ngram-mod", "speculative.types", [6, 9]),
    ],
)
def test_a_flag_becomes_its_setting(extra: str, name: str, value: object) -> None:
    assert settings(extra, ctx_size=2048)[name] == value


def test_files_are_read_or_named_absolutely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("{{ messages }}")
    Path("m.gguf").touch()
    got = settings("--chat-template-file t.jinja -m m.gguf -md m.gguf")
    assert got["chat_template"] == "{{ messages }}"
    assert got["model.path"] == got["speculative.draft.mparams.path"] == str(tmp_path / "m.gguf")
    assert got["speculative.types"] == [1]
    assert "cache_ram_mib" not in got  # with a draft model the RAM cache stays as it is


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ("--grammar x", "The embedded engine does not know the flag --grammar."),
        ("-hf a/b", "The embedded engine does not know the flag -hf."),
        ("-c many", "-c 'many': the embedded engine needs a number here."),
        ("-fa maybe", "-fa 'maybe': the embedded engine needs one of auto, off, on here."),
        ("-m absent.gguf", "-m 'absent.gguf': the embedded engine needs a file that exists here."),
        ("--chat-template-file no", "--chat-template-file 'no': the embedded engine needs a readable text file here."),
        ("--chat-template-kwargs []", "--chat-template-kwargs '[]': the embedded engine needs a JSON object here."),
        ("--rope-scale 0", "--rope-scale '0': the embedded engine needs a number here."),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(extra: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(extra)
    assert str(caught.value).startswith(sentence)


def test_every_setting_exists_in_xllamacpp(tmp_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    samples = {"--chat-template-kwargs": "{}", "--spec-type": "none", "--reasoning-format": "auto", "-fa": "on"}
    file = tmp_path / "file"
    file.touch()
    for flag in dict.fromkeys(GRAMMAR.values()):
        for name in flag.names:
            value = _sample(flag.names, samples, file)
            got = params_for_embedded_one(name, value if flag.arity else None)
            params = xllamacpp.CommonParams()
            assign(params, got)
            for dotted, wanted in got.items():
                target = params
                for step in dotted.split("."):
                    target = getattr(target, step)
                if dotted == "model_alias":
                    assert target == {"2"}
                else:
                    assert target == pytest.approx(wanted), (name, dotted)


def _sample(names: tuple[str, ...], samples: dict[str, str], file: Path) -> str:
    for value in [samples[name] for name in names if name in samples] + ["2", "q8_0", "none", "on", str(file)]:
        try:
            params_for_embedded_one(names[0], value)
        except UsageError:
            continue
        return value
    raise AssertionError(f"no value fits {names}")


def params_for_embedded_one(name: str, value: str | None) -> dict[str, object]:
    """What this one flag sets."""
    from llamacpp.engines.embedded_flags import _settings
    from llamacpp.engines.flags import Given

    return _settings(Given(GRAMMAR[name], name, () if value is None else (value,)))
