"""A history in which messages that say nothing came or went, laid out like its line's ledger, position by position.

Agents put reminders into messages of their own, and take them out again or move them to the end; an interrupted answer
may leave an empty one. The ledger goes on telling what it told: what is gone for the client is put back, what the
client added among messages that were sent is left out (its reminders are told in the newest).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from policies.append_only import Defaults, aligned, says_nothing
from policies.message_parts import only_reminders, reminders, size_of
from policies.reminders import moved_reminders
from policies.types import DIGEST_BYTES
from proxy.api.read import ModelRequest, chained
from proxy.ledger import Ledger

Json = dict[str, Any]

GONE = bytes(DIGEST_BYTES)
"""In the place of a spelling's digest: the client does not say this message any more, the ledger does."""


@dataclass(frozen=True, slots=True)
class Realigned:
    """The request with the ledger's positions, the client's messages that have none, and reminders that it moved to
    its new messages though the ledger tells them."""

    request: ModelRequest
    left_out: tuple[Json, ...]
    moved: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A message, its JSON, the digests of its spelling and of its normal form."""

    message: Json
    blob: bytes
    raw: bytes
    normal: bytes


def realigned(
    request: ModelRequest, ledger: Ledger, sent: Sequence[bytes], shared: int, defaults: Defaults
) -> Realigned | None:
    """`shared`: messages that agree as they stand. None when all others do, too, or differ in what they say."""
    n = max(shared, request.prompt.n_leading)
    messages: list[Json] = request.body["messages"]
    before = [orjson.loads(blob) for blob in sent[n:]]
    if not any(map(says_nothing, (*before, *messages[n:]))):
        return None
    found = aligned(before, messages[n:], defaults, ledger.normal[n:])
    if found is None:
        return None
    places, n_shared = found
    own = [_Entry(*each) for each in zip(messages, request.blobs, request.raws, request.normals, strict=True)]
    known = [
        own[n + place] if place is not None else _Entry(before[i], blob, GONE, ledger.normal[n + i])
        for i, (place, blob) in enumerate(zip(places, sent[n:], strict=False))
    ]
    moved = Counter(moved_reminders(before, messages[n:], n_shared))
    new = []
    for each in own[n + n_shared :]:
        said = Counter(reminders(each.message))
        if only_reminders(each.message) and said <= moved:
            moved -= said
        else:
            new.append(each)
    taken = set(places)
    left_out = tuple(own[n + i].message for i in range(n_shared) if i not in taken)
    return Realigned(_of(request, [*own[:n], *known, *new]), left_out, tuple(moved.elements()))


def _of(request: ModelRequest, entries: Sequence[_Entry]) -> ModelRequest:
    sizes = tuple(size_of(each.blob) for each in entries)
    raws = tuple(each.raw for each in entries)
    chain = chained(request.prompt.base, raws)
    return replace(
        request,
        body={**request.body, "messages": [each.message for each in entries]},
        prompt=replace(request.prompt, chain=chain, sizes=sizes),
        blobs=tuple(each.blob for each in entries),
        raws=raws,
        normals=tuple(each.normal for each in entries),
    )
