"""A real model sums up its own conversation, on its warm prefix; the proxy runs in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config import load
from tests.conftest import StartEngine
from tests.servers import until
from tests.wire.conftest import serving

TURNS = (
    ("Our shop is called Harbour. Its README is at docs/README.md.", "I read docs/README.md: how to install and test."),
    ("The tests in tests/test_cart.py fail: E4711.", "src/cart.py added the tax twice. I removed that; they pass."),
    ("Keep prices in cents. Do not change the public interface.", "Prices stay in cents, the interface as it is."),
    ("Build it on commit 9f8e7d6c.", "The build took 42 seconds and ended without errors."),
)


async def test_the_models_own_summary(
    live_engine: StartEngine, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the old messages' place, with the names that it left out."""
    monkeypatch.delenv("SLOTKEEPER_CONFIG", raising=False)
    engine = await live_engine(demo_model, parallel=1, ctx_size=1024)
    url = f"{engine.client.base_url},slots={engine.slot_dir}"
    monkeypatch.setenv("SLOTKEEPER_UPSTREAM_API_KEY", engine.child.api_key)
    async with serving(load({"upstream": (url,), "state_dir": tmp_path / "state"})) as wire:
        await until(wire.is_ready)
        messages = [{"role": "system", "content": "You are a helpful assistant for programmers."}]
        for n in range(24):
            ask, said = TURNS[n % len(TURNS)]
            messages += [{"role": "user", "content": f"{n}. {ask}"}, {"role": "assistant", "content": said}]
        messages.append({"role": "user", "content": "What is left to do?"})
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        answer = await wire.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        *asked, main = (await wire.recorded(2))[::-1]
        assert main["compaction"]["outcome"] == "summary", (main, asked)
        assert main["compaction"]["requests"] == [r["id"] for r in asked]
        assert main["cache_n"] + main["prompt_n"] == main["compaction"]["after"] < 1024
        (line,) = wire.service.lines
        assert line.ledger is not None
        text = line.ledger.replaced[-1].text
        assert [name for name in ("docs/README.md", "tests/test_cart.py", "9f8e7d6c") if name not in text] == []
        assert "User: " not in text, "a digest"
