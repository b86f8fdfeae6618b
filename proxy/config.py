"""One frozen value with every setting, read once at start and handed down.

Precedence: flags, then SLOTKEEPER_* environment, then the TOML file, then defaults. The flags of `slotkeeper serve` are
made from this class (proxy/flags.py) and the README's table is tested against it: a setting is written down once.
"""

import difflib
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from policies.layout_rules import Rule, check_rules
from proxy.errors import UsageError

ENV_PREFIX = "SLOTKEEPER_"
OTHER_VARIABLES = frozenset(
    {"CONFIG", "CACHE_DIR", "DEBUG", "ENGINE_API_KEY", "TEST_SERVER", "TEST_TOOLS", "LLAMA_CPP", "TRACES", "KEY"}
)
"""Names of variables with our prefix that are no settings; KEY is what the README has Codex send."""
_KUBERNETES = re.compile(ENV_PREFIX + r"(SERVICE_|PORT_\d)")
"""What Kubernetes gives every pod beside a Service named slotkeeper."""
_AS_NEAR = 0.8
"""Likeness (0 to 1) from which a second name may have been meant as well."""
_SECONDS = re.compile(r"\d+(?:\.\d+)?s?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)


def parse_size(value: object) -> object:
    """Bytes from "20GiB" (1024), "64 MB" (1000) or a number; anything else goes on to pydantic's own complaint."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("is not a size: write bytes or a unit, such as 20GiB or 500MB")
    number, unit, binary, _ = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))


def parse_seconds(value: object) -> object:
    """Seconds from "10s", "1.5" or a number, None from "off"; anything else goes on to pydantic's own complaint."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if text == "off":
        return None
    if not _SECONDS.fullmatch(text):
        raise ValueError("is no time: write seconds, such as 10s, or off")
    return float(text.removesuffix("s"))


def _words(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
UserPath = Annotated[Path, AfterValidator(Path.expanduser)]


def _state_dir() -> Path:
    return Path(platformdirs.user_state_dir("slotkeeper", appauthor=False))


class Settings(BaseSettings):
    """Everything that can be set. Lists come from the environment as words, quoted as in a shell."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    model: UserPath | None = Field(None, description="GGUF file to serve; without one, the demo model")
    upstream: Words = Field(
        (), description="attach to a llama-server: URL[,model=NAME][,slots=DIR][,kind=chat|embedding]; repeatable"
    )
    engine: Literal["auto", "embedded", "binary"] = Field(
        "auto", description="what to start: a llama-server binary, the embedded one, or the binary if one is found"
    )
    llama_server: UserPath | None = Field(None, description="llama-server binary to start; else the one on PATH")
    engine_port: int | None = Field(None, ge=1, le=65535, description="loopback port of our engine; else a free one")
    upstream_api_key: SecretStr | None = Field(None, description="key that attached engines ask for (not a flag)")
    engine_flags: Words = Field((), description="flags for llama-server; on the command line: everything after --")

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8484, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_key_file: UserPath | None = Field(None, description="file of tenant:key lines; clients must then send a key")
    allowed_host: Words = Field((), description="further Host and Origin name to accept; repeatable")

    parallel: int = Field(
        4, ge=1, le=256, description="slots of an engine that we start; fewer where the memory at hand holds no more"
    )
    ctx_size: int | None = Field(
        None,
        ge=256,
        description="context of an engine that we start, in tokens; else the model's own, at most 32768 and what the "
        "memory at hand holds",
    )
    swa: Literal["auto", "full", "checkpoints"] = Field(
        "auto",
        description="sliding windows in an engine that we start; full: kept whole (--swa-full); checkpoints: not; "
        "auto: whole when the memory at hand holds that, or when the engine restores nothing without",
    )
    reply_reserve: int = Field(4096, ge=1, description="tokens set aside for an answer of unknown length")
    mode: Literal["observe", "repair", "strict"] = Field(
        "repair",
        description="repair: prompts are kept append-only; observe: the model reads exactly what the client sent; "
        "strict: a request that does not extend its conversation is refused",
    )

    compaction: bool = Field(
        True, description="a summary takes the place of old messages when a prompt and its reply no longer fit"
    )
    compact_at: float = Field(
        1.0, gt=0, le=1, description="share of the context that a prompt and its reply may use before a compaction"
    )
    compact_prepare_at: float = Field(
        0.85, gt=0, le=1, description="the same, from which on a compaction is prepared while the engine is idle"
    )

    finish_prefill: Literal["always", "half", "never"] = Field(
        "half",
        description="a client that leaves while its prompt is processed: the work goes on to the prompt's end always, "
        "when over half of it is done or the engine has nothing else to do, or never",
    )
    keep_alive: Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(parse_seconds)] = Field(
        10.0, description="pause between two signs of life during a long prefill, such as 10s; off for none"
    )

    layout_rules: tuple[Rule, ...] = Field(
        (), description="further shapes of volatile text in system prompts; tables in the configuration file"
    )
    template_clock: Literal["fixed", "engine"] = Field(
        "fixed",
        description="a chat template that prints the date, in an engine that we start; fixed: the date is told with "
        "the messages, and midnight changes no prompt's beginning; engine: left as it is, as with --mode observe",
    )
    append_only_template: bool = Field(
        False,
        description="Qwen3's family, in an engine that we start: the prompt keeps the reasoning of earlier turns, "
        "which the model's own template drops at each question; not with --mode observe",
    )

    state_dir: UserPath = Field(default_factory=_state_dir, description="where slot files and their index are kept")
    disk_budget: Bytes = Field(20 * 1024**3, description="most bytes of slot files on disk")
    persist: bool = Field(True, description="keep slot files; --no-persist deletes those that are there")

    show_prompts: bool = Field(False, description="show prompt text in /slotkeeper/requests")
    allow_engine_admin: bool = Field(False, description="open the engine's writing endpoints to clients")

    max_body_bytes: Bytes = Field(64_000_000, gt=0, description="longest request body, in bytes")
    max_waiting: int = Field(64, ge=0, description="most requests that wait for a slot")
    max_wait_seconds: float = Field(600.0, gt=0, description="longest wait for a slot, in seconds")
    exit_deadline_seconds: float = Field(
        30.0, gt=0, description="longest stop, in seconds, slot files included; a second signal waits for nothing"
    )
    max_lines: int = Field(1000, ge=1, description="most conversations that are remembered")

    log_format: Literal["json", "console"] = Field("console", description="how log lines are written to stderr")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")

    @model_validator(mode="after")
    def _one_kind_of_engine(self) -> "Settings":
        if self.upstream:
            own = {"model": self.model, "llama_server": self.llama_server, "engine_port": self.engine_port}
            clash = next((flag_name(k) for k, v in own.items() if v is not None), None)
            if clash or self.engine_flags:
                what = clash or "flags after --"
                raise ValueError(f"--upstream attaches to a running engine, {what} starts one: leave one of them out")
        if self.engine == "embedded" and self.llama_server is not None:
            raise ValueError("--llama-server names a binary, but --engine embedded does not start one: leave one out")
        return self

    @field_validator("layout_rules")
    @classmethod
    def _rules_that_work(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        check_rules(rules)
        return rules

    @property
    def drain_seconds(self) -> float:
        """How long running answers may go on once we stop; the rest of the exit deadline belongs to slot files."""
        return self.exit_deadline_seconds / 3

    @property
    def slots_dir(self) -> Path:
        """Given to our engines as --slot-save-path (contract.md, state directory)."""
        return self.state_dir / "slots"

    @property
    def models_dir(self) -> Path:
        """Where fetched models lie (contract.md, state directory)."""
        return self.state_dir / "models"

    @property
    def logs_dir(self) -> Path:
        """Where engines write (contract.md, state directory)."""
        return self.state_dir / "logs"

    @property
    def control_socket(self) -> Path:
        """Where `slotkeeper snapshots` finds the running server (contract.md, state directory)."""
        return self.state_dir / "control.sock"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, file: nothing else is read."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, cls._file_values())

    @classmethod
    def _file_values(cls) -> dict[str, Any]:
        return {}


def flag_name(field: str) -> str:
    """`max_wait_seconds` -> `--max-wait-seconds`."""
    return "--" + field.replace("_", "-")


def load(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """All settings. flags: those given, by field name. config: TOML file, else $SLOTKEEPER_CONFIG, else none.

    Raises UsageError with one sentence: which setting, where it was set, what is wrong with it.
    """
    given = dict(flags or {})
    _check_environment()
    path = config or (Path(os.environ["SLOTKEEPER_CONFIG"]) if os.environ.get("SLOTKEEPER_CONFIG") else None)
    from_file = _read_toml(path) if path else {}

    class Loaded(Settings):
        @classmethod
        def _file_values(cls) -> dict[str, Any]:
            return from_file

    try:
        return Loaded(**given)
    except ValidationError as error:
        raise UsageError(_sentence(error.errors(include_url=False)[0], given, path)) from None


def _check_environment() -> None:
    """Raises UsageError for a variable that would be meant for us and is none: no setting may be lost in silence."""
    known = {field.upper() for field in Settings.model_fields}
    for name in sorted(os.environ):
        prefix, word = name[: len(ENV_PREFIX)], name[len(ENV_PREFIX) :].upper()
        is_ours = prefix.upper() == ENV_PREFIX and os.environ[name] and not _KUBERNETES.match(name)
        if is_ours and word not in known | OTHER_VARIABLES:
            hint = _hint(word, known, ENV_PREFIX)
            raise UsageError(f"{name} in the environment is no setting of Slotkeeper. {hint}")


def _hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """What to do about a name that is not known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1)
    if close and close[0] != name:
        close = difflib.get_close_matches(name, names, 2, _AS_NEAR) or close
    words = " or ".join(prefix + found for found in close)
    return f"Did you mean {words}?" if words else "Leave it out; the README lists all of them."


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.expanduser().read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"The configuration file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"The configuration file {path} is not TOML: {error}.") from None


def _sentence(error: ErrorDetails, given: Mapping[str, Any], path: Path | None) -> str:
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    if not error["loc"]:
        return message[0].upper() + message[1:] + "."
    field = str(error["loc"][0])
    if field not in Settings.model_fields:
        hint = _hint(field.replace("-", "_").lower(), Settings.model_fields)
        return f"The configuration file {path} sets '{field}', which is no setting of Slotkeeper. {hint}"
    variable = ENV_PREFIX + field.upper()
    if field in given:
        where = flag_name(field)
    elif variable in {name.upper() for name in os.environ}:
        where = variable
    else:
        where = f"'{field}' in {path}"
    shown = "" if field == "upstream_api_key" else f" {error['input']!s:.80}"
    return f"{where}{shown}: {message[0].lower()}{message[1:]}."
