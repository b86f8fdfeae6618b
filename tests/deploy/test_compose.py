"""compose.yaml as a compose client reads it, and the Dockerfile it builds."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamacpp.engines.flags import NEEDED
from proxy.config import ENV_PREFIX, Settings
from tests.deploy.tools import need, run

ROOT = Path(__file__).parent.parent.parent
COMPOSE = (ROOT / "compose.yaml").read_text()
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
NEWER = (", required: false", "name: slotkeeper\n")
"""What Debian's docker-compose 1.29 does not know yet; everything else it checks."""


@pytest.fixture
def read(tmp_path: Path) -> dict[str, Any]:
    """The services, variables replaced by .env.example's, both profiles on."""
    (tmp_path / ".env").write_text((ROOT / ".env.example").read_text().replace("PROFILES=cpu", "PROFILES=cpu,cuda"))
    command, text = ["docker", "compose"], COMPOSE
    if not shutil.which("docker") or run(*command, "version").returncode:
        command = [need("docker-compose", "docker-compose")]
        for words in NEWER:
            assert words in text
            text = text.replace(words, "")
    (tmp_path / "compose.yaml").write_text(text)
    found = run(*command, "-f", "compose.yaml", "config", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    services: dict[str, Any] = yaml.safe_load(found.stdout)["services"]
    return services


def test_services(read: dict[str, Any]) -> None:
    """All that issue 7 names, each without rights it does not need, with limits and a health check."""
    assert set(read) == {"volumes", "llama", "llama-cuda", "slotkeeper", "prometheus", "grafana"}
    for name, service in read.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("mem_limit"), name
        assert name == "slotkeeper" or "healthcheck" in service, name  # its image has one
        user = service.get("user", "10001:10001")  # the image's own
        assert user.partition(":")[0] not in ("0", "root"), name
    assert "HEALTHCHECK" in DOCKERFILE


def test_start_order(read: dict[str, Any]) -> None:
    """Folders, engine, proxy, Prometheus, Grafana."""
    after = {name: dict(service.get("depends_on", {})) for name, service in read.items()}
    assert after["llama"]["volumes"]["condition"] == "service_completed_successfully"
    assert after["slotkeeper"]["llama"]["condition"] == "service_healthy"
    assert after["slotkeeper"]["llama-cuda"]["condition"] == "service_healthy"
    assert set(after["prometheus"]) == {"slotkeeper"}
    assert set(after["grafana"]) == {"prometheus"}


def test_one_uid_shares_the_slot_files(read: dict[str, Any]) -> None:
    """The engine writes where the proxy reads, as the same user, in a folder that only this user may enter."""
    sharing = [read[name] for name in ("llama", "llama-cuda", "slotkeeper")]
    assert {s["user"] for s in sharing} == {"10001:10001"}
    for service in sharing:
        assert any(str(v).startswith("slots:/slots") or "/slots" in str(v) for v in service["volumes"])
    assert "--slot-save-path=/slots" in read["llama"]["command"]
    assert "--upstream=http://llama:8080,slots=/slots" in read["slotkeeper"]["command"]
    assert "USER 10001:10001" in DOCKERFILE
    assert re.search(r"install --directory --owner 10001 .*--mode 0700 /state /slots", DOCKERFILE)


def test_the_engine_has_the_flags_that_we_need(read: dict[str, Any]) -> None:
    """As README, "Engines", says for an attached one."""
    given = {word.partition("=")[0] for word in read["llama"]["command"]}
    assert set(NEEDED) - given == set()
    assert read["llama"]["command"] == read["llama-cuda"]["command"]


def test_nothing_listens_beyond_loopback(read: dict[str, Any]) -> None:
    """Ports are published on 127.0.0.1 alone, the engine's not at all."""
    ports = {name: str(service["ports"]) for name, service in read.items() if service.get("ports")}
    assert set(ports) == {"slotkeeper", "prometheus", "grafana"}
    assert all("127.0.0.1" in text for text in ports.values())


def test_only_cuda_takes_gpus(read: dict[str, Any]) -> None:
    """A profile of its own."""
    assert "devices" in str(read["llama-cuda"]["deploy"])
    assert "deploy" not in read["llama"]
    profiles = yaml.safe_load(COMPOSE)["services"]
    assert [profiles[name]["profiles"] for name in ("llama", "llama-cuda")] == [["cpu"], ["cuda"]]


def test_every_variable_is_in_the_example() -> None:
    """And the other way round; images are variables."""
    used = set(re.findall(r"\$\{(\w+)", COMPOSE))
    example = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert used == set(example) - {"COMPOSE_PROFILES"}
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE):
        assert example[name] == default, name
    images = re.findall(r"^\s+image: (\S+)", COMPOSE, re.MULTILINE)
    assert all(image.startswith("${") or image == "slotkeeper" for image in images)


def test_files_that_are_mounted_are_there() -> None:
    """Relative paths of bind mounts, and the folder that the provisioning names."""
    for path in re.findall(r"- \./([\w./-]+):", COMPOSE):
        assert (ROOT / path).is_dir(), path
    provider = (ROOT / "deploy/grafana/provisioning/dashboards/slotkeeper.yml").read_text()
    folder = yaml.safe_load(provider)["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/dashboards:{folder}:ro" in COMPOSE


def test_dockerfile() -> None:
    """Two stages, the build context holds what is copied, and settings are settings."""
    assert len(re.findall(r"^FROM ", DOCKERFILE, re.MULTILINE)) == 2
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "**"
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name
            assert f"!{name}" in ignored, name
    named = set(re.findall(rf"{ENV_PREFIX}(\w+)=", DOCKERFILE)) - {"CACHE_DIR"}
    assert {name.lower() for name in named} - set(Settings.model_fields) == set()
