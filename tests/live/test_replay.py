"""Recorded agent sessions, replayed against the real proxy and engine: prompt tokens computed, whatever the machine.

The recordings lie in tests/data as their longest request per conversation; every request was a prefix of one of them.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.__main__ import ENOUGH, TIGHT, replay
from tests.bench.process import Proxy
from tests.live.talk import CHATML

DATA = Path(__file__).parent.parent / "data"
WELL = 0.98
"""Least share of unavoidable work (issue 2, "Must show")."""


def session(name: str, folder: Path) -> Path:
    """A recording as prefill.py reads it."""
    found = json.loads((DATA / f"{name}.json").read_text())
    lines = []
    for request in found["requests"]:
        body = found["conversations"][request["conversation"]]
        body = body | {"messages": body["messages"][: request["messages"]]}
        lines.append(
            json.dumps({"method": "POST", "path": request["path"], "headers": request["headers"], "body": body})
        )
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def run(request: pytest.FixtureRequest, engine_kind: str, tiny_models: dict[str, Path], tmp_path: Path) -> Any:
    """`result = await run("dense", ["opencode-run1"], flags, restart=True)`: what prefill.py counted."""

    async def replayed(model: str, names: list[str], flags: list[str] = ENOUGH, restart: bool = False) -> Any:
        arguments = ["--model", str(tiny_models[model]), "--engine", engine_kind, *flags]
        if engine_kind == "binary":
            arguments += ["--llama-server", str(request.getfixturevalue("native_server"))]
        proxy = await asyncio.to_thread(Proxy.start, tmp_path / "run", arguments, ["-t", "1", *CHATML])
        request.addfinalizer(lambda: Proxy(proxy.file).stop())
        files = [session(name, tmp_path) for name in names]
        result = await asyncio.to_thread(replay, proxy, files, restart)
        assert result["errors"] == 0, result
        print(json.dumps({"model": model, "session": names, "restart": restart} | result))
        return result

    return replayed


async def test_each_token_is_computed_once(run: Any) -> None:
    """A title, a main line, a restart, a sub-agent, the main line again: nothing is computed twice."""
    result = await run("dense", ["opencode-run1"], restart=True)
    assert result["efficiency"] >= WELL, result


async def test_two_sessions_in_a_pool_too_small_for_both(run: Any) -> None:
    """They evict each other through files and lose next to nothing."""
    result = await run("dense", ["opencode-run1", "pi-run1"], TIGHT)
    assert result["efficiency"] >= 0.9, result


@pytest.mark.parametrize("model", ["swa", "hybrid"])
async def test_files_that_cannot_be_cut_back(run: Any, model: str) -> None:
    """Reusable are whole files only: `bound` is the least. A file ends where the next prompt is sure to agree."""
    result = await run(model, ["opencode-run1"], restart=True)
    assert result["bound_efficiency"] >= WELL, result
