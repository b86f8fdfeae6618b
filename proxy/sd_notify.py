"""Telling systemd how far we are (Type=notify): a datagram to $NOTIFY_SOCKET (sd_notify(3)). Without one, nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable

LOOK_SECONDS = 0.2
"""Pause between two looks at whether an engine can be asked."""


def notify(*lines: str) -> bool:
    """Sends lines like `READY=1`; whether somebody could be told. Raises nothing: we run without a manager, too."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        # "@" stands for the NUL byte that begins a name in Linux's abstract namespace.
        sock.sendto("\n".join(lines).encode(), "\0" + address[1:] if address[0] == "@" else address)
        return True
    return False


def stopping() -> None:
    """The stop has begun: what is running is finished, slot files are saved."""
    notify("STOPPING=1", "STATUS=finishing answers, saving slots")


@contextlib.asynccontextmanager
async def told(
    is_ready: Callable[[], bool], why_not: Callable[[], str], greet: Callable[[], None]
) -> AsyncIterator[None]:
    """READY=1 and `greet` once `is_ready` says what /readyz would, while the body runs; until then the reason as the
    status."""
    watching = asyncio.create_task(_watch(is_ready, why_not, greet), name="sd_notify")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(is_ready: Callable[[], bool], why_not: Callable[[], str], greet: Callable[[], None]) -> None:
    said = ""
    while not is_ready():
        reason = " ".join(why_not().split())[:200]
        if reason != said:
            notify(f"STATUS=not ready: {reason}")
        said = reason
        await asyncio.sleep(LOOK_SECONDS)
    greet()
    notify("READY=1", "STATUS=ready")
