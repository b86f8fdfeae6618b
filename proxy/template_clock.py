"""The date that a chat template would have printed: told like any other volatile value, or given to one request."""

from __future__ import annotations

import time
from typing import Any

from policies.layout import Value
from proxy.engines import Engines
from proxy.serving import answering

Json = dict[str, Any]


def clock_values(engines: Engines, body: Json) -> tuple[Value, ...]:
    """Values whose `[[env:name]]` stands in the prompt of this body, as of now, in the engine's own formats."""
    engine = answering(engines, body.get("model"))
    if engine is None:
        return ()
    messages = body["messages"]
    has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
    wanted = engine.clock_told(has_system=has_system, has_tools=bool(body.get("tools")))
    asked, arguments = _arguments(body), {name: argument for argument, name in engine.clock_arguments}
    return tuple(Value(n, time.strftime(f), "move") for n, f in wanted if arguments.get(n) not in asked)


def with_clock(engines: Engines, body: Json) -> Json:
    """The body of a request in mode observe: the template prints the date, as it does without us."""
    engine = answering(engines, body.get("model"))
    if engine is None or not engine.clock_arguments:
        return body
    formats = dict(engine.clock_values)
    dates = {a: time.strftime(formats[name]) for a, name in engine.clock_arguments if name in formats}
    return {**body, "chat_template_kwargs": {**dates, **_arguments(body)}}


def _arguments(body: Json) -> Json:
    found = body.get("chat_template_kwargs")
    return found if isinstance(found, dict) else {}
