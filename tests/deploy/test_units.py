"""The systemd unit and the launchd agent: read by their own programs where there are any, and true to the code."""

import plistlib
import re
from pathlib import Path

from proxy.config import Settings
from proxy.stop import STOP_GRACE
from tests.deploy.tools import need, run

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
UNIT = DEPLOY / "systemd" / "slotkeeper.service"
LONGEST_STOP = Settings.model_fields["exit_deadline_seconds"].default + STOP_GRACE
MOST_EXPOSED = 20
"""systemd-analyze's scale from 0 to 100 (shown as 0.0 to 10.0); a unit without hardening has 96."""


def settings_of(text: str) -> dict[str, str]:
    """The unit's lines; the last of a name counts."""
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def test_systemd_reads_it(tmp_path: Path) -> None:
    """No unknown setting, no wrong value; only its program is not installed here."""
    analyze = need("systemd-analyze", "systemd")
    text = UNIT.read_text()
    (tmp_path / UNIT.name).write_text(text.replace("/opt/slotkeeper/bin/slotkeeper", "/bin/true"))
    found = run(analyze, "verify", "--man=no", str(tmp_path / UNIT.name))
    assert (found.returncode, found.stderr) == (0, "")
    (tmp_path / UNIT.name).write_text(text.replace("ProtectHome=", "ProtectHomes="))
    assert "ProtectHomes" in run(analyze, "verify", "--man=no", str(tmp_path / UNIT.name)).stderr


def test_it_is_hardened() -> None:
    """As systemd itself counts."""
    analyze = need("systemd-analyze", "systemd")
    found = run(analyze, "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", str(UNIT))
    assert found.returncode == 0, found.stdout[-200:]


def test_it_waits_for_the_last_saves() -> None:
    """Longer than our own longest stop; and the engine is not killed before it has saved."""
    unit = settings_of(UNIT.read_text())
    assert unit["Type"] == "notify"
    assert int(unit["TimeoutStopSec"]) > LONGEST_STOP
    assert unit["KillMode"] == "mixed"
    assert unit["StateDirectoryMode"] == "0700"
    assert "/var/lib/slotkeeper" in unit["ExecStart"]


def test_launchd_agent() -> None:
    """A plist that says what is started, and waits for the last saves."""
    agent = plistlib.loads((DEPLOY / "launchd" / "slotkeeper.plist").read_bytes())
    assert agent["Label"] == "slotkeeper"
    assert agent["ExitTimeOut"] > LONGEST_STOP
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    shell, flag, command = agent["ProgramArguments"]
    assert (shell, flag) == ("/bin/sh", "-c")
    assert " exec " in command  # signals reach Slotkeeper, not a shell
    assert run("sh", "-n", "-c", command).returncode == 0
