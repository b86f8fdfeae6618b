"""Settings: precedence, spelling of values, and one clear sentence for each mistake."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config import Settings, flag_name, load, parse_size
from proxy.errors import UsageError


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own settings stay out of the tests."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"SLOTKEEPER_{name.upper()}", raising=False)
    monkeypatch.delenv("SLOTKEEPER_CONFIG", raising=False)


def file(tmp_path: Path, text: str) -> Path:
    """A configuration file."""
    path = tmp_path / "slotkeeper.toml"
    path.write_text(text)
    return path


def test_flags_beat_environment_beat_file_beat_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of contract.md, one setting after the other."""
    config = file(tmp_path, "port = 1\nparallel = 2\nmax_lines = 3")
    monkeypatch.setenv("SLOTKEEPER_PORT", "10")
    monkeypatch.setenv("SLOTKEEPER_PARALLEL", "20")
    settings = load({"port": 100}, config)
    assert (settings.port, settings.parallel, settings.max_lines, settings.max_waiting) == (100, 20, 3, 64)


def test_defaults_are_those_of_the_contract() -> None:
    """contract.md: command line and limits."""
    s = load()
    assert (s.host, s.port, s.parallel, s.reply_reserve, s.engine, s.mode) == (
        "127.0.0.1",
        8484,
        4,
        4096,
        "auto",
        "repair",
    )
    assert (s.max_body_bytes, s.max_waiting, s.max_wait_seconds) == (64_000_000, 64, 600)
    assert (s.exit_deadline_seconds, s.max_lines, s.disk_budget) == (30, 1000, 20 * 2**30)
    assert s.state_dir.name == "slotkeeper"


def test_settings_cannot_change() -> None:
    """Read once, handed down."""
    with pytest.raises(ValueError, match="frozen"):
        load().port = 1  # type: ignore[misc]


def test_lists_from_flags_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words in the environment are quoted as in a shell."""
    monkeypatch.setenv("SLOTKEEPER_ENGINE_FLAGS", "--alias 'my model' -t 1")
    settings = load({"allowed_host": ("a",)}, file(tmp_path, 'upstream = []\nallowed_host = ["b"]'))
    assert settings.engine_flags == ("--alias", "my model", "-t", "1")
    assert settings.allowed_host == ("a",)


def test_config_file_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$SLOTKEEPER_CONFIG stands in for --config."""
    monkeypatch.setenv("SLOTKEEPER_CONFIG", str(file(tmp_path, "port = 7")))
    assert load().port == 7


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with ~ means the home directory, from any source."""
    monkeypatch.setenv("SLOTKEEPER_STATE_DIR", "~/x")
    assert load().state_dir == Path.home() / "x"


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GiB", 20 * 2**30), ("64 MB", 64_000_000), ("1.5k", 1500), ("7", 7), ("2tib", 2 * 2**40), ("0", 0)],
)
def test_sizes(text: str, size: int) -> None:
    """Units of 1000, with an i of 1024."""
    assert parse_size(text) == size


@given(st.integers(0, 2**50), st.sampled_from(["", "B", "kB", "MiB"]))
def test_sizes_grow_with_their_number(number: int, unit: str) -> None:
    """A size never shrinks when its number grows."""
    size, larger = parse_size(f"{number}{unit}"), parse_size(f"{number + 1}{unit}")
    assert isinstance(size, int)
    assert isinstance(larger, int)
    assert number <= size < larger


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"port": "abc"}, "--port abc: input should be a valid integer"),
        ({"port": 70000}, "--port 70000: input should be less than or equal to 65535"),
        ({"disk_budget": "much"}, "--disk-budget much: is not a size"),
        ({"mode": "mend"}, "--mode mend: input should be 'observe', 'repair' or 'strict'"),
        ({"engine": "cloud"}, "--engine cloud: input should be 'auto', 'embedded' or 'binary'"),
        ({"upstream": ("http://a",), "model": "m"}, "--upstream attaches to a running engine, --model starts one"),
        ({"upstream": ("http://a",), "engine_flags": ("-t",)}, "flags after -- starts one"),
        ({"engine": "embedded", "llama_server": "x"}, "--llama-server names a binary"),
    ],
)
def test_a_wrong_flag_is_one_sentence(flags: dict[str, object], expected: str) -> None:
    """Which setting, which value, what is wrong with it."""
    with pytest.raises(UsageError) as caught:
        load(flags)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_source_of_a_wrong_value_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable, or the file."""
    config = file(tmp_path, "parallel = 0")
    with pytest.raises(UsageError, match=f"'parallel' in {config} 0"):
        load({}, config)
    monkeypatch.setenv("SLOTKEEPER_PARALLEL", "none")
    with pytest.raises(UsageError, match="SLOTKEEPER_PARALLEL none"):
        load({}, config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port 1", "is not TOML"),
        ("prot = 1", "sets 'prot', which is no setting of Slotkeeper. Did you mean port?"),
        ("modle = 1", "sets 'modle', which is no setting of Slotkeeper. Did you mean mode or model?"),
        ("max-lines = 1", "sets 'max-lines', which is no setting of Slotkeeper. Did you mean max_lines?"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str | None, expected: str) -> None:
    """Not there, not TOML, or with an unknown name."""
    config = tmp_path / "none.toml" if text is None else file(tmp_path, text)
    with pytest.raises(UsageError, match=expected):
        load({}, config)


def test_a_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream key appears in no repr."""
    monkeypatch.setenv("SLOTKEEPER_UPSTREAM_API_KEY", "hush")
    settings = load()
    assert settings.upstream_api_key is not None
    assert settings.upstream_api_key.get_secret_value() == "hush"
    assert "hush" not in repr(settings)


def test_flag_names() -> None:
    """Underscores are dashes."""
    assert flag_name("max_wait_seconds") == "--max-wait-seconds"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SLOTKEEPER_PARALEL", "SLOTKEEPER_PARALEL in the environment is no setting of Slotkeeper. Did you mean "),
        ("SLOTKEEPER_PARALEL", "Did you mean SLOTKEEPER_PARALLEL?"),
        ("slotkeeper_stat_dir", "Did you mean SLOTKEEPER_STATE_DIR?"),
        ("SLOTKEEPER_XYZZY", "Leave it out"),
    ],
)
def test_a_misspelled_variable_is_refused(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a misspelled key of the file is; an empty one says nothing."""
    monkeypatch.setenv(name, "")
    load()
    monkeypatch.setenv(name, "3")
    with pytest.raises(UsageError) as caught:
        load()
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["CACHE_DIR", "DEBUG", "KEY", "ENGINE_API_KEY", "SERVICE_HOST", "PORT_8484_TCP_ADDR"])
def test_variables_that_are_no_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others read them, or Kubernetes sets them for a Service of our name."""
    monkeypatch.setenv(f"SLOTKEEPER_{name}", "x")
    load()
