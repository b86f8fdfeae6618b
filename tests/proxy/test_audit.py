"""`slotkeeper audit`: what it tells of recorded requests, checked by hand and against agents.md."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from policies.flatten import Piece
from policies.prefix import common
from proxy.audit import Audit, Prompt, Prompts, Tokens
from proxy.audit_cli import _print
from proxy.audit_parts import Steadiness, shape_of
from proxy.cli import main
from proxy.recorded import Recorded

Run = Callable[..., str]
TRACES = Path(os.environ.get("SLOTKEEPER_TRACES", "/work/shared/traces"))
TEXT = "one two three four five six seven eight nine ten. " * 40

DEEP = '{"a":' * 990 + "1" + "}" * 990
KEYS = st.sampled_from("role content text type tool_calls function arguments".split())
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded traces here (SLOTKEEPER_TRACES)")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`slotkeeper audit ...`: what it printed, once its exit code is the one expected."""
    monkeypatch.setenv("COLUMNS", "140")

    def run(*words: str | Path, code: int = 0) -> str:
        done = main(["audit", *map(str, words)])
        said = capsys.readouterr()
        assert done == code, said
        return said.out + said.err

    return run


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """A file of lines, given as values or as they are."""

    def written(*lines: Any) -> Path:
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        (tmp_path / "trace.jsonl").write_text("".join(f"{text}\n" for text in texts))
        return tmp_path / "trace.jsonl"

    return written


