"""The flags of `slotkeeper serve`, made from Settings: a setting is named, typed and explained in one place."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from proxy.config import Settings, flag_name

# Set otherwise: keys do not belong in argv (any user of the machine can read it); engine flags follow `--`.
NOT_FLAGS = frozenset({"upstream_api_key", "engine_flags", "layout_rules"})


PANELS: dict[str, tuple[str, ...]] = {
    "Model and engine": ("model", "upstream", "engine", "llama_server", "engine_port", "parallel", "ctx_size", "swa"),
    "Who can ask": ("host", "port", "api_key_file", "allowed_host", "show_prompts", "allow_engine_admin"),
    "Prompts": ("mode", "template_clock", "append_only_template", "reply_reserve", "finish_prefill", "keep_alive"),
    "Prompts that do not fit": ("compaction", "compact_at", "compact_prepare_at"),
    "Slot files": ("state_dir", "disk_budget", "persist"),
    "Limits": ("max_body_bytes", "max_waiting", "max_wait_seconds", "exit_deadline_seconds", "max_lines"),
    "Log": ("log_format", "log_level"),
}
"""Headings of the help, and the settings below them."""
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
METAVARS = {
    "model": "FILE",
    "upstream": "URL",
    "llama_server": "PATH",
    "host": "ADDRESS",
    "allowed_host": "NAME",
    "parallel": "N",
    "ctx_size": "TOKENS",
    "reply_reserve": "TOKENS",
    "compact_at": "SHARE",
    "compact_prepare_at": "SHARE",
    "keep_alive": "SECONDS|off",
    "disk_budget": "SIZE",
    "max_body_bytes": "SIZE",
    "max_waiting": "N",
    "max_lines": "N",
}
"""What stands for a value in the help; of the others the last word of the name."""


class Grouped(TyperCommand):
    """A command whose help has its options under headings. Typer groups in rich's tables only, which cut the names of
    flags in a narrow terminal."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """One section a heading; what has none comes last."""
        groups: dict[str, list[tuple[str, str]]] = {panel: [] for panel in (*PANELS, "Options")}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                groups[getattr(param, "rich_help_panel", None) or "Options"].append(record)
        for panel, records in groups.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a typer command that takes (context, config, **given): it gets a flag for every setting.

    A flag that is not given is None and is left to the environment, the file or the default.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = [_parameter(name, field) for name, field in Settings.model_fields.items() if name not in NOT_FLAGS]
    command.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*own, *flags)} | {"return": None}
    return command


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kind = _flag_type(field)
    flag = flag_name(name)
    spelling = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    default = shown_default(name, field)
    text = f"{field.description}; default {default}" if default and kind is not bool else field.description
    metavar = None if kind is bool else _metavar(name, field)
    panel = _PANEL_OF.get(name)
    option = typer.Option(spelling, help=text, show_default=False, metavar=metavar, rich_help_panel=panel)
    annotation = Annotated[kind | None, option] if kind is not list else Annotated[list[str] | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag_type(field: FieldInfo) -> Any:
    """bool and list flags are told apart; every other value stays text, for one set of messages: config's."""
    kind = field.annotation
    if kind is bool:
        return bool
    return list if get_origin(kind) is tuple or any(get_origin(k) is tuple for k in get_args(kind)) else str


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The values that a setting can have, where they are a list of words."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def _metavar(name: str, field: FieldInfo) -> str:
    if words := choices(field):
        return "|".join(words)
    return METAVARS.get(name) or name.rsplit("_", 1)[-1].upper()


def shown_default(name: str, field: FieldInfo) -> str:
    """The default as people write it: sizes with their unit, nothing for an empty one."""
    if name == "disk_budget":
        return "20GiB"
    if name == "max_body_bytes":
        return "64MB"
    if name == "keep_alive":
        return "10s"
    if name == "state_dir":
        return "the platform's user state folder"
    if field.default is None or field.default == ():
        return ""
    return str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}".removesuffix(".0")
