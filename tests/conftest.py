"""Fixtures that several test modules share: tiny models, real engines, the real proxy."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from llamacpp.engines import EngineSpec
from llamacpp.engines.build import built_servers
from llamacpp.engines.cache import cache_dir
from llamacpp.engines.models import fetch_demo
from tests import servers
from tests.models import make_tiny_models
from tests.servers import ONE_THREAD, LiveEngine, ProxyServer

# The gate repeats the same series; by hand they are random. A series that finds something new belongs into an issue.
# However busy the machine is, no test fails for it.
for name, derandomize in (("hand", False), ("ci", True)):
    hypothesis.settings.register_profile(
        name, derandomize=derandomize, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "hand")


ON_BOTH = frozenset("test_bases test_draft test_pool test_router test_sdk test_sleep test_tables test_turns".split())
"""Files of tests/live that the gate runs on engine A, too."""
LONG_FILES = frozenset("test_beside test_fuzz test_given_back test_memory test_templates".split())
LONG = (
    "test_twenty_turns[B-hybrid",
    "test_twenty_turns_with_prunes",
    "test_prepared_in_idle_time[B-True",
    "test_off[B",
    "test_engine_killed_while_it_sums_up[B-/v1/messages",
    "test_five_retries_cost_one_prefill[B-swa",
    "test_five_retries_cost_one_prefill[B-hybrid",
    "test_a_recorded_base[B-swa",
    "test_a_recorded_base[B-hybrid",
    "test_the_same_answer_in_each_dialect",
    "test_assembled_tool_calls",
    "test_structured_output_by_the_sdks_own_parsers",
    "test_two_directories[B-cline",
    "test_two_directories[B-pi",
    "test_files_that_cannot_be_cut_back[B-swa",
)
"""What is too long for the gate, of tests/live."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what the gate leaves to `make test-all`."""
    for item in items:
        if item.path.parent.name == "live":
            file = item.path.stem
            is_repeated = item.get_closest_marker("native") is not None and file not in ON_BOTH
            if is_repeated or file in LONG_FILES or item.name.startswith(LONG):
                item.add_marker(pytest.mark.long)


StartEngine = Callable[..., Awaitable[LiveEngine]]
StartProxy = Callable[..., Awaitable[ProxyServer]]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, fetched once into the cache directory."""
    return fetch_demo(cache_dir() / "models")


@pytest.fixture(scope="session")
def tiny_models(demo_model: Path) -> dict[str, Path]:
    """dense, swa and hybrid: random weights, real cache behaviour."""
    return make_tiny_models(demo_model)


@pytest.fixture
def engine_kind(request: pytest.FixtureRequest) -> str:
    """ "binary" (engine A) in tests marked native, else "embedded" (engine B)."""
    return "binary" if request.node.get_closest_marker("native") else "embedded"


@pytest.fixture(scope="session")
def native_server() -> Path:
    """Engine A. `make test-native` builds it and names it; otherwise one that was built before."""
    named = os.environ.get("SLOTKEEPER_TEST_SERVER")
    found = [Path(named)] if named else list(built_servers())
    assert found, "no llama-server was built: run `make test-native`, or set SLOTKEEPER_TEST_SERVER"
    return found[0]


@pytest.fixture
async def live_engine(
    request: pytest.FixtureRequest, engine_kind: str, tiny_models: dict[str, Path], tmp_path: Path
) -> AsyncIterator[StartEngine]:
    """Start real engines: `engine = await live_engine("dense", parallel=2, ctx_size=4096, extra=("--swa-full",))`."""
    binary = request.getfixturevalue("native_server") if engine_kind == "binary" else None
    async with AsyncExitStack() as stack:

        async def start(model: str | Path = "dense", *, extra: tuple[str, ...] = (), **options: Any) -> LiveEngine:
            state_dir = options.pop("state_dir", tmp_path / f"engine-{len(started)}")
            state_dir.mkdir(parents=True, exist_ok=True)
            options = {"parallel": 2, "ctx_size": 4096, "slot_dir": state_dir / "slots"} | options
            path = tiny_models[model] if isinstance(model, str) else model
            spec = EngineSpec(model=path, kind=engine_kind, llama_server=binary, extra=(*ONE_THREAD, *extra), **options)
            engine = await servers.start_engine(spec, state_dir)
            started.append(engine)
            stack.push_async_callback(engine.stop)
            return engine

        started: list[LiveEngine] = []
        yield start


@pytest.fixture
async def proxy_server(
    request: pytest.FixtureRequest, engine_kind: str, tiny_models: dict[str, Path], tmp_path: Path
) -> AsyncIterator[StartProxy]:
    """Start the real command and wait until it is ready.

    `proxy = await proxy_server("--parallel", "2", model="dense")` has an engine of its own (one thread);
    `await proxy_server("--upstream", fake.url)` has none. `wait=False` returns while it still starts.
    """
    async with AsyncExitStack() as stack:

        async def start(
            *arguments: str, model: str | None = None, state_dir: Path | None = None, wait: bool = True, **options: Any
        ) -> ProxyServer:
            words = list(arguments)
            if model is not None:
                words += ["--model", str(tiny_models[model]), "--engine", engine_kind]
                options["engine_flags"] = (*ONE_THREAD, *options.get("engine_flags", ()))
                if engine_kind == "binary":
                    words += ["--llama-server", str(request.getfixturevalue("native_server"))]
            proxy = await servers.start_proxy(words, state_dir or tmp_path / "state", **options)
            stack.push_async_callback(proxy.stop)
            if wait:
                await proxy.ready()
            return proxy

        yield start
