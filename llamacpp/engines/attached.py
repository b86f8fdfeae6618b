"""An engine that somebody else started: how it is named on the command line, and what it lacks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

import httpx

from llamacpp.client import LlamaClient
from llamacpp.engines.flags import UsageError
from llamacpp.errors import EngineError, EngineRefused
from llamacpp.wire import Props, SlotReport

UpstreamKind = Literal["chat", "embedding"]
_FORM = "URL[,model=NAME][,slots=DIR][,kind=chat|embedding]"


@dataclass(frozen=True, slots=True)
class AttachedSpec:
    """One --upstream. `slots`: the engine's slot directory as we see it; `model`: what clients call its model."""

    url: str
    model: str | None = None
    slots: Path | None = None
    kind: UpstreamKind = "chat"


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a running engine can do. `missing`: sentences on what is off, and the flag that switches it on."""

    props: Props
    slots: tuple[SlotReport, ...]
    has_slots: bool
    has_metrics: bool
    can_save: bool
    missing: tuple[str, ...]

    @property
    def speculative(self) -> bool:
        return any(slot.speculative for slot in self.slots)


def parse_upstream(text: str) -> AttachedSpec:
    """`URL[,model=NAME][,slots=DIR][,kind=chat|embedding]`; a trailing `/v1` of the URL is dropped.

    Raises UsageError.
    """
    url, *rest = text.split(",")
    options: dict[str, str] = {}
    for part in rest:
        name, equals, value = part.partition("=")
        if name not in ("model", "slots", "kind") or not equals or not value:
            raise UsageError(f"--upstream {text}: {part!r} is not understood. The form is {_FORM}.")
        if name in options:
            raise UsageError(f"--upstream {text}: {name} stands twice. The form is {_FORM}.")
        options[name] = value
    kind = options.get("kind", "chat")
    if kind not in ("chat", "embedding"):
        raise UsageError(f"--upstream {text}: kind is chat or embedding, not {kind!r}.")
    slots = Path(options["slots"]).expanduser().absolute() if "slots" in options else None
    return AttachedSpec(_checked_url(url.strip(), text), options.get("model"), slots, cast(UpstreamKind, kind))


def _checked_url(url: str, text: str) -> str:
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_fine = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        raise UsageError(f"--upstream {text}: {url!r} is no http:// or https:// URL. Example: http://127.0.0.1:8080.")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            f"--upstream {parts.hostname}: the URL holds a user name, a query or a fragment. Leave them out; a key "
            "belongs into SLOTKEEPER_UPSTREAM_API_KEY."
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def inspect(client: LlamaClient, spec: AttachedSpec) -> Inspection:
    """Ask a running engine what it can do; changes nothing in it. A sleeping one is not woken.

    Raises EngineError when it cannot be reached, refuses our key, or is no llama-server; UsageError when it is a
    Slotkeeper: two would place and repair on top of each other.
    """
    props = await client.props()
    if props.slotkeeper:
        raise UsageError(
            f"{spec.url} is a Slotkeeper, not a llama-server. Attach the engine behind it instead, or send requests "
            "there without a second Slotkeeper."
        )
    missing: list[str] = []
    # Rule 7 of design.md: GET /slots wakes a sleeping engine and keeps it awake.
    slots = [] if props.is_sleeping else await _slots(client, missing)
    has_metrics = await _has_metrics(client, props, missing)
    can_save = await _can_save(client, spec, props, missing)
    if any(slot.speculative for slot in slots):
        missing.append(
            f"{spec.url} has a draft model: slot files cannot be restored beside one, so nothing is kept on disk. "
            "Leave --model-draft out of its flags to have snapshots."
        )
    has_slots = bool(slots) or props.is_sleeping
    return Inspection(props, tuple(slots), has_slots, has_metrics, can_save, tuple(missing))


async def _slots(client: LlamaClient, missing: list[str]) -> list[SlotReport]:
    try:
        return await client.slots()
    except EngineRefused as error:
        missing.append(
            f"{client.base_url} does not show its slots ({error.message}): whether a slot is free again is guessed "
            "from its streams. Start it without --no-slots."
        )
        return []


async def _has_metrics(client: LlamaClient, props: Props, missing: list[str]) -> bool:
    if props.is_sleeping:
        return props.endpoint_metrics
    try:
        await client.metrics()
        return True
    except EngineRefused:
        missing.append(
            f"{client.base_url} has no metrics: its own counters cannot be compared with ours. Start it with --metrics."
        )
        return False


async def _can_save(client: LlamaClient, spec: AttachedSpec, props: Props, missing: list[str]) -> bool:
    """True when it writes slot files and we see the directory; that it is the same directory the first save shows."""
    if spec.slots is None:
        missing.append(
            f"{spec.url} has no slot directory that is known here: nothing is kept across its restarts. Start it with "
            f"--slot-save-path DIR and name that directory: --upstream {spec.url},slots=DIR."
        )
        return False
    if not spec.slots.is_dir():
        missing.append(
            f"The slot directory {spec.slots} of {spec.url} is not there: nothing is kept across its restarts. Check "
            "slots= in --upstream; it is the engine's --slot-save-path as seen from here."
        )
        return False
    if not props.is_sleeping and not await _accepts_slot_files(client):
        missing.append(
            f"{spec.url} writes no slot files, so nothing is kept across its restarts. "
            f"Start it with --slot-save-path {spec.slots}."
        )
        return False
    return True


async def _accepts_slot_files(client: LlamaClient) -> bool:
    """llama-server looks for --slot-save-path (501) before it looks at the name (400), so a bad name asks for free."""
    try:
        await client.save_slot(0, "/")
    except EngineRefused as error:
        return error.status == httpx.codes.BAD_REQUEST
    except EngineError:
        return False
    return False
