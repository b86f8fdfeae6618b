"""The tables of llama-server.md ("Slot files"), found by doctor on both engines; and what it says of wrong flags."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartEngine, StartProxy
from tests.live.talk import CHATML
from tests.servers import PATIENCE, ROOT, clean_environment

Levels = dict[str, str]
NAMES = ("slots_pinned", "idle_slots", "slot_directory", "restore_append", "restore_diverge", "determinism")


def doctor(*words: str, state_dir: Path, **environment: str) -> tuple[int, dict[str, Any]]:
    """The command as a process: exit code and answer."""
    command = [sys.executable, "-m", "proxy", "doctor", "--json", "--state-dir", str(state_dir), *words]
    environment = clean_environment() | environment
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)["engines"][0]


def reused(engine: dict[str, Any], kind: str) -> tuple[int, int]:
    """(shared, reused) of one kind of restore."""
    effect = engine["learned"][kind]
    return effect["shared"], effect["reused"]


def levels(engine: dict[str, Any]) -> Levels:
    """Finding -> level."""
    return {f["name"]: f["level"] for f in engine["findings"]}


TABLE = [
    # memory, --swa, (shared, reused) when a prompt extends a restored file and when it diverges in it: B, then A
    ("dense", "auto", ((48, 48), (28, 28)), ((48, 48), (28, 28))),
    ("hybrid", "auto", ((48, 48), (28, 24)), ((48, 48), (28, 0))),
    ("swa", "checkpoints", ((192, 187), (28, 18)), ((192, 0), (28, 0))),
    ("swa", "auto", ((192, 192), (28, 0)), ((192, 192), (28, 0))),
]


@pytest.mark.parametrize(("model", "swa", "on_b", "on_a"), TABLE, ids=[f"{row[0]}-{row[1]}" for row in TABLE])
def test_restores_are_worth_what_the_table_says(
    tiny_models: dict[str, Path],
    tmp_path: Path,
    engine_kind: str,
    request: pytest.FixtureRequest,
    model: str,
    swa: str,
    on_b: tuple[tuple[int, int], tuple[int, int]],
    on_a: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """An engine of doctor's own: started, tried, answers compared, ended. Exit code 1 where restores do nothing."""
    binary = ["--llama-server", str(request.getfixturevalue("native_server"))] if engine_kind == "binary" else []
    words = ["--model", str(tiny_models[model]), "--engine", engine_kind, *binary, "--swa", swa]
    code, engine = doctor(*words, "--probe", "--determinism", "--", "-t", "1", *CHATML, state_dir=tmp_path / "state")
    appended, diverged = on_b if engine_kind == "embedded" else on_a
    assert (reused(engine, "appended"), reused(engine, "diverged")) == (appended, diverged)
    is_useless = appended[1] == 0
    assert (code, engine["effective"]) == ((1, False) if is_useless else (0, True))
    found = levels(engine)
    assert (found["slots_pinned"], found["idle_slots"], found["slot_directory"]) == ("ok", "ok", "ok")
    assert found["determinism"] == ("unknown" if is_useless else "ok")
    assert engine["plan"]["fits"] and engine["plan"]["total"] > engine["plan"]["weights"]
    assert ("--swa-full" in (engine["command"] or "")) == (swa == "checkpoints")
    assert not (tmp_path / "state").exists()


async def test_idle_slots_that_llama_server_empties(live_engine: StartEngine, tmp_path: Path) -> None:
    """llama-server's own defaults, attached: exit code 1, and the flags that keep them. Nothing is left behind."""
    engine = await live_engine("dense", extra=("--cache-ram", "64", "--cache-idle-slots"))
    words = ("--upstream", f"{engine.child.base_url},slots={engine.slot_dir}")
    key = {"SLOTKEEPER_UPSTREAM_API_KEY": engine.child.api_key}
    _, quiet = doctor(*words, state_dir=tmp_path / "state", **key)
    assert levels(quiet)["idle_slots"] == "unknown"
    code, found = doctor(*words, "--probe", state_dir=tmp_path / "state", **key)
    assert (code, levels(found)["idle_slots"]) == (1, "broken")
    assert "--no-cache-idle-slots --cache-ram 0" in found["command"]
    assert os.listdir(engine.slot_dir) == []
    assert [slot.n_prompt_tokens for slot in await engine.client.slots()] == [0, 0]


async def test_ways_are_found_out_once_and_kept(proxy_server: StartProxy) -> None:
    """Our own engine is tried at its first start with at most 256 tokens; the next start knows. The sums are logged."""
    proxy = await proxy_server("--parallel", "2", model="hybrid", engine_flags=CHATML)
    sums = await proxy.logged("engine_memory")
    assert (sums["memory"], sums["parallel"], sums["n_ctx"]) == ("hybrid", 2, 32768)
    assert "--ctx-checkpoints 32" in sums["flags"]
    code, first = doctor(state_dir=proxy.state_dir)
    assert (code, levels(first)["restore_append"], first["learned"]["probed"]) == (0, "ok", 48)
    await proxy.stop()
    again = await proxy_server("--parallel", "2", model="hybrid", engine_flags=CHATML)
    engine_metrics = [line for line in again.lines if line.get("event") == "not_probed"]
    assert engine_metrics == []
    code, known = doctor(state_dir=again.state_dir)
    assert (code, known["learned"]) == (0, first["learned"])
