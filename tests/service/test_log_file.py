"""A journal that is a file, which nothing rotates: it stays below its limit and keeps its later half."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.service.rig import REPORTS, SANITIZE, tool

MIB = 1 << 20


def lines(journal: Path) -> list[dict[str, object]]:
    """Those that are whole by now: each is JSON."""
    return [json.loads(line) for line in journal.read_bytes().split(b"\n")[:-1]]


@contextlib.contextmanager
def serving(
    model: Path, out: BinaryIO, said: Callable[[], bytes], *options: str, under: Sequence[str] = ()
) -> Iterator[None]:
    """`serve` whose journal is ``out``, as soon as ``said()`` has its `ready`; must end well at SIGTERM.

    Args:
        under: what runs it.
    """
    command = [*under, tool(SANITIZE), "serve", "--model", model, "--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stderr=out)
    try:
        end = time.monotonic() + 60
        while not re.search(rb'[" ]ready\b', said()):
            assert time.monotonic() < end
            time.sleep(0.05)
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("supervise", [[], ["--supervise"]], ids=["alone", "supervised"])
def test_a_long_file_keeps_its_later_half(model: Path, tmp_path: Path, supervise: list[str]) -> None:
    journal = tmp_path / "engine.log"
    old = [json.dumps({"event": "old", "n": n, "pad": "x" * 80}) for n in range(MIB // 130)]
    journal.write_text("\n".join(old) + "\n")
    before = journal.stat()
    assert MIB * 0.8 < before.st_size < MIB - 5000
    options = ["--log", "json", "--threads", "1", "--log-max", "1", *supervise]
    with journal.open("ab") as out, serving(model, out, journal.read_bytes, *options):
        (ready,) = (d for d in lines(journal) if d["event"] == "ready")
        url = f"http://127.0.0.1:{ready['port']}/v1/completions"
        asked = 0
        # Its last act: whoever reads in the middle of it sees a line that is torn.
        while b'"log_shortened"' not in journal.read_bytes():
            assert asked < 10_000 and journal.stat().st_size < MIB + 1000
            complete(url)
            asked += 1
        now = lines(journal)
        assert MIB * 0.45 < journal.stat().st_size < MIB * 0.52
        assert journal.stat().st_ino == before.st_ino
        (cut,) = (d for d in now if d["event"] == "log_shortened")
        assert isinstance(cut["bytes"], int) and MIB < cut["bytes"] < MIB + 1000
        # The later half, without a gap: the last of the old lines, then all that came since.
        numbers = [d["n"] for d in now if d["event"] == "old"]
        assert numbers == list(range(MIB // 130 - len(numbers), MIB // 130)) and len(numbers) > 3000
        assert len([d for d in now if d["event"] == "request"]) == asked
        complete(url)
    assert [d["event"] for d in lines(journal)][-1] in ("stopping", "stopped", "drained")
    assert not any(word in journal.read_text() for word in REPORTS)


def test_a_file_that_may_only_be_appended_to_loses_nothing(model: Path, tmp_path: Path) -> None:
    """Opened by somebody else for the service, as a manager does: it grows on, and that is said."""
    journal = tmp_path / "theirs.log"
    begin = b"a line of theirs\n" * (2 * MIB // 17)
    journal.write_bytes(begin)
    under: list[str] = []
    with journal.open("ab") as out, journal.open("rb") as reader:

        def said() -> bytes:
            reader.seek(len(begin))
            return reader.read()

        if os.geteuid() == 0:  # a root that may open only its own files
            os.chown(journal, 65534, 65534)
            under = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
        journal.chmod(0o600 if os.geteuid() == 0 else 0o200)
        with serving(model, out, said, "--log", "json", "--log-max", "1", under=under):
            pass
        assert said().count(b'"log_unbounded"') == 1
        reader.seek(0)
        assert reader.read().startswith(begin)


def test_without_the_option_nothing_is_cut(model: Path, tmp_path: Path) -> None:
    journal = tmp_path / "mine.log"
    journal.write_text("a line of mine\n" * (2 * MIB // 15))
    size = journal.stat().st_size
    with (
        journal.open("ab") as out,
        serving(model, out, lambda: journal.read_bytes()[size:]),
    ):
        pass
    assert journal.read_bytes()[:size] == b"a line of mine\n" * (2 * MIB // 15)


def complete(url: str) -> None:
    """A request: it leaves a line."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()
