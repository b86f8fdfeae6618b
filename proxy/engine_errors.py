"""An engine's failures and refusals, and our own mistakes, as the client sees them."""

from __future__ import annotations

import orjson
import structlog

from llamacpp.client import LlamaClient
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

SERVER_ERROR = 500
KEY_REFUSED = (401, 403)
"""What llama-server (401), or a proxy in front of it, answers to a wrong key or to none."""
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


async def refused(client: LlamaClient, chat: bytes | None, status: int, body: bytes) -> SlotkeeperError:
    """The engine's refusal of a model request. `chat`: the body of a chat, None for other requests.

    llama-server answers 500 for a chat that its parser or template cannot take (cut tool arguments, a template's own
    raise_exception), and SDKs send a request again for that, in vain. If the template alone refuses it, too, it is the
    request's fault: 400, in the engine's words.
    """
    found = answered(status, body)
    if status != SERVER_ERROR or chat is None or not isinstance(found, EngineAnswered):
        return found
    try:
        await client.apply_template(chat)
    except EngineRefused as again:
        return at_fault(found) if again.status == SERVER_ERROR else found
    except EngineError:
        pass
    return found


def at_fault(error: SlotkeeperError) -> SlotkeeperError:
    """The engine's 500 for a chat that its template cannot take, as the request's own fault; others as they are."""
    if not isinstance(error, EngineAnswered) or error.status != SERVER_ERROR:
        return error
    return EngineAnswered(400, {**error.raw, "code": 400, "type": "invalid_request_error"})


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


def not_attached(error: Exception, *, has_key: bool) -> str:
    """Why an engine that answers cannot be attached; `has_key`: one was sent."""
    if not isinstance(error, EngineRefused) or error.status not in KEY_REFUSED:
        return str(error)
    was = "refuses the key in SLOTKEEPER_UPSTREAM_API_KEY" if has_key else "asks for a key, and we have none"
    return f"it {was} ({error.status}: {error.message}). Set SLOTKEEPER_UPSTREAM_API_KEY to its --api-key."


def unasked(url: str, why: str) -> str:
    """Why the engine at `url` cannot be asked, as a sentence that names it once."""
    why = why if why.endswith((".", "?")) else f"{why}. Is it running?"
    return why if url in why else f"The engine at {url} cannot be asked: {why}"
