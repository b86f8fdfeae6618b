"""Whose key is it: the inbound API key file, read once at start.

One `tenant:key` per line; blank lines and lines that begin with # are skipped. A tenant may have several keys (so that
keys can be changed without a gap); a key belongs to one tenant. Without a file everybody is the tenant "local".
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proxy.errors import Unauthorised, UsageError

LOCAL = "local"  # the one tenant when there are no keys
ADMIN = "admin"  # the tenant that may read /metrics and /slotkeeper/state (contract.md)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Tenants:
    """Keys by digest. Only digests are kept, so that no log, repr or crash dump can show a key."""

    by_digest: Mapping[bytes, str] | None = field(default=None, repr=False)

    @property
    def has_keys(self) -> bool:
        """Whether a key is asked for at all."""
        return self.by_digest is not None

    @property
    def names(self) -> frozenset[str]:
        """Every tenant there is."""
        return frozenset({LOCAL} if self.by_digest is None else self.by_digest.values())

    def tenant_of(self, key: str | None, challenge: str = "Bearer") -> str:
        """The tenant that the key belongs to. Raises Unauthorised, with the `challenge` that says how to send a key.

        Every known digest is compared, each in constant time: the time taken says nothing about a near miss.
        """
        if self.by_digest is None:
            return LOCAL
        if not key:
            raise Unauthorised("This proxy asks for an API key: send 'Authorization: Bearer KEY'.", challenge=challenge)
        asked, found = _digest(key), None
        for digest, tenant in self.by_digest.items():
            if hmac.compare_digest(digest, asked):
                found = tenant
        if found is None:
            sentence = "This API key is not in the proxy's key file: check it, or ask the operator for one."
            raise Unauthorised(sentence, challenge=challenge)
        return found

    def is_admin(self, tenant: str) -> bool:
        """Whether the tenant may see everybody's numbers: the admin, or the only tenant there is."""
        return self.by_digest is None or tenant == ADMIN


def load(path: Path | None) -> Tenants:
    """Read a key file; None means no keys. Raises UsageError with the line that is wrong."""
    if path is None:
        return Tenants()
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"The API key file {path} cannot be read: {reason}.") from None
    found: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            _add(found, line.strip(), f"{path}, line {number}")
    if not found:
        raise UsageError(f"The API key file {path} holds no key: write 'tenant:key', one a line.")
    return Tenants(found)


def key_from(authorization: str | None, x_api_key: str | None, *, basic: bool = False) -> str | None:
    """The key that a request carries: `Authorization: Bearer KEY` or `x-api-key: KEY`; llama-server accepts both.

    `basic`: also as the password of `Authorization: Basic`, whatever the user name, which is what a browser can send.
    """
    scheme, _, value = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    if basic and scheme.lower() == "basic":
        return _password(value.strip())
    return x_api_key.strip() if x_api_key and x_api_key.strip() else None


def _password(credentials: str) -> str | None:
    try:
        pair = base64.b64decode(credentials, validate=True).decode("utf-8", "surrogateescape")
    except ValueError:
        return None
    return pair.partition(":")[2] or None


def _add(found: dict[bytes, str], line: str, where: str) -> None:
    tenant, separator, key = (part.strip() for part in line.partition(":"))
    if not separator or not key or not _NAME.fullmatch(tenant):
        raise UsageError(f"{where}: expected 'tenant:key', the tenant in letters, digits, '.', '_' and '-'.")
    if found.setdefault(_digest(key), tenant) != tenant:
        raise UsageError(f"{where}: the key of '{tenant}' also belongs to another tenant; give each its own.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
