"""Whose key is it: the key file, and what a request carries."""

from pathlib import Path

import pytest

from proxy import tenants
from proxy.errors import Unauthorised, UsageError


def keys(tmp_path: Path, text: str) -> tenants.Tenants:
    """Tenants of a key file with this text."""
    path = tmp_path / "keys"
    path.write_text(text)
    return tenants.load(path)


def test_without_a_file_everybody_is_local() -> None:
    """No key asked for; the only tenant may see all numbers."""
    none = tenants.load(None)
    assert (none.tenant_of(None), none.tenant_of("anything"), none.has_keys) == ("local", "local", False)
    assert none.is_admin("local")


def test_a_key_names_its_tenant(tmp_path: Path) -> None:
    """Comments and blank lines are skipped, a tenant may have two keys, a key may hold a colon."""
    found = keys(tmp_path, "# people\n\nann: k1 \nann:k2\nbob:a:b\nadmin:root")
    assert [found.tenant_of(k) for k in ("k1", "k2", "a:b", "root")] == ["ann", "ann", "bob", "admin"]
    assert found.names == {"ann", "bob", "admin"}
    assert [found.is_admin(t) for t in ("ann", "admin")] == [False, True]


@pytest.mark.parametrize("key", [None, "", "k", "k11", "K1", "ann:k1"])
def test_any_other_key_is_refused(tmp_path: Path, key: str | None) -> None:
    """Missing, shorter, longer, other case: 401."""
    with pytest.raises(Unauthorised):
        keys(tmp_path, "ann:k1").tenant_of(key)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ann", "line 1: expected 'tenant:key'"),
        ("ann:k\nbob:", "line 2: expected"),
        ("a b:k", "line 1: expected"),
        ("ann:k\nbob:k", "line 2: the key of 'bob' also belongs to another tenant"),
        ("# nobody", "holds no key"),
    ],
)
def test_a_wrong_file_names_its_line(tmp_path: Path, text: str, expected: str) -> None:
    """The sentence says where, and never shows a key."""
    with pytest.raises(UsageError, match=expected):
        keys(tmp_path, text)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    """Not there, or no text."""
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        tenants.load(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        tenants.load(tmp_path / "binary")


def test_no_key_in_repr(tmp_path: Path) -> None:
    """What is kept cannot be printed."""
    assert "k1" not in repr(keys(tmp_path, "ann:k1"))


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "key"),
    [
        ("Bearer k", None, "k"),
        ("bearer  k ", "other", "k"),
        ("Basic k", "x", "x"),
        ("Bearer ", "x", "x"),
        (None, " x ", "x"),
        (None, " ", None),
        (None, None, None),
    ],
)
def test_where_a_request_carries_its_key(authorization: str | None, x_api_key: str | None, key: str | None) -> None:
    """Authorization first, then x-api-key."""
    assert tenants.key_from(authorization, x_api_key) == key
