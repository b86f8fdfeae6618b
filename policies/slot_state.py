"""The states of a slot, as one table. Everything that changes a slot's state goes through `step`.

Two rules: a slot is changed only by whoever holds its lease (states LEASED to SAVING), and whatever we did not see
happen (a cancelled request, a failed restore) leaves UNKNOWN until the engine's own report settles it.
"""

from enum import StrEnum


class SlotState(StrEnum):
    """Label values of the metric `slotkeeper_slots` (contract.md)."""

    EMPTY = "empty"
    IDLE = "idle"
    LEASED = "leased"
    BUSY = "busy"
    RESTORING = "restoring"
    SAVING = "saving"
    UNKNOWN = "unknown"


class SlotEvent(StrEnum):
    """What happens to a slot."""

    LEASE = "lease"
    SEND = "send"
    ANSWERED = "answered"
    CANCELLED = "cancelled"
    SAVE = "save"
    RESTORE = "restore"
    FILE_DONE = "file_done"
    RELEASE_FULL = "release_full"
    RELEASE_EMPTY = "release_empty"
    LOST = "lost"


S, E = SlotState, SlotEvent

TABLE: dict[SlotState, dict[SlotEvent, SlotState]] = {
    S.EMPTY: {E.LEASE: S.LEASED, E.LOST: S.EMPTY},
    S.IDLE: {E.LEASE: S.LEASED, E.LOST: S.EMPTY},
    S.LEASED: {
        E.SEND: S.BUSY,
        E.SAVE: S.SAVING,
        E.RESTORE: S.RESTORING,
        E.RELEASE_FULL: S.IDLE,
        E.RELEASE_EMPTY: S.EMPTY,
        E.CANCELLED: S.UNKNOWN,
        E.LOST: S.LEASED,
    },
    S.BUSY: {E.ANSWERED: S.LEASED, E.CANCELLED: S.UNKNOWN, E.LOST: S.LEASED},
    S.SAVING: {E.FILE_DONE: S.LEASED, E.CANCELLED: S.UNKNOWN, E.LOST: S.LEASED},
    S.RESTORING: {E.FILE_DONE: S.LEASED, E.CANCELLED: S.UNKNOWN, E.LOST: S.LEASED},
    S.UNKNOWN: {E.RELEASE_FULL: S.IDLE, E.RELEASE_EMPTY: S.EMPTY, E.LOST: S.UNKNOWN, E.CANCELLED: S.UNKNOWN},
}


class IllegalStep(Exception):
    """An event that the state does not allow: a bug in the caller, never a client's fault."""


def step(state: SlotState, event: SlotEvent) -> SlotState:
    """The state after an event; raises IllegalStep and changes nothing when the table has no such step."""
    try:
        return TABLE[state][event]
    except KeyError:
        raise IllegalStep(f"a slot that is {state} cannot {event}") from None


def is_free_to_lease(state: SlotState) -> bool:
    """Nobody holds it and its content is certain."""
    return SlotEvent.LEASE in TABLE[state]
