"""Which template a child starts with: where it is looked for, what is passed on, and what is left alone."""

import json
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from llamacpp.engines import EngineSpec
from proxy.config import Settings
from proxy.engine_template import ChosenTemplate, with_template
from tests.fakes.gguf_bytes import gguf_file

DATA = Path(__file__).parent.parent / "data"
QWEN3 = (DATA / "qwen3.jinja").read_text()
CLOCK = "{{ strftime_now('%Y') }}"
FIXED = "{{ (template_date if template_date is defined else '[[env:template_date]]') }}"
VALUES = (("template_date", "%Y"),)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own settings stay out of the tests."""
    for name in ("LLAMA_ARG_CHAT_TEMPLATE", "LLAMA_ARG_CHAT_TEMPLATE_FILE", "LLAMA_ARG_JINJA"):
        monkeypatch.delenv(name, raising=False)


def settings(tmp_path: Path, **more: object) -> Settings:
    """Repair, with its state below tmp_path."""
    return Settings(**({"mode": "repair", "state_dir": tmp_path} | more))  # type: ignore[arg-type]


def spec(tmp_path: Path, template: str | None = CLOCK, *extra: str, **more: str) -> EngineSpec:
    """An engine for a model with this template."""
    model = tmp_path / "model.gguf"
    keys = {} if template is None else {"tokenizer.chat_template": template}
    model.write_bytes(gguf_file(keys | {f"tokenizer.chat_template.{name}": text for name, text in more.items()}))
    return EngineSpec(model=model, extra=extra)


def written(tmp_path: Path) -> str:
    """The template that the engine is given."""
    return (tmp_path / "template.jinja").read_text()


def flags(tmp_path: Path) -> tuple[str, str]:
    """What names it."""
    return "--chat-template-file", str(tmp_path / "template.jinja")


def test_the_models_own_template(tmp_path: Path) -> None:
    """Read from the model's header, written for its owner only, named behind the person's own flags."""
    new, chosen = with_template(settings(tmp_path), spec(tmp_path, CLOCK, "-ngl", "99"))
    assert new.extra == ("-ngl", "99", *flags(tmp_path))
    assert written(tmp_path) == FIXED
    assert stat.S_IMODE((tmp_path / "template.jinja").stat().st_mode) == 0o600
    assert chosen == ChosenTemplate(VALUES, (("template_date", "template_date"),))


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    """Also one that is open to others, and a link is not followed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    (tmp_path / "template.jinja").symlink_to(elsewhere)
    with_template(settings(tmp_path), spec(tmp_path))
    assert (written(tmp_path), elsewhere.read_text()) == (FIXED, "kept")


@pytest.mark.parametrize("name", ["--chat-template-file", "--chat_template_file"])
def test_a_template_file_that_was_given(tmp_path: Path, name: str) -> None:
    """The last one counts, as it does in llama-server, and ours stands in its place."""
    given = tmp_path / "own.jinja"
    given.write_bytes(b"own\r\n" + CLOCK.encode())
    asked = spec(tmp_path, "model's", "--chat-template", "x", name, str(given), "-c", "512")
    new, chosen = with_template(settings(tmp_path), asked)
    assert new.extra == ("-c", "512", *flags(tmp_path))
    assert (tmp_path / "template.jinja").read_bytes() == b"own\r\n" + FIXED.encode()
    assert chosen.clock_values == VALUES


def test_a_template_text_that_was_given(tmp_path: Path) -> None:
    """Of --chat-template."""
    new, _ = with_template(settings(tmp_path), spec(tmp_path, None, "--chat-template", CLOCK))
    assert (new.extra, written(tmp_path)) == (flags(tmp_path), FIXED)


def test_a_model_named_behind_the_dashes(tmp_path: Path) -> None:
    """Its header is read."""
    asked = spec(tmp_path)
    new, _ = with_template(settings(tmp_path), EngineSpec(model=None, extra=("-m", str(asked.model))))
    assert new.extra == ("-m", str(asked.model), *flags(tmp_path))


