"""The line that service definitions start with: a release on trial does not survive a power cut."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from colibri_kit.deploy import release
from colibri_kit.deploy.plan import Settings
from colibri_kit.deploy.services import Service, render
from colibri_kit.transport.local import LocalTransport

SHELLS = [["sh"], ["bash"], ["busybox", "sh"]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Two releases; r2 is current."""
    for name in ("r1", "r2"):
        (tmp_path / "releases" / name).mkdir(parents=True)
    (tmp_path / "current").symlink_to("releases/r2")
    return tmp_path


def boot(shell: list[str], prefix: Path) -> str:
    done = subprocess.run(
        [*shell, "-c", release.BOOT_GUARD, "sh", str(prefix)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done
    return done.stdout


def current(prefix: Path) -> str:
    return (prefix / "current").readlink().name


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_a_later_boot_goes_back(prefix: Path, shell: list[str]) -> None:
    assert shutil.which(shell[0])
    release.begin_trial(LocalTransport(), str(prefix), "r1")
    assert boot(shell, prefix) == "" and current(prefix) == "r2"  # this very boot: the trial goes on
    (prefix / "trial.boot").write_text("6c0b8e3f-1c55-4a0e-9d4e-000000000000\n")
    assert "back to releases/r1" in boot(shell, prefix) and current(prefix) == "r1"
    assert sorted(p.name for p in prefix.iterdir()) == ["current", "releases"]
    assert boot(shell, prefix) == "" and current(prefix) == "r1"


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_no_trial_no_change(prefix: Path, shell: list[str]) -> None:
    assert boot(shell, prefix) == "" and current(prefix) == "r2"
    release.begin_trial(LocalTransport(), str(prefix), "r1")
    release.end_trial(LocalTransport(), str(prefix))
    assert boot(shell, prefix) == "" and current(prefix) == "r2"


def test_the_record_of_the_boot_got_lost(prefix: Path) -> None:
    """Cut between two writes: back to what was well, as in any later boot."""
    release.begin_trial(LocalTransport(), str(prefix), "r1")
    (prefix / "trial.boot").unlink()
    boot(["sh"], prefix)
    assert current(prefix) == "r1"


def test_systemd_runs_the_same_line(prefix: Path) -> None:
    """The unit's escapes undone as systemd undoes them give the line."""
    made = render(
        "systemd", Service(prefix=str(prefix), user="colibri", settings=Settings(1 << 30), memory_max=2 << 30)
    )
    assert made
    (found,) = re.findall(r"^ExecStartPre=\+/bin/sh -c '([^']*)' sh (\S+)$", made.text, re.MULTILINE)
    assert found[0].replace("$$", "$").replace("%%", "%") == release.BOOT_GUARD
    assert "$" not in found[0].replace("$$", "") and found[1] == str(prefix)
