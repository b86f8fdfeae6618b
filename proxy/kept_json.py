"""JSON of values that are kept."""

from __future__ import annotations

from typing import Any

import orjson


def kept_json(value: Any) -> bytes:
    """A value as JSON, in no more memory than its length. Raises orjson.JSONEncodeError.

    orjson (3.13) reserves eight bytes for each character of a string and leaves them to its result: 42 KB of text hold
    520 KB, and ledgers that keep a message each would take ten times their budget.
    """
    return bytes(memoryview(orjson.dumps(value)))
