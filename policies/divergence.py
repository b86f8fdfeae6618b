"""Where does a prompt stop being the continuation of an earlier one, and what changed there?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policies.changes import Change, Kind, kind_of
from policies.flatten import PARAMS, Group, Json, Section, dumps, flatten, groups_of
from policies.prefix import common

AROUND = 80
"""Characters of text shown on each side of a divergence."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where `now` is not what `before` was.

    `message`: index in the body's list of messages, or of tools in the section "tools". `path`: within it. `at`:
    characters from the start of the section's text; `flat`: from the start of the flattened prompt. `shared`: up to 80
    characters before it; `old` and `new`: up to 80 characters from it on.
    """

    section: Section
    message: int | None
    role: str | None
    path: str
    at: int
    flat: int
    shared: str
    old: str
    new: str
    kind: Kind


def first_divergence(before: Json, now: Json) -> Divergence | None:
    """The first difference between two bodies of one dialect; None when `now` is `before` with something appended.

    Equal texts in another form (a text or parts) are no difference. Ids of calls and fields that decide how a prompt is
    rendered are looked at when the texts show none. Raises RecursionError for JSON nested too deeply to be compared.
    """
    return _in_text(before, now, ids=False) or _in_params(before, now) or _in_text(before, now, ids=True)


def _in_text(before: Json, now: Json, *, ids: bool) -> Divergence | None:
    old, new = groups_of(flatten(before, ids=ids)), groups_of(flatten(now, ids=ids))
    for i, mine in enumerate(old):
        its = new[i] if i < len(new) else None
        if its is not None and its.key == mine.key and its.text == mine.text:
            continue
        if i == len(old) - 1 and its is not None and its.key == mine.key and _grew(mine, its):
            return None
        at = common(mine.text, its.text) if its is not None and its.key == mine.key else 0
        return _found(old, new, i, at, Change(before, now, mine, its, at))
    return _base_grew(old, new, before, now)


def _grew(mine: Group, its: Group) -> bool:
    """A last text that only got longer is appended to, unless it lies in the base, behind which messages followed."""
    return mine.section == "messages" and its.text.startswith(mine.text)


def _base_grew(old: list[Group], new: list[Group], before: Json, now: Json) -> Divergence | None:
    """All of the earlier prompt is there, but behind it the base goes on where there were messages, or could have."""
    if len(new) > len(old) and old and new[len(old)].section in ("system", "tools"):
        its = new[len(old)]
        if its.section != old[-1].section or its.section == "tools":
            return _found(old, new, len(old), 0, Change(before, now, None, its, 0))
    return None


def _found(old: list[Group], new: list[Group], i: int, at: int, change: Change) -> Divergence:
    place = _first(change.old, change.new)
    piece = place.piece_at(at)
    flat = sum(len(g.text) for g in old[:i]) + at
    in_section = sum(len(g.text) for g in old[:i] if g.section == place.section) + at
    was = "".join(_texts(old[i:], at))[:AROUND]
    shared = "".join(g.text for g in old[max(0, i - 8) : i]) + (old[i].text[:at] if i < len(old) else "")
    return Divergence(
        section=place.section,
        message=piece.message,
        role=piece.role,
        path=piece.path,
        at=in_section,
        flat=flat,
        shared=shared[-AROUND:],
        old=was,
        new="".join(_texts(new[i:], at))[:AROUND],
        kind=kind_of(change),
    )


_ORDER = {"system": 0, "tools": 1, "messages": 2}


def _first(old: Group | None, new: Group | None) -> Group:
    """Of the two texts at a divergence the one that comes first in a prompt; the newer one of two versions."""
    both = [group for group in (new, old) if group is not None]
    if len(both) > 1 and both[0].key != both[1].key:
        both.reverse()
    return min(both, key=lambda group: (_ORDER[group.section], group.ordinal))


def _texts(groups: Sequence[Group], at: int) -> Iterator[str]:
    """Enough text from a place on to show it."""
    left = AROUND
    for group in groups:
        text = group.text[at : at + left]
        at, left = 0, left - len(text)
        yield text
        if left <= 0:
            return


def _in_params(before: Json, now: Json) -> Divergence | None:
    for name in PARAMS:
        if before.get(name) != now.get(name):
            old, new = (dumps(body.get(name))[:AROUND] for body in (before, now))
            return Divergence("params", None, None, name, 0, 0, "", old, new, Kind.SETTING)
    return None
