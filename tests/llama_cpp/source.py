"""Where llama.cpp's server tests are taken from, and the place they are run in."""

import shutil
import tarfile
from pathlib import Path

from llamacpp.engines.build import SDIST
from llamacpp.engines.cache import cache_dir

TESTS = Path("tools", "server", "tests")
TEMPLATES = Path("models", "templates")  # named by the tests as ../../../models/templates
INSIDE_SDIST = Path("vendor", "llama.cpp")


def known_source() -> Path | None:
    """The sdist, or its unpacked source, where `slotkeeper build-server` keeps them; None when neither is there."""
    cache = cache_dir()
    places = [cache / "downloads" / SDIST.file_name, *sorted((cache / "llama-server").glob("*.work/llama.cpp"))]
    return next((place for place in places if place.is_file() or (place / TESTS).is_dir()), None)


def lay_out(source: Path, into: Path) -> Path:
    """Copies the tests and templates of `source` (llama.cpp's folder, the sdist's, or its .tar.gz) into `into`.

    Returns the folder to run pytest in. Raises FileNotFoundError with a sentence when `source` holds no such tests.
    """
    if source.is_file():
        _unpack(source, into)
    else:
        root = next((at for at in (source, source / INSIDE_SDIST) if (at / TESTS / "utils.py").is_file()), None)
        if root is not None:
            for part in (TESTS, TEMPLATES):
                shutil.copytree(root / part, into / part)
    tests = into / TESTS
    if not (tests / "utils.py").is_file():
        raise FileNotFoundError(f"{source} holds no {TESTS}/utils.py. Give llama.cpp's folder, or {SDIST.file_name}.")
    # It downloads models before the first test and wants packages that nothing else here needs; plugin.py stands in.
    (tests / "conftest.py").unlink(missing_ok=True)
    return tests


def _unpack(sdist: Path, into: Path) -> None:
    with tarfile.open(sdist) as archive:
        for member in archive:
            inside = Path(*Path(member.name).parts[1:])  # without llama_cpp_python-X.Y.Z/
            if member.isfile() and any(inside.is_relative_to(INSIDE_SDIST / part) for part in (TESTS, TEMPLATES)):
                member.name = str(inside.relative_to(INSIDE_SDIST))
                archive.extract(member, into, filter="data")
