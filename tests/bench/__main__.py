"""The project's own benchmark: `python -m tests.bench` (make bench); parts of it by their names.

prefill: recorded agent sessions against the real proxy and engine on tiny models; tokens, whatever the machine.
overhead: what the proxy adds to an instant upstream; milliseconds, so it does. Nothing else should run beside it.
dialects: CPU per request of each dialect on the same upstream.
streams: many clients at once, who leave at random and read slowly; fails for a lost slot or a word of another's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from llamacpp.engines.cache import cache_dir
from llamacpp.engines.models import fetch_demo
from tests.bench.dialects import PATHS, cpu_per_request
from tests.bench.process import ENGINE_KEY, ROOT, Proxy, free_port
from tests.bench.streams import measure
from tests.models import make_tiny_models

BENCH = Path(__file__).parent
TEMPLATE = ROOT / "tests" / "data" / "chatml-tools.jinja"
ENOUGH = ["--parallel", "4", "--ctx-size", "65536"]  # room for every conversation of a session
TIGHT = ["--parallel", "2", "--ctx-size", "12288"]  # issue 2: too small for two sessions at once
RESTART_AT = 0.67  # of the session; issue 2

# name, model, traces, proxy flags, with a restart?
Row = tuple[str, str, list[str], list[str], bool]


def rows() -> Iterator[Row]:
    """What is measured, in order."""
    for trace in ("opencode-run1", "pi-run1", "cline-run1"):
        for restart in (False, True):
            yield f"{trace}{', restart' if restart else ''}", "dense", [trace], ENOUGH, restart
    yield "opencode-run1 and pi-run1 interleaved, 12,288 tokens", "dense", ["opencode-run1", "pi-run1"], TIGHT, False
    for model in ("swa", "hybrid"):
        for restart in (False, True):
            yield f"opencode-run1{', restart' if restart else ''}", model, ["opencode-run1"], ENOUGH, restart


def prefill(options: argparse.Namespace) -> None:
    """One line of JSON for each row; efficiency and bound_efficiency as prefill.py explains them."""
    models = make_tiny_models(fetch_demo(cache_dir() / "models"))
    for name, model, traces, flags, restart in rows():
        if options.only and options.only not in f"{model} {name}":
            continue
        files = [options.traces / f"{trace}.jsonl" for trace in traces]
        missing = [str(file) for file in files if not file.is_file()]
        if missing:
            raise SystemExit(f"{', '.join(missing)}: not there; give the recordings' directory with --traces DIR")
        with tempfile.TemporaryDirectory(prefix="slotkeeper-bench-") as folder:
            arguments = ["--model", str(models[model]), "--engine", options.engine, *flags]
            engine_flags = ["-t", "1", "--jinja", "--chat-template-file", str(TEMPLATE), *options.engine_flag]
            proxy = Proxy.start(Path(folder) / "run", arguments, engine_flags)
            try:
                result = replay(proxy, files, restart)
            finally:
                Proxy(proxy.file).stop()
        print(json.dumps({"model": model, "session": name} | result), flush=True)


def replay(proxy: Proxy, files: list[Path], restart: bool) -> dict[str, Any]:
    """Run prefill.py --loop against a proxy."""
    command = [sys.executable, str(BENCH / "prefill.py"), "--base", proxy.base, "--engine", proxy.facts["engine"]]
    command += ["--engine-key", ENGINE_KEY, "--loop", "--rows"]
    if restart:
        again = f"{sys.executable} -m tests.bench.process {proxy.file}"
        command += ["--restart-at", str(RESTART_AT), "--restart", again]
    done = subprocess.run([*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    errors = [line for line in done.stderr.splitlines() if '"error"' in line]
    result: dict[str, Any] = json.loads(done.stdout)
    return result | ({"first_error": errors[0]} if errors else {})


def overhead(options: argparse.Namespace) -> None:
    """overhead.py against its own stub, directly and through the proxy: ten times 100 turns, then resident memory.

    Ten conversations rather than one of 1,000 turns, which would outgrow the stub's context.
    """
    with stub() as upstream, tempfile.TemporaryDirectory(prefix="slotkeeper-bench-") as folder:
        proxy = Proxy.start(Path(folder) / "run", ["--upstream", upstream], [])
        try:
            command = [sys.executable, str(BENCH / "overhead.py"), "--direct", upstream, "--proxy", proxy.base]
            command += ["--pid", str(proxy.facts["pid"])]
            for run in range(1 if options.only else 10):
                each = ["--turns", "100", "--body-kb", str(100 + run)]  # another one, not the same again
                done = subprocess.run([*command, *each], capture_output=True, text=True, check=True)
                print(json.dumps({"requests": 100 * (run + 1)} | json.loads(done.stdout)), flush=True)
        finally:
            proxy.stop()


@contextmanager
def stub() -> Iterator[str]:
    """overhead.py's instant upstream."""
    port = free_port()
    process = subprocess.Popen([sys.executable, str(BENCH / "overhead.py"), "--stub", str(port)])
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
            client.get(f"http://127.0.0.1:{port}/health").raise_for_status()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def dialects(options: argparse.Namespace) -> None:
    """One line for each size of a conversation: CPU per request in each dialect, and how many times that of chat."""
    del options
    for kilobytes in (10, 100):
        found = {}
        for dialect in PATHS:
            with stub() as upstream, tempfile.TemporaryDirectory(prefix="slotkeeper-bench-") as folder:
                proxy = Proxy.start(Path(folder) / "run", ["--upstream", upstream], [])
                try:
                    found[dialect] = cpu_per_request(dialect, proxy.base, proxy.facts["pid"], 100, kilobytes)
                finally:
                    proxy.stop()
        times = {dialect: round(cpu / found["chat"], 2) for dialect, cpu in found.items()}
        cpu = {dialect: round(cpu, 1) for dialect, cpu in found.items()}
        print(json.dumps({"body_kb": kilobytes, "cpu_ms_per_request": cpu, "times_chat": times}), flush=True)


