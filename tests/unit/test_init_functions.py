"""The shell functions of the init scripts, run by real shells, with processes that are not the engine."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from colibri_kit.deploy.plan import Settings
from colibri_kit.deploy.services import Service, shell
from colibri_kit.deploy.serving import ServeOptions

SHELLS = [["dash"], ["bash", "--posix"], ["busybox", "sh"]]


@pytest.fixture(params=SHELLS, ids=lambda words: words[0])
def words(request: pytest.FixtureRequest) -> list[str]:
    found: list[str] = request.param
    if shutil.which(found[0]) is None:
        pytest.skip(f"no {found[0]}")
    return found


def run(words: list[str], prefix: Path, code: str) -> subprocess.CompletedProcess[str]:
    """``code`` after the functions of a service under ``prefix``, which stops within a second."""
    text = shell.functions(Service(str(prefix), "nobody", Settings(), 0, options=ServeOptions(drain=30)))
    text = text.replace("in 45 5;", "in 1 5;")
    assert "in 1 5;" in text
    script = f"{text}\nPIDFILE={prefix}/pid\n{code}\n"
    return subprocess.run([*words, "-c", script], capture_output=True, text=True, timeout=30, check=False)


def test_a_number_that_another_program_has_by_now_is_not_ours(words: list[str], tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            (tmp_path / "pid").write_text(f"{other.pid}\n")
            assert run(words, tmp_path, "alive").returncode != 0
            assert run(words, tmp_path, "engine_reload").returncode != 0
            assert run(words, tmp_path, "engine_stop").returncode == 0
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize("text", ["", "x", "-1", "999999999", "/../self"])
def test_a_damaged_pidfile_is_nobody(words: list[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "pid").write_text(text)
    assert run(words, tmp_path, "alive").returncode != 0


def test_the_engine_is_told_twice_before_it_is_killed(words: list[str], tmp_path: Path) -> None:
    engine = tmp_path / "current/colibri"
    engine.parent.mkdir()
    # A supervisor whose child hangs: the first TERM changes nothing, the second ends both.
    engine.write_text('#!/bin/sh\nn=0\ntrap \'n=$((n + 1)); echo $n; [ $n = 2 ] && exit 7\' TERM\n'
                      'echo 0\nwhile :; do sleep 0.1; done\n')  # fmt: skip
    engine.chmod(0o755)
    with subprocess.Popen([engine, "serve"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"0\n"
            (tmp_path / "pid").write_text(f"{process.pid}\n")
            assert run(words, tmp_path, "alive").returncode == 0
            start = time.monotonic()
            done = run(words, tmp_path, "engine_stop")
            assert (done.stderr, (tmp_path / "pid").exists()) == ("", False)
            assert process.wait(5) == 7
            assert time.monotonic() - start < 5
        finally:
            process.kill()


def test_what_hears_no_signal_is_killed(words: list[str], tmp_path: Path) -> None:
    engine = tmp_path / "current/colibri"
    engine.parent.mkdir()
    engine.write_text("#!/bin/sh\ntrap '' TERM\necho 0\nwhile :; do sleep 0.1; done\n")
    engine.chmod(0o755)
    with subprocess.Popen([engine, "serve"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"0\n"
            (tmp_path / "pid").write_text(f"{process.pid}\n")
            run(words, tmp_path, "engine_stop")
            assert process.wait(5) == -signal.SIGKILL
        finally:
            process.kill()
