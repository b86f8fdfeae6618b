"""The flags of `slotkeeper serve`, made from Settings: a setting is named, typed and explained in one place."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from proxy.config import Settings, flag_name

# Set otherwise: keys do not belong in argv (any user of the machine can read it); engine flags follow `--`.
NOT_FLAGS = frozenset({"upstream_api_key", "engine_flags", "layout_rules"})


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
    option = typer.Option(
        spelling, help=text, show_default=False, metavar=None if kind is bool else _metavar(name, field)
    )
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
    word = name.rsplit("_", 1)[-1]
    return {"size": "N", "server": "PATH", "upstream": "URL", "budget": "SIZE", "bytes": "SIZE"}.get(word, word.upper())


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
