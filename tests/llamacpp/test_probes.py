"""A probe against stand-ins for engines that do things otherwise."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llamacpp.determinism import TOLERANCE, Answer, difference
from llamacpp.errors import EngineRefused, EngineUnreachable
from llamacpp.probes import BUDGET, Effect, Learned, file_length, probe
from llamacpp.reports import SlotFileReport, SlotReport, Timings
from tests.fakes.slot_bytes import slot_file


@dataclass
class Engine:
    """Two slots in memory. Each flag is something that a real engine does in some configuration."""

    folder: Path
    pins: bool = True
    keeps_idle: bool = True
    shows_slots: bool = True
    writes: bool = True
    writes_elsewhere: bool = False
    restores: bool = True
    rewinds: bool = True
    checkpoints: bool = False
    breaks: bool = False
    held: dict[int, bytes] = field(default_factory=lambda: {0: b"", 1: b""})
    processed: int = 0
    _rigid: set[int] = field(default_factory=set)

    async def tokenize(self, text: str) -> bytes:
        return array("i", [zlib.crc32(word.encode()) & 0xFFFFFF for word in text.split()]).tobytes()

    async def prime(self, slot: int, tokens: bytes) -> Timings:
        slot = slot if self.pins else 0
        if self.breaks:
            raise EngineUnreachable("gone")
        if not self.keeps_idle:
            self.held = {number: kept if number == slot else b"" for number, kept in self.held.items()}
        held, same = self.held[slot], 0
        while same < min(len(held), len(tokens)) and held[same : same + 4] == tokens[same : same + 4]:
            same += 4
        if slot in self._rigid and same < len(held):
            same = 0
        self._rigid.discard(slot)
        self.held[slot] = tokens
        self.processed += (len(tokens) - same) // 4
        return Timings(same // 4, (len(tokens) - same) // 4, 1.0, 0, 0.0)

    async def slots(self) -> list[SlotReport]:
        if not self.shows_slots:
            raise EngineRefused(501, b"", "no slots")
        return [SlotReport(number, 4096, False, False, 1, len(kept) // 4) for number, kept in self.held.items()]

    async def save_slot(self, slot: int, filename: str) -> SlotFileReport:
        if not self.writes:
            raise EngineRefused(501, b"", "not supported")
        data = slot_file(self.held[slot]) + (b"SCKP" if self.checkpoints else b"")
        if not self.writes_elsewhere:
            (self.folder / filename).write_bytes(data)
        return SlotFileReport(len(self.held[slot]) // 4, len(data), 0.001)

    async def restore_slot(self, slot: int, filename: str) -> SlotFileReport:
        self.held[slot] = self._saved if self.restores else b""
        if not self.rewinds:
            self._rigid.add(slot)
        return SlotFileReport(len(self._saved) // 4, 1, 0.001)

    async def erase_slot(self, slot: int) -> int:
        self.held[slot] = b""
        return 0

    @property
    def _saved(self) -> bytes:
        from llamacpp.slot_files import read_header

        return read_header(next(self.folder.glob("*"))).tokens


async def tried(engine: Engine, *, n_swa: int = 0, n_file: int = 48) -> Learned:
    return await probe(engine, 1, 0, n_file=n_file, file=engine.folder / "probe.tmp", n_swa=n_swa)


async def test_a_good_engine(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    assert await tried(engine) == Learned(
        pinned=True,
        keeps_idle=True,
        appended=Effect(48, 48, 48),
        diverged=Effect(48, 28, 28),
        file_checkpoints=False,
        file_seen=True,
        timings=True,
        probed=48,
    )
    assert engine.held == {0: b"", 1: b""}


@pytest.mark.parametrize("flaw", ["keeps_idle", "restores", "rewinds", "shows_slots", "writes", "pins"])
async def test_a_probe_is_short(tmp_path: Path, flaw: str) -> None:
    """Whatever the engine does, and both slots are empty afterwards."""
    engine = Engine(tmp_path, **{flaw: False})
    await tried(engine)
    assert 0 < engine.processed <= BUDGET
    assert engine.held == {0: b"", 1: b""}


async def test_idle_slots_that_are_cleared(tmp_path: Path) -> None:
    assert (await tried(Engine(tmp_path, keeps_idle=False))).keeps_idle is False


async def test_requests_that_go_elsewhere(tmp_path: Path) -> None:
    assert await tried(Engine(tmp_path, pins=False)) == Learned(pinned=False, timings=True)


async def test_restores_that_do_nothing(tmp_path: Path) -> None:
    found = await tried(Engine(tmp_path, restores=False))
    assert (found.appended, found.diverged) == (Effect(48, 48, 0), Effect(48, 28, 0))
    assert found.appended is not None and not found.appended.is_effective


async def test_files_that_cannot_be_cut_back(tmp_path: Path) -> None:
    found = await tried(Engine(tmp_path, rewinds=False, checkpoints=True))
    assert (found.appended, found.diverged) == (Effect(48, 48, 48), Effect(48, 28, 0))
    assert found.file_checkpoints is True


@pytest.mark.parametrize("flaw", [{"writes": False}, {"writes_elsewhere": True}])
async def test_files_that_are_not_seen(tmp_path: Path, flaw: dict[str, bool]) -> None:
    found = await tried(Engine(tmp_path, **flaw))
    assert (found.file_seen, found.appended, found.keeps_idle) == (False, None, True)


async def test_a_file_within_a_window_says_nothing(tmp_path: Path) -> None:
    assert (await tried(Engine(tmp_path), n_swa=128)).appended is None
    assert (await tried(Engine(tmp_path), n_swa=128, n_file=192)).appended == Effect(192, 192, 192)


async def test_slots_that_are_not_shown(tmp_path: Path) -> None:
    assert (await tried(Engine(tmp_path, shows_slots=False))).pinned is None


async def test_an_engine_that_goes(tmp_path: Path) -> None:
    with pytest.raises(EngineUnreachable):
        await tried(Engine(tmp_path, breaks=True))


def test_length_of_a_file() -> None:
    assert file_length(1024, 32768, asked=False) == 48
    assert file_length(1024, 32768, asked=True) == 1088
    assert file_length(4096, 32768, asked=True) == 48, "too long to process for a question"
    assert file_length(1024, 2048, asked=True) == 48, "does not fit"
    assert file_length(0, 32768, asked=True) == 48


def answer(tokens: tuple[int, ...], *logprobs: float, cache_n: int = 96) -> Answer:
    return Answer(tokens, logprobs, cache_n)


def test_answers_that_are_equal() -> None:
    found = difference(96, answer((1, 2), -0.5, -1.0), answer((1, 2), -0.5, -1.0 - TOLERANCE / 2))
    assert (found.same, found.is_equal, found.is_tested) == (2, True, True)


def test_a_near_tie_is_no_difference() -> None:
    """Behind the first unequal token nothing is compared."""
    found = difference(96, answer((1, 2, 3), -0.5, -0.693, -9.0), answer((1, 4, 5), -0.5, -0.694, -0.1))
    assert (found.same, found.is_equal) == (1, True)


@pytest.mark.parametrize("other", [answer((1, 2), -0.5, -1.5), answer((1, 4), -0.5, -0.2), answer((1,), -0.5)])
def test_answers_that_differ(other: Answer) -> None:
    assert not difference(96, answer((1, 2), -0.5, -1.0), other).is_equal


def test_a_restore_that_was_not_used_proves_nothing() -> None:
    assert not difference(96, answer((1,), -0.5), answer((1,), -0.5, cache_n=0)).is_tested