def asked(*texts: str, date: str = "Sun Nov 29 2026", system: str = TEXT) -> dict[str, Any]:
    """A chat body whose system prompt begins with a date."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": f"Helper.\nToday's date: {date}\n{system}"}, *messages]}


def report(*bodies: dict[str, Any]) -> dict[str, Any]:
    """The report on some chat bodies."""
    audit = Audit()
    for i, body in enumerate(bodies, 1):
        audit.add(Recorded(i, body, "chat"))
    return audit.to_json()


def trace(name: str, run: Run, *more: str | Path) -> dict[str, Any]:
    """The report on a recorded trace."""
    found: dict[str, Any] = json.loads(run(TRACES / f"{name}.jsonl", "--json", *more))
    return found


def test_a_session_that_only_appends() -> None:
    """Each prompt holds the one before; nothing diverges; one conversation, one base."""
    found = report(asked("a"), asked("a", "b", "c"), asked("a", "b", "c", "d", "e"))
    assert found["divergences"] == [] and found["n_bases"] == found["conversations"] == 1
    sizes = [len("".join(m["content"] for m in asked(*"abcde"[:n])["messages"])) for n in (1, 3, 5)]
    assert found["was"]["prompt_tokens"] == round(sum(sizes) / 3.8)
    assert found["was"]["cached_tokens"] == round(sum(sizes[:2]) / 3.8)
    assert found["was"]["processed_tokens"] == found["was"]["prompt_tokens"] - found["was"]["cached_tokens"]


def test_a_date_that_changes() -> None:
    """The position, its texts, what it cost and the advice."""
    found = report(asked("a"), asked("a", "b", "c"), asked("a", "b", "c", "d", "e", date="Mon Nov 30 2026"))
    (place,) = found["divergences"]
    assert (place["section"], place["path"], place["kind"], place["times"]) == ("system", "content", "date", 1)
    assert place["character"] == len("Helper.\nToday's date: ")
    assert place["old"].startswith("Sun Nov 29") and place["new"].startswith("Mon Nov 30")
    assert place["lost_tokens"] == pytest.approx(len(TEXT) / 3.8, abs=10)
    assert place["lines"] == [3]
    (parts,) = found["parts"]
    assert parts["characters"]["volatile"] == len("Today's date: Sun Nov 29 2026\n")
    assert parts["characters"]["static"] == len(f"Helper.\n{TEXT}\n")
    assert parts["changing"][0]["new"] == "Today's date: Mon Nov 30 2026"


def test_a_date_that_changes_once_in_a_while() -> None:
    """Seldom is semi-static."""
    days = ["Sun Nov 29 2026"] * 4 + ["Mon Nov 30 2026"] * 4
    (parts,) = report(*(asked("a", date=day) for day in days))["parts"]
    assert parts["characters"]["semi-static"] > 0 == parts["characters"]["volatile"]
    assert [line["part"] for line in parts["changing"]] == ["semi-static"]


def test_another_conversation_is_no_divergence() -> None:
    """On the same base another first message begins another conversation."""
    found = report(asked("a"), asked("z"), asked("a", "b", "c"), asked("z", "y", "x"))
    assert found["divergences"] == [] and found["conversations"] == 2


def test_a_history_that_was_edited_is_one() -> None:
    """Within a conversation a changed message is named, as often as it happened."""
    found = report(asked("a", "b", "c"), asked("a", "b", "X", "y", "z"), asked("a", "b", "X", "Y", "z"))
    assert [(p["section"], p["message"], p["times"]) for p in found["divergences"]] == [("messages", 3, 2)]


@given(st.lists(st.text("ab", max_size=6), max_size=12))
def test_the_nearest_earlier_prompt(texts: list[str]) -> None:
    """The longest prefix that any earlier prompt shares, also when some were forgotten because others extend them."""
    prompts = Prompts()
    for i, text in enumerate(texts):
        found, shared = prompts.nearest(text)
        assert shared == max((common(text, earlier) for earlier in texts[:i]), default=0)
        assert found is None or common(found.text, text) == shared
        prompts.add(Prompt(text, len(text), {}, "", "", i))


def test_tokens_within() -> None:
    """Pieces are counted apart, the last one as far as it goes."""
    pieces = [Piece("messages", 0, "user", "content", "content", text) for text in ("abcd", "efgh")]
    tokens = Tokens(lambda text: b"\0\0\0\0" * len(text))
    assert [tokens.within(pieces, n) for n in (0, 3, 4, 6, 8, 99)] == [0, 3, 4, 6, 8, 8]
    assert Tokens().within(pieces, 8) == pytest.approx(8 / 3.8)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Today's date: Sun Nov 29 2026", "Today's date: Mon Nov 30 2026"),
        ("Time: 10:00:00.", "Time: 10:01:07."),
        ("cwd: /home/a/one", "cwd: /srv/b/two/three"),
        ("PID 20718 up 3s", "PID 993 up 17s"),
    ],
)
def test_shapes(one: str, other: str) -> None:
    """A line is the same line when only a value in it changed."""
    assert shape_of(one) == shape_of(other) != shape_of("something else")


def test_lines_that_come_and_go() -> None:
    """A git status is lines that were not there before."""
    steady = Steadiness()
    for i, text in enumerate(("a\nclean", "a\n?? b.py", "a\n?? b.py\n?? c.py")):
        steady.see(bytes([i]), [Piece("system", 0, "system", "content", "content", text)])
    found = steady.to_json()
    assert found["characters"]["static"] == len("a\n")
    assert {(line["old"], line["new"]) for line in found["changing"]} >= {("clean", "")}


# -- the command -------------------------------------------------------------------------------------------------------


def test_table(run: Run, written: Callable[..., Path]) -> None:
    """The figures for people."""
    file = written(asked("a"), asked("a", "b", "c", date="Mon Nov 30 2026"), {"path": "/v1/models", "body": None})
    text = run(file)
    assert "2 requests (1 other line) of 1 conversation on 2 bases" in text
    assert "as it was" in text and "date" in text and "Mon Nov 30" in text and "--mode repair" in text


def test_refused_requests_do_not_count(run: Run, written: Callable[..., Path]) -> None:
    """What was answered with an error was not processed."""
    file = written(*({"path": "/v1/chat/completions", "status": s, "body": asked("a")} for s in (503, 400, 200)))
    found = json.loads(run(file, "--json"))
    assert (found["requests"], found["skipped"], found["was"]["cached_tokens"]) == (1, 2, 0)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["{"], "line 1, is not JSON"),
        ([asked("a"), "[1]"], "line 2, is a JSON list"),
        (["", "null"], "line 2, is a JSON NoneType"),
        ([], "no answered model request"),
        ([{"path": "/v1/embeddings", "body": {"input": ["x"]}}], "no answered model request"),
        (["[" * 100_000], "is not JSON"),
    ],
)
def test_bad_files(run: Run, written: Callable[..., Path], lines: list[Any], sentence: str) -> None:
    """A sentence that names the line; exit code 2."""
    assert sentence in " ".join(run(written(*lines), code=2).split())


def test_missing_files(run: Run, tmp_path: Path, written: Callable[..., Path]) -> None:
    """No file, a directory, bytes, a vocabulary that is none."""
    assert "no such file" in run(tmp_path / "none.jsonl", code=2)
    assert "cannot be read" in run(tmp_path, code=2)
    (tmp_path / "bytes.jsonl").write_bytes(bytes(range(256)))
    assert "is not JSON" in run(tmp_path / "bytes.jsonl", code=2)
    file = written(asked("a"))
    assert "is not there" in run(file, "--vocab", tmp_path / "none.gguf", code=2)
    run(file, "--vocab", file, code=1)


def test_hostile_file_names(run: Run, tmp_path: Path) -> None:
    said = run(str(tmp_path / "no\x1b[31m\u202e.jsonl"), code=2)
    assert "cannot be read" in said and not {"\x1b", "\u202e"} & set(said)


def test_hostile_text(run: Run, written: Callable[..., Path]) -> None:
    """Markup and control characters stay text; half a surrogate pair is no reason to fail."""
    evil = "[bold red]\x1b[2J\u202e[/nope]\ud800"
    file = written(asked("a", system=f"{TEXT}x"), asked("a", system=f"{TEXT}{evil}"))
    text = run(file)
    assert "[bold red]" in text and "[/nope]" in text
    assert not {"\x1b", "\u202e"} & set(text)
    assert json.loads(run(file, "--json"))["divergences"][0]["new"].startswith(evil[:10])


def test_deep_and_long_text(run: Run, written: Callable[..., Path]) -> None:
    """JSON as deep as a client can send it, and a million spaces beside reminders."""
    spaces = " " * 1_000_000 + "<system-reminder>" * 2000
    deep = json.dumps(asked("a", spaces, "b"))[:-1] + f', "tools": [{DEEP}], "tool_choice": {DEEP}}}'
    file = written(deep, deep.replace('"b"', '"c"'), asked("a", spaces + "x", "b"), asked("a", spaces + "y", "b"))
    found = json.loads(run(file, "--json"))
    assert found["requests"] == 4 and len(found["divergences"]) >= 1


@given(st.recursive(st.none() | st.text("ab", max_size=3), lambda x: st.lists(x) | st.dictionaries(KEYS, x)))
def test_any_body_is_taken(body: Any) -> None:
    """Whatever JSON a recorder wrote."""
    audit = Audit()
    for number in (1, 2):
        audit.add(Recorded(number, {"messages": body}, "chat"))
    assert audit.to_json()["requests"] == 2


SYSTEMS = "".join(f"{letter * 50} is what this agent is called.\n{TEXT * 30}" for letter in "ab")


def test_tables_in_a_pipe_are_whole(run: Run, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the terminal beside it has: no heading and no name is cut."""
    monkeypatch.setenv("COLUMNS", "30")
    text = run(written(asked("a", system=SYSTEMS), asked("a", "b", "c", system=SYSTEMS)))
    assert "\u2026" not in text
    assert text.splitlines()[2].split() == "hit rate prompt tokens cached processed rate".split()


