"""An engine's failures and refusals, and our own mistakes, as the client sees them."""

from __future__ import annotations

import orjson
import structlog

from llamacpp.errors import EngineBroken, EngineError, EngineRefused, EngineUnreachable
from llamacpp.errors import EngineStarting as EngineLoading
from proxy.errors import (
    ContextExceeded,
    EngineAnswered,
    EngineFailed,
    EngineStarting,
    InternalError,
    SlotkeeperError,
    too_deep,
)

log = structlog.get_logger(__name__)


def too_long(n_prompt: int, n_ctx: int) -> ContextExceeded:
    """llama-server's own refusal (server-context.cpp, exceed_context_size_error), before anybody is evicted for it.

    Its wording is kept: agents recognise it and compact (agents.md, "Reaction to errors").
    """
    return ContextExceeded(
        f"request ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it",
        n_prompt_tokens=n_prompt,
        n_ctx=n_ctx,
    )


def answered(status: int, body: bytes) -> SlotkeeperError:
    """The engine's refusal, to be handed on with its status and its own fields."""
    try:
        found = orjson.loads(body)
        raw = found.get("error") if isinstance(found, dict) else None
    except orjson.JSONDecodeError:
        raw = None
    if not isinstance(raw, dict):
        raw = {"message": f"The engine answered {status} without a reason.", "type": "server_error"}
    return EngineAnswered(status, raw)


def as_ours(error: EngineError) -> SlotkeeperError:
    """An engine's failure as the client sees it."""
    if isinstance(error, EngineRefused):
        return answered(error.status, error.body)
    if isinstance(error, EngineLoading):
        return EngineStarting(error.message, retry_after=2)
    if isinstance(error, EngineUnreachable):
        return EngineFailed(f"The engine broke off: {error.message} Send the request again.", retry_after=2)
    if isinstance(error, EngineBroken):
        return EngineFailed(error.message)
    return EngineFailed(f"The engine failed: {error.message} Send the request again.")


def whatever(error: Exception, request: str) -> SlotkeeperError:
    """Any failure of a request as its client sees it; what is a mistake of ours is logged with its traceback."""
    found = too_deep(error) if isinstance(error, TypeError) else error
    if isinstance(found, EngineError):
        return as_ours(found)
    if isinstance(found, SlotkeeperError):
        return found
    log.error("exchange_failed", request=request, exc_info=error)
    return InternalError("Slotkeeper made a mistake with this request; its log says more. Try again.")
