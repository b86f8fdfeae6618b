"""`slotkeeper warm` through the control socket of a real server in front of a fake engine."""

import asyncio
import json
from pathlib import Path

import pytest

from proxy.cli import main
from tests.fakes.llama import FakeLlama
from tests.wire.conftest import Serve
from tests.wire.test_doctor import listening
from tests.wire.wire import chat


@pytest.mark.parametrize(
    ("keys", "tenant", "says"),
    [
        ("", "bob", "There is no tenant 'bob': the server has no --api-key-file"),
        ("anna:a\nben:b\n", "bob", "There is no tenant 'bob': the tenants are anna, ben."),
        ("anna:a\nben:b\n", "", "Name whose prompts these are with --tenant: anna, ben."),
    ],
)
async def test_a_tenant_that_is_none(
    serve: Serve,
    fake: FakeLlama,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    keys: str,
    tenant: str,
    says: str,
) -> None:
    """One sentence that says so; exit code 1."""
    (tmp_path / "keys").write_text(keys)
    wire = await serve(fake, **({"api_key_file": tmp_path / "keys"} if keys else {}))
    file = tmp_path / "one.json"
    file.write_text(json.dumps(chat("hi")))
    words = ["warm", str(file), "--tenant", tenant, "--state-dir", str(wire.service.settings.state_dir)]
    async with listening(wire):
        assert await asyncio.to_thread(main, words) == 1
    assert says in capsys.readouterr().err
