"""`python -m llamacpp.engines`: the embedded engine's process (see embedded.py)."""

import os
import sys

from llamacpp.engines.embedded import main

if __name__ == "__main__":
    # Not sys.exit: llama.cpp's threads may still be up, and their destructors wait for each other.
    code = main()
    sys.stdout.flush()
    os._exit(code)
