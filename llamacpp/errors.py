"""What can go wrong between us and llama-server. One tree, mapped to HTTP answers at the proxy's border."""


class EngineError(Exception):
    """Something failed at or on the way to an engine. `str(error)` is a sentence for people."""

    @property
    def message(self) -> str:
        return str(self)


class EngineUnreachable(EngineError):
    """No connection, or it broke before the answer was complete."""


class EngineStarting(EngineError):
    """The engine answers but is still loading its model (503 `unavailable_error`)."""


class EngineRefused(EngineError):
    """The engine answered with an HTTP error.

    `status` is the HTTP status, `body` the answer as received, `message` the engine's own words when it gave any.
    """

    def __init__(self, status: int, body: bytes, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class EngineBroken(EngineError):
    """The engine's answer makes no sense: not JSON, fields missing, an event without end."""


class EngineSetupError(Exception):
    """An engine cannot be started: model missing, not GGUF, no llama-server found, flag unknown, port in use.

    `str(error)` is a sentence that says what to do about it.
    """


def is_refused(error: BaseException | None) -> bool:
    """Whether a connection was refused at the bottom of it: nobody listens there (no time-out, no lack of sockets)."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_refused, error.exceptions))
    return error is not None and (
        isinstance(error, ConnectionRefusedError) or is_refused(error.__cause__ or error.__context__)
    )
