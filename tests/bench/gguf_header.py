"""Time and memory of reading a GGUF header with a vocabulary of 250,000 tokens (wanted: < 0.5 s, < 40 MB).

usage: python -m tests.bench.gguf_header [MODEL.gguf]
Without a file: writes one with 250,000 tokens, their types and 500,000 merges.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from llamacpp.gguf import read_header
from llamacpp.memory import facts
from tests.fakes.gguf_bytes import gguf_file

N_TOKENS = 250_000


def write(path: Path) -> None:
    tokens = [f"Ġword{i:x}" for i in range(N_TOKENS)]
    merges = [f"Ġwo rd{i:x}" for i in range(2 * N_TOKENS)]
    model = {"general.architecture": "llama", "llama.block_count": 32}
    vocabulary = {"tokenizer.ggml.tokens": tokens, "types": [1] * N_TOKENS, "tokenizer.ggml.merges": merges}
    path.write_bytes(gguf_file({**model, **vocabulary}))


def measure(path: Path) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    found = facts(read_header(path))
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB on Linux, bytes on macOS
    grown_mb = grown / 1e6 if sys.platform == "darwin" else grown / 1e3
    print(f"{path.name}: {found.kind}, {path.stat().st_size / 1e6:.1f} MB file, {seconds:.3f} s, +{grown_mb:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
    else:  # the writer's memory must not hide the reader's: measure in a fresh process
        import subprocess

        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "vocabulary-250k.gguf"
            write(made)
            subprocess.run([sys.executable, "-m", "tests.bench.gguf_header", str(made)], check=True)
