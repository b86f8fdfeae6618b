"""The model's answers in a history that comes back: given back as it gave them, but for what is the client's own.

An answer is the reply to all that stands before it. So a ledger's reply goes to nobody else's prompt, and thoughts that
the client sends and the model did not have (another fork's, another model's) stay as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from policies.message_parts import thought_texts
from policies.normal_form import Defaults
from policies.placeholders import resolved
from policies.replay import GAVE_UP, give_back, has_other_thoughts, places_again
from proxy.api.read import ModelRequest
from proxy.ledger import Ledger

Json = dict[str, Any]


def own_thoughts(request: ModelRequest, ledger: Ledger, known: int) -> int | None:
    """The first of the known messages with thoughts of the client's that are not in what was sent: its edit. `ledger`:
    its text in memory."""
    messages: list[Json] = request.body["messages"]
    for i in range(request.prompt.n_leading, known):
        if ledger.sent is None or ledger.raw[i] == request.raws[i] or not thought_texts(messages[i]):
            continue
        if has_other_thoughts(resolved(orjson.loads(ledger.sent[i]), ledger.values_before(i)), messages[i]):
            return i
    return None


def given_back(
    ledger: Ledger, request: ModelRequest, places: dict[int, int], messages: list[Json], defaults: Defaults, most: int
) -> tuple[set[int], list[str]]:
    """Puts answers that are echoed in other words, or without what the model thought, into `messages` as the model
    gave them, at most so many. Their positions, and what was given back. `places`: `answered`."""
    altered: set[int] = set()
    repairs: list[str] = []
    for i in sorted(places):
        if messages[i].get("role") != "assistant":
            continue
        if len(altered) >= most:
            return altered, [*repairs, GAVE_UP]
        reply = _reply(ledger, places[i], request.blobs[i])
        if reply is None:
            continue
        messages[i], kinds = give_back(reply, messages[i], defaults, ledger.values_before(places[i]))
        if kinds != (GAVE_UP,) and kinds:
            altered.add(i)
        repairs += kinds
    return altered, repairs


def answered(ledger: Ledger, normals: Sequence[bytes], known: int, agreed: int, *, is_edit: bool) -> dict[int, int]:
    """Where the ledger has the answers of a history, by position: its own reply behind its own messages only, older
    ones behind an edit where the message before is the same. `agreed`: messages that say what the ledger says; those
    before `known` are spelled like it already."""
    end = len(ledger.normal)
    places = places_again(ledger.normal, normals, known) if is_edit and ledger.sent is not None else {}
    if end < len(normals) and tuple(ledger.normal[agreed:]) == tuple(normals[agreed:end]):
        places[end] = end
    return places


def _reply(ledger: Ledger, at: int, blob: bytes) -> Json | None:
    """What the model said at a position of the ledger, or to all of it; None where that is not known, or is `blob`."""
    if at == len(ledger.normal):
        return ledger.reply.message
    said: Json | None = None if ledger.sent is None or ledger.sent[at] == blob else orjson.loads(ledger.sent[at])
    return said
