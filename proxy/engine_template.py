"""Which chat template our engine starts with: the model's own, or one that keeps prompts append-only."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import structlog

from llamacpp import engines as children
from llamacpp import gguf, templates
from llamacpp.engines.flags import spelled
from llamacpp.errors import EngineSetupError
from policies.layout_text import placeholder
from proxy.config import Settings
from proxy.state_dir import PRIVATE_FILE

log = structlog.get_logger(__name__)

TEMPLATE_FLAGS = frozenset({"--chat-template", "--chat-template-file"})
ARGUMENTS_FLAG = frozenset({"--chat-template-kwargs"})
_MODEL = frozenset({"-m", "--model"})
_BY_ENVIRONMENT = ("LLAMA_ARG_CHAT_TEMPLATE", "LLAMA_ARG_CHAT_TEMPLATE_FILE", "LLAMA_ARG_JINJA")
_OWN, _FOR_TOOLS = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"

CLOCK_PRICE = (
    "the chat template prints the date near the prompt's beginning: at midnight every prompt is processed again"
)


@dataclass(frozen=True, slots=True)
class ChosenTemplate:
    """What was done to a child's template.

    clock_values: (name, strftime format) of each `[[env:name]]` that it prints where the date was. clock_arguments:
    (argument, name): `chat_template_kwargs` by which one request gets the date in its place. fixed: variables of the
    engine's clock that are set at its start. keeps_reasoning: it is the append-only variant.
    """

    clock_values: tuple[tuple[str, str], ...] = ()
    clock_arguments: tuple[tuple[str, str], ...] = ()
    fixed: tuple[str, ...] = ()
    keeps_reasoning: bool = False


def with_template(settings: Settings, spec: children.EngineSpec) -> tuple[children.EngineSpec, ChosenTemplate]:
    """The spec with the template that the settings ask for, written to the state directory.

    Where the template cannot be had, read or written, the engine starts with its own: that costs tokens, not answers.
    """
    own = None if settings.mode == "observe" else _own_template(spec)
    theirs = _arguments(spec.extra)
    if own is None or theirs is None:
        return spec, ChosenTemplate()
    clock = templates.fix_clock(own, placeholder) if settings.template_clock == "fixed" else templates.FixedClock(own)
    kept = templates.keep_reasoning(clock.text) if settings.append_only_template else None
    if settings.append_only_template and kept is None:
        log.warning(
            "template_not_known", consequence="--append-only-template knows no variant of this model's template"
        )
    text, extra = kept or clock.text, spec.extra
    if text != own:
        try:
            extra = (*_without(extra, TEMPLATE_FLAGS), "--chat-template-file", str(_write(settings.state_dir, text)))
        except OSError as error:
            log.warning("template_not_written", error=str(error), consequence="the engine uses its own template")
            return spec, ChosenTemplate()
    if clock.defaults:
        given = json.dumps({**dict(clock.defaults), **theirs})
        extra = (*_without(extra, ARGUMENTS_FLAG), *ARGUMENTS_FLAG, given)
    return replace(spec, extra=extra), _chosen(clock, frozenset(theirs), kept is not None)


def _chosen(clock: templates.FixedClock, theirs: frozenset[str], keeps_reasoning: bool) -> ChosenTemplate:
    """Without what the person sets by --chat-template-kwargs: that stands in the prompt, whatever the day."""
    arguments = tuple((argument, name) for argument, name in clock.arguments if argument not in theirs)
    names = {name for _, name in arguments}
    return ChosenTemplate(
        clock_values=tuple(value for value in clock.values if value[0] in names),
        clock_arguments=arguments,
        fixed=tuple(variable for variable, _ in clock.defaults),
        keeps_reasoning=keeps_reasoning,
    )


def _own_template(spec: children.EngineSpec) -> str | None:
    """The template that the engine would use for every request; None where that is not known, or more than one."""
    names = [spelled(word) for word in spec.extra]
    if "--no-jinja" in names or (spec.kind != "embedded" and any(os.environ.get(v) for v in _BY_ENVIRONMENT)):
        return None
    given = _given(spec.extra, TEMPLATE_FLAGS)
    try:
        if given:
            return given[1] if spelled(given[0]) == "--chat-template" else Path(given[1]).read_bytes().decode()
        model = _given(spec.extra, _MODEL)
        path = Path(model[1]) if model else spec.model
        if path is None or (spec.names_model and not model):
            return None
        header = gguf.read_header(path)
        text = header.text(_OWN) if header.text(_FOR_TOOLS) is None else None
        return text if text is not None and text.encode() else None
    except (OSError, UnicodeError, EngineSetupError):
        return None


def _given(extra: tuple[str, ...], flags: frozenset[str]) -> tuple[str, ...]:
    """The last of these flags with its value, or nothing: llama-server takes the last one, too."""
    pairs = [pair for pair in pairwise(extra) if spelled(pair[0]) in flags]
    return pairs[-1] if pairs else ()


def _without(extra: tuple[str, ...], flags: frozenset[str]) -> tuple[str, ...]:
    """The words without these flags and their values."""
    kept: list[str] = []
    rest = list(extra)
    while rest:
        word = rest.pop(0)
        if spelled(word) in flags:
            del rest[:1]
        else:
            kept.append(word)
    return tuple(kept)


def _arguments(extra: tuple[str, ...]) -> dict[str, object] | None:
    """What the person's own --chat-template-kwargs say together; None (the engine complains) when one is no object."""
    found: dict[str, object] = {}
    for word, value in pairwise(extra):
        if spelled(word) in ARGUMENTS_FLAG:
            try:
                found.update(json.loads(value))
            except (ValueError, TypeError):
                return None
    return found


def _write(state_dir: Path, text: str) -> Path:
    """Whole or not at all, for the owner only. Returns where. Raises OSError."""
    path = state_dir / "template.jinja"
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "wb") as file:
        file.write(text.encode())
    new.replace(path)
    return path


def clock_advice(settings: Settings, kind: str) -> str:
    """What a person can do about an engine whose template prints the clock."""
    if kind == "attached":
        return (
            "start it with --chat-template-file and a copy of its template in which strftime_now(...) is a constant "
            "text (and --chat-template-kwargs for date_string), or let Slotkeeper start the engine"
        )
    if settings.mode == "observe" or settings.template_clock == "engine":
        return "leave out --mode observe and --template-clock engine: then the date is told with the messages"
    return "name the model's file with --model, or give its template with -- --chat-template-file FILE"
