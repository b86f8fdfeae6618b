"""Text that is kept takes the memory that the budgets count for it, no more."""

import ctypes
import sys

import orjson
import pytest

from proxy.kept_json import kept_json
from tests.fakes.llama import FakeLlama
from tests.wire.wire import CHAT, Wire, chat

LONG = "averylongword" * 3000
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")


def held(data: bytes) -> int:
    """Bytes of memory behind a long bytes object."""
    usable = ctypes.CDLL(None).malloc_usable_size
    usable.restype, usable.argtypes = ctypes.c_size_t, (ctypes.c_void_p,)
    return int(usable(id(data)))


def test_kept_json_is_as_large_as_its_text() -> None:
    """Whatever the writer had reserved."""
    value = {"messages": [{"role": "user", "content": LONG}]}
    found = kept_json(value)
    assert found == orjson.dumps(value)
    assert held(found) < 1.1 * len(found)


@pytest.mark.parametrize("mode", ["observe", "repair"])
async def test_what_a_conversation_leaves_behind(mode: str, wire: Wire, fake: FakeLlama) -> None:
    """Its ledger's messages, the bodies in slots, the newest body that explanations compare with."""
    answer = await wire.post(CHAT, chat(LONG), headers={"x-slotkeeper-mode": mode})
    assert answer.status_code == 200
    (line,) = wire.service.lines
    bodies = [slot.body for engine in wire.service.engines.all for slot in engine.table.slots if slot.body]
    kept = [*bodies, wire.service.explainer.body_of(line), *(line.ledger.sent if line.ledger else ())]
    assert len(kept) == (3 if mode == "repair" else 2)
    for data in kept:
        assert data is not None and held(data) < 1.1 * len(data)
