"""Every error that a client or an operator can see, as one tree, mapped to HTTP only here.

    SlotkeeperError
    ├── BadRequest 400 ── ContextExceeded 400
    ├── Unauthorised 401
    ├── Forbidden 403
    ├── NotFound 404 ── UnknownModel 404
    ├── MethodNotAllowed 405
    ├── BrokenLine 409
    ├── TooLarge 413
    ├── ClientLeft 499 (never sent: nobody is there)
    ├── InternalError 500
    ├── EngineFailed 502 ── EngineDown 502
    ├── EngineAnswered (the engine's own status)
    └── Unavailable 503 ── Busy, WaitedTooLong, EngineStarting, PoolExceeded, ShuttingDown
UsageError (wrong settings: exit code 2) and StoreError (state directory unusable: exit code 1) never reach HTTP.

`kind` is llama-server's own error type where it has one (tools/server, format_error_response); `code` is a stable
slug for programs; `outcome` is the label of `slotkeeper_requests_total`.
"""

from typing import Any, Literal

import orjson

_TOO_MANY, _UNAVAILABLE = 429, 503
Dialect = Literal["chat", "completion", "native", "messages", "responses"]
Outcome = Literal["ok", "client_left", "engine_error", "refused", "overflow", "timeout"]


class UsageError(Exception):
    """Wrong flags, environment or configuration file. The message is one sentence for people; exit code 2."""


class StoreError(Exception):
    """The state directory cannot be used. The message is one sentence for people; exit code 1."""


class SlotkeeperError(Exception):
    """An answer other than success.

    message: what happened, to which thing, what to do. status: HTTP status. kind: error type in the body.
    retry_after: seconds for the Retry-After header. source: which of the two programs failed.
    """

    status: int = 500
    kind: str = "server_error"
    code: str | int = "internal_error"
    outcome: Outcome = "refused"
    source: Literal["slotkeeper", "engine"] = "slotkeeper"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that belong to this error; Retry-After in whole seconds, rounded up (RFC 9110 10.2.3)."""
        if self.retry_after is None:
            return {}
        return {"retry-after": str(max(1, -int(-self.retry_after // 1)))}

    def details(self) -> dict[str, Any]:
        """Further fields of the error object, as llama-server has them for some errors."""
        return {}


class BadRequest(SlotkeeperError):
    """The body or a parameter is not what the door expects."""

    status, kind = 400, "invalid_request_error"
    code: str | int = "bad_request"


class ContextExceeded(BadRequest):
    """The prompt and its reply cannot fit the context; fields as in llama-server's exceed_context_size_error."""

    kind, code, outcome = "exceed_context_size_error", 400, "overflow"

    def __init__(self, message: str, *, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(message)
        self.n_prompt_tokens, self.n_ctx = n_prompt_tokens, n_ctx

    def details(self) -> dict[str, Any]:
        return {"n_prompt_tokens": self.n_prompt_tokens, "n_ctx": self.n_ctx}


class Unauthorised(SlotkeeperError):
    """No inbound API key, or one that is not in the key file."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"

    def __init__(self, message: str, *, challenge: str = "Bearer") -> None:
        super().__init__(message)
        self.challenge = challenge

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": self.challenge}


class Forbidden(SlotkeeperError):
    """Known, and not allowed: foreign Host or Origin, engine administration, another tenant's things."""

    status, kind, code = 403, "permission_error", "forbidden"


class NotFound(SlotkeeperError):
    """No such path, request or snapshot here."""

    status, kind, code = 404, "not_found_error", "not_found"


class UnknownModel(NotFound):
    """No engine serves the model that the body names."""

    code = "model_not_found"


class MethodNotAllowed(SlotkeeperError):
    """The path exists with another method."""

    status, kind, code = 405, "invalid_request_error", "method_not_allowed"


class BrokenLine(SlotkeeperError):
    """Mode strict: the request does not extend its conversation."""

    status, kind, code = 409, "invalid_request_error", "broken_line"

    def __init__(self, message: str, divergence: dict[str, Any] | None = None) -> None:
        """`divergence`: positions and hashes of the first difference (proxy/explain), where known."""
        super().__init__(message)
        self.divergence = divergence

    def details(self) -> dict[str, Any]:
        """Where it departs, beside the sentence."""
        return {"divergence": self.divergence} if self.divergence else {}


class TooLarge(SlotkeeperError):
    """The body is longer than max_body_bytes."""

    status, kind, code = 413, "invalid_request_error", "body_too_large"


class ClientLeft(SlotkeeperError):
    """The client closed its connection. 499 as in nginx; nobody reads it, it is there for logs and metrics."""

    status, kind, code, outcome = 499, "invalid_request_error", "client_left", "client_left"


class InternalError(SlotkeeperError):
    """A mistake of ours. The message names no prompt text."""


class EngineFailed(SlotkeeperError):
    """The engine broke off or answered nonsense."""

    status, code, outcome, source = 502, "engine_failed", "engine_error", "engine"


class EngineDown(EngineFailed):
    """The engine cannot be reached, and it is not ours to start."""

    code = "engine_down"


class EngineAnswered(SlotkeeperError):
    """The engine's own refusal, handed on with its status.

    raw: the engine's error object ({"code", "message", "type", ...}); its further fields stay.
    """

    code, source = "engine_refused", "engine"
    outcome: Outcome = "engine_error"

    def __init__(self, status: int, raw: dict[str, Any]) -> None:
        message = str(raw.get("message") or f"the engine answered {status} without a message")
        # 503: it loads its model again, and says no time itself (tools/server, ERROR_TYPE_UNAVAILABLE); 429: an
        # attached engine's own front is busy.
        super().__init__(message, retry_after=2 if status in (_TOO_MANY, _UNAVAILABLE) else None)
        self.status = status
        self.kind = str(raw.get("type") or "server_error")
        self.raw = raw
        self.code = raw.get("code", self.code)
        if self.kind == "exceed_context_size_error":
            self.outcome = "overflow"

    def details(self) -> dict[str, Any]:
        return {k: v for k, v in self.raw.items() if k not in ("message", "type", "code", "param")}


class Unavailable(SlotkeeperError):
    """Not now: try again after `retry_after` seconds."""

    status, kind, code = 503, "unavailable_error", "unavailable"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message, retry_after=retry_after)


