"""The tiny models: made once per version of their script, kept in the cache directory."""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from llamacpp.engines.cache import cache_dir, locked

SCRIPT = Path(__file__).with_name("tiny_models.py")


def make_tiny_models(vocabulary: Path) -> dict[str, Path]:
    """dense, swa and hybrid, with the vocabulary of a GGUF file: random weights, real cache behaviour."""
    version = sha256(SCRIPT.read_bytes() + vocabulary.name.encode()).hexdigest()[:12]
    place = cache_dir() / f"tiny-models-{version}"
    with locked(place.with_suffix(".lock")):
        if not place.is_dir():
            with TemporaryDirectory(dir=place.parent) as made:
                command = [sys.executable, str(SCRIPT), str(vocabulary), f"{made}/new"]
                subprocess.run(command, check=True, capture_output=True)
                Path(made, "new").rename(place)
    return {kind: place / f"{kind}.gguf" for kind in ("dense", "swa", "hybrid")}
