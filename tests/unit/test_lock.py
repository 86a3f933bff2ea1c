"""The lock on a board: what a power cut leaves of it locks nobody out."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from colibri_kit.deploy.state import Lock
from colibri_kit.errors import PreflightError
from colibri_kit.transport.local import LocalTransport

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text()
OTHER = {"user": "eve", "host": "elsewhere", "pid": 1, "token": "x", "time": "2026-11-30T08:00:00Z"}


@pytest.fixture(params=["system", "busybox"], autouse=True)
def tools(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The board's programs: this machine's, or busybox's alone."""
    if request.param == "busybox":
        busybox = shutil.which("busybox")
        assert busybox, "tests need busybox"
        (tmp_path / "bin").mkdir()
        for name in ("sh", "cat", "mkdir", "date", "rm", "sleep"):
            (tmp_path / "bin" / name).symlink_to(busybox)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def left(prefix: Path, **files: str) -> Path:
    lock = prefix / "lock"
    lock.mkdir()
    for name, text in files.items():
        (lock / name).write_text(text)
    return lock


def test_taken_and_given_back(tmp_path: Path) -> None:
    with Lock(LocalTransport(), str(tmp_path)):
        assert (tmp_path / "lock" / "boot").read_text() == BOOT
        assert json.loads((tmp_path / "lock" / "owner").read_text())["pid"] == os.getpid()
        with pytest.raises(PreflightError, match="is locked by"), Lock(LocalTransport(), str(tmp_path)):
            pass
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize(
    "files",
    [
        {"boot": "", "owner": "", "since": ""},  # names were written out, contents were not
        {"boot": "", "owner": json.dumps(OTHER), "since": "\0\0\0"},
        {"boot": "00000000-0000-0000-0000-000000000000\n", "owner": json.dumps(OTHER), "since": "17\n"},
    ],
    ids=["empty", "zeros", "another boot"],
)  # fmt: skip
def test_one_from_before_the_boards_start_is_taken_over(tmp_path: Path, files: dict[str, str]) -> None:
    left(tmp_path, **files)
    with Lock(LocalTransport(), str(tmp_path)):
        assert json.loads((tmp_path / "lock" / "owner").read_text())["pid"] == os.getpid()


def test_one_of_this_start_is_respected(tmp_path: Path) -> None:
    left(tmp_path, boot=BOOT, owner=json.dumps(OTHER), since="")
    with (
        pytest.raises(PreflightError, match=r"eve@elsewhere since .*\(0 s ago\)"),
        Lock(LocalTransport(), str(tmp_path)),
    ):
        pass
    with Lock(LocalTransport(), str(tmp_path), force=True):
        pass


def test_one_of_an_older_kit_is_respected(tmp_path: Path) -> None:
    """It recorded no start of the board."""
    left(tmp_path, owner=json.dumps(OTHER), since="1796042324\n")
    with pytest.raises(PreflightError, match="eve@elsewhere"), Lock(LocalTransport(), str(tmp_path)):
        pass


def test_a_lock_that_was_broken_is_not_given_back_twice(tmp_path: Path) -> None:
    """The first deployment was only slow: its end leaves the second one's lock alone."""
    with Lock(LocalTransport(), str(tmp_path)) as first:
        second = Lock(LocalTransport(), str(tmp_path), force=True).__enter__()
    assert json.loads((tmp_path / "lock" / "owner").read_text())["token"] == second.token != first.token
    second.__exit__()
    assert not (tmp_path / "lock").exists()


def test_a_stale_lock_that_another_took_over_meanwhile_is_that_ones(tmp_path: Path) -> None:
    left(tmp_path, boot=BOOT, owner=json.dumps({**OTHER, "host": socket.gethostname(), "pid": 2**22 + 1}))
    quicker = Lock(LocalTransport(), str(tmp_path))

    class Slow(LocalTransport):
        """Between what it reads and what it does about it, another has the lock."""

        raced = False

        def run(self, *args: Any, **more: Any) -> Any:
            done = super().run(*args, **more)
            if done.rc == 44 and not self.raced:
                self.raced = True
                quicker.__enter__()
            return done

    with pytest.raises(PreflightError, match="is locked by"), Lock(Slow(), str(tmp_path)):
        pass
    assert json.loads((tmp_path / "lock" / "owner").read_text())["token"] == quicker.token
    quicker.__exit__()
