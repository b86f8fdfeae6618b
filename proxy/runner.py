"""A request in a slot, as the pool's sums need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BESIDE_TOKENS = 4
"""Events of an answer that bear no token and are counted as one: role, finish reason, usage, and one in hand. Without
them, whoever may say 40 tokens and has said them would seem to outgrow its reserve of 40."""


@dataclass(slots=True, eq=False)
class Runner:
    """A request that runs or is about to: what it may still put into the pool. `order` grows with each admission."""

    order: int
    n_prompt: int
    reserve: int
    stop: Callable[[], None]
    n_decoded: int = 0
    first_token: float = 0.0
    stopped: bool = False
    watch: Callable[[], None] = lambda: None

    def grew(self) -> None:
        """More was generated; beyond the reserve the pool has to be watched."""
        if self.has_outgrown:
            self.watch()

    def told(self, n_prompt: int) -> None:
        """The engine says how many tokens the prompt has: more than estimated, and the pool has to be watched."""
        if n_prompt > self.n_prompt:
            self.n_prompt = n_prompt
            self.watch()

    @property
    def has_outgrown(self) -> bool:
        """It takes more of the pool than was reserved for it."""
        return self.n_decoded > self.reserve + BESIDE_TOKENS

    @property
    def need(self) -> int:
        """Cells that it holds or may claim."""
        return self.n_prompt + max(self.reserve, self.n_decoded)
