"""--upstream: how it is written, and what an engine lacks. A scripted server stands for what a real one is not."""

from pathlib import Path
from typing import Any

import pytest

from llamacpp.client import LlamaClient
from llamacpp.engines.attached import AttachedSpec, Inspection, inspect, parse_upstream
from llamacpp.engines.flags import UsageError
from llamacpp.errors import EngineError, EngineRefused
from tests.fakes.http import Answer, Request, Server
from tests.llamacpp.engines.conftest import KINDS, Starter, spec_for


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("http://127.0.0.1:8080", AttachedSpec("http://127.0.0.1:8080")),
        ("http://127.0.0.1:8080/v1/", AttachedSpec("http://127.0.0.1:8080")),
        ("https://host/llama/", AttachedSpec("https://host/llama")),
        ("http://[::1]:80,kind=embedding", AttachedSpec("http://[::1]:80", kind="embedding")),
        ("http://h,model=m=1,slots=/s", AttachedSpec("http://h", "m=1", Path("/s"))),
    ],
)
def test_an_upstream_as_it_is_written(text: str, spec: AttachedSpec) -> None:
    assert parse_upstream(text) == spec


def test_a_slot_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert parse_upstream("http://h,slots=here").slots == tmp_path / "here"
    assert parse_upstream("http://h,slots=~/s").slots == Path("/home/somebody/s")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("127.0.0.1:8080", "is no http:// or https:// URL"),
        ("http://", "is no http:// or https:// URL"),
        ("http://h:99999", "is no http:// or https:// URL"),
        ("ftp://h", "is no http:// or https:// URL"),
        ("", "is no http:// or https:// URL"),
        ("http://h,model", "'model' is not understood. The form is URL[,model=NAME]"),
        ("http://h,slots=", "'slots=' is not understood"),
        ("http://h,colour=red", "'colour=red' is not understood"),
        ("http://h,model=a,model=b", "model stands twice"),
        ("http://h,kind=chess", "kind is chat or embedding, not 'chess'"),
        ("http://h/?key=1", "a query or a fragment"),
    ],
)
def test_a_wrong_upstream_is_explained(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_upstream(text)
    assert sentence in str(caught.value)


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(UsageError, match="SLOTKEEPER_UPSTREAM_API_KEY") as caught:
        parse_upstream("http://me:secret@h")
    assert "secret" not in str(caught.value)


NOT_SUPPORTED = {"error": {"code": 501, "message": "not supported here", "type": "not_supported_error"}}
INVALID_NAME = {"error": {"code": 400, "message": "Invalid filename", "type": "invalid_request_error"}}


class Scripted:
    """Answers the questions of inspect() as told, and counts them."""

    def __init__(self, *, slots: bool = True, metrics: bool = True, files: bool = True, **props: Any) -> None:
        self.slots, self.metrics, self.files = slots, metrics, files
        self.speculative = bool(props.pop("speculative", False))
        self.props = {
            "default_generation_settings": {"n_ctx": 64},
            "total_slots": 1,
            "endpoint_metrics": metrics,
        } | props
        self.asked: list[str] = []

    async def __call__(self, request: Request, answer: Answer) -> None:
        self.asked.append(f"{request.method} {request.path}")
        if request.path == "/props":
            return await answer.json(self.props)
        if request.path == "/metrics" and self.metrics:
            return await answer.whole(200, b"llamacpp:prompt_tokens_total 0\n", "text/plain")
        if request.path == "/slots" and self.slots:
            return await answer.json([{"id": 0, "n_ctx": 64, "speculative": self.speculative, "is_processing": False}])
        if request.path == "/slots/0" and self.files:
            return await answer.json(INVALID_NAME, 400)
        return await answer.json(NOT_SUPPORTED, 501)

    async def inspected(self, slots: Path | None) -> Inspection:
        async with Server(self) as server:
            client = LlamaClient(server.url)
            try:
                return await inspect(client, AttachedSpec(server.url, slots=slots))
            finally:
                await client.aclose()


async def test_a_complete_engine_lacks_nothing(tmp_path: Path) -> None:
    found = await Scripted().inspected(tmp_path)
    assert (found.has_slots, found.has_metrics, found.can_save, found.missing) == (True, True, True, ())
    assert not found.speculative


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        (Scripted(slots=False), "without --no-slots"),
        (Scripted(metrics=False), "Start it with --metrics"),
        (Scripted(files=False), "Start it with --slot-save-path"),
        (Scripted(speculative=True), "Leave --model-draft out"),
    ],
)
async def test_what_is_missing_is_said_with_the_flag_that_helps(script: Scripted, flag: str, tmp_path: Path) -> None:
    found = await script.inspected(tmp_path)
    assert (found.has_slots, found.has_metrics, found.can_save) == (script.slots, script.metrics, script.files)
    assert found.speculative is script.speculative
    [sentence] = found.missing
    assert flag in sentence


async def test_without_a_slot_directory_that_we_see_nothing_is_kept(tmp_path: Path) -> None:
    found = await Scripted().inspected(None)
    assert not found.can_save
    assert ",slots=DIR" in found.missing[0]
    found = await Scripted().inspected(tmp_path / "absent")
    assert not found.can_save
    assert "absent" in found.missing[0]
    assert "is not there" in found.missing[0]


async def test_a_sleeping_engine_is_not_woken(tmp_path: Path) -> None:
    script = Scripted(is_sleeping=True)
    found = await script.inspected(tmp_path)
    assert script.asked == ["GET /props"]
    assert (found.has_slots, found.has_metrics, found.can_save) == (True, True, True)


async def test_something_else_than_llama_server_is_an_error(tmp_path: Path) -> None:
    script = Scripted()
    script.props = {"hello": "world"}
    with pytest.raises(EngineError, match="Is the upstream URL a llama-server"):
        await script.inspected(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
async def test_real_engines_are_seen_as_they_are(kind: str, started: Starter, demo_model: Path, tmp_path: Path) -> None:
    child, client = await started(spec_for(kind, demo_model, slot_dir=tmp_path / "slots"))
    found = await inspect(client, AttachedSpec(child.base_url, slots=tmp_path / "slots"))
    assert (found.has_slots, found.has_metrics, found.can_save, found.missing) == (True, True, True, ())
    assert list((tmp_path / "slots").iterdir()) == []
    child, client = await started(spec_for(kind, demo_model))
    found = await inspect(client, AttachedSpec(child.base_url, slots=tmp_path))
    assert not found.can_save
    assert "--slot-save-path" in found.missing[0]
    stranger = LlamaClient(child.base_url, "wrong key")
    with pytest.raises(EngineRefused) as caught:
        await inspect(stranger, AttachedSpec(child.base_url))
    await stranger.aclose()
    assert caught.value.status == 401
