"""What the distribution says about itself agrees with the tree and with the pinned versions."""

import re
import tomllib
from pathlib import Path

from proxy import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RUNTIME = set(
    "fastapi uvicorn httpx pydantic pydantic-settings prometheus-client tiktoken orjson structlog typer rich "
    "platformdirs xxhash".split()
)


def name_of(requirement: str) -> str:
    """The normalised name of a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def constraints() -> dict[str, str]:
    """Pinned versions by normalised name."""
    pairs = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line)
    return {name_of(name): version for name, version in pairs}


def test_packages_are_named_explicitly() -> None:
    """Each package directory is in the list, so a wheel holds all of them and no tests."""
    tops = ("proxy", "policies", "llamacpp")
    found = {
        str(p.parent.relative_to(ROOT)).replace("/", ".") for top in tops for p in (ROOT / top).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_files_that_are_no_code_are_packaged() -> None:
    """What the status page is made of is in the wheel, too."""
    data = PROJECT["tool"]["setuptools"]["package-data"]
    named = {f for package, globs in data.items() for g in globs for f in (ROOT / package.replace(".", "/")).glob(g)}
    ignored = (".py", ".pyc")
    found = {
        f for top in ("proxy", "policies", "llamacpp") for f in (ROOT / top).rglob("*.*") if f.suffix not in ignored
    }
    assert found == named


def test_runtime_dependencies_are_those_agreed() -> None:
    """Issue 2's list, each with a lower bound and nothing else."""
    wanted = PROJECT["project"]["dependencies"]
    assert {name_of(line) for line in wanted} == RUNTIME
    assert all(re.fullmatch(r"[a-z-]+(\[standard\])?>=[\d.]+", line) for line in wanted)


def test_every_dependency_is_pinned() -> None:
    """constraints.txt has an exact version of all that can be installed, and no address."""
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"embedded", "native", "test"}
    wanted = [*PROJECT["project"]["dependencies"], *(line for lines in extras.values() for line in lines)]
    assert {name_of(line) for line in wanted} - constraints().keys() == set()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in (ROOT / "constraints.txt").read_text().split())


def test_version_is_in_the_changelog_or_unreleased() -> None:
    """The changelog begins with this version, or with what is not released yet."""
    heads = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] in ("Unreleased", __version__)


def test_command_is_there() -> None:
    """`slotkeeper` is `python -m proxy`."""
    assert PROJECT["project"]["scripts"] == {"slotkeeper": "proxy.__main__:main"}
