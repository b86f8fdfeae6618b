"""What llama-server answers to questions, typed. A missing field is empty, zero or off, unless it is vital."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from llamacpp.errors import EngineBroken, EngineRefused

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Props:
    """GET /props. `n_ctx`: tokens one slot can hold (with `--kv-unified` the whole pool)."""

    n_ctx: int
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    build_info: str
    is_sleeping: bool
    modalities_vision: bool
    endpoint_slots: bool
    endpoint_metrics: bool
    slotkeeper: str
    """The version of the Slotkeeper that answered for an engine; empty when the engine answers itself."""
    raw: Json = field(repr=False, compare=False)

    @classmethod
    def from_json(cls, found: object) -> Props:
        """Raises EngineBroken when `found` has no context size or slots."""
        got = _object(found, "GET /props")
        settings, modalities = _part(got, "default_generation_settings"), _part(got, "modalities")
        if "n_ctx" not in settings or "total_slots" not in got:
            raise EngineBroken("GET /props names neither n_ctx nor total_slots. Is the upstream URL a llama-server?")
        return cls(
            n_ctx=_int(settings, "n_ctx"),
            total_slots=_int(got, "total_slots"),
            model_alias=str(got.get("model_alias") or ""),
            model_path=str(got.get("model_path") or ""),
            chat_template=str(got.get("chat_template") or ""),
            build_info=str(got.get("build_info") or ""),
            is_sleeping=bool(got.get("is_sleeping")),
            modalities_vision=bool(modalities.get("vision")),
            endpoint_slots=bool(got.get("endpoint_slots")),
            endpoint_metrics=bool(got.get("endpoint_metrics")),
            slotkeeper=str(got.get("slotkeeper") or ""),
            raw=got,
        )


def is_same(one: Props, other: Props) -> bool:
    """Whether an engine says the same of itself as before, awake or asleep."""
    return replace(one, is_sleeping=other.is_sleeping) == other


@dataclass(frozen=True, slots=True)
class SlotReport:
    """One entry of GET /slots. `id_task` and `n_prompt_tokens` are -1 and 0 for a slot that was never used."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    id_task: int
    n_prompt_tokens: int

    @classmethod
    def from_json(cls, found: object) -> SlotReport:
        """Raises EngineBroken when `found` names no slot."""
        got = _object(found, "GET /slots")
        if "id" not in got:
            raise EngineBroken("An entry of GET /slots has no id. Is the upstream URL a llama-server?")
        return cls(
            id=_int(got, "id"),
            n_ctx=_int(got, "n_ctx"),
            speculative=bool(got.get("speculative")),
            is_processing=bool(got.get("is_processing")),
            id_task=_int(got, "id_task", -1),
            n_prompt_tokens=_int(got, "n_prompt_tokens"),
        )


@dataclass(frozen=True, slots=True)
class SlotFileReport:
    """Answer to a slot's save or restore: tokens, bytes on disk, seconds that the engine stood still."""

    n_tokens: int
    n_bytes: int
    seconds: float

    @classmethod
    def from_json(cls, got: Json) -> SlotFileReport:
        """Raises EngineBroken when `got` is neither a save's nor a restore's answer."""
        saved = "n_saved" in got
        if not saved and "n_restored" not in got:
            raise EngineBroken("llama-server's answer to a slot action says neither n_saved nor n_restored.")
        tokens, size, took = ("n_saved", "n_written", "save_ms") if saved else ("n_restored", "n_read", "restore_ms")
        return cls(_int(got, tokens), _int(got, size), _float(_part(got, "timings"), took) / 1000)


@dataclass(frozen=True, slots=True)
class Timings:
    """Of one request: prompt tokens from the cache, prompt tokens processed, tokens generated, milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float

    @classmethod
    def from_json(cls, found: object) -> Timings | None:
        """None when `found` is no timings object."""
        if not isinstance(found, dict) or "prompt_n" not in found:
            return None
        return cls(
            cache_n=max(0, _int(found, "cache_n")),
            prompt_n=max(0, _int(found, "prompt_n")),
            prompt_ms=max(0.0, _float(found, "prompt_ms")),
            predicted_n=max(0, _int(found, "predicted_n")),
            predicted_ms=max(0.0, _float(found, "predicted_ms")),
        )

    def after(self, first: Timings) -> Timings:
        """The figures of both requests, where `first` processed a part of this one's prompt just before it."""
        return replace(
            self,
            cache_n=max(0, self.cache_n - first.prompt_n),
            prompt_n=self.prompt_n + first.prompt_n,
            prompt_ms=self.prompt_ms + first.prompt_ms,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """`prompt_progress`: tokens of the prompt, of them from the cache, of them done (cached ones too), elapsed ms."""

    total: int
    cache: int
    processed: int
    time_ms: float

    @classmethod
    def from_json(cls, found: object) -> Progress | None:
        """None when `found` is no progress object."""
        if not isinstance(found, dict) or "total" not in found:
            return None
        return cls(_int(found, "total"), _int(found, "cache"), _int(found, "processed"), _float(found, "time_ms"))


def error_of(event: object) -> EngineRefused | None:
    """The error in an answer or a stream event, `{"error": {code, message, type}}`; None when it carries none."""
    if not isinstance(event, dict) or not event.get("error"):
        return None
    found = event["error"]
    if not isinstance(found, dict):
        return EngineRefused(500, _dumped(event), str(found))
    code = found.get("code")
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return EngineRefused(status, _dumped(event), str(found.get("message") or "unknown error"))


def _object(found: object, what: str) -> Json:
    if not isinstance(found, dict):
        raise EngineBroken(f"The answer to {what} is not a JSON object. Is the upstream URL a llama-server?")
    return found


def _part(got: Json, name: str) -> Json:
    part = got.get(name)
    return part if isinstance(part, dict) else {}


def _int(got: Json, name: str, missing: int = 0) -> int:
    value = got.get(name, missing)
    return int(value) if isinstance(value, int | float) else missing


def _float(got: Json, name: str) -> float:
    value = got.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _dumped(event: object) -> bytes:
    """The event as JSON; empty for numbers that JSON of 64 bits cannot say."""
    try:
        return orjson.dumps(event)
    except TypeError:
        return b""
