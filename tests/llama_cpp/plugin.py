"""A pytest plugin that makes llama.cpp's server tests start what we say, and writes down how each test ended.

It runs in the pytest that run.py starts, in llama.cpp's tests folder, with these variables: SUITE_SERVER (what to start
in place of llama-server, which takes llama-server's flags), SUITE_MODEL (the GGUF in place of every download) and
SUITE_RESULTS (a file that gets one line of JSON a test).
"""

import json
import os
import re
import sys
import types
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.process import free_port

OTHER_MODELS = ("bert_bge_small", "bert_bge_small_with_fa", "jina_reranker_tiny", "tinygemma3", "router")
"""Presets of llama.cpp's tests/utils.py that need what a small text model has not: a projector, a ranking head..."""
STORY = re.compile("Suddenly|Whillicter|couldn't|felter|John|blue|3000|going|princesses")
"""In patterns that only the model which they download would fulfil; of ours any text is right, and is written down."""
COUNTS = ("n_prompt",)
"""Parameters with that model's numbers of tokens; ours are written down."""

seen: list[Any] = []
"""What the running test was told in places where only their model's answer could have been expected: the same text and
numbers have to come both ways."""


class Anything:
    """Equal to whatever it is compared with, which it writes down."""

    def __eq__(self, other: object) -> bool:
        seen.append(other)
        return True

    __hash__ = None  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Patches their utils.py before any test module takes its names."""
    del config
    sys.modules.setdefault("wget", types.ModuleType("wget"))  # only their download_file calls it
    import utils  # type: ignore[import-not-found]

    begin = utils.ServerProcess.start

    def start(server: Any, timeout_seconds: int = 60) -> None:
        server.server_path = os.environ["SUITE_SERVER"]
        server.model_file, server.offline, server.n_threads = os.environ["SUITE_MODEL"], False, 1
        server.model_hf_repo = server.model_hf_file = server.model_url = None
        server.server_port = free_port()
        begin(server, timeout_seconds)

    match = utils.match_regex

    def match_regex(regex: str, text: str) -> bool:
        if STORY.search(regex) is None:
            return bool(match(regex, text))
        seen.append(text)
        return bool(text)

    utils.ServerProcess.start, utils.match_regex = start, match_regex
    utils.download_file = _no_such_model
    for name in OTHER_MODELS:
        setattr(utils.ServerPreset, name, staticmethod(_no_such_model))


def _no_such_model(*_: object) -> None:
    pytest.skip("needs a model that would have to be downloaded")


@pytest.fixture(autouse=True)
def stop_servers() -> Iterator[None]:
    """As their conftest.py does."""
    yield
    import utils

    for server in set(utils.server_instances):
        server.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without their slow tests, which download models of gigabytes, and without their model's numbers of tokens."""
    items[:] = [item for item in items if item.get_closest_marker("slow") is None]
    for item in items:
        if (spec := getattr(item, "callspec", None)) is not None:
            spec.params.update({name: Anything() for name in COUNTS if name in spec.params})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """One line a test: its name, how it ended, where and why it failed, and what it was told."""
    report = yield
    if report.when != "call" and report.outcome == "passed":
        return report
    line = {
        "test": item.nodeid.removeprefix("unit/"),
        "outcome": report.outcome,
        "why": _why(report, call),
        "seen": seen,
    }
    with Path(os.environ["SUITE_RESULTS"]).open("a") as results:
        results.write(json.dumps(line) + "\n")
    seen.clear()
    return report


def _why(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    """`line N: message` of a failure, the reason of a skip, nothing of a test that passed."""
    if report.outcome == "passed":
        return ""
    if report.outcome == "skipped":
        return str(call.excinfo.value) if call.excinfo else ""
    crash = getattr(report.longrepr, "reprcrash", None)
    place = next((e.lineno + 1 for e in call.excinfo.traceback if "test_" in str(e.path)), 0) if call.excinfo else 0
    return f"line {place}: {crash.message.splitlines()[0] if crash else report.longreprtext[-300:]}"