def test_variables_of_the_engine(tmp_path: Path) -> None:
    """Given as template arguments, beneath the person's own; one that the person sets is no clock."""
    asked = spec(
        tmp_path, "{{ date_string }}", "--chat-template-kwargs", '{"a": 1}', "--chat-template-kwargs", '{"b": 2}'
    )
    new, chosen = with_template(settings(tmp_path), asked)
    assert new.extra[:-1] == ("--chat-template-kwargs",)
    assert json.loads(new.extra[-1]) == {"date_string": "[[env:template_date]]", "a": 1, "b": 2}
    values = (("template_date", "%d %b %Y"),)
    assert chosen == ChosenTemplate(values, (("date_string", "template_date"),), ("date_string",))
    own = spec(tmp_path, "{{ date_string }}", "--chat-template-kwargs", '{"date_string": "today"}')
    new, chosen = with_template(settings(tmp_path), own)
    assert json.loads(new.extra[-1]) == {"date_string": "today"}
    assert (chosen.clock_values, chosen.clock_arguments, chosen.fixed) == ((), (), ("date_string",))


@pytest.mark.parametrize(
    ("template", "extra", "more"),
    [
        (CLOCK, ("--no-jinja",), {}),
        (CLOCK, ("-hf", "some/model"), {}),
        (CLOCK, ("--chat-template-file", "/nowhere/at/all"), {}),
        (CLOCK, ("--chat-template-kwargs", "[1]"), {}),
        (CLOCK, ("--chat-template-kwargs", "no JSON"), {}),
        (CLOCK, ("--chat-template", "chatml"), {}),
        (CLOCK, (), {"tool_use": "another"}),
        (None, (), {}),
        ("no clock", (), {}),
        ("\udcff" + CLOCK, (), {}),
    ],
)
def test_left_alone(tmp_path: Path, template: str | None, extra: tuple[str, ...], more: dict[str, str]) -> None:
    """What cannot be read, is not the whole of it, or is for llama-server to complain about."""
    if template is not None and "\udcff" in template:
        asked = spec(tmp_path, "?" + CLOCK)
        assert asked.model is not None
        asked.model.write_bytes(asked.model.read_bytes().replace(b"?", b"\xff"))
    else:
        asked = spec(tmp_path, template, *extra, **more)
    assert with_template(settings(tmp_path), asked) == (asked, ChosenTemplate())
    assert not (tmp_path / "template.jinja").exists()


def test_no_model_at_hand(tmp_path: Path) -> None:
    """The start itself says so."""
    for asked in (EngineSpec(model=None), EngineSpec(model=tmp_path / "none.gguf")):
        assert with_template(settings(tmp_path), asked) == (asked, ChosenTemplate())


def test_a_template_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a binary reads it: what it says is not overruled, and the embedded engine is not troubled by it."""
    monkeypatch.setenv("LLAMA_ARG_CHAT_TEMPLATE_FILE", "x")
    asked = spec(tmp_path)
    assert with_template(settings(tmp_path), asked)[0] == asked
    embedded = EngineSpec(model=asked.model, kind="embedded")
    assert with_template(settings(tmp_path), embedded)[0].extra == flags(tmp_path)


@pytest.mark.parametrize("more", [{"mode": "observe", "append_only_template": True}, {"template_clock": "engine"}])
def test_settings_that_leave_it_alone(tmp_path: Path, more: dict[str, object]) -> None:
    """--mode observe, whatever else is set, and --template-clock engine."""
    asked = spec(tmp_path, QWEN3 + CLOCK)
    assert with_template(settings(tmp_path, **more), asked) == (asked, ChosenTemplate())


def test_append_only_template(tmp_path: Path) -> None:
    """When it was asked for; together with the clock, or without."""
    asked = spec(tmp_path, QWEN3 + CLOCK)
    assert not with_template(settings(tmp_path), asked)[1].keeps_reasoning
    new, chosen = with_template(settings(tmp_path, append_only_template=True), asked)
    assert (new.extra, chosen.keeps_reasoning, chosen.clock_values) == (flags(tmp_path), True, VALUES)
    assert "or reasoning_content)" in written(tmp_path) and written(tmp_path).endswith(FIXED)
    _, chosen = with_template(settings(tmp_path, append_only_template=True, template_clock="engine"), asked)
    assert (chosen, written(tmp_path).endswith(CLOCK)) == (ChosenTemplate(keeps_reasoning=True), True)


def test_append_only_template_of_another_family(tmp_path: Path) -> None:
    """A warning, and the engine starts as it would without."""
    with capture_logs() as logs:
        _, chosen = with_template(settings(tmp_path, append_only_template=True), spec(tmp_path, "other"))
    assert not chosen.keeps_reasoning
    assert [line["event"] for line in logs] == ["template_not_known"]


def test_a_state_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """Costs tokens, not answers."""
    asked = spec(tmp_path)
    with capture_logs() as logs:
        result = with_template(settings(tmp_path / "none"), asked)
    assert result == (asked, ChosenTemplate())
    assert [line["event"] for line in logs] == ["template_not_written"]
