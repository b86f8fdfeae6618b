"""What an engine really does with slots and slot files, found by a few short prompts in an empty slot.

Nothing of this can be read from /props: whether `id_slot` is honoured, whether idle slots keep their KV, what a
restored file is worth for a prompt that extends it and for one that diverges inside it (llama-server.md, the tables
under "Slot files"). A probe processes at most BUDGET tokens, more only where a window has to be passed and it was asked
for.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llamacpp.errors import EngineError, EngineRefused
from llamacpp.reports import SlotFileReport, SlotReport, Timings
from llamacpp.slot_files import BadSlotFile, read_header
from llamacpp.slot_layout import CHECKPOINTS

BUDGET = 256
"""Most tokens that a probe processes at an engine's start (issue 5)."""
N_BASE, N_FIRST, N_AT, N_TAIL = 48, 24, 28, 16
"""Tokens: in the file; of them processed first, so that a checkpoint lies before N_AT; where the other prompt diverges;
what is appended. Processed when nothing at all is reused: 48 + 4 + 64 + 64 + 48 = 228."""
BEYOND_WINDOW = 64
"""Tokens by which a file must be longer than a window to tell anything about it."""
LONGEST = 4096
"""Most tokens of a file that is made to pass a window."""
USELESS = 2
"""Useless restores in a row after which an engine's files are not made any more: one may be an accident."""
SLACK = 5
"""Tokens that a restore may lose and still be effective: a checkpoint lies 4 before a prompt's end."""
TEXT = "Six grey cats sat on a long wall and counted 4711 birds, while the baker next door sold warm bread to all. "
OTHER = "Nobody knows why rivers bend, yet every map of 1848 shows it; a teacher drew this one with a blue pen. "


class Slots(Protocol):
    """The part of `llamacpp.client.LlamaClient` that is used here."""

    async def tokenize(self, text: str) -> bytes: ...
    async def prime(self, slot: int, tokens: bytes) -> Timings: ...
    async def slots(self) -> list[SlotReport]: ...
    async def save_slot(self, slot: int, filename: str) -> SlotFileReport: ...
    async def restore_slot(self, slot: int, filename: str) -> SlotFileReport: ...
    async def erase_slot(self, slot: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Effect:
    """What one restore was worth, in tokens: the file's, those it shares with the prompt behind it, those reused."""

    held: int
    shared: int
    reused: int

    @property
    def is_effective(self) -> bool:
        """Almost all that is shared was reused."""
        return self.reused + SLACK >= self.shared


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of an engine's ways; None: not known yet.

    pinned: `id_slot` is honoured. keeps_idle: idle slots keep their KV when another slot works. appended, diverged:
    the last restore of each kind; useless: restores of the first kind in a row that gave (almost) nothing. steps_back:
    a prompt that ends with its restored file finds its tokens. file_checkpoints: slot files hold checkpoints.
    file_seen: its files are seen in the slot directory. timings: answers say cache_n. probed: tokens that a probe's
    file held, 0 without one.
    """

    pinned: bool | None = None
    keeps_idle: bool | None = None
    appended: Effect | None = None
    diverged: Effect | None = None
    file_checkpoints: bool | None = None
    file_seen: bool | None = None
    timings: bool | None = None
    probed: int = 0
    useless: int = 0
    steps_back: bool | None = None

    @property
    def is_useless(self) -> bool:
        """Its files are not worth making."""
        return self.useless >= USELESS


def file_length(n_swa: int, n_ctx: int, *, asked: bool) -> int:
    """Tokens of a probe's file. `asked`: a person wants to know, so it may be as long as a window needs."""
    wanted = n_swa + BEYOND_WINDOW
    return wanted if asked and n_swa and wanted <= min(LONGEST, n_ctx // 2) else N_BASE


async def probe(
    client: Slots, slot: int, other: int | None, *, n_file: int = N_BASE, file: Path | None = None, n_swa: int = 0
) -> Learned:
    """Tries an engine's ways in `slot`, which is empty and nobody's, and so is `other` (None: there is none).

    `file`: where a slot file of that name is seen from here, None to leave files alone; it is not deleted. n_swa:
    window in tokens: a shorter file tells nothing about it. Both slots are empty afterwards. Raises EngineError.
    """
    text = await client.tokenize(TEXT * (n_file // 16 + 2))
    stranger = await client.tokenize(OTHER)
    base, longer = text[: 4 * n_file], text[: 4 * (n_file + N_TAIL)]
    try:
        await client.erase_slot(slot)
        await client.prime(slot, base[: 4 * N_FIRST])
        first = await client.prime(slot, base)
        known = Learned(timings=first.cache_n + first.prompt_n == n_file, pinned=await _is_pinned(client, slot, n_file))
        if known.pinned is False:
            return known
        if file is not None:
            known = await _saved(client, slot, file, known)
        if other is not None:
            await client.prime(other, stranger[: 4 * 4])
            again = await client.prime(slot, longer)
            known = replace(known, keeps_idle=again.cache_n > 0)
        if file is not None and known.file_seen and (n_file > n_swa or not n_swa):
            mixed = base[: 4 * N_AT] + stranger[: 4 * (n_file - N_AT)]
            seen = await _restored(client, slot, file.name, longer, n_file, n_file)
            known = replace(known, appended=seen, useless=0 if seen.is_effective else USELESS)
            known = replace(known, diverged=await _restored(client, slot, file.name, mixed, n_file, N_AT))
        return replace(known, probed=n_file)
    finally:
        await _erase(client, slot)
        if other is not None:
            await _erase(client, other)


async def _is_pinned(client: Slots, slot: int, n_tokens: int) -> bool | None:
    try:
        found = {report.id: report.n_prompt_tokens for report in await client.slots()}
    except EngineRefused:
        return None
    return found.get(slot) == n_tokens


async def _saved(client: Slots, slot: int, file: Path, known: Learned) -> Learned:
    """What its slot file says; an engine that writes none, or elsewhere, is one without."""
    try:
        await client.save_slot(slot, file.name)
        holds = await asyncio.to_thread(_holds_checkpoints, file)
    except (EngineRefused, BadSlotFile, OSError):
        return replace(known, file_seen=False)
    return replace(known, file_seen=True, file_checkpoints=holds)


def _holds_checkpoints(file: Path) -> bool:
    """Raises BadSlotFile, OSError."""
    start = read_header(file).header_bytes
    return CHECKPOINTS in file.read_bytes()[start:]


async def _restored(client: Slots, slot: int, name: str, prompt: bytes, held: int, shared: int) -> Effect:
    await client.erase_slot(slot)
    await client.restore_slot(slot, name)
    return Effect(held, shared, (await client.prime(slot, prompt)).cache_n)


async def _erase(client: Slots, slot: int) -> None:
    """Also behind an error: then the error counts, not this."""
    try:
        await client.erase_slot(slot)
    except EngineError:
        return
