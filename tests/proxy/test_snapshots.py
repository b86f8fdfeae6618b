"""`slotkeeper snapshots` without a server: the same words and numbers that the store holds."""

import asyncio
import json
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.page.text import size, span
from proxy.snapshots import _table
from proxy.state_dir import remember_budget
from proxy.store import Store
from tests.fakes.slot_bytes import slot_file

FINGERPRINT = "ab12cd34"


Run = Callable[..., str]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with two snapshots, of 3 and of 5 tokens."""
    asyncio.run(fill(tmp_path / "state"))
    return tmp_path / "state"


async def fill(folder: Path, counts: Iterable[int] = (3, 5)) -> None:
    """Two snapshots through the store."""
    store = await Store.open(folder, budget=2**20, max_lines=10)
    slots = folder / "slots"
    slots.mkdir(exist_ok=True)
    await store.add_dir(slots)
    for count in counts:
        tokens, name = array("i", range(100, 100 + count)).tobytes(), store.temp_name(FINGERPRINT)
        (slots / name).write_bytes(slot_file(tokens))
        await store.publish(
            name,
            dir=slots,
            fingerprint=FINGERPRINT,
            tenant="local",
            model="tiny",
            kind="line",
            line=f"line-{count}",
            reason="idle",
            expect_tokens=tokens,
            supersede=False,
        )
    await store.close()


@pytest.fixture
def run(state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`slotkeeper snapshots ...` on the state directory: what it printed, once its exit code is the one expected."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str, code: int = 0) -> str:
        assert main(["snapshots", *words, "--state-dir", str(state)]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return run


def listed(run: Run) -> list[dict[str, object]]:
    """`ls --json`."""
    found = json.loads(run("ls", "--json"))["snapshots"]
    assert isinstance(found, list)
    return found


def test_ls_and_show(run: Run) -> None:
    """Both snapshots with their sizes; one by the beginning of its id."""
    found = listed(run)
    assert {s["n_tokens"] for s in found} == {3, 5}
    table = run("ls")
    assert "tiny" in table
    assert table.rstrip().splitlines()[-1].startswith("2 snapshots, ")
    shown = json.loads(run("show", str(found[0]["id"])[:6], "--json"))
    assert shown == found[0]
    assert "n_tokens" in run("show", str(found[0]["id"]))


def test_pin_unpin_rm_purge(run: Run, state: Path) -> None:
    """Each does what it says, and says it."""
    name = str(listed(run)[0]["id"])
    assert run("pin", name) == f"{name} is pinned.\n"
    assert [s["pinned"] for s in listed(run) if s["id"] == name] == [True]
    assert run("unpin", name) == f"{name} is no longer pinned.\n"
    assert run("rm", name).startswith("1 removed, ")
    assert name not in {s["id"] for s in listed(run)}
    assert run("purge").startswith("1 removed, ")
    assert listed(run) == []
    assert list((state / "slots").glob("*.bin")) == []


def test_prune_keeps_what_fits(run: Run) -> None:
    """Within the budget nothing goes."""
    assert run("prune") == "0 removed, 0 B freed.\n"
    assert len(listed(run)) == 2


@pytest.mark.parametrize("words", [("ls",), ("show", "zz"), ("prune",)])
def test_the_servers_budget_is_used_without_it(run: Run, state: Path, words: tuple[str, ...]) -> None:
    """A server with a larger budget than the default has ended: nothing of what it kept goes."""
    remember_budget(state, 30 * 1024**3)
    run(*words, code=words == ("show", "zz"))
    assert json.loads(run("ls", "--json"))["budget_bytes"] == 30 * 1024**3
    assert len(listed(run)) == 2


def test_looking_deletes_nothing(run: Run, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More on disk than the budget: only `prune` deletes; what is set here goes before what the server had."""
    remember_budget(state, 1)
    assert len(listed(run)) == 2
    monkeypatch.setenv("SLOTKEEPER_DISK_BUDGET", "1GiB")
    assert run("prune").startswith("0 removed")
    monkeypatch.delenv("SLOTKEEPER_DISK_BUDGET")
    assert run("prune").startswith("2 removed")


@pytest.mark.parametrize("text", [None, "", "much"])
def test_a_budget_that_was_not_kept(run: Run, state: Path, text: str | None) -> None:
    """The default."""
    if text is not None:
        (state / "disk_budget").write_text(text)
    assert json.loads(run("ls", "--json"))["budget_bytes"] == 20 * 1024**3


@pytest.mark.parametrize("words", [("show", "zz"), ("pin", "zz"), ("rm", "zz")])
def test_an_unknown_id_is_a_sentence(run: Run, words: tuple[str, ...]) -> None:
    """Exit code 1 and what to do."""
    said = run(*words, code=1)
    assert "'zz'" in said
    assert said.count("\n") == 1


ROWS = [
    ("id", "kind", "tokens", "size", "used", "model", "reason", "state"),
    (
        "0123456789abcdef",
        "line",
        "12,345",
        "139.0 MiB",
        "3 min ago",
        "a-model-with-a-long-name-Q4_K_M",
        "idle",
        "pinned",
    ),
]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, None])
def test_a_narrow_table_has_fewer_columns(width: int | None) -> None:
    """What is shown is shown whole: the id is what the other commands need."""
    lines = _table(ROWS, width)
    assert lines[1].startswith("0123456789abcdef  line  12,345")
    assert width is None or max(map(len, lines)) <= width
    assert ("a-model-with-a-long-name-Q4_K_M" in lines[1]) == (width is None or width >= 120)


def test_a_pipe_gets_all_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No terminal, no width."""
    monkeypatch.setenv("COLUMNS", "20")
    head, first, *_ = run("ls").splitlines()
    assert head.split() == list(ROWS[0])
    assert "tiny" in first and "idle" in first


@pytest.mark.parametrize("word", ["show", "pin", "unpin", "rm"])
def test_an_empty_id(run: Run, word: str) -> None:
    """Wrong usage, also with a server that would take it for the list's door."""
    assert "ID is empty" in run(word, "", code=2)


def test_an_id_of_many(run: Run, state: Path) -> None:
    """It is said that there are several, not that there may be none."""
    asyncio.run(fill(state, range(3, 40)))
    beginning = next(c for c in "0123456789abcdef" if sum(str(s["id"])[0] == c for s in listed(run)) > 1)
    assert f"snapshots have ids that begin with '{beginning}'" in run("show", beginning, code=1)
    assert run("show", "zz", code=1).startswith("slotkeeper: No snapshot has an id that begins with 'zz'")


def test_sizes_and_ages() -> None:
    """Binary units, whole words."""
    assert [size(n) for n in (0, 1023, 1536, 20 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "20.0 GiB"]
    assert [span(s) for s in (5, 61, 7200, 200000)] == ["5 s", "1 min", "2 h", "2 d"]
