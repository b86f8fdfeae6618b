"""`slotkeeper doctor` through the control socket of a real server in front of a fake engine, and without a server."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from proxy.api.ops import control_app
from proxy.cli import _control, main
from proxy.doctor_cli import INDENT, _told
from tests.fakes.llama import FakeLlama
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire

Doctor = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """The command sets this process's log up; the former configuration comes back."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = before


@asynccontextmanager
async def listening(wire: Wire) -> AsyncIterator[None]:
    """The proxy's control socket is open."""
    settings = wire.service.settings

    async def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as knock:
            return knock.connect_ex(str(settings.control_socket)) == 0

    async with _control(control_app(wire.service), settings):
        await until(listens)
        yield


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """`slotkeeper doctor --json ...`: its answer, what it said on stderr ("said"), its exit code ("code")."""

    async def run(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        code = await asyncio.to_thread(main, ["doctor", *words, "--json", "--state-dir", str(tmp_path / "state")])
        said = capsys.readouterr()
        return {"code": code, "said": said.err, **(json.loads(said.out) if said.out else {})}

    return run


def levels(answer: dict[str, Any]) -> dict[str, str]:
    """Finding -> level of the first engine; of several with one name the last."""
    return {f["name"]: f["level"] for f in answer["engines"][0]["findings"]}


async def test_a_running_server_is_asked(serve: Serve, fake: FakeLlama, tmp_path: Path, doctor: Doctor) -> None:
    """Nothing is tried unasked; with --probe everything is known, and the slot is empty again."""
    fake.slot_dir = tmp_path / "engine"
    fake.slot_dir.mkdir()
    wire = await serve(fake, upstream=(f"{fake.url},slots={fake.slot_dir}",))
    async with listening(wire):
        before = len(fake.model_requests)
        quiet = await doctor()
        assert len(fake.model_requests) == before
        assert levels(quiet)["slots_pinned"] == levels(quiet)["restore_append"] == "unknown"
        probed = await doctor("--probe")
    assert (quiet["code"], probed["code"]) == (0, 0)
    names = ("slots_pinned", "idle_slots", "slot_directory", "restore_append", "restore_diverge")
    assert {name: levels(probed)[name] for name in names} == dict.fromkeys(names, "ok")
    assert [slot.tokens for slot in fake.slots] == [[], []]
    assert list(fake.slot_dir.glob("0000-*")) == []
    assert wire.service.engines.all[0].table.used() == 0


async def test_a_slot_that_is_used_is_left_alone(serve: Serve, fake: FakeLlama, tmp_path: Path, doctor: Doctor) -> None:
    """With every slot in use nothing is tried. That is said, with what to do; exit code 1, if it was asked for."""
    wire = await serve(fake)
    for text in ("one", "two"):
        body = {"messages": [{"role": "user", "content": text * 300}], "max_tokens": 1}
        assert (await wire.post(CHAT, body, headers={"x-slotkeeper-session": text})).status_code == 200
    held = [list(slot.tokens) for slot in fake.slots]
    assert all(held)
    async with listening(wire):
        answer, quiet = await doctor("--probe", "--determinism"), await doctor()
        wire.service.engines.all[0].slot_dir = tmp_path
        with_files = await doctor("--determinism")
    assert [slot.tokens for slot in fake.slots] == held
    assert (answer["code"], quiet["code"], with_files["code"]) == (1, 0, 1)
    assert (answer["effective"], answer["done"], quiet["done"]) == (True, False, True)
    said = [f["what"] for a in (answer, with_files) for f in a["engines"][0]["findings"] if f["name"] == "engine"]
    for words in ("doctor --probe --model FILE", "cannot be compared", "doctor --determinism --model FILE"):
        assert any(words in sentence for sentence in said), said


async def test_what_requests_taught_is_told(serve: Serve, fake: FakeLlama, doctor: Doctor) -> None:
    """A conversation that was continued shows that its slot was kept."""
    wire = await serve(fake)
    messages = [{"role": "user", "content": "one two three four " * 40}]
    for _ in range(2):
        answer = await wire.post(CHAT, {"messages": messages, "max_tokens": 2})
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    async with listening(wire):
        answer = await doctor()
    assert {name: levels(answer)[name] for name in ("slots_pinned", "idle_slots", "timings")} == {
        "slots_pinned": "ok",
        "idle_slots": "ok",
        "timings": "ok",
    }


async def test_an_attached_engine_without_a_server(fake: FakeLlama, tmp_path: Path, doctor: Doctor) -> None:
    """It is asked, and tried only with --probe; its slot directory holds afterwards what it held before."""
    fake.slot_dir = tmp_path / "engine"
    fake.slot_dir.mkdir()
    other = fake.slot_dir / "ab12cd34-0123456789abcdef.tmp"
    other.write_bytes(b"another server's")
    quiet = await doctor("--upstream", fake.url)
    assert (quiet["code"], levels(quiet)["slot_directory"], fake.model_requests) == (0, "costs", [])
    assert "--slot-save-path DIR" in quiet["engines"][0]["command"]
    probed = await doctor("--upstream", f"{fake.url},slots={fake.slot_dir}", "--probe")
    assert (probed["code"], levels(probed)["restore_append"]) == (0, "ok")
    assert [path.name for path in fake.slot_dir.iterdir()] == [other.name]
    assert not (tmp_path / "state").exists()


async def test_a_directory_that_is_not_the_engines(fake: FakeLlama, tmp_path: Path, doctor: Doctor) -> None:
    """Broken: exit code 1."""
    fake.slot_dir = tmp_path / "engine"
    fake.slot_dir.mkdir()
    (tmp_path / "wrong").mkdir()
    answer = await doctor("--upstream", f"{fake.url},slots={tmp_path / 'wrong'}", "--probe")
    assert (answer["code"], answer["effective"], levels(answer)["slot_directory"]) == (1, False, "broken")


async def test_a_draft_model(fake: FakeLlama, doctor: Doctor) -> None:
    fake.speculative = True
    answer = await doctor("--upstream", fake.url)
    assert (answer["code"], levels(answer)["draft_model"]) == (0, "costs")


async def test_nobody_to_ask(tmp_path: Path, doctor: Doctor) -> None:
    """One sentence each: no server, no engine, wrong words."""
    for words, code, says in [
        ((), 1, "or name an engine: --upstream URL"),
        (("--upstream", "nonsense"), 2, "no http:// or https:// URL"),
        (("--model", str(tmp_path / "none.gguf")), 1, "none.gguf"),
        (("--model", "x", "--swa", "half"), 2, "--swa half"),
    ]:
        answer = await doctor(*words)
        assert (answer["code"], says in answer["said"], answer["said"].count("\n")) == (code, True, 1), answer
        assert not answer["said"].endswith(("?.\n", "..\n")), answer


async def test_nobody_listens(doctor: Doctor) -> None:
    """A line while it waits, then one sentence that names the address once."""
    answer = await doctor("--upstream", "http://127.0.0.1:9")
    waits, said = answer["said"].splitlines()
    assert (answer["code"], waits) == (1, "Waiting up to 5 s for http://127.0.0.1:9 ...")
    assert said.startswith("slotkeeper: No answer from llama-server at http://127.0.0.1:9: ")
    assert (said.count("127.0.0.1"), said.endswith("Is it running?")) == (1, True)


def test_a_narrow_terminal_keeps_the_columns() -> None:
    """What does not fit goes on below its beginning; into a pipe everything is one line."""
    words = {"what": "word " * 40, "consequence": "loss " * 40, "better": "--flag " * 40}
    engine = {"name": "e", "findings": [{"name": "template_reasoning", "level": "costs", **words}], "command": ""}
    head, first, *more = _told(engine, 80).plain.splitlines()
    assert first.startswith("  costs  template_reasoning  word word")
    assert len(more) > 10 and all(line.startswith(" " * INDENT) for line in more)
    assert max(map(len, (head, first, *more))) <= 80
    assert len(_told(engine, None).plain.splitlines()) == 4


async def test_for_people(fake: FakeLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a finding, its consequence and what is better below it; a name with control characters is cleaned."""
    fake.alias = "evil\x1b[2Jname"
    words = ["doctor", "--upstream", fake.url, "--state-dir", str(tmp_path / "state")]
    assert await asyncio.to_thread(main, words) == 0
    said = capsys.readouterr().out
    assert "\x1b[2J" not in said and "evil" in said
    assert "  costs  slot_directory      no slot directory is seen from here" in said
    assert "better: --slot-save-path DIR" in said
    assert "  command  llama-server -m /models/fake.gguf" in said
