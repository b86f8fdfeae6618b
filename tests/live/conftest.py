"""Every test here runs on engine B (mark live, `make test`) and on engine A (mark native, `make test-native`)."""

import pytest


@pytest.fixture(
    params=[
        pytest.param("embedded", marks=pytest.mark.live, id="B"),
        pytest.param("binary", marks=pytest.mark.native, id="A"),
    ]
)
def engine_kind(request: pytest.FixtureRequest) -> str:
    """What `live_engine` and `proxy_server` start."""
    kind: str = request.param
    return kind
