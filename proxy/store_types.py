"""What the store keeps: snapshots, ledgers, and the names of slot files."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import orjson
import xxhash

Kind = Literal["line", "base"]

# contract.md "State directory": <fingerprint>-<token hash>.bin. Only names of these two shapes are ever deleted by us:
# an attached engine's directory may hold other people's files.
SNAPSHOT_NAME = re.compile(r"(?P<fingerprint>[0-9a-f]{4,64})-(?P<hash>[0-9a-f]{32})\.bin")
TEMP_NAME = re.compile(r"[0-9a-f]{4,64}-[0-9a-f]{16}\.tmp")
FINGERPRINT = re.compile(r"[0-9a-f]{4,64}")

LEDGER_VERSION = 1
Row = tuple[Any, ...]
_META_SIZE = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A slot file and what it holds. Sizes in bytes, times in seconds since 1970."""

    id: str
    file: str
    dir: Path
    fingerprint: str
    tenant: str
    model: str
    kind: Kind
    line: str | None
    n_tokens: int
    bytes: int
    created: float
    last_used: float
    pinned: bool = False
    effective: bool | None = None
    reason: str = ""
    checksum: str = ""
    """xxh3-64 of the whole file, 16 hex digits; empty: recorded by an earlier version, and not needed yet."""

    @property
    def path(self) -> Path:
        """Where the file is, as this process sees it."""
        return self.dir / self.file


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """What was last sent for a line, as it survives a restart.

    `base` and the `chain` entries are opaque bytes (hashes); `tokens` packed little-endian int32; `updated` seconds
    since 1970; `extra` anything JSON can say. One record is one blob in state.db.
    """

    line: str
    tenant: str
    session: str
    agent: str
    base: bytes
    chain: tuple[bytes, ...]
    n_tokens: int
    updated: float
    parent: str | None = None
    tokens: bytes = b""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_blob(self) -> bytes:
        """Bytes for the database. Raises TypeError when `extra` holds what JSON cannot say."""
        parts = (self.base, self.tokens, *self.chain)
        meta = {
            "v": LEDGER_VERSION,
            "line": self.line,
            "tenant": self.tenant,
            "session": self.session,
            "agent": self.agent,
            "n_tokens": self.n_tokens,
            "updated": self.updated,
            "parent": self.parent,
            "extra": self.extra,
            "sizes": [len(part) for part in parts],
        }
        packed = orjson.dumps(meta)
        return b"".join((_META_SIZE.pack(len(packed)), packed, *parts))

    @classmethod
    def from_blob(cls, blob: bytes) -> LedgerRecord:
        """The record again. Raises ValueError for anything that `to_blob` of this version did not write."""
        try:
            (size,) = _META_SIZE.unpack_from(blob)
            meta = orjson.loads(blob[_META_SIZE.size : _META_SIZE.size + size])
            base, tokens, *chain = _split(blob, _META_SIZE.size + size, meta["sizes"])
            if meta["v"] != LEDGER_VERSION:
                raise ValueError(f"ledger version {meta['v']}")
            names = ("line", "tenant", "session", "agent", "n_tokens", "updated", "parent", "extra")
            return cls(base=base, tokens=tokens, chain=tuple(chain), **{name: meta[name] for name in names})
        except (struct.error, KeyError, TypeError, ValueError) as err:
            raise ValueError(f"not a ledger record: {err}") from err


def _split(blob: bytes, start: int, sizes: list[int]) -> list[bytes]:
    parts = []
    for size in sizes:
        parts.append(blob[start : start + size])
        start += size
    if start != len(blob):
        raise ValueError(f"{len(blob)} bytes where {start} were written")
    return parts


def token_hash(tenant: str, tokens: bytes) -> str:
    """32 hex digits of xxh3-128 over tenant and packed tokens: two tenants never share a file name."""
    name = tenant.encode("utf-8", "surrogatepass")
    return xxhash.xxh3_128_hexdigest(b"%d:%b%b" % (len(name), name, tokens))  # the length: no two pairs spell the same


def snapshot_name(fingerprint: str, tenant: str, tokens: bytes) -> str:
    """The file name of a published snapshot."""
    return f"{fingerprint}-{token_hash(tenant, tokens)}.bin"


def snapshot_id(stored_dir: str, file: str) -> str:
    """16 hex digits that name a snapshot: its directory (as recorded) and file, so the same tokens may lie in two."""
    return xxhash.xxh3_64_hexdigest(f"{stored_dir}/{file}".encode("utf-8", "surrogatepass"))


def stored_dir(path: Path, state_dir: Path) -> str:
    """A slots directory as recorded: relative inside the state directory, so that this one can be moved."""
    return str(path.relative_to(state_dir)) if path.is_relative_to(state_dir) else str(path)


def to_row(snapshot: Snapshot, state_dir: Path) -> Row:
    """A snapshot as a row of state.db: its fields in order."""
    values = {column.name: getattr(snapshot, column.name) for column in fields(Snapshot)}
    return tuple((values | {"dir": stored_dir(snapshot.dir, state_dir)}).values())


def from_row(row: Row, state_dir: Path) -> Snapshot | None:
    """The snapshot again; None for a row that we did not write: a file of another name must never be deleted."""
    id_, file, directory, *_ = row
    if not SNAPSHOT_NAME.fullmatch(str(file)) or snapshot_id(str(directory), str(file)) != id_:
        return None
    snapshot = Snapshot(*row)
    effective = None if snapshot.effective is None else bool(snapshot.effective)
    return replace(snapshot, dir=state_dir / directory, pinned=bool(snapshot.pinned), effective=effective)
