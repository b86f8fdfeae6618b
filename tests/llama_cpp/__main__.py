"""`python -m tests.llama_cpp --source DIR`: llama.cpp's own server tests, directly and through Slotkeeper.

DIR: llama.cpp's folder, or the folder or .tar.gz of the llama-cpp-python sdist that holds it; without --source the one
that `slotkeeper build-server` left in the cache, else it is fetched as that command does. Prints a row for each test
that does not pass both ways and the counts of all; exits with 1 when one ends otherwise through Slotkeeper without
being listed in exceptions.toml, or is listed there and need not be.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from llamacpp.engines.build import SDIST, build_server, built_servers
from llamacpp.engines.cache import cache_dir
from llamacpp.engines.download import fetch
from llamacpp.engines.models import fetch_demo
from tests.llama_cpp.source import known_source
from tests.llama_cpp.suite import FILES, Row, exceptions, run, unknown
from tests.models import make_tiny_models


def main() -> int:
    """The exit code: 0 all well, 1 not, 2 wrong usage."""
    options = _parser().parse_args()
    source = options.source or known_source() or fetch(SDIST, cache_dir() / "downloads")
    engine = options.llama_server or next(iter(built_servers()), None) or build_server("cpu")
    model = make_tiny_models(fetch_demo(cache_dir() / "models"))["dense"]
    try:
        table = run(source, engine, model, options.files, options.only)
    except (FileNotFoundError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    report(table, everything=options.all)
    wrong = [row.wrong for row in table if row.wrong]
    wrong += [] if options.only else unknown(table, exceptions(options.files))
    print("\n".join(wrong))
    return 1 if wrong else 0


def report(table: Sequence[Row], *, everything: bool) -> None:
    """Prints the rows that are not plainly passed (all with `everything`) and the counts."""
    for row in table:
        if everything or row.differs or row.direct.outcome != "passed":
            print(f"{row.test} | {row.direct.outcome} | {row.through.outcome} | {row.reason or row.through.why}")
    counts = Counter((row.direct.outcome, row.through.outcome, row.differs) for row in table)
    for (direct, through, differs), n in counts.items():
        print(f"{n} {direct} directly, {through} through Slotkeeper{', otherwise' if differs else ''}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="where llama.cpp's tests lie")
    parser.add_argument("--llama-server", type=Path, default=os.environ.get("SLOTKEEPER_TEST_SERVER"), help="engine A")
    parser.add_argument("--files", nargs="+", default=list(FILES), help=f"test files; else {' '.join(FILES)}")
    parser.add_argument("--only", default="", help="only tests that match, as pytest's -k")
    parser.add_argument("--all", action="store_true", help="show every row")
    return parser


if __name__ == "__main__":
    sys.exit(main())
