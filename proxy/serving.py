"""Which engine a request is about, before it is placed: what its template takes, and what the clock in it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llamacpp.capabilities import TemplateFacts
from policies.types import digest
from proxy.engine import Engine, names_of

if TYPE_CHECKING:
    from proxy.api.read import ModelRequest
    from proxy.engines import Engines


async def wake(engines: Engines, model: str | None, door: str) -> None:
    """Has the model that a request names loaded, where a router put it away. Raises SlotkeeperError."""
    if any(e.wake is not None for e in engines.all):
        engine = engines.pick(model, door)
        if engine.wake is not None:
            await engine.wake()


def of_its_model(engines: Engines, request: ModelRequest) -> ModelRequest:
    """The request, its model a part of its base where several are served: the same words to another model are another
    conversation."""
    if len(engines.all) < 2:
        return request
    name, p = request.model, request.prompt
    model = next((e.model for e in engines.all if isinstance(name, str) and name in names_of(e)), "")
    if not model or len({e.model for e in engines.all} - {""}) == 1:
        return request
    key = model.encode()
    chain = tuple(digest(link, key) for link in p.chain)
    return replace(request, prompt=replace(p, params=digest(p.params, key), chain=chain))


def template_of(engines: Engines, model: object) -> TemplateFacts | None:
    """What the chat template of the named model takes, else that of the first engine that answers; None while nothing
    is known."""
    found = _named([e for e in engines.all if e.template is not None], model)
    return found.template if found is not None else None


def answering(engines: Engines, model: object) -> Engine | None:
    """The engine of that model that answers, else the first that does; None while none does."""
    return _named([e for e in engines.all if e.ready], model)


def _named(engines: Sequence[Engine], model: object) -> Engine | None:
    if len(engines) > 1 and isinstance(model, str):
        return next((e for e in engines if model in names_of(e)), engines[0])
    return engines[0] if engines else None
