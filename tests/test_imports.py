"""Imports point one way (design.md, House): a module may import what its place allows and nothing else."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parsing import parsed

ROOT = Path(__file__).parent.parent
PACKAGES = ("policies", "llamacpp", "proxy")
LLAMACPP = {"httpx", "pydantic", "orjson", "tiktoken", "xxhash", "llama_cpp", "xllamacpp", "llamacpp"}
# Third-party modules that only some modules may import: name -> the places, as path prefixes.
ONLY_IN = {
    "fastapi": ("proxy/app.py", "proxy/api/"),
    "starlette": ("proxy/app.py", "proxy/api/"),
    "uvicorn": ("proxy/cli.py",),
    "prometheus_client": ("proxy/metrics.py", "proxy/api/ops.py"),
    "llama_cpp": ("llamacpp/tokens.py",),
    "tiktoken": ("llamacpp/tokens.py",),
    "xllamacpp": ("llamacpp/engines/embedded.py",),
}


def imported(source: str) -> Iterator[str]:
    """Every absolute import of a module, wherever it stands."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            yield node.module or ""


def wrong_imports(place: str, source: str) -> list[str]:
    """The imports that a module at `place` (path in the repository) may not have."""
    allowed = {"policies": {"policies"}, "llamacpp": LLAMACPP, "proxy": None}[place.split("/", maxsplit=1)[0]]
    wrong = []
    for name in imported(source):
        top = name.split(".")[0]
        is_foreign = allowed is not None and top not in allowed and top not in sys.stdlib_module_names
        is_elsewhere = top in ONLY_IN and not place.startswith(ONLY_IN[top])
        if is_foreign or is_elsewhere or top == "tests":
            wrong.append(name)
    return wrong


MODULES = sorted(str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("place", MODULES)
def test_imports_point_one_way(place: str) -> None:
    """No module imports what its place does not allow."""
    assert wrong_imports(place, (ROOT / place).read_text()) == []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("policies/types.py", "import httpx"),
        ("policies/types.py", "from llamacpp.client import LlamaClient"),
        ("llamacpp/client.py", "def f():\n    from policies.types import Line"),
        ("llamacpp/client.py", "import proxy.config"),
        ("proxy/exchange.py", "from fastapi import Request"),
        ("proxy/app.py", "import uvicorn"),
        ("proxy/slots.py", "import prometheus_client.core"),
        ("llamacpp/render.py", "import tiktoken"),
        ("proxy/app.py", "from tests.fakes import llama"),
    ],
)
def test_wrong_imports_are_seen(place: str, source: str) -> None:
    """Each direction that design.md forbids is found."""
    assert len(wrong_imports(place, source)) == 1
