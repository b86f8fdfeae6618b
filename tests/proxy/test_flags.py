"""Every setting has its flag, with the same words."""

import re

import click
import pytest
import typer.main

from proxy.cli import app, main
from proxy.config import Settings, flag_name
from proxy.flags import METAVARS, NOT_FLAGS, PANELS, shown_default


@pytest.fixture(scope="module")
def options() -> dict[str, click.Option]:
    """The options of `slotkeeper serve` by spelling."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {opt: p for p in command.params for opt in (*p.opts, *p.secondary_opts)}


def test_every_setting_has_a_flag(options: dict[str, click.Option]) -> None:
    """Only keys and llama-server's own flags come another way."""
    flags = {flag_name(name) for name in Settings.model_fields if name not in NOT_FLAGS}
    assert flags - options.keys() == set()
    assert {flag_name(name) for name in NOT_FLAGS} & options.keys() == set()


def test_panels_and_placeholders_name_settings(options: dict[str, click.Option]) -> None:
    """Each flag below one heading at most; a setting that was renamed is renamed there, too."""
    grouped = [name for names in PANELS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert {*grouped, *METAVARS} - (Settings.model_fields.keys() - NOT_FLAGS) == set()
    assert options["--keep-alive"].metavar == "SECONDS|off"


def test_help_is_the_description(options: dict[str, click.Option]) -> None:
    """The flag says what the setting says."""
    for name, field in Settings.model_fields.items():
        if name not in NOT_FLAGS:
            assert (options[flag_name(name)].help or "").startswith(field.description or "?")


def test_yes_and_no_for_switches(options: dict[str, click.Option]) -> None:
    """contract.md has --no-persist; each switch has both spellings, so that a flag beats the environment either way."""
    assert {"--persist", "--no-persist", "--show-prompts", "--no-show-prompts"} <= options.keys()


@pytest.mark.parametrize(
    ("name", "text"),
    [("disk_budget", "20GiB"), ("port", "8484"), ("max_wait_seconds", "600"), ("model", ""), ("persist", "true")],
)
def test_defaults_as_people_write_them(name: str, text: str) -> None:
    """Units where a number alone says little, nothing where there is none."""
    assert shown_default(name, Settings.model_fields[name]) == text


def test_shown_sizes_are_the_real_defaults() -> None:
    """The two defaults that are spelled out by hand mean what the settings hold."""
    from proxy.config import parse_size

    for name in ("disk_budget", "max_body_bytes"):
        field = Settings.model_fields[name]
        assert parse_size(shown_default(name, field)) == field.default


@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_help_shows_every_flag_whole(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However narrow the terminal; with the words that a flag takes, and how llama-server's own are given."""
    monkeypatch.setenv("COLUMNS", width)
    assert main(["serve", "--help"]) == 0
    said = capsys.readouterr().out
    words = re.split(r"[\s,/]+", said)
    assert {flag_name(name) for name in Settings.model_fields if name not in NOT_FLAGS} - set(words) == set()
    assert {"auto|embedded|binary", "observe|repair|strict", "json|console", "debug|info|warning|error"} <= set(words)
    assert "[-- LLAMA_SERVER_FLAG ...]" in " ".join(said.split())
    assert [said.index(f"{panel}:") for panel in PANELS] == sorted(said.index(f"{panel}:") for panel in PANELS)
    assert said.rstrip().endswith(",slots=/var/llama/slots")


def test_summaries_are_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No command's first sentence is cut in a usual terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], ["snapshots"]):
        assert main([*words, "--help"]) == 0
        summaries = capsys.readouterr().out.partition("Commands:")[2].strip().splitlines()
        assert len(summaries) >= 7
        assert all(line.endswith(".") and not line.endswith("...") for line in summaries), summaries
