"""What doctor says of engines that do things otherwise: level, consequence in tokens or bytes, the flag that helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamacpp import memory
from llamacpp.capabilities import TemplateFacts
from llamacpp.determinism import Comparison
from llamacpp.engines.plan import Asked, plan
from llamacpp.gguf import read_header
from llamacpp.probes import Effect, Learned
from proxy.doctor import keeps_windows
from proxy.findings import Facts, Finding, findings, report

TEMPLATE = TemplateFacts(
    late_system=True, several_leading=True, must_alternate=False, takes_tools=True, takes_reasoning=True
)
SEEN = Learned(
    pinned=True,
    keeps_idle=True,
    appended=Effect(48, 48, 48),
    diverged=Effect(48, 28, 28),
    file_checkpoints=False,
    file_seen=True,
    timings=True,
    probed=48,
)


@pytest.fixture
def good(tiny_models: dict[str, Path]) -> Facts:
    """A dense model in an engine of ours, with everything as it should be."""
    header = read_header(tiny_models["dense"])
    return Facts(
        name="engine0",
        kind="embedded",
        url="http://127.0.0.1:1",
        model="dense",
        model_path=str(header.path),
        build="b1",
        n_ctx=32768,
        n_slots=4,
        learned=SEEN,
        memory=memory.facts(header),
        plan=plan(header, Asked(ram=8 << 30)),
        template=TEMPLATE,
        unified=True,
        swa_full=False,
        slot_dir="/slots",
        has_fingerprint=True,
    )


def model_of(facts: Facts, path: Path, *, swa_full: bool = False) -> Facts:
    """The same with another model."""
    header = read_header(path)
    sums = plan(header, Asked(ram=8 << 30, swa="full" if swa_full else "checkpoints"))
    return replace(facts, memory=memory.facts(header), plan=sums, swa_full=swa_full, model_path=str(path))


def named(facts: Facts, name: str) -> Finding:
    """One finding."""
    return next(f for f in findings(facts) if f.name == name)


def test_a_good_engine_has_nothing_to_change(good: Facts) -> None:
    assert [f for f in findings(good) if f.level != "ok"] == []
    told = report(good)
    assert (told["effective"], told["command"]) == (True, None)
    assert told["plan"]["total"] > told["plan"]["weights"]
    assert "32,768 tokens at 1,024 bytes, 4 slots" in named(good, "arithmetic").what


@pytest.mark.parametrize(
    ("change", "name", "level", "better"),
    [
        ({"pinned": False}, "slots_pinned", "broken", "llama-server"),
        ({"pinned": None}, "slots_pinned", "unknown", "--probe"),
        ({"keeps_idle": False}, "idle_slots", "broken", "--no-cache-idle-slots --cache-ram 0"),
        ({"keeps_idle": None}, "idle_slots", "unknown", "--probe"),
        ({"timings": False}, "timings", "costs", "newer"),
        ({"file_seen": False}, "slot_directory", "broken", "--slot-save-path /slots"),
        ({"appended": Effect(48, 48, 0)}, "restore_append", "broken", "--no-persist"),
        ({"appended": Effect(48, 48, 43)}, "restore_append", "ok", ""),
        ({"appended": None}, "restore_append", "unknown", "--probe"),
        ({"diverged": Effect(48, 28, 0)}, "restore_diverge", "costs", "boundaries"),
        ({"diverged": Effect(48, 28, 18)}, "restore_diverge", "ok", ""),
        ({"diverged": None}, "restore_diverge", "unknown", "--probe"),
    ],
)
def test_what_was_learned(good: Facts, change: dict[str, Any], name: str, level: str, better: str) -> None:
    found = named(replace(good, learned=replace(SEEN, **change)), name)
    assert (found.level, better in found.better) == (level, True)


@pytest.mark.parametrize(
    ("change", "name", "level", "says"),
    [
        ({"n_slots": 1}, "slots", "costs", "32,768 tokens"),
        ({"speculative": True}, "draft_model", "costs", "32,768 tokens"),
        ({"persists": False}, "slot_directory", "costs", "32,768 tokens"),
        ({"slot_dir": None}, "slot_directory", "costs", "32,768 tokens"),
        ({"has_fingerprint": False}, "slot_directory", "broken", "32,768 tokens"),
        ({"memory": None}, "memory", "unknown", ""),
        ({"template": None}, "template", "unknown", ""),
        ({"template": replace(TEMPLATE, late_system=False)}, "template_system", "ok", "folded"),
        ({"template": replace(TEMPLATE, takes_tools=False)}, "template_tools", "costs", "tools"),
        ({"drops_reasoning": True}, "template_reasoning", "costs", "processed again"),
        ({"prints_clock": True}, "template_clock", "costs", "midnight"),
        ({"unified": False, "n_ctx": 8192}, "context_split", "costs", "8,192 tokens although 32,768"),
        ({"unified": None}, "context_split", "unknown", ""),
        ({"n_ctx": 8192}, "context", "costs", "24.0 MiB more"),
        ({"missing": ("It lacks metrics.",)}, "engine", "costs", ""),
    ],
)
def test_what_is_known(good: Facts, change: dict[str, Any], name: str, level: str, says: str) -> None:
    found = named(replace(good, **change), name)
    assert found.level == level
    assert says in found.consequence


def test_windows(good: Facts, tiny_models: dict[str, Path]) -> None:
    """Kept whole, not kept whole, and not known."""
    narrow = model_of(good, tiny_models["swa"])
    found = named(narrow, "memory")
    assert (found.level, found.better) == ("costs", "--swa-full")
    assert "--swa-full takes 32.0 MiB more; 129.7 KiB a checkpoint, 32 a slot" in found.consequence
    assert named(model_of(good, tiny_models["swa"], swa_full=True), "memory").level == "ok"
    unknown = named(replace(narrow, kind="attached", plan=None, swa_full=None), "memory")
    assert (unknown.level, unknown.better) == ("unknown", "--swa-full")


def test_files_of_windows(good: Facts, tiny_models: dict[str, Path]) -> None:
    """Where a restore serves nothing, a whole window helps; what a checkpoint takes in a file."""
    narrow = model_of(good, tiny_models["swa"])
    useless = replace(narrow, learned=replace(SEEN, appended=Effect(192, 192, 0)))
    assert (named(useless, "restore_append").level, named(useless, "restore_append").better) == ("broken", "--swa-full")
    assert report(useless)["effective"] is False
    assert named(narrow, "file_checkpoints").level == "costs"
    holds = replace(narrow, learned=replace(SEEN, file_checkpoints=True))
    assert (named(holds, "file_checkpoints").level, "129.7 KiB" in named(holds, "file_checkpoints").what) == (
        "ok",
        True,
    )
    assert "129.7 KiB a checkpoint" in named(holds, "slot_directory").consequence


def test_files_that_give_nothing(good: Facts, tiny_models: dict[str, Path]) -> None:
    """Which makes caching ineffective, and has a remedy where windows are to blame."""
    found = named(replace(model_of(good, tiny_models["swa"]), files_help=False), "restore_append")
    assert (found.level, found.better) == ("broken", "--swa-full")
    assert "no files are made" in found.what


def test_states(good: Facts, tiny_models: dict[str, Path]) -> None:
    found = named(model_of(good, tiny_models["hybrid"]), "memory")
    assert "cannot be rolled back" in found.what
    assert "2.1 KiB a checkpoint" in found.consequence


def test_too_large(good: Facts, tiny_models: dict[str, Path]) -> None:
    sums = plan(read_header(tiny_models["dense"]), Asked(ram=1 << 20, n_ctx=32768))
    found = named(replace(good, plan=sums), "fit")
    assert (found.level, found.better) == ("costs", "-c 8192")


def test_command_of_an_engine_of_ours(good: Facts, tiny_models: dict[str, Path]) -> None:
    """Its own flags after --, and what is better behind them; settings of the proxy before."""
    narrow = replace(model_of(good, tiny_models["swa"]), given=("-t", "1"), drops_reasoning=True)
    path = tiny_models["swa"]
    assert report(narrow)["command"] == f"slotkeeper serve --model {path} --append-only-template -- -t 1 --swa-full"


def test_command_of_an_attached_engine(good: Facts) -> None:
    learned = replace(SEEN, keeps_idle=False)
    facts = replace(good, kind="attached", model_path="/my models/m.gguf", slot_dir=None, n_slots=1, learned=learned)
    assert report(facts)["command"] == (
        "llama-server -m '/my models/m.gguf' -c 32768 --kv-unified --no-cache-idle-slots --cache-ram 0 --metrics "
        "-np 4 --slot-save-path DIR"
    )


@pytest.mark.parametrize(
    ("change", "keeps"),
    [
        ({"appended": Effect(192, 192, 192)}, True),
        ({"appended": Effect(192, 192, 0)}, False),
        ({"appended": Effect(192, 192, 187), "file_checkpoints": True}, False),
        ({"appended": None}, None),
        ({"probed": 48}, None),
    ],
)
def test_whole_windows_show_in_a_probe(
    tiny_models: dict[str, Path], change: dict[str, Any], keeps: bool | None
) -> None:
    """Of an attached engine, whose flags nobody tells."""
    facts = memory.facts(read_header(tiny_models["swa"]))
    assert keeps_windows(replace(SEEN, **{"probed": 192, **change}), facts) is keeps
    assert keeps_windows(SEEN, None) is None


def comparison(apart: float, reused: int = 96) -> Comparison:
    """One prompt's two answers."""
    return Comparison(96, reused, 16, 16, apart)


@pytest.mark.parametrize(
    ("compared", "level"),
    [
        ((comparison(0.001), comparison(0.0)), "ok"),
        ((comparison(0.001), comparison(0.5)), "broken"),
        ((comparison(0.5, reused=0),), "unknown"),
    ],
)
def test_determinism(good: Facts, compared: tuple[Comparison, ...], level: str) -> None:
    assert named(replace(good, compared=compared), "determinism").level == level
