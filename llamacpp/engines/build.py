"""`slotkeeper build-server`: llama-server from the llama.cpp source that llama-cpp-python's sdist holds.

The build lies in the cache (`cache.cache_dir()`), named by the sdist's hash and the backend, so that every clone
shares it and a newer pin never meets an older build. An interrupted build goes on where it stopped.
"""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Literal, get_args

from llamacpp.engines import binary
from llamacpp.engines.cache import cache_dir, locked
from llamacpp.engines.download import Package, Progress, fetch, no_progress, run_lines
from llamacpp.errors import EngineSetupError

Backend = Literal["cpu", "cuda", "metal"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# Engine A of llama-server.md: its vendor/llama.cpp is commit 0c1e57098.
SDIST = Package(
    "llama-cpp-python",
    "0.3.36",
    "llama_cpp_python-0.3.36.tar.gz",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
)
_SOURCE = "llama_cpp_python-0.3.36/vendor/llama.cpp/"

# llama-server.md, "Ways to get one": without LLAMA_USE_PREBUILT_UI=OFF the build tries to download.
_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
_BACKEND_FLAGS: dict[Backend, tuple[str, ...]] = {
    # On macOS Metal is on unless it is switched off.
    "cpu": ("-DGGML_CUDA=OFF", "-DGGML_METAL=OFF"),
    "cuda": ("-DGGML_CUDA=ON",),
    "metal": ("-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"),
}


# GCC's `_tile_loadconfig` (seen with 12.2) tells the optimiser that it reads 8 bytes, so that the rest of the tile
# configuration is never stored and quantised models die of a general protection fault on processors with AMX. Without
# this macro ggml leaves its AMX kernels out and uses AVX-512; where there is no AMX the flag changes nothing.
_WITHOUT_AMX = "-U__AMX_INT8__"


def built_servers() -> tuple[Path, ...]:
    """The servers that `build_server` left in the cache for this pin and this machine; the fastest backend first."""
    order: tuple[Backend, ...] = ("metal", "cuda", "cpu")
    return tuple(server for backend in order if _is_current(server := server_path(backend), backend))


def server_path(backend: Backend) -> Path:
    """Where `build_server(backend)` puts the program."""
    return cache_dir() / "llama-server" / f"{SDIST.sha256[:16]}-{backend}" / "llama-server"


def build_server(backend: Backend, progress: Progress = no_progress) -> Path:
    """The path of a llama-server for `backend`, built unless the cache has it.

    Raises EngineSetupError when a tool is missing, the source cannot be fetched, or the build fails.
    """
    server = server_path(backend)
    check_tools(backend)
    with locked(server.parent.with_suffix(".lock")):
        if not _is_current(server, backend):
            try:
                _build(backend, server, progress)
            except OSError as error:
                raise EngineSetupError(
                    f"llama-server cannot be built in {server.parent}: {error.strerror}. It takes about 400 MB there; "
                    "set SLOTKEEPER_CACHE_DIR to another place."
                ) from error
    return server


def check_tools(backend: Backend) -> None:
    """Raises EngineSetupError that names what has to be installed."""
    if backend == "metal" and sys.platform != "darwin":
        raise EngineSetupError("The backend metal is for macOS. Use --backend cpu or --backend cuda here.")
    wanted = {"cmake": ("cmake",), "ninja": ("ninja", "ninja-build"), "a C++ compiler": _compilers()}
    if backend == "cuda":
        wanted["the CUDA toolkit (nvcc)"] = (os.environ.get("CUDACXX", "nvcc"), "/usr/local/cuda/bin/nvcc")
    missing = [what for what, names in wanted.items() if not any(shutil.which(name) for name in names)]
    if missing:
        how = (
            "xcode-select --install; brew install cmake ninja" if sys.platform == "darwin" else "cmake ninja-build g++"
        )
        raise EngineSetupError(
            f"To build llama-server {', '.join(missing)} must be installed first (on this system: {how}). The embedded "
            "engine needs no compiler: `slotkeeper serve --engine embedded`."
        )


def cmake_flags(backend: Backend) -> list[str]:
    """What `cmake` gets besides the paths; CFLAGS and CXXFLAGS of the environment are kept."""
    flags = [*_FLAGS, *_BACKEND_FLAGS[backend]]
    for language, variable in (("C", "CFLAGS"), ("CXX", "CXXFLAGS")):
        flags.append(f"-DCMAKE_{language}_FLAGS={os.environ.get(variable, '')} {_WITHOUT_AMX}")
    return flags


def _compilers() -> tuple[str, ...]:
    return (os.environ["CXX"],) if os.environ.get("CXX") else ("c++", "g++", "clang++")


def _build(backend: Backend, server: Path, progress: Progress) -> None:
    work = server.parent.with_suffix(".work")
    work.mkdir(parents=True, exist_ok=True)
    source = _source(work, progress)
    log = server.parent.with_suffix(".log")
    log.unlink(missing_ok=True)
    configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(work / "build")]
    _run([*configure, *cmake_flags(backend)], "configuring", log, progress)
    _run(["cmake", "--build", str(work / "build"), "--target", "llama-server"], "compiling", log, progress)
    binary.inspect(work / "build" / "bin" / "llama-server")
    server.parent.mkdir(parents=True, exist_ok=True)
    temporary = server.with_suffix(".tmp")
    shutil.copy2(work / "build" / "bin" / "llama-server", temporary)
    temporary.replace(server)
    _stamp(server).write_text(_identity(backend))
    shutil.rmtree(work)


def _source(work: Path, progress: Progress) -> Path:
    """Unpack vendor/llama.cpp of the sdist; a whole one is recognised by the mark that is written last."""
    target, mark = work / "llama.cpp", work / "unpacked"
    if mark.exists():
        return target
    sdist = fetch(SDIST, cache_dir() / "downloads", progress)
    progress("unpacking", 0, 0)
    shutil.rmtree(target, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        for member in archive:
            if member.isfile() and member.name.startswith(_SOURCE):
                member.name = member.name.removeprefix(_SOURCE)
                archive.extract(member, target, filter="data")
    mark.touch()
    sdist.unlink()
    return target


def _run(command: list[str], what: str, log: Path, progress: Progress) -> None:
    progress(what, 0, 0)
    environment = os.environ | {"NINJA_STATUS": "[%f/%t] "}
    tail: list[str] = []
    with log.open("a") as out:
        for line in run_lines(command, env=environment):
            print(line, file=out)
            tail = [*tail[-50:], line]
            if match := re.match(r"\[(\d+)/(\d+)\]", line):
                progress(what, int(match[1]), int(match[2]))
    if tail[-1] != "exit code 0":
        errors = [line for line in tail if "error" in line.lower()]
        raise EngineSetupError(f"{what.capitalize()} llama-server failed: {(errors or tail)[0][:300]}. The log: {log}.")


def _is_current(server: Path, backend: Backend) -> bool:
    try:
        return server.is_file() and _stamp(server).read_text() == _identity(backend)
    except OSError:
        return False


def _stamp(server: Path) -> Path:
    return server.with_name("identity")


def _identity(backend: Backend) -> str:
    """What the build depends on besides the source: its flags, and the processor whose instructions it uses.

    On another processor it could die of SIGILL, so it is built again there.
    """
    features = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = [sys.platform, platform.machine(), features, *_FLAGS, *_BACKEND_FLAGS[backend], _WITHOUT_AMX]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
