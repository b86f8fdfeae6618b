"""Is this file a model? Asked before a process is started for it, so that the answer is a sentence."""

from pathlib import Path

from llamacpp.errors import EngineSetupError

GGUF_MAGIC = b"GGUF"  # ggml/include/gguf.h


def check_model(path: Path) -> None:
    """Raises EngineSetupError when `path` is no readable GGUF file."""
    if path.is_dir():
        raise EngineSetupError(f"The model {path} is a directory. Give the .gguf file in it (of several, the first).")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError as error:
        raise EngineSetupError(f"There is no model at {path}. Check the path given with --model.") from error
    except OSError as error:
        raise EngineSetupError(f"The model {path} cannot be read: {error.strerror}.") from error
    if not magic:
        raise EngineSetupError(f"The model {path} is empty, not a GGUF file. Download it again, to its end.")
    if magic != GGUF_MAGIC:
        raise EngineSetupError(
            f"{path} is not a GGUF file (it begins with {magic!r}). llama-server reads GGUF only: download that form "
            "of the model, or convert it with llama.cpp's convert_hf_to_gguf.py. A file of a few hundred bytes is "
            "usually a Git LFS pointer."
        )
