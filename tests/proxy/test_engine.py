"""What an engine says of its own template."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from llamacpp.client import LlamaClient
from llamacpp.reports import Props
from llamacpp.templates import keep_reasoning
from policies.checkpoints import Memory
from proxy.engine import Engine
from proxy.engine_template import ChosenTemplate
from proxy.metrics import Metrics
from proxy.store import Store

CLOCK = "{{ strftime_now('%Y') }}"


def props(template: str, **more: Any) -> Props:
    """As the engine tells it."""
    return Props.from_json(
        {"default_generation_settings": {"n_ctx": 8}, "total_slots": 1, "chat_template": template, **more}
    )


@pytest.fixture
def engine() -> Engine:
    """One that nobody asks."""
    return Engine("engine0", "attached", None, Metrics(), 1, LlamaClient("http://127.0.0.1:1"))  # type: ignore[arg-type]


async def test_a_clock_is_told_once(engine: Engine) -> None:
    """At its first start with it; also where only the template for tools has one."""
    with capture_logs() as logs:
        await engine.read_template(props("plain"), "advice")
        assert not engine.prints_clock
        for _ in range(2):
            await engine.read_template(props("plain", chat_template_tool_use=CLOCK), "advice")
            assert engine.prints_clock
    assert [line["advice"] for line in logs if line["event"] == "template_prints_clock"] == ["advice"]


async def test_variables_that_were_given_are_no_clock(engine: Engine) -> None:
    """The engine's own variables stay in the text, and stand still."""
    engine.chosen_template = ChosenTemplate(fixed=("date_string",))
    await engine.read_template(props("{{ date_string }}"), "")
    assert not engine.prints_clock
    await engine.read_template(props("{{ date_string }}{{ datetime }}"), "")
    assert engine.prints_clock


def test_only_what_stands_in_the_prompt_is_told(engine: Engine) -> None:
    """By the probe; everything as long as nothing was asked."""
    values = (("template_date", "%Y"), ("template_date_2", "%d"))
    engine.chosen_template = ChosenTemplate(values)
    assert engine.clock_told(has_system=True, has_tools=False) == values
    engine.clock_printed = {(True, False): frozenset(), (False, False): frozenset({"[[env:template_date_2]]"})}
    assert engine.clock_told(has_system=True, has_tools=False) == ()
    assert engine.clock_told(has_system=False, has_tools=False) == values[1:]


async def test_whether_a_setting_would_keep_reasoning(engine: Engine) -> None:
    """True for the family's own template, false for ours and for others."""
    own = (Path(__file__).parent.parent / "data" / "qwen3.jinja").read_text()
    found = []
    for text in (own, keep_reasoning(own) or "", "plain"):
        await engine.read_template(props(text), "")
        found.append(engine.drops_reasoning)
    assert found == [True, False, False]


def test_a_snapshot_that_fits_no_slot_is_none(engine: Engine, tmp_path: Path) -> None:
    """One that was made with a larger --ctx-size: the engine would refuse it and empty the slot, at every turn."""
    kept = SimpleNamespace(id="s", n_tokens=9, dir=tmp_path, effective=None)
    found = SimpleNamespace(persist=True, candidates=lambda *_: [kept], tokens=lambda _: bytes(4 * 9))
    engine.store, engine.slot_dir, engine.fingerprint = cast(Store, found), tmp_path, "f"
    engine.props = props("plain")
    assert engine.snapshots_for("t", bytes(4 * 20)) == ()
    kept.n_tokens = engine.n_ctx
    assert [(s.tokens, s.common) for s in engine.snapshots_for("t", bytes(4 * 20))] == [(8, 8)]


def test_a_base_is_found_behind_many_conversations_that_cannot_be_cut_back_to_it(
    engine: Engine, tmp_path: Path
) -> None:
    """Their files share more with the prompt than the base's, and give nothing where memory cannot be rewound."""
    base, prompt = bytes(4 * 100), bytes(4 * 150)
    held = {"base": base} | {f"c{i}": bytes(4 * 110) + b"\1" * 4 * 90 for i in range(12)}
    kept = [SimpleNamespace(id=name, n_tokens=len(t) // 4, dir=tmp_path, effective=None) for name, t in held.items()]
    found = SimpleNamespace(persist=True, candidates=lambda *_: kept, tokens=lambda s: held[s.id])
    engine.store, engine.slot_dir, engine.fingerprint = cast(Store, found), tmp_path, "f"
    engine.props = replace(props("plain"), n_ctx=1000)
    engine.can_rewind = engine.files_rewind = False
    engine.memory = Memory(recurrent=True)
    engine.refresh_abilities()
    assert engine.snapshots_for("t", prompt)[0].id == "base"