class Busy(Unavailable):
    """The waiting line is full (max_waiting)."""

    code = "waiting_line_full"


class WaitedTooLong(Unavailable):
    """No slot came free within max_wait_seconds."""

    code, outcome = "waited_too_long", "timeout"


class EngineStarting(Unavailable):
    """The engine is loading or being restarted."""

    code = "engine_starting"


class PoolExceeded(Unavailable):
    """Two runners outgrew the engine's shared context; the younger one ends (design rule 8)."""

    code, outcome = "pool_exceeded", "overflow"


class ShuttingDown(Unavailable):
    """The proxy is stopping."""

    code = "shutting_down"


def too_deep(error: TypeError) -> Exception:
    """What a failure to write a client's JSON means: orjson reads deeper nesting than it writes. Its JSONEncodeError is
    TypeError itself, and any other TypeError is a mistake of ours: it comes back as it is."""
    if "Recursion limit" not in str(error):
        return error
    return BadRequest(f"The body cannot be passed on: {error}. Nest it less deeply.")


def body(error: SlotkeeperError) -> bytes:
    """The JSON body of an error in OpenAI's shape; llama-server's native doors use the same object, and so does whoever
    asks for none of the model doors.

    `source` stands beside the error, as the contract says, and inside it too: the OpenAI SDKs hand their users only the
    inner object.
    """
    inner = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return orjson.dumps({"error": inner | {"source": error.source} | error.details(), "source": error.source})


def event(error: SlotkeeperError) -> bytes:
    """The same as one server-sent event, for a stream whose status line is already sent; llama-server's own spelling.

    No [DONE] follows: an SDK must not take a broken answer for a whole one.
    """
    return b"data: " + body(error) + b"\n\n"


def ended(why: str) -> str:
    """A reason as the end of a sentence."""
    return why if why.endswith((".", "?")) else f"{why}."