def test_tables_on_a_narrow_terminal() -> None:
    """80 columns: every heading and number is readable, and only names are cut."""
    found = report(asked("a", system=SYSTEMS), asked("a", "b", "c", system=SYSTEMS))
    found["parts"][0]["group"] = "unknown agent, with tools, " + "name " * 20
    out = Console(width=80, force_terminal=True, color_system=None, file=io.StringIO(), highlight=False)
    _print(out, found | {"skipped": 0, "counted": "characters / 3.8"})
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    (at,) = [i for i, line in enumerate(lines) if "semi-static" in line]
    assert lines[at].split() == "characters of bases requests static semi-static volatile".split()
    assert lines[at + 1].split()[-4:] == ["2", f"{found['parts'][0]['characters']['static']:,}", "0", "0"]
    assert lines[at + 1].count("\u2026") == 1 and max(map(len, lines)) <= 80


# -- real sessions (agents.md) -----------------------------------------------------------------------------------------


@needs_traces
def test_opencode_next_day(run: Run) -> None:
    """agents.md: the date at about 8,857 makes everything behind it new: 22.5k of 31.3k characters."""
    (place,) = trace("opencode-nextday", run)["divergences"]
    assert (place["kind"], place["section"], place["lines"]) == ("date", "system", [5])
    assert place["character"] == pytest.approx(8857, abs=50)
    assert place["lost_tokens"] == pytest.approx(22_500 / 3.8, rel=0.02)
    assert "OPENCODE_EXPERIMENTAL_CACHE_STABILIZATION=1" in place["advice"]


@needs_traces
def test_continue(run: Run) -> None:
    """agents.md: date at 542, git status at 807 of the system prompt (another directory's length aside)."""
    (day,) = trace("continue-nextday", run)["divergences"]
    (git,) = trace("continue-run1", run)["divergences"]
    assert (day["kind"], git["kind"]) == ("date", "git status")
    assert day["character"] == pytest.approx(542, abs=30) and git["character"] == pytest.approx(807, abs=30)


@needs_traces
def test_claude(run: Run) -> None:
    """agents.md: request 9 diverges at tools+16,987 of 56.9k; the billing header at 48 after compaction."""
    found = trace("claude-tui", run)["divergences"]
    tools = next(place for place in found if place["section"] == "tools")
    assert (tools["character"], tools["kind"], tools["lines"]) == (16_987, "tools added", [9])
    assert tools["flat_character"] == pytest.approx(24_149, abs=50)
    assert "ENABLE_TOOL_SEARCH=false" in tools["advice"]
    header = next(place for place in found if place["section"] == "system")
    assert header["kind"] == "id" and header["character"] in (47, 48)
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in header["advice"]


@needs_traces
def test_aider(run: Run) -> None:
    """agents.md: the files block moves behind the history at each turn: character 7.1k of 10.7k."""
    place = trace("aider-run1", run)["divergences"][0]
    assert (place["section"], place["kind"]) == ("messages", "edited")
    assert place["flat_character"] == pytest.approx(7_100, abs=200)


@needs_traces
@pytest.mark.parametrize("name", ["pi-run1", "cline-run1", "codex-run1"])
def test_agents_that_append(run: Run, name: str) -> None:
    """The best behaved: every request extends the one before, or begins something new."""
    assert trace(name, run)["divergences"] == []
