"""What engines were seen to do, kept per (fingerprint, build, flags) in the state directory.

Learned in passing, from the figures of ordinary requests, and by one short probe (llamacpp/probes) at the start of an
engine of ours that nothing is known of.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import structlog
import xxhash

from llamacpp.errors import EngineError
from llamacpp.probes import SLACK, Effect, Learned, file_length, probe
from llamacpp.reports import SlotReport, Timings
from policies.types import Action
from proxy.errors import StoreError
from proxy.state_dir import PRIVATE_DIR, PRIVATE_FILE

if TYPE_CHECKING:
    from proxy.carry_out import Carried
    from proxy.engine import Engine
    from proxy.engines import Engines

log = structlog.get_logger(__name__)

TELLING = 64
"""Predicted tokens from which a hit or a miss says something about an engine."""
MOST_KNOWN = 64
"""Engines that are remembered; those used last."""
USELESS_PRICE = "restored files gave nothing, so none are made: after a restart everything is processed again"
NOT_FLAGS = frozenset({"--host", "--port", "--slot-save-path", "--alias", "-a", "--chat-template-file", "-t", "-tb"})
"""Flags with a value that change nothing here."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """One file: the build by its name, so that a new model of that build need not start from nothing."""

    build: str
    swa_full: bool
    n_swa: int
    learned: Learned


class LearnedBook:
    """One small file per engine in `directory`. A file that cannot be read or written is none: nothing depends on it
    but probes and advice."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: str) -> Learned:
        """What is known; empty when nothing is. Reads a file."""
        path = self._directory / f"{key}.json"
        found = _read(path)
        if found is None:
            return Learned()
        try:
            os.utime(path)
        except OSError as error:
            log.debug("learned_not_touched", error=str(error))
        return found.learned

    def put(self, engine: Engine) -> None:
        """Keeps what is known of an engine. Writes a small file."""
        n_swa = engine.plan.n_swa if engine.plan else 0
        kept = _Kept(engine.build, _swa_full(engine), n_swa, engine.learned)
        path = self._directory / f"{engine.learned_key}.json"
        try:
            self._directory.mkdir(mode=PRIVATE_DIR, exist_ok=True)
            new = path.with_suffix(".new")
            new.touch(mode=PRIVATE_FILE)
            new.write_bytes(orjson.dumps(asdict(kept)))
            new.replace(path)
            for old in sorted(self._directory.glob("*.json"), key=lambda p: -p.stat().st_mtime)[MOST_KNOWN:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.warning("learned_not_kept", error=str(error), consequence="it is found out again at the next start")

    def restores_windows(self, build: str) -> bool:
        """Whether files of this build were seen to be worth something where windows are not kept whole."""
        found = map(_read, self._directory.glob("*.json"))
        return any(
            k.build == build and k.n_swa and not k.swa_full and k.learned.appended and k.learned.appended.is_effective
            for k in found
            if k is not None
        )

    def note_turn(self, engine: Engine, carried: Carried, timings: Timings) -> None:
        """What an ordinary request showed; written down when that is new."""
        known = after_turn(engine.learned, carried, timings)
        if known != engine.learned:
            is_news = _signs(known) != _signs(engine.learned)
            if known.is_useless and not engine.learned.is_useless:
                log.warning("files_useless", engine=engine.name, consequence=USELESS_PRICE)
            engine.learned = known
            if is_news and engine.learned_key:
                asyncio.get_running_loop().run_in_executor(None, self.put, engine)


def after_turn(known: Learned, carried: Carried, timings: Timings) -> Learned:
    """`known` with what a settled request says. Short hits say nothing."""
    known = replace(known, timings=True)
    predicted, hit = carried.predicted_cache_n, timings.cache_n
    if predicted < TELLING:
        return known
    if carried.snapshot is None:
        kept = carried.action is Action.CONTINUE and hit + SLACK >= predicted
        return replace(known, pinned=True, keeps_idle=True) if kept else known
    held = carried.snapshot.n_tokens
    effect = Effect(held, predicted, hit)
    if predicted + SLACK < held:
        return replace(known, diverged=effect)
    length = hit + timings.prompt_n
    if held >= length:  # it ends with the file: another question
        return replace(known, steps_back=hit > 0)
    useless = 0 if 2 * hit >= predicted else known.useless + 1
    return replace(known, appended=effect, useless=useless) if held + SLACK < length else known


def _signs(known: Learned) -> tuple[object, ...]:
    """What of it changes advice."""
    effects = (known.appended, known.diverged)
    seen = known.pinned, known.keeps_idle, known.timings, known.useless, known.steps_back
    return *seen, *(e and e.is_effective for e in effects)


def key_of(engine: Engine) -> str:
    """(fingerprint, build, flags), 16 hex digits. An attached engine's flags show in its context and slots alone."""
    flags = [f"{engine.n_ctx}", f"{engine.table.n_slots}", engine.kind]
    if engine.spec is not None:
        flags += _telling((*engine.spec.chosen, *engine.spec.extra))
    elif engine.props is not None:
        flags += [engine.client.base_url, engine.props.model_path]
    build = engine.build or (engine.props.build_info if engine.props else "")
    parts = [engine.fingerprint or "", engine.model, build, *flags]
    return xxhash.xxh3_64_hexdigest("\0".join(parts).encode())


def _telling(words: Sequence[str]) -> list[str]:
    return [w for i, w in enumerate(words) if w not in NOT_FLAGS and (not i or words[i - 1] not in NOT_FLAGS)]


async def learn_ways(engines: Engines, engine: Engine, slots: Sequence[SlotReport]) -> None:
    """What is known of an engine that has just answered; ours is tried once, where nothing is."""
    engine.learned_key = key_of(engine)
    engine.learned = await asyncio.to_thread(engines.learned.get, engine.learned_key)
    empty = [s.id for s in slots if not s.n_prompt_tokens and not s.is_processing]
    if engine.kind != "attached" and not engine.learned.probed and empty and not engine.speculative:
        await probe_ways(engines, engine, empty[::-1], asked=False)


async def probe_ways(engines: Engines, engine: Engine, empty: Sequence[int], *, asked: bool) -> None:
    """Tries an engine's ways in empty slots that are nobody's (one, or two) and keeps what was found. Fails open."""
    facts = await asyncio.to_thread(engine.memory_facts)
    n_swa = facts.n_swa if facts else 0
    n_file = file_length(n_swa, engine.n_ctx, asked=asked)
    file = _file(engine)
    other = empty[1] if len(empty) > 1 else None
    try:
        found = await probe(engine.client, empty[0], other, n_file=n_file, file=file, n_swa=n_swa)
        engine.learned = merge(engine.learned, found)
        await asyncio.to_thread(engines.learned.put, engine)
    except EngineError as error:
        log.warning("not_probed", engine=engine.name, error=str(error))
    finally:
        if file is not None:
            await _discard(engine, file)


def _file(engine: Engine) -> Path | None:
    """Where a slot file may be written that is deleted afterwards: a name of the store's own, where there is one."""
    if engine.slot_dir is None or (engine.kind != "attached" and not engine.store.persist):
        return None
    name = engine.store.temp_name("0000") if engine.store.persist else f"0000-{secrets.token_hex(8)}.tmp"
    return engine.slot_dir / name


async def _discard(engine: Engine, file: Path) -> None:
    try:
        if engine.store.persist:
            await engine.store.discard(file.name)
        else:
            await asyncio.to_thread(file.unlink, missing_ok=True)
    except (StoreError, OSError) as error:
        log.warning("probe_file_left", engine=engine.name, error=str(error))


def merge(known: Learned, found: Learned) -> Learned:
    """`known`, with everything that `found` knows."""
    new = {name: value for name in _FIELDS if (value := getattr(found, name)) is not None}
    return replace(known, **new, useless=found.useless if found.appended else known.useless)


_FIELDS = tuple(name for name in Learned.__dataclass_fields__ if name != "useless")


def _swa_full(engine: Engine) -> bool:
    return engine.plan is not None and engine.plan.swa_full


def _read(path: Path) -> _Kept | None:
    try:
        found = orjson.loads(path.read_bytes())
        learned: dict[str, Any] = found["learned"]
        for name in ("appended", "diverged"):
            learned[name] = Effect(**learned[name]) if learned[name] else None
        return _Kept(str(found["build"]), bool(found["swa_full"]), int(found["n_swa"]), Learned(**learned))
    except (OSError, ValueError, KeyError, TypeError):
        return None
