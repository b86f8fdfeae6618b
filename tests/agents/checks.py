"""What must be true of an agent's session with Slotkeeper. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.agents.script import AFTER, NOTE
from tests.agents.tap import Seen

WANTED = {"greet.py": AFTER, "notes.md": NOTE}
"""The scratch repository at the end."""


def wrong(
    seen: Sequence[Seen], files: Mapping[str, str], least_turns: int, placements: Sequence[str] = ("continue",)
) -> list[str]:
    """A sentence for each thing that is not as it must be; `least_turns`: how many answers the script has;
    `placements`: what a turn after the first may have (after a restart a snapshot may hold more than the slot)."""
    found = [f"{s.method} {s.path} was answered with {s.status}" for s in seen if not 200 <= s.status < 300]
    found += [f"{name} holds {files.get(name)!r}" for name, text in WANTED.items() if files.get(name) != text]
    turns = [s for s in seen if s.is_main]
    if len(turns) < least_turns:
        found.append(f"{len(turns)} turns, not {least_turns}")
    found += [
        f"turn {i + 1} was placed {s.placement!r}" for i, s in enumerate(turns) if i and s.placement not in placements
    ]
    lines = {s.line for s in turns}  # several where the agent edits its history: each is a branch of the one before
    aside = [s for s in seen if s.is_model_request and not s.is_main]
    return found + [
        f"side request {i + 1} is on the conversation's line" for i, s in enumerate(aside) if s.line in lines
    ]
