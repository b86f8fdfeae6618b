"""start(): what stands in the way is said in a sentence, and what runs is fenced in. Real engines."""

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import orjson
import pytest

from llamacpp.client import LlamaClient
from llamacpp.engines import EngineSpec, UsageError, choose, free_port, last_words, start
from llamacpp.engines.embedded import build_name
from llamacpp.errors import EngineRefused, EngineSetupError
from llamacpp.packed import pack
from tests.llamacpp.engines.conftest import KINDS, QUICK, Starter, spec_for

ROOT = Path(__file__).resolve().parents[3]

# --- refused before a process is there ------------------------------------------------------------------------------


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    return path


async def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineSetupError, match=r"no model at .*gone\.gguf.*--model"):
        await start(EngineSpec(tmp_path / "gone.gguf", kind="embedded"), state_dir=tmp_path)


async def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("version https://git-lfs")
    with pytest.raises(EngineSetupError, match=r"model\.gguf is not a GGUF file \(it begins with b'vers'\)"):
        await start(EngineSpec(tmp_path / "model.gguf", kind="embedded"), state_dir=tmp_path)


async def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(EngineSetupError, match=r"model\.gguf is empty"):
        await start(EngineSpec(tmp_path / "model.gguf", kind="embedded"), state_dir=tmp_path)


async def test_a_directory_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(EngineSetupError, match="is a directory"):
        await start(EngineSpec(tmp_path, kind="embedded"), state_dir=tmp_path)


async def test_no_model_at_all(tmp_path: Path) -> None:
    with pytest.raises(EngineSetupError, match="No model is named"):
        await start(EngineSpec(None, kind="embedded"), state_dir=tmp_path)


async def test_a_model_named_after_the_dashes_is_checked_instead_of_ours(gguf: Path, tmp_path: Path) -> None:
    spec = EngineSpec(gguf, kind="embedded", extra=("-m", str(tmp_path / "other.gguf")))
    with pytest.raises(EngineSetupError, match=r"no model at .*other\.gguf"):
        await start(spec, state_dir=tmp_path)


async def test_an_unknown_flag_is_named_with_the_nearest(gguf: Path, tmp_path: Path) -> None:
    spec = EngineSpec(gguf, kind="embedded", extra=("--ctx-sise", "5"))
    with pytest.raises(
        UsageError, match=r"embedded engine does not know the flag --ctx-sise\. Did you mean --ctx-size"
    ):
        await start(spec, state_dir=tmp_path)


async def test_a_port_in_use_is_named(gguf: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineSetupError, match=rf"port {port}: Address already in use.*--engine-port"):
            await start(EngineSpec(gguf, kind="embedded", port=port), state_dir=tmp_path)


async def test_a_llama_server_that_is_not_there_is_named(gguf: Path, tmp_path: Path) -> None:
    spec = EngineSpec(gguf, kind="binary", llama_server=tmp_path / "llama-server")
    with pytest.raises(EngineSetupError, match=r"No llama-server at .*--llama-server"):
        await start(spec, state_dir=tmp_path)


def test_without_any_engine_the_ways_to_get_one_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("llamacpp.engines.embedded.is_installed", lambda: False)
    for kind in ("auto", "binary"):
        with pytest.raises(EngineSetupError, match=r"build-server.*pip install.*\[embedded\].*--upstream"):
            choose(EngineSpec(None, kind=kind))


def test_auto_falls_back_to_the_embedded_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("llamacpp.engines.embedded.is_installed", lambda: True)
    assert choose(EngineSpec(None)) is None


def test_the_embedded_engine_when_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        raise __import__("importlib.metadata").metadata.PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(EngineSetupError, match=r"pip install 'slotkeeper\[embedded\]'"):
        build_name()


def test_the_last_words_are_the_first_error_of_the_last_lines() -> None:
    log = (
        "0.00.001.000 E srv    operator(): an old failure\n"
        + "0.00.002.000 I srv  fine\n" * 20
        + "0.00.004.119 E llama_model_load: error loading model: tensor data is not within the file bounds\n"
        "0.00.004.120 E llama_model_load_from_file_impl: failed to load model\n"
        "0.00.004.125 I srv    operator(): cleaning up before exit...\n"
        "error: Failed to init server"
    )
    assert last_words(log) == "llama_model_load: error loading model: tensor data is not within the file bounds"
    assert last_words("0.00.415.195 I slot      release: id  0 | stop processing") == ""


def test_the_embedded_child_imports_nothing_heavy_of_ours() -> None:
    code = "import llamacpp.engines.embedded, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = {"httpx", "pydantic", "orjson", "tiktoken", "xxhash", "fastapi", "xllamacpp"}
    assert "llamacpp.engines.embedded" in done.stdout.split()
    assert heavy.isdisjoint(done.stdout.split())


# --- running --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_only_the_holder_of_the_key_gets_in_and_no_page_does(
    kind: str, started: Starter, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_HOST", "0.0.0.0")
    monkeypatch.setenv("LLAMA_API_KEY", "somebody-else")
    child, _ = await started(spec_for(kind, demo_model))
    assert re.fullmatch(r"[0-9a-f]{48}", child.api_key)
    assert child.api_key.encode() not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
    async with httpx.AsyncClient(base_url=child.base_url, headers={"origin": "http://evil.test"}) as stranger:
        for key in (None, "somebody-else"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            for method, path in (("GET", "/props"), ("GET", "/slots"), ("GET", "/metrics"), ("POST", "/completion")):
                answer = await stranger.request(method, path, headers=headers, json={"prompt": "x"})
                assert answer.status_code == 401, path
        for method in ("GET", "OPTIONS"):
            answer = await stranger.request(method, "/health")
            assert answer.headers.get("access-control-allow-origin") in (None, "https://no-origin.invalid")
            assert answer.headers.get("access-control-allow-credentials") in (None, "false")
    other = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line]
    assert f"0100007F:{child.port:04X}" in other
    assert f"00000000:{child.port:04X}" not in other


