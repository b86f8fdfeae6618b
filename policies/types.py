"""The values that decisions are made of: frozen, without I/O, without a clock."""

from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from policies.checkpoints import REWINDS, Checkpoints, Memory

DIGEST_BYTES = 16


def digest(*parts: bytes) -> bytes:
    """16-byte hash of length-prefixed parts, so that ("ab", "c") and ("a", "bc") differ."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A model request reduced to what decides its prefix.

    `system`, `tools` and `params` are digests of the system text, the tool definitions and the fields that change the
    rendering; together they are the base. `chain[i]` is the digest of base and messages 0..i, `sizes[i]` the bytes of
    message i as JSON. A prompt without messages (a completion) has one entry, its text.
    """

    system: bytes
    tools: bytes
    params: bytes
    chain: tuple[bytes, ...]
    sizes: tuple[int, ...]
    n_leading: int = 0
    """Leading messages that belong to the base (system, developer)."""

    @property
    def base(self) -> bytes:
        """Identity of system text, tools and rendering parameters."""
        return digest(self.system, self.tools, self.params)

    @property
    def n_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(self.sizes)


class Match(StrEnum):
    """How a prompt relates to the ledger it was matched with."""

    EXTENDS = "extends"
    EDITED = "edited"
    BASE = "base"
    """Same session, another base."""
    NEW = "new"


class Action(StrEnum):
    """Where the tokens of a prompt come from (contract.md, `x-slotkeeper-placement`)."""

    CONTINUE = "continue"
    GUEST = "guest"
    FORK = "fork"
    RESTORE = "restore"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """One slot as placement sees it; token counts are cells of the engine's KV.

    `common`: tokens shared with the prompt to be placed. `mine`: its line owns the slot. `family`: the owner is an
    earlier state of the same conversation. `saved`: tokens of its content that a snapshot holds. `foreign`: owned by
    another tenant. `ownerless`: nobody comes back for its content. `idle`: nobody holds its lease. `settling`: the
    engine is about to give it back (a client left). `prompt`: tokens of the owner's newest prompt, the reply after it
    left out; None: all.
    `rigid`: its first tokens that can only be kept together, because they came from a file (Abilities.rewind_files).
    `checkpoints`: where the engine can go back to, where memory cannot be rewound.
    """

    id: int
    tokens: int
    common: int = 0
    idle: bool = True
    mine: bool = False
    family: bool = False
    foreign: bool = False
    ownerless: bool = False
    saved: int = 0
    last_used: float = 0.0
    settling: bool = False
    prompt: int | None = None
    rigid: int = 0
    checkpoints: Checkpoints = ()

    @property
    def is_empty(self) -> bool:
        """No tokens in it."""
        return self.tokens == 0

    @property
    def owner_end(self) -> int:
        """Where the owner's newest prompt ends; a guest begins behind it."""
        return self.tokens if self.prompt is None else min(self.prompt, self.tokens)

    @property
    def at_stake(self) -> int:
        """Tokens that no snapshot holds."""
        return max(0, self.tokens - self.saved)


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """A stored slot file, how many tokens it shares with the prompt, and the checkpoints that it brings along."""

    id: str
    tokens: int
    common: int
    checkpoints: Checkpoints = ()


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the engine can do and at which price.

    `save`, `restore`: slot files work. `rewind`: a slot's end can be cut off at any token for free (dense memory, or a
    sliding window kept whole). `rewind_files`: so can the end of what was loaded from a file (dense memory only: a file
    holds no more than the window of a local layer, also with --swa-full). `step_back_files`: at least by the few tokens
    between a prompt's end and the checkpoint before it, which engine B keeps in the file and engine A does not.
    `memory`: what it keeps where it cannot be rewound; unless that is known, contents are used whole or not at all.
    `file_checkpoints`: its files hold the checkpoints of their slot. `save_cost`, `restore_cost`: prefill tokens that
    take as long as saving or restoring one token.
    """

    save: bool = True
    restore: bool = True
    rewind: bool = True
    rewind_files: bool = True
    step_back_files: bool = True
    memory: Memory = REWINDS
    file_checkpoints: bool = False
    save_cost: float = 0.05
    restore_cost: float = 0.02


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to be placed: its tokens, the reply it reserves, and the pool it has to fit into.

    `reserved`: tokens that running requests may still fill, prompts included. `capacity`: cells of the pool that all
    slots share, or None where each slot has its own. `fresh`: nothing may be reused (`cache_prompt: false`).
    """

    n_prompt: int
    reserve: int
    slots: tuple[SlotFacts, ...]
    snapshots: tuple[SnapshotFacts, ...] = ()
    reserved: int = 0
    capacity: int | None = None
    abilities: Abilities = Abilities()
    fresh: bool = False
    extends: bool = False
    """The prompt extends its line's ledger, whatever the token counts say."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """An idle slot to be emptied first, and whether its content is worth a snapshot."""

    slot: int
    save: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Run in `slot`. FORK copies slot `source`, RESTORE loads `snapshot`; `save_first` keeps what it will lose.

    `cut`: FORK copies no more than so many tokens of the source: it is saved, cut there, copied, and gets its end back.
    """

    action: Action
    slot: int
    predicted_cache_n: int
    reason: str
    source: int | None = None
    snapshot: str | None = None
    save_first: bool = False
    erase_first: bool = False
    evictions: tuple[Eviction, ...] = ()
    cut: int = 0

    @property
    def is_at_hand(self) -> bool:
        """The prompt can be sent at once: nothing has to be saved, loaded or emptied before."""
        moves_files = self.save_first or self.action in (Action.FORK, Action.RESTORE)
        return not (moves_files or self.erase_first or self.evictions)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be granted now. `by_choice`: a slot could be had, but its line's own, busy one is worth waiting for;
    then nobody needs to wait behind it."""

    reason: str
    by_choice: bool = False


Decision = Place | Wait
