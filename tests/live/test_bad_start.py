"""What cannot start says why in a sentence, with an exit code and without a traceback."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.conftest import StartProxy
from tests.live.talk import complete
from tests.servers import PATIENCE, ROOT, clean_environment


async def serve(tmp_path: Path, *words: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and stderr of a `serve` that ends by itself."""
    command = [sys.executable, "-m", "proxy", "serve", "--port", "0", "--state-dir", str(tmp_path / "state"), *words]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env=clean_environment() | (environment or {}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            _, said = await process.communicate()
    except TimeoutError:
        process.kill()
        raise AssertionError(f"it still runs: {(await process.communicate())[1].decode()}") from None
    text = " ".join(said.decode().split())
    assert "Traceback" not in text, text
    assert process.returncode is not None
    return process.returncode, text


@pytest.fixture
def words(request: pytest.FixtureRequest, engine_kind: str) -> list[str]:
    """Which engine to start."""
    named = ["--llama-server", str(request.getfixturevalue("native_server"))] if engine_kind == "binary" else []
    return ["--engine", engine_kind, *named]


async def test_model_is_missing(tmp_path: Path, words: list[str]) -> None:
    """The path is in the sentence."""
    code, said = await serve(tmp_path, "--model", "/nowhere/model.gguf", *words)
    assert code != 0
    assert "/nowhere/model.gguf" in said


async def test_model_is_cut_off(tmp_path: Path, words: list[str], tiny_models: dict[str, Path]) -> None:
    """A download that broke: three starts are enough, and the reason is a whole sentence."""
    file = tmp_path / "model.gguf"
    whole = tiny_models["dense"].read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    code, said = await serve(tmp_path, "--model", str(file), *words)
    assert code == 1
    assert ". Its log: " in said
    assert said.endswith("It has never been ready in 3 starts.")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
async def test_model_is_not_gguf(tmp_path: Path, words: list[str], content: bytes) -> None:
    """Empty, cut off, or something else."""
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    code, said = await serve(tmp_path, "--model", str(file), *words)
    assert code != 0
    assert str(file) in said
    assert "GGUF" in said


async def test_flag_is_unknown(tmp_path: Path, tiny_models: dict[str, Path], words: list[str]) -> None:
    """By its name."""
    code, said = await serve(tmp_path, "--model", str(tiny_models["dense"]), *words, "--", "--no-such-flag", "7")
    assert code != 0
    assert "--no-such-flag" in said


async def test_flag_that_we_live_on(tmp_path: Path, tiny_models: dict[str, Path], words: list[str]) -> None:
    """Exit code 2 (contract.md)."""
    code, said = await serve(tmp_path, "--model", str(tiny_models["dense"]), *words, "--", "--slot-save-path", "/tmp")
    assert code == 2
    assert "--slot-save-path" in said


async def test_no_llama_server(tmp_path: Path, tiny_models: dict[str, Path], engine_kind: str) -> None:
    """Nothing on PATH and nothing built: what to do is in the sentence."""
    del engine_kind
    (tmp_path / "nothing").mkdir()
    nothing = {"PATH": str(tmp_path / "nothing"), "SLOTKEEPER_CACHE_DIR": str(tmp_path / "cache")}
    code, said = await serve(tmp_path, "--model", str(tiny_models["dense"]), "--engine", "binary", environment=nothing)
    assert code != 0
    assert "build-server" in said


async def test_port_or_directory_in_use(
    proxy_server: StartProxy, tmp_path: Path, tiny_models: dict[str, Path], words: list[str]
) -> None:
    """Another proxy on the same state directory, and on the same port: refused; the first one serves on."""
    first = await proxy_server(model="dense")
    model = ["--model", str(tiny_models["dense"])]
    code, said = await serve(tmp_path, *model, *words)
    assert code != 0
    assert "in use by another Slotkeeper" in said
    port = first.url.rsplit(":", 1)[1]
    code, said = await serve(tmp_path / "other", *words, "--port", port, *model)
    assert code != 0
    assert port in said
    assert (await complete(first, "hello", 2)).predicted_n == 2


async def test_engine_port_in_use(
    proxy_server: StartProxy, tmp_path: Path, tiny_models: dict[str, Path], words: list[str]
) -> None:
    """--engine-port names one that somebody listens on."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        port = str(server.sockets[0].getsockname()[1])
        code, said = await serve(tmp_path, "--model", str(tiny_models["dense"]), *words, "--engine-port", port)
    assert code != 0
    assert port in said


async def test_directory_cannot_be_made(tmp_path: Path, tiny_models: dict[str, Path], words: list[str]) -> None:
    """A part of its path is a file."""
    (tmp_path / "state").write_text("a file")
    code, said = await serve(tmp_path, "--model", str(tiny_models["dense"]), *words)
    assert code != 0
    assert str(tmp_path / "state") in said
