"""What ordinary requests teach, and what is kept of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llamacpp.engines.flags import EngineSpec
from llamacpp.probes import Effect, Learned
from llamacpp.reports import Timings
from policies.types import Action
from proxy.carry_out import Carried
from proxy.engine import Engine
from proxy.learned import MOST_KNOWN, LearnedBook, after_turn, key_of, merge
from proxy.store_types import Snapshot


def timings(cache_n: int, prompt_n: int = 100) -> Timings:
    return Timings(cache_n, prompt_n, 1.0, 1, 1.0)


def snapshot(n_tokens: int) -> Snapshot:
    return cast(Snapshot, SimpleNamespace(n_tokens=n_tokens))


def test_a_hit_in_a_slot_shows_that_it_was_kept() -> None:
    known = after_turn(Learned(), Carried(Action.CONTINUE, 500), timings(498))
    assert (known.pinned, known.keeps_idle, known.timings) == (True, True, True)


@pytest.mark.parametrize(
    ("carried", "found"),
    [
        (Carried(Action.CONTINUE, 500), timings(0)),
        (Carried(Action.CONTINUE, 20), timings(20)),
        (Carried(Action.COLD, 0), timings(0)),
        (Carried(Action.RESTORE, 500, snapshot(500)), timings(500, 1)),
    ],
    ids=["a miss has many causes", "too short", "nothing expected", "ends with the file"],
)
def test_what_says_nothing(carried: Carried, found: Timings) -> None:
    assert after_turn(Learned(), carried, found) == Learned(timings=True)


def test_restores() -> None:
    """Extended, and diverging inside the file."""
    extended = after_turn(Learned(), Carried(Action.RESTORE, 500, snapshot(500)), timings(0, 600))
    assert extended.appended == Effect(500, 500, 0)
    diverged = after_turn(Learned(), Carried(Action.RESTORE, 300, snapshot(500)), timings(290))
    assert (diverged.appended, diverged.diverged) == (None, Effect(500, 300, 290))


def test_merging_forgets_nothing() -> None:
    known = Learned(pinned=True, appended=Effect(1, 1, 1), probed=48)
    assert merge(known, Learned(pinned=False, probed=192)) == Learned(
        pinned=False, appended=Effect(1, 1, 1), probed=192
    )


def engine(**more: Any) -> Engine:
    """As much of one as is asked for here."""
    default: dict[str, Any] = {
        "fingerprint": "ab12",
        "model": "tiny",
        "build": "b1",
        "kind": "binary",
        "n_ctx": 4096,
        "props": None,
        "plan": SimpleNamespace(swa_full=False, n_swa=128),
        "spec": EngineSpec(None, extra=("--ctx-checkpoints", "3", "--port", "1")),
        "table": SimpleNamespace(n_slots=2),
        "learned": Learned(pinned=True, appended=Effect(192, 192, 192), probed=192),
        "learned_key": "k1",
    }
    return cast(Engine, SimpleNamespace(**default | more))


def test_the_key_tells_engines_apart() -> None:
    """By fingerprint, build and flags; not by those that change from start to start."""
    same = key_of(engine(spec=EngineSpec(None, extra=("--ctx-checkpoints", "3", "--port", "2"))))
    others = [{"fingerprint": "cd34"}, {"build": "b2"}, {"n_ctx": 8192}, {"spec": EngineSpec(None, extra=("-kvo",))}]
    assert same == key_of(engine())
    assert len({same, *(key_of(engine(**other)) for other in others)}) == 1 + len(others)


def test_kept_and_found_again(tmp_path: Path) -> None:
    book = LearnedBook(tmp_path / "engines")
    assert book.get("k1") == Learned()
    book.put(engine())
    assert book.get("k1") == engine().learned
    assert (book.restores_windows("b1"), book.restores_windows("b2")) == (True, False)
    assert (tmp_path / "engines").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("more", [{"plan": SimpleNamespace(swa_full=True, n_swa=128)}, {"learned": Learned(probed=48)}])
def test_a_build_that_was_not_seen_to_restore_windows(tmp_path: Path, more: dict[str, Any]) -> None:
    book = LearnedBook(tmp_path / "engines")
    book.put(engine(**more))
    assert not book.restores_windows("b1")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"build": "b1"}', '{"build": 1, "learned": {"x": 1}}'])
def test_damage_is_nothing_known(tmp_path: Path, text: str) -> None:
    (tmp_path / "k1.json").write_text(text)
    assert LearnedBook(tmp_path).get("k1") == Learned()
    assert not LearnedBook(tmp_path).restores_windows("b1")


def test_bounded(tmp_path: Path) -> None:
    book = LearnedBook(tmp_path / "engines")
    for number in range(MOST_KNOWN + 3):
        book.put(engine(learned_key=f"k{number}"))
    assert len(list((tmp_path / "engines").iterdir())) == MOST_KNOWN


def test_files_that_give_nothing_twice_are_useless() -> None:
    """Until one gives something; a prompt that ends with its file is another question."""
    carried, known = Carried(Action.RESTORE, 500, snapshot(500)), Learned()
    known = after_turn(known, carried, timings(0, 600))
    assert not known.is_useless
    known = after_turn(known, carried, timings(0, 500))
    assert (known.steps_back, known.is_useless) == (False, False)
    known = after_turn(known, carried, timings(0, 600))
    assert known.is_useless
    assert not after_turn(known, carried, timings(500, 100)).is_useless
    assert merge(known, Learned(pinned=True)).is_useless, "nothing was restored by that probe"
