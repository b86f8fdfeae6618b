"""Building llama-server: cache, progress, failure. Small programs stand for cmake and the compiler."""

import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llamacpp.engines import build
from llamacpp.engines.build import BACKENDS, build_server, built_servers, check_tools, cmake_flags, server_path
from llamacpp.engines.cache import cache_dir
from llamacpp.engines.download import sha256_of
from llamacpp.errors import EngineSetupError
from tests.llamacpp.engines.test_flags import HELP

# Configures by writing down its arguments; builds by "compiling" $FAKE_HELP into a program that prints it.
CMAKE = """#!/bin/sh
if [ "$1" = --build ]; then
    echo "[1/2] Building CXX object server.cpp.o"
    if [ -n "$FAKE_FAILURE" ]; then echo "server.cpp:1: error: $FAKE_FAILURE"; exit 2; fi
    mkdir -p "$2/bin"
    { echo "#!/bin/sh"; echo "cat $FAKE_HELP"; } > "$2/bin/llama-server"
    chmod +x "$2/bin/llama-server"
    echo "[2/2] Linking CXX executable bin/llama-server"
else
    echo configure "$@" >> "$FAKE_CALLS"
    [ -f "$4/CMakeLists.txt" ] || exit 1
fi
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the sdist in it, and fake tools on PATH. Returns the file that lists the configurations."""
    monkeypatch.setenv("SLOTKEEPER_CACHE_DIR", str(tmp_path / "cache"))
    for name, text in (("cmake", CMAKE), ("ninja", "#!/bin/sh\n"), ("c++", "#!/bin/sh\n"), ("nvcc", "#!/bin/sh\n")):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(text)
        tool.chmod(0o755)
    (tmp_path / "help").write_text(HELP)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("FAKE_HELP", str(tmp_path / "help"))
    sdist = tmp_path / "cache" / "downloads" / build.SDIST.file_name
    sdist.parent.mkdir(parents=True)
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("vendor/llama.cpp/CMakeLists.txt", "vendor/llama.cpp/src/llama.cpp", "setup.py"):
            member = tarfile.TarInfo(f"llama_cpp_python-0.3.36/{name}")
            member.size = 4
            archive.addfile(member, io.BytesIO(b"text"))
    monkeypatch.setattr(build, "SDIST", replace(build.SDIST, sha256=sha256_of(sdist)))
    return tmp_path / "calls"


def test_it_is_built_once_and_found_afterwards(tools: Path) -> None:
    assert built_servers() == ()
    seen: list[tuple[str, int, int]] = []
    server = build_server("cpu", lambda *step: seen.append(step))
    assert server == server_path("cpu")
    assert os.access(server, os.X_OK)
    assert seen == [
        ("unpacking", 0, 0),
        ("configuring", 0, 0),
        ("compiling", 0, 0),
        ("compiling", 1, 2),
        ("compiling", 2, 2),
    ]
    assert build_server("cpu", lambda *step: pytest.fail("built again")) == server
    assert built_servers() == (server,)
    assert tools.read_text().count("configure") == 1
    left = {path.name for path in server.parent.parent.iterdir()}
    assert left == {server.parent.name, server.parent.name + ".lock", server.parent.name + ".log"}


def test_it_is_named_by_the_hash_of_its_source_and_lies_in_the_cache(tools: Path) -> None:
    assert server_path("cuda").parent == cache_dir() / "llama-server" / f"{build.SDIST.sha256[:16]}-cuda"


def test_another_processor_builds_again(tools: Path) -> None:
    server = build_server("cpu")
    (server.parent / "identity").write_text("another machine")
    assert built_servers() == ()
    sdist = cache_dir() / "downloads" / build.SDIST.file_name
    assert not sdist.exists()  # it would be fetched again, which the fake registry of these tests cannot
    with tarfile.open(sdist, "w:gz"):
        pass
    with pytest.raises(EngineSetupError, match="pip"):
        build_server("cpu")


def test_a_failed_build_says_why_and_goes_on_next_time(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "out of beans")
    with pytest.raises(EngineSetupError, match=r"Compiling llama-server failed: .*out of beans\. The log: (\S+)\."):
        build_server("cpu")
    log = server_path("cpu").parent.with_suffix(".log")
    assert "out of beans" in log.read_text()
    assert built_servers() == ()
    monkeypatch.delenv("FAKE_FAILURE")
    steps: list[str] = []
    build_server("cpu", lambda what, done, total: steps.append(what))
    assert "unpacking" not in steps


def test_a_build_without_our_flags_is_not_kept(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "help").write_text("usage: nothing")
    with pytest.raises(EngineSetupError, match="does not know the flags --slot-save-path"):
        build_server("cpu")
    assert built_servers() == ()


def test_a_cache_that_cannot_be_written_is_named(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLOTKEEPER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(EngineSetupError, match=r"cannot be written.*SLOTKEEPER_CACHE_DIR"):
        build_server("cpu")


def test_flags_of_the_backends(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXXFLAGS", "-O1")
    flags = {backend: cmake_flags(backend) for backend in BACKENDS}
    for words in flags.values():
        assert {"-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DBUILD_SHARED_LIBS=OFF"} <= set(words)
        assert "-DCMAKE_CXX_FLAGS=-O1 -U__AMX_INT8__" in words
    assert "-DGGML_METAL=OFF" in flags["cpu"]
    assert "-DGGML_CUDA=ON" in flags["cuda"]
    assert "-DGGML_METAL=ON" in flags["metal"]
    build_server("cpu")
    assert "-G Ninja" in tools.read_text()


def without(*names: str) -> Callable[[str], str | None]:
    return lambda name: None if name in names else f"/usr/bin/{name}"


def test_missing_tools_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", without("cmake", "c++", "g++", "clang++"))
    with pytest.raises(EngineSetupError, match=r"cmake, a C\+\+ compiler must be installed first .*--engine embedded"):
        check_tools("cpu")
    monkeypatch.setattr("shutil.which", without("nvcc", "/usr/local/cuda/bin/nvcc"))
    check_tools("cpu")
    with pytest.raises(EngineSetupError, match="the CUDA toolkit"):
        check_tools("cuda")
    monkeypatch.setattr("shutil.which", without())
    check_tools("cuda")
    with pytest.raises(EngineSetupError, match="metal is for macOS"):
        check_tools("metal")


@pytest.mark.parametrize(
    ("platform", "variables", "place"),
    [
        ("linux", {"SLOTKEEPER_CACHE_DIR": "/c"}, "/c"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/slotkeeper"),
        ("linux", {}, "/home/p/.cache/slotkeeper"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/p/Library/Caches/slotkeeper"),
    ],
)
def test_where_the_cache_is(
    platform: str, variables: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    for name in ("SLOTKEEPER_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"HOME": "/home/p"}).items():
        monkeypatch.setenv(name, value)
    assert str(cache_dir()) == place