def streams(options: argparse.Namespace) -> None:
    """One line of JSON: what came of the clients' requests, the slots afterwards, resident memory on the way."""
    model = make_tiny_models(fetch_demo(cache_dir() / "models"))["dense"]
    with tempfile.TemporaryDirectory(prefix="slotkeeper-bench-") as folder:
        arguments = ["--model", str(model), "--engine", options.engine, "--parallel", "16", "--ctx-size", "24576"]
        # A sign of life with each report, so that clients can leave in prefill and join.
        arguments += ["--keep-alive", "0.001", "--finish-prefill", "always"]
        engine_flags = ["-t", "1", "--jinja", "--chat-template-file", str(TEMPLATE), *options.engine_flag]
        proxy = Proxy.start(Path(folder) / "run", arguments, engine_flags)
        try:
            found = measure(proxy.base, proxy.facts["pid"], options.clients, options.seconds, options.seed)
        finally:
            proxy.stop()
    print(json.dumps(found), flush=True)


def gguf(options: argparse.Namespace) -> None:
    """Seconds and megabytes to read a header with a vocabulary of 250,000 tokens."""
    del options
    subprocess.run([sys.executable, "-m", "tests.bench.gguf_header"], cwd=ROOT, check=True)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "prefill": prefill,
    "overhead": overhead,
    "dialects": dialects,
    "streams": streams,
    "gguf": gguf,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces", help="recorded sessions")
    parser.add_argument("--engine", default="embedded", help="embedded or binary")
    parser.add_argument("--engine-flag", action="append", default=[], help="a further flag for llama-server")
    parser.add_argument("--only", help="rows whose 'model name' contains this; the first run of overhead")
    parser.add_argument("--clients", type=int, default=64, help="of streams")
    parser.add_argument("--seconds", type=float, default=60.0, help="of streams")
    parser.add_argument("--seed", type=int, default=1, help="of what streams' clients do")
    arguments = parser.parse_args()
    for part in arguments.part or list(PARTS):
        PARTS[part](arguments)