@pytest.mark.parametrize("kind", KINDS)
async def test_what_we_live_on_is_on(kind: str, started: Starter, demo_model: Path, tmp_path: Path) -> None:
    child, client = await started(spec_for(kind, demo_model, slot_dir=tmp_path / "slots", alias="demo"))
    props = await client.props()
    assert (props.total_slots, props.n_ctx, props.model_alias) == (2, 1024, "demo")
    assert props.endpoint_slots
    assert "llamacpp:prompt_tokens_total" in await client.metrics()
    tokens = pack(list(range(300, 364)))
    await client.prime(0, tokens)
    await client.prime(1, tokens)
    # Idle slots keep their KV (no idle clearing), each slot has the whole pool, and files are for us alone.
    assert (await client.save_slot(0, "a.bin")).n_tokens == 64
    assert stat.S_IMODE((tmp_path / "slots" / "a.bin").stat().st_mode) == 0o600
    assert child.build


@pytest.mark.parametrize("kind", KINDS)
async def test_flags_after_the_dashes_win(kind: str, started: Starter, demo_model: Path) -> None:
    extra = (*QUICK, "-c", "512", "--parallel", "3", "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", "--alias", "mine")
    child, client = await started(spec_for(kind, demo_model, extra=extra, alias="ours"))
    props = await client.props()
    assert (props.total_slots, props.n_ctx, props.model_alias) == (3, 512, "mine")
    assert "specified multiple times" not in child.tail()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_environment_reaches_the_engine(
    kind: str, started: Starter, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SERVER_SLOTS_DEBUG", "1")
    monkeypatch.setenv("SLOTKEEPER_ENGINE_API_KEY", "chosen-by-the-person")
    child, client = await started(spec_for(kind, demo_model))
    assert child.api_key == "chosen-by-the-person"
    body = {"prompt": "a remarkable prompt", "n_predict": 1, "id_slot": 0}
    assert (await client.request("POST", "/completion", content=orjson.dumps(body))).status_code == 200
    assert "a remarkable prompt" in (await client.request("GET", "/slots")).text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_corrupt_model_is_reported_in_the_engines_words(kind: str, demo_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(demo_model.read_bytes()[: 20 << 20])
    log = tmp_path / "logs" / "engine.log"
    child = await start(spec_for(kind, broken, log_file=log), state_dir=tmp_path)
    assert await child.wait() == 1
    assert re.search(r"ended with exit code 1: .*(corrupted|incomplete|failed to read|file bounds)", child.obituary())
    assert "broken.gguf" in child.tail()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "broken.gguf" in log.read_text()
    assert not list(tmp_path.glob("engine-*.json"))


@pytest.mark.parametrize("kind", KINDS)
async def test_stop_ends_it_and_its_port_is_free_again(kind: str, started: Starter, demo_model: Path) -> None:
    port = free_port()
    child, client = await started(spec_for(kind, demo_model, port=port))
    assert child.base_url == f"http://127.0.0.1:{port}"
    await child.stop(5)
    assert child.exit_code in (0, -15)
    assert not await client.health()
    again, _ = await started(spec_for(kind, demo_model, port=port))
    assert again.pid != child.pid


@pytest.mark.parametrize("kind", KINDS)
async def test_a_draft_model_keeps_the_ram_cache_on(kind: str, started: Starter, demo_model: Path) -> None:
    draft = ("-md", str(demo_model), "--spec-type", "draft-simple")
    spec = spec_for(kind, demo_model, extra=(*QUICK, *draft))
    assert spec.has_draft
    _, client = await started(spec)
    assert all(slot.speculative for slot in await client.slots())


@pytest.mark.native
async def test_a_flag_that_the_binary_does_not_know_is_named(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"llama-server does not know the flag --cache-rum\. Did you mean --cache-ram"):
        await start(spec_for("binary", demo_model, extra=("--cache-rum", "0")), state_dir=tmp_path)


@pytest.mark.live
async def test_slots_can_be_restored_where_they_were_saved(started: Starter, demo_model: Path, tmp_path: Path) -> None:
    spec = spec_for("embedded", demo_model, slot_dir=tmp_path / "slots")
    tokens = pack(list(range(300, 364)))
    first, client = await started(spec)
    await client.prime(0, tokens)
    await client.save_slot(0, "a.bin")
    await first.stop(5)
    _, client = await started(spec)
    assert (await client.restore_slot(1, "a.bin")).n_tokens == 64
    assert (await client.prime(1, tokens + pack([400]))).prompt_n <= 2
    with pytest.raises(EngineRefused):
        await client.restore_slot(1, "absent.bin")


@pytest.mark.live
async def test_two_engines_of_one_owner_live_side_by_side(started: Starter, demo_model: Path) -> None:
    first, client = await started(spec_for("embedded", demo_model))
    second, _ = await started(spec_for("embedded", demo_model))
    assert first.pid != second.pid
    assert await client.health()
    assert first.api_key != second.api_key or "SLOTKEEPER_ENGINE_API_KEY" in os.environ
    stranger = LlamaClient(first.base_url, second.api_key)
    with pytest.raises(EngineRefused):
        await stranger.props()
    await stranger.aclose()
