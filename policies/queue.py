"""The order in which waiting requests may be granted a slot."""

from dataclasses import dataclass

MAX_BYPASSED = 8
"""Times that later requests may be served before one that does not fit yet; then all wait for it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the waiting line: who it belongs to, when it came (a growing number), how often it was bypassed."""

    key: int
    tenant: str
    bypassed: int = 0


def order(waiting: tuple[Waiting, ...], served: dict[str, int]) -> list[int]:
    """Keys of the requests that may be tried now, best first.

    Tenants take turns: the one that was served longest ago comes first (`served`: tenant -> number of its last grant);
    within a tenant the oldest request. A request that has been bypassed MAX_BYPASSED times stops the line behind it.
    """
    starved = [w for w in waiting if w.bypassed >= MAX_BYPASSED]
    if starved:
        return [min(starved, key=lambda w: w.key).key]
    rounds: dict[str, int] = {}
    ranked = []
    for w in sorted(waiting, key=lambda w: w.key):
        turn = rounds.get(w.tenant, 0)
        rounds[w.tenant] = turn + 1
        ranked.append((turn, served.get(w.tenant, -1), w.key))
    return [key for _, _, key in sorted(ranked)]
