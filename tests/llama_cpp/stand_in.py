"""`slotkeeper serve` in llama-server's clothes: started with llama-server's flags, in its place.

Flags that are Slotkeeper's own are given to it, those that it sets itself are left out, all others go on to the engine.
SUITE_ENGINE names the real llama-server, SUITE_STATE a folder for state directories.
"""

import os
import sys
import tempfile
from collections.abc import Sequence

TAKEN = {
    "--host": "--host",
    "--port": "--port",
    "--model": "--model",
    "--parallel": "--parallel",
    "--ctx-size": "--ctx-size",
}
"""llama-server's spelling -> ours; each with one value."""
WITHOUT_VALUE = ("--slots", "--no-slots", "--kv-unified")
"""Always on behind Slotkeeper, for the engine's part; clients get GET /slots from its own table."""
WITH_VALUE = ("--api-key", "--slot-save-path", "--cache-ram")


def translated(words: Sequence[str]) -> list[str]:
    """The words after `slotkeeper serve` for llama-server's `words`."""
    ours, engine, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if word in TAKEN:
            ours += [TAKEN[word], rest.pop(0)]
        elif word in WITH_VALUE:
            rest.pop(0)
        elif word not in WITHOUT_VALUE:
            engine.append(word)
    return [*ours, "--", *engine]


def main() -> None:
    """Becomes Slotkeeper: the process id is what the tests' utils.py started and will end."""
    state = tempfile.mkdtemp(dir=os.environ["SUITE_STATE"])
    words = ["serve", "--mode", "observe", "--engine", "binary", "--llama-server", os.environ["SUITE_ENGINE"]]
    words += ["--state-dir", state, *translated(sys.argv[1:])]
    os.execv(sys.executable, [sys.executable, "-m", "proxy", *words])


if __name__ == "__main__":
    main()
