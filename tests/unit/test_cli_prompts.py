"""`colibri run --prompts`: a process that lives on; hot swaps by SIGHUP, faults, SIGTERM."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine_build as eb
import pytest
from engine_build import colibri, ok, ok_json
from tiny_model import DATA, NAME, tiny_model

from colibri_kit.convert import container as box
from colibri_kit.trace.file import read

HELLO = "hello there, hello"
N = ["-n", "24"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another release of the same geometry: the same model in Q8_0."""
    out = tmp_path_factory.mktemp("newer") / "q8.coli"
    gguf = DATA / f"{NAME}.gguf"
    cmd = [sys.executable, "-m", "colibri_kit", "convert", str(gguf), "-q", "--quant", "q8_0", "-o", str(out)]
    done = subprocess.run(cmd, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return out


def alone(model: Path, text: str = HELLO) -> str:
    """What a run of its own answers."""
    return str(ok_json("run", "--model", model, "--prompt", text, *N)["text"])


class Session:
    """A running `colibri run --prompts - --json`."""

    def __init__(self, *flags: str | Path) -> None:
        args = [eb.tool(), "run", "--prompts", "-", "--json", *flags]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(list(map(str, args)), stdin=pipe, stdout=pipe, stderr=pipe)
        self.notes: list[str] = []
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.notes.append(line.decode())

    def send(self, text: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(text.encode() + b"\n")
        self.child.stdin.flush()

    def ask(self, text: str = HELLO) -> Any:
        self.send(text)
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, "".join(self.notes)
        return json.loads(line)

    def wait_note(self, start: str) -> str:
        """The first line of stderr, from now on or before, that begins so; it is taken."""
        for _ in range(600):
            for note in list(self.notes):
                if note.startswith(start):
                    self.notes.remove(note)
                    return note
            assert self.child.poll() is None, "".join(self.notes)
            time.sleep(0.05)
        raise AssertionError(f"no {start!r} in {self.notes}")

    def end(self) -> int:
        assert self.child.stdin is not None
        self.child.stdin.close()
        status = self.child.wait(timeout=60)
        self._reader.join(timeout=10)
        return status


@contextmanager
def session(*flags: str | Path) -> Iterator[Session]:
    s = Session(*flags)
    try:
        yield s
    finally:
        s.child.kill()
        s.child.wait()


# ---- line after line ------------------------------------------------------------


def test_answers_do_not_know_of_each_other(model: Path, tmp_path: Path) -> None:
    prompts = [HELLO, "another one", HELLO]
    (tmp_path / "p.txt").write_bytes(b"\n".join(p.encode() for p in prompts[:2]) + b"\r\n\n" + HELLO.encode())
    out = ok("run", "--model", model, "--prompts", tmp_path / "p.txt", *N, "--json").stdout
    got = [json.loads(line)["text"] for line in out.splitlines()]
    assert got == [alone(model, p) for p in prompts]
    plain = ok("run", "--model", model, "--prompts", "-", *N, stdin="\n".join(prompts).encode())
    single = ok("run", "--model", model, "--prompt", HELLO, *N).stdout
    assert plain.stdout.startswith(single)
    assert plain.stdout.endswith(single)
    assert plain.stderr.count(b"finish: ") == 3


def test_a_bad_line_costs_its_own_answer_only(model: Path) -> None:
    long = b"x" * (4096 * 16 + 5)
    lines = [HELLO.encode(), b"bad \xff", b"hello " * 600, long, HELLO.encode()]
    done = colibri("run", "--model", model, "--prompts", "-", *N, "--json", stdin=b"\n".join(lines) + b"\n")
    docs = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 2
    assert docs[0]["text"] == docs[4]["text"] == alone(model)
    codes = [d["error"]["code"] for d in docs[1:4]]
    assert codes == ["CB_EUTF8", "CB_ECONTEXT", "CB_ECONTEXT"]
    assert "more than 65536 bytes" in docs[3]["error"]["message"]


def test_one_source_of_prompts(model: Path) -> None:
    done = colibri("run", "--model", model, "--prompts", "-", "--prompt", "x")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"or --prompts FILE" in done.stderr
    assert colibri("run", "--model", model, "--prompts", "/nowhere/p").returncode == 2
    assert ok("run", "--model", model, "--prompts", "-").stdout == b""


def test_traces_go_on_over_prompts(model: Path, tmp_path: Path) -> None:
    both, first = tmp_path / "b", tmp_path / "f"
    ok("run", "--model", model, "--prompts", "-", *N, "--trace-experts", both, stdin=b"hello\nworld\n")
    ok("run", "--model", model, "--prompt", "hello", *N, "--trace-experts", first)
    n = read(first).n_token
    assert read(both).n_token > n
    assert (read(both).experts[:n] == read(first).experts).all()
    assert read(both).starts[n]


# ---- hot swap ---------------------------------------------------------------------


def point(link: Path, to: Path) -> None:
    """As deployments switch `current`: a rename over the old link."""
    new = link.with_suffix(".new")
    new.symlink_to(to)
    new.rename(link)


def test_sighup_takes_over_what_the_path_names_now(model: Path, newer: Path, tmp_path: Path) -> None:
    want_old, want_new = alone(model), alone(newer)
    assert want_old != want_new
    link = tmp_path / "current.coli"
    point(link, model)
    with session("--model", link, *N, "--hot-swap", "--cache-experts", "6") as s:
        assert s.ask()["text"] == want_old
        for turn in range(3):
            point(link, newer)
            s.child.send_signal(signal.SIGHUP)
            promised = json.loads((newer / "manifest.json").read_text())["golden"]["sha256"]
            note = s.wait_note("swapped to ")
            assert f"golden ok {promised[:12]}" in note
            doc = s.ask()
            assert (doc["text"], doc["golden"]["sha256"]) == (want_new, promised)
            assert doc["cache"]["swaps"] == 2 * turn + 1
            point(link, model)
            s.child.send_signal(signal.SIGHUP)
            s.wait_note("swapped to ")
            assert s.ask()["text"] == want_old
        assert s.end() == 0


def test_a_bad_release_is_refused_and_the_old_one_stays(model: Path, newer: Path, tmp_path: Path) -> None:
    want = alone(model)
    link = tmp_path / "current.coli"
    wrong = Path(shutil.copytree(newer, tmp_path / "wrong.coli"))
    manifest = json.loads((wrong / "manifest.json").read_text())
    manifest["golden"]["sha256"] = "0" * 64
    (wrong / "manifest.json").write_text(json.dumps(manifest))
    cut = Path(shutil.copytree(newer, tmp_path / "cut.coli"))
    data = (cut / "dense.coli").read_bytes()
    (cut / "dense.coli").write_bytes(data[:-64])
    spoilt = Path(shutil.copytree(newer, tmp_path / "spoilt.coli"))
    shard = bytearray((spoilt / "experts-0000.coli").read_bytes())
    for at in range(len(shard) // 2, len(shard), 4096):
        shard[at] ^= 1
    (spoilt / "experts-0000.coli").write_bytes(bytes(shard))
    point(link, model)
    with session("--model", link, *N, "--hot-swap") as s:
        assert s.ask()["text"] == want
        for bad, why in (
            (wrong, "golden is 000000000000"),
            (cut, "dense.coli"),
            (spoilt, "unhealthy"),
            (tmp_path / "none", "manifest.json"),
        ):
            point(link, bad)
            s.child.send_signal(signal.SIGHUP)
            note = s.wait_note("swap refused: ")
            assert why in note
            assert note.endswith("(old model stays)\n")
            doc = s.ask()
            assert (doc["text"], doc["cache"]["swaps"]) == (want, 0)
            assert (doc["lossy"], doc["unhealthy"]) == (False, 0)
        point(link, newer)
        s.child.send_signal(signal.SIGHUP)
        s.wait_note("swapped to ")
        assert s.ask()["text"] == alone(newer)
        assert s.end() == 0


def test_an_answer_ends_with_the_weights_it_began_with(model: Path, newer: Path, tmp_path: Path) -> None:
    link = tmp_path / "current.coli"
    point(link, model)
    flags = ["-n", "400", "--temp", "2", "--top-k", "0", "--min-p", "0"]
    want = ok_json("run", "--model", model, "--prompt", "a", *flags)["text"]
    with session("--model", link, *flags, "--hot-swap", "--trace") as s:
        s.send("a")
        s.wait_note("token 1:")
        point(link, newer)
        s.child.send_signal(signal.SIGHUP)
        assert s.child.stdout is not None
        assert json.loads(s.child.stdout.readline())["text"] == want
        s.wait_note("swapped to ")
        assert s.end() == 0


def test_without_hot_swap_sighup_is_what_it_always_was(model: Path) -> None:
    with session("--model", model, *N) as s:
        s.ask()
        s.child.send_signal(signal.SIGHUP)
        assert s.child.wait(timeout=30) == -signal.SIGHUP


# ---- signals and faults -----------------------------------------------------------


def test_sigterm_ends_between_prompts(model: Path) -> None:
    with session("--model", model, *N) as s:
        s.ask()
        s.child.send_signal(signal.SIGTERM)
        assert s.child.wait(timeout=30) == 143


def test_sigterm_ends_after_the_current_token(model: Path) -> None:
    for seed in range(20):
        flags = ["-n", "16000000", "--temp", "3", "--top-k", "0", "--min-p", "0", "--seed", str(seed)]
        with session("--model", model, *flags, "--trace") as s:
            s.send("ab")
            s.wait_note("token 1:")
            s.child.send_signal(signal.SIGTERM)
            assert s.child.stdout is not None
            line = s.child.stdout.readline()
            status = s.child.wait(timeout=30)
            assert status == 143
            if json.loads(line)["finish"] == "cancel":
                return
    pytest.fail("every answer was over before the signal came")


def damage_on_disk(folder: Path, layer: int, expert: int) -> None:
    """Flips a bit of one expert in the file that the engine has open."""
    shard = folder / "experts-0000.coli"
    with shard.open("r+b") as f:
        header = box.parse_header(f.read(box.HEADER_BYTES), shard.name, shard.stat().st_size)
        entries = box.parse_experts(f.read(header.entries * 128), header, shard.name)
        (entry,) = [e for e in entries if (e.layer, e.expert) == (layer, expert)]
        f.seek(entry.offset + 100)
        byte = f.read(1)[0]
        f.seek(entry.offset + 100)
        f.write(bytes([byte ^ 4]))


@pytest.fixture
def used(model: Path, tmp_path: Path) -> tuple[Path, int, int]:
    """A copy to damage, and an expert (layer, number) that HELLO uses."""
    ok("run", "--model", model, "--prompt", HELLO, *N, "--trace-experts", tmp_path / "t")
    counts = read(tmp_path / "t").counts()
    layer, expert = divmod(int(counts.argmax()), counts.shape[1])
    return Path(shutil.copytree(model, tmp_path / "copy.coli")), layer, expert


def test_a_damaged_expert_fails_its_answer_and_the_process_lives(used: tuple[Path, int, int]) -> None:
    folder, layer, expert = used
    with session("--model", folder, *N, "--cache-experts", "0") as s:
        assert s.ask()["lossy"] is False
        damage_on_disk(folder, layer, expert)
        for _ in range(2):
            error = s.ask()["error"]
            assert (error["code"], error["exit_status"]) == ("CB_EEXPERT", 6)
            assert f"layer {layer}, expert {expert} is unhealthy" in error["message"]
        assert s.end() == 6
        assert any(note.startswith("UNHEALTHY: 1 expert ") for note in s.notes)


def test_the_next_ranked_expert_answers_and_says_so(used: tuple[Path, int, int]) -> None:
    folder, layer, expert = used
    with session("--model", folder, *N, "--cache-experts", "0", "--on-bad-expert", "next") as s:
        before = s.ask()
        assert (before["lossy"], before["degraded"]) == (False, 0)
        damage_on_disk(folder, layer, expert)
        for _ in range(2):
            doc = s.ask()
            assert (doc["lossy"], doc["unhealthy"]) == (True, 1)
            assert doc["degraded"] > 0
        assert s.end() == 0
        assert sum(note.startswith("LOSSY: degraded: ") for note in s.notes) == 2
