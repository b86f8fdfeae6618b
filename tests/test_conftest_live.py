"""The shared fixtures really start what they say."""

import pytest

from tests.conftest import StartEngine


@pytest.mark.live
async def test_live_engine_is_embedded(live_engine: StartEngine) -> None:
    """Engine B answers /props with the slots asked for."""
    engine = await live_engine("dense", parallel=3)
    props = await engine.client.props()
    assert (engine.child.kind, props.total_slots) == ("embedded", 3)


@pytest.mark.native
async def test_live_engine_is_binary(live_engine: StartEngine) -> None:
    """Engine A answers in tests marked native."""
    engine = await live_engine("dense", parallel=3)
    props = await engine.client.props()
    assert (engine.child.kind, props.total_slots) == ("binary", 3)
