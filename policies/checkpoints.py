"""What of a common prefix a slot, or a file that was loaded into one, really gives: llama-server's rule, simulated.

Source: `update_slots` and `create_checkpoint` in tools/server/server-context.cpp of llama.cpp 0c1e57098; b11549 follows
the same rule (tests/live/test_tables.py asks both). Dense memory goes back to any token. Where local layers keep only a
window, or state is recurrent, the engine goes back to a checkpoint, or processes everything again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MOST, MIN_STEP, BATCH, MICRO_BATCH = 32, 8192, 2048, 512
"""llama-server's own --ctx-checkpoints, --checkpoint-min-step, -b and -ub."""
BEFORE_END = 4
"""A checkpoint is made so many tokens before a prompt's end, and one a micro-batch earlier (`checkpoint_offsets`)."""

Checkpoints = tuple[int, ...]
"""Where checkpoints end, in tokens, in the order in which they were made."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What an engine keeps of a sequence. `window`: tokens of its local layers, 0 where they are kept whole or there
    are none; `recurrent`: it has state that can only be continued from its end. `most`, `min_step`, `micro_batch`:
    --ctx-checkpoints, --checkpoint-min-step, -ub."""

    window: int = 0
    recurrent: bool = False
    most: int = MOST
    min_step: int = MIN_STEP
    micro_batch: int = MICRO_BATCH

    @property
    def rewinds(self) -> bool:
        """A slot's end can be cut off at any token."""
        return not (self.window or self.recurrent)


REWINDS = Memory()


def reused(
    memory: Memory, held: int, common: int, n_prompt: int, checkpoints: Checkpoints, *, from_file: bool = False
) -> int:
    """Tokens that a prompt of `n_prompt` finds in a slot of `held` tokens, of which it shares `common`.

    `from_file`: a file was loaded and nothing has run on it; its window is one position shorter than a running slot's.
    """
    at = min(common, held, n_prompt)
    if at <= 0:
        return 0
    again = at == n_prompt  # the prompt's last token is always processed, so the engine goes back by one
    threshold = max(0, at - memory.window - again)
    if _start(memory, held, from_file=from_file) >= threshold:
        at = next((_end(memory, c) for c in reversed(checkpoints) if _serves(memory, c, at, threshold)), 0)
    return max(0, min(at, n_prompt - 1))


def _start(memory: Memory, held: int, *, from_file: bool = True) -> int:
    """First position from which on everything is there (`llama_memory_seq_pos_min`): as late as it can be."""
    if memory.recurrent:
        return held - 1
    return max(0, held - memory.window - (not from_file)) if memory.window else 0


def _serves(memory: Memory, checkpoint: int, at: int, threshold: int) -> bool:
    start = _start(memory, checkpoint)
    return checkpoint - 1 <= at and (start < threshold or start == 0)


def _end(memory: Memory, checkpoint: int) -> int:
    """Where the engine goes on from it: a window's checkpoint is left one token early."""
    return checkpoint if memory.recurrent else checkpoint - 1


def after_prompt(
    memory: Memory, checkpoints: Checkpoints, cache_n: int, n_prompt: int, user_starts: tuple[int, ...] = ()
) -> Checkpoints:
    """A slot's checkpoints once a prompt was processed, of which `cache_n` tokens were found.

    `user_starts`: where its user messages begin, as far as that is known (the engine knows them of chats alone).
    """
    if memory.rewinds or not memory.most:
        return ()
    kept, made = [c for c in checkpoints if c - 1 <= cache_n], set[int]()
    for start, stop in _batches(memory, kept, cache_n, n_prompt, user_starts):
        near = n_prompt < stop + memory.micro_batch
        if start == 0 or not (near or start in user_starts):
            continue
        if near or not kept or start == user_starts[-1] or start > kept[-1] + memory.min_step:
            _make(memory, kept, made, start)
    return tuple(kept)


def _batches(
    memory: Memory, kept: list[int], start: int, n_prompt: int, user_starts: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """(start, stop) of the batches of one prompt that runs alone; `kept` grows meanwhile."""
    while start < n_prompt:
        stops = [start + BATCH, n_prompt]
        stops += [n_prompt - min(BATCH, n) for n in (BEFORE_END + memory.micro_batch, BEFORE_END)]
        last = kept[-1] if kept else -memory.min_step
        stops += [u for u in user_starts if u == user_starts[-1] or u > last + memory.min_step]
        stop = min(s for s in stops if s > start)
        yield start, stop
        start = stop


def _make(memory: Memory, kept: list[int], made: set[int], at: int) -> None:
    """One more: when the list is full those within the spacing of an earlier one go first, then the oldest."""
    last, i = -1, 0
    while len(kept) + 1 >= memory.most and i < len(kept):
        if kept[i] not in made and last >= 0 and kept[i] <= last + memory.min_step:
            del kept[i]
        else:
            last, i = kept[i], i + 1
    del kept[: max(0, len(kept) - memory.most + 1)]
    if at in kept:
        kept.remove(at)
    kept.append(at)
    made.add(at)
