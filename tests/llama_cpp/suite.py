"""Both runs of llama.cpp's tests, and what the two say about Slotkeeper."""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.llama_cpp.source import lay_out
from tests.servers import ROOT, clean_environment

FILES = (
    "test_chat_completion.py",
    "test_compat_oai_responses.py",
    "test_compat_anthropic.py",
    "test_tool_call.py",
)
EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
PATIENCE = 60  # seconds until one test counts as hung


@dataclass(frozen=True, slots=True)
class Ended:
    """How one test ended: "passed", "failed" or "skipped", why ("" for passed), and what plugin.py saw in it."""

    outcome: str
    why: str
    seen: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One test both ways; `reason` is what exceptions.toml says of it."""

    test: str
    direct: Ended
    through: Ended
    reason: str = ""

    @property
    def differs(self) -> bool:
        """It passes directly and not through Slotkeeper; or it fails in another way, or another text came."""
        return self.direct != self.through

    @property
    def difference(self) -> str:
        """What came through Slotkeeper, and what directly."""
        ways = ((self.through, "through Slotkeeper"), (self.direct, "directly"))
        return "; ".join(f"{e.outcome} {way} ({e.why or e.seen})" for e, way in ways)

    @property
    def wrong(self) -> str:
        """What is wrong with this row; "" for nothing."""
        if self.differs and not self.reason:
            return f"{self.test}: {self.difference}"
        if self.reason and not self.differs:
            return f"{self.test}: listed in {EXCEPTIONS.name}, but it ends as it does directly. Take it out."
        return ""


def run(source: Path, engine: Path, model: Path, files: Sequence[str] = FILES, only: str = "") -> list[Row]:
    """Runs the test files on `engine` and on Slotkeeper before it. `only`: a pytest -k expression.

    Raises FileNotFoundError when `source` holds no tests, RuntimeError with pytest's words when it could not run them.
    """
    with tempfile.TemporaryDirectory(prefix="slotkeeper-llama-cpp-") as folder:
        place = lay_out(source, Path(folder, "llama.cpp"))
        stand_in = Path(folder, "slotkeeper")
        stand_in.write_text(f"#!{sys.executable}\nfrom tests.llama_cpp.stand_in import main\n\nmain()\n")
        stand_in.chmod(0o755)
        own = {"SUITE_MODEL": str(model), "SUITE_ENGINE": str(engine), "SUITE_STATE": folder}
        ways = [own | {"SUITE_SERVER": str(server)} for server in (engine, stand_in)]
        with ThreadPoolExecutor(len(ways)) as pool:
            direct, through = pool.map(lambda way: _pytest(place, files, only, way), ways)
    return rows(direct, through, exceptions(files))


def _pytest(place: Path, files: Sequence[str], only: str, own: dict[str, str]) -> dict[str, Ended]:
    """One run in a process of its own."""
    results = Path(own["SUITE_STATE"], f"{Path(own['SUITE_SERVER']).name}.jsonl")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.llama_cpp.plugin", "-p", "no:cacheprovider"]
    command += ["-c", "pytest.ini", f"--timeout={PATIENCE}", *(["-k", only] if only else [])]
    command += [f"unit/{file}" for file in files]
    environment = clean_environment() | own | {"SUITE_RESULTS": str(results), "PYTHONPATH": f"{ROOT}:{place}"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not results.is_file():
        raise RuntimeError(f"pytest could not run llama.cpp's tests:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return ended(results.read_text())


def ended(lines: str) -> dict[str, Ended]:
    """plugin.py's lines by test; a test that passed and failed while it was cleaned up has failed."""
    found: dict[str, Ended] = {}
    for line in map(json.loads, lines.splitlines()):
        found[line["test"]] = Ended(line["outcome"], line["why"], json.dumps(line["seen"]))
    return found


def rows(direct: Mapping[str, Ended], through: Mapping[str, Ended], listed: Mapping[str, str]) -> list[Row]:
    """The table, in the order of the tests."""
    absent = Ended("absent", "the test was not run")
    return [Row(t, direct.get(t, absent), through.get(t, absent), listed.get(t, "")) for t in {**direct, **through}]


def unknown(table: Sequence[Row], listed: Mapping[str, str]) -> list[str]:
    """Sentences about exceptions for tests that there are not; only for a run of whole files."""
    known = {row.test for row in table}
    return [
        f"{test}: listed in {EXCEPTIONS.name}, but there is no such test. Take it out."
        for test in listed.keys() - known
    ]


def exceptions(files: Sequence[str]) -> dict[str, str]:
    """Test -> reason, of exceptions.toml, for the tests of these files."""
    listed = tomllib.loads(EXCEPTIONS.read_text()).get("exception", [])
    return {e["test"]: e["reason"] for e in listed if e["test"].split("::")[0] in files}
