"""The appliance's console as it is on the card, under busybox on a terminal here, with a real engine."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from virtual import good, kit

from colibri_kit.transport.serial_answer import classify

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = REPO / "native" / "appliance"


class Terminal:
    """A program on a pty: what it prints, what is typed."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execv(argv[0], argv)
        self.seen = b""

    def until(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Reads on until the pattern shows; what came before it is forgotten."""
        end = time.monotonic() + seconds
        while True:
            text = self.seen.decode("utf-8", "replace").replace("\r", "")
            found = re.search(pattern, text)
            if found:
                self.seen = text[found.end() :].encode()
                return found
            assert time.monotonic() < end, f"{pattern!r} not seen: {text[-2000:]}"
            if select.select([self.fd], [], [], 0.5)[0]:
                self.seen += os.read(self.fd, 65536)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode() + b"\r")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGHUP)
        os.close(self.fd)
        os.waitpid(self.pid, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("m") / "m.coli"
    assert kit("convert", REPO / "tests/data/engine/qwen3moe.t64.f32.gguf", "-o", out).rc == 0
    return out


@pytest.fixture
def console(tmp_path: Path, model: Path) -> Iterator[Terminal]:
    """The very scripts; only their folders are others."""
    busybox = shutil.which("busybox")
    assert busybox, "tests need busybox"
    for name in ("bin", "run/conf", "state/log"):
        (tmp_path / name).mkdir(parents=True)
    assert kit("build", "--board", "host", "-o", tmp_path / "bin" / "colibri", "-q").rc == 0
    (tmp_path / "bin" / "slot").symlink_to("/bin/true")
    (tmp_path / "run" / "conf" / "board.conf").write_text("max_new=12\nengine_flags=--threads 1\n")
    here = f"{tmp_path}/"
    functions = (SCRIPTS / "functions").read_text()
    for old, new in (
        ("PATH=/bin:/sbin:/usr/bin:/usr/sbin", f"PATH={here}bin:/usr/bin:/bin"),
        ("MODEL=/weights/model.coli", f"MODEL={model}"),
        ("STATE=/state", f"STATE={here}state"),
        (">/dev/console", ""),
        ("/run/conf", f"{here}run/conf"),
    ):
        assert old in functions
        functions = functions.replace(old, new)
    (tmp_path / "functions").write_text(functions)
    prompt = (SCRIPTS / "prompt").read_text()
    assert ". /lib/colibri/functions" in prompt
    prompt = prompt.replace("/lib/colibri/", here).replace("/run/", f"{here}run/")
    (tmp_path / "prompt").write_text(prompt)
    terminal = Terminal([busybox, "sh", str(tmp_path / "prompt")], tmp_path)
    try:
        yield terminal
    finally:
        terminal.close()


def engine(terminal: Terminal) -> int | None:
    """The pid of the engine that the console keeps."""
    for child in Path(f"/proc/{terminal.pid}/task/{terminal.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"--prompts" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def ask(terminal: Terminal, prompt: str) -> str:
    terminal.type(prompt)
    return str(terminal.until(rf"(?s){re.escape(prompt)}\n(.*)\ncolibri> $").group(1))


def here(model: Path, prompt: str) -> str:
    return str(good("run", model, "-p", prompt, "-n", 12)["text"])


def printable(text: str) -> str:
    return re.sub(r"[^\x21-\x7e]", "", text)


def test_flash_serial_knows_its_prompt(console: Terminal) -> None:
    console.until("Type a prompt; .help lists commands.\n")
    while not console.seen.endswith(b"> "):
        console.seen += os.read(console.fd, 4096)
    assert classify(console.seen).kind == "engine", console.seen
    console.seen = b""
    console.type("")  # as `detect` and `flash --serial` ask who is there
    time.sleep(0.5)
    raw = os.read(console.fd, 4096)
    assert classify(raw).kind == "engine", raw


def test_the_model_stays_loaded(console: Terminal, model: Path) -> None:
    golden = json.loads((model / "manifest.json").read_text())["golden"]["sha256"]
    console.until(f"golden ok, slot a, {golden}")
    console.until("colibri> ")
    first = ask(console, "the quick brown")
    kept = engine(console)
    assert kept and printable(first) == printable(here(model, "the quick brown")) != ""
    other = ask(console, "hello")
    assert printable(other) == printable(here(model, "hello"))
    assert ask(console, "the quick brown") == first and engine(console) == kept
    console.type(".free")
    console.until("colibri> ")
    assert engine(console) is None
    assert ask(console, "the quick brown") == first


def test_an_engine_that_dies_is_checked_and_started_again(console: Terminal) -> None:
    console.until("colibri> ")
    first = ask(console, "hello")
    kept = engine(console)
    assert kept
    os.kill(kept, signal.SIGKILL)
    console.type("hello")
    console.until("the engine ended with status 137")
    console.until("golden ok, slot a")
    console.until("colibri> ")
    assert ask(console, "hello") == first and engine(console) != kept


def test_interrupts_and_refusals_end_the_answer_only(console: Terminal, model: Path) -> None:
    console.until("colibri> ")
    first = ask(console, "hello")
    for _ in range(40):  # while nothing is asked, and often while the prompt is being printed
        os.write(console.fd, b"\x03")
        console.until("colibri> ")
    assert ask(console, "hello") == first
    console.type("hello " * 400)  # more tokens than the context holds
    console.until(r"error: .*context[^\n]*\n")
    console.until("colibri> ")
    assert ask(console, "hello") == first
    console.type(".check")
    console.until("golden ok, slot a")
    console.until("colibri> ")
    assert engine(console) is None, "two would not fit the memory of a small board"
