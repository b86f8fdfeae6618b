"""`slotkeeper` with a stand-in for proxy.app: what the command does around the app, without engines.

python -m tests.fakes.serve_stub serve ...   STUB=fail|slow changes how the lifespan behaves.
"""

import asyncio
import os
import sys
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI

from llamacpp.errors import EngineSetupError
from proxy.cli import main
from proxy.config import Settings

log = structlog.get_logger()


def create_app(settings: Settings) -> FastAPI:
    """An app with one door that never ends, and a control app."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings.state_dir.mkdir(parents=True, exist_ok=True)
        if os.environ.get("STUB") == "fail":
            raise EngineSetupError("The model cannot be loaded. Choose another.")
        if os.environ.get("STUB") == "bug":
            raise RuntimeError("secret prompt text")
        yield
        log.info("saving")
        if os.environ.get("STUB") == "slow":
            await asyncio.Event().wait()
        log.info("saved")

    app = FastAPI(lifespan=lifespan)
    app.state.control = FastAPI()

    @app.get("/readyz")
    def readyz() -> dict[str, bool]:
        return {"ready": True}

    @app.get("/endless")
    async def endless() -> None:
        log.info("endless began")
        await asyncio.Event().wait()

    @app.state.control.get("/snapshots")
    def snapshots() -> dict[str, object]:
        return {"snapshots": [], "total_bytes": 1, "budget_bytes": 2}

    return app


if __name__ == "__main__":
    stub = types.ModuleType("proxy.app")
    stub.create_app = create_app  # type: ignore[attr-defined]
    sys.modules["proxy.app"] = stub
    sys.exit(main())
