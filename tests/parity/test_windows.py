"""The Windows binary, run by wine: the same golden, bits and text as everywhere else.

wine is no Windows: it shows that the binary loads, that its arithmetic, its file reading
and its paths are right; not how fast a PC is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from .conftest import kit, reference


class Wine:
    """``wine(ARGS…)`` runs colibri.exe in a prefix of its own."""

    def __init__(self, folder: Path) -> None:
        tool = shutil.which("wine")
        assert tool, "wine is missing: apt-get install wine wine64"
        self.exe, self.tool = folder / "colibri.exe", tool
        self.env = {**os.environ, "WINEDEBUG": "-all", "WINEPREFIX": str(folder / "prefix"), "DISPLAY": ""}
        (folder / "prefix").mkdir()
        kit("build", "--board", "windows-x86", "-o", self.exe, "-q")

    def __call__(self, *args: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [self.tool, str(self.exe), *map(str, args)],
            env=self.env, input=stdin, capture_output=True, timeout=280, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def wine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wine]:
    """One wine server for all: starting one takes seconds."""
    made = Wine(tmp_path_factory.mktemp("wine"))
    server = shutil.which("wineserver")
    assert server, "wineserver is missing: apt-get install wine wine64"
    subprocess.run([server, "-p"], env=made.env, check=True)
    # What this starts lives on: it must not hold a pipe that a test reads to its end.
    subprocess.run(
        [made.tool, "wineboot", "-i"], env=made.env, timeout=280, check=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield made
    subprocess.run([server, "-k"], env=made.env, check=False)


@pytest.fixture(scope="module")
def linux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("linux") / "colibri"
    kit("build", "--board", "host", "-o", path, "-q")
    return path


def test_every_kernel(wine: Wine) -> None:
    done = wine("selftest")
    assert done.returncode == 0 and b"0 failed" in done.stdout + done.stderr, done.stderr


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--weights", "preload"),
        ("--cache-experts", "0"),
        ("--cache-experts", "0", "--buffered"),
        ("--lock",),
    ],
    ids=" ".join,
)
def test_golden(wine: Wine, convert: Callable[..., Path], options: tuple[str, ...]) -> None:
    """The converter's hash, in every way to hold the weights that Windows has."""
    model = convert(reference("olmoe", "q4_k_m").gguf)
    golden = json.loads((model / "manifest.json").read_text())["golden"]
    done = wine("check", "--model", model, *options, "--json")
    assert done.returncode == 0, done.stderr
    assert golden["sha256"] in done.stdout.decode()


def test_bits_and_text(wine: Wine, linux: Path, convert: Callable[..., Path], tmp_path: Path) -> None:
    """Logits and text of a folder with a name that no code page has."""
    ref = reference("qwen2moe", "q4_k_m")
    model = tmp_path / "Modèle 模型.coli"
    shutil.copytree(convert(ref.gguf), model)
    tokens = str(ref.gguf)[: -len(".gguf")] + ".tokens.npy"
    hashes = []
    for name, run in (("linux", _native(linux)), ("windows", wine)):
        out = tmp_path / f"{name}.npy"
        done = run("logits", "--model", model, "--tokens", tokens, "-o", out, "--threads", 2)
        assert done.returncode == 0, done.stderr
        hashes.append(hashlib.sha256(np.load(out).tobytes()).hexdigest())
    assert hashes[0] == hashes[1]
    say = ("run", "--model", model, "-p", "Où est le café ?", "-n", 24, "--temp", 0.8, "--seed", 3)
    here, there = _native(linux)(*say), wine(*say)
    assert here.returncode == there.returncode == 0, there.stderr
    assert here.stdout == there.stdout and here.stdout.strip()


def test_what_it_lacks_is_named(wine: Wine, convert: Callable[..., Path]) -> None:
    model = convert(reference("olmoe", "q4_k_m").gguf)
    for words in (
        ("check", "--weights", "lazy"),
        ("check", "--weights", "mmap"),
        ("serve",),
        ("expertd", "--listen", "tcp:127.0.0.1:1"),
    ):
        done = wine(words[0], "--model", model, *words[1:])
        assert done.returncode not in (0, 1, 139) and b"Windows" in done.stderr, (words, done.stderr)


def test_damage_is_found(wine: Wine, convert: Callable[..., Path], tmp_path: Path) -> None:
    model = tmp_path / "m.coli"
    shutil.copytree(convert(reference("olmoe", "q4_k_m").gguf), model)
    shard = model / "experts-0000.coli"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    done = wine("check", "--model", model)
    assert done.returncode in (3, 6), done.stderr
    (model / "manifest.json").unlink()
    done = wine("check", "--model", model)
    assert done.returncode == 3 and b"manifest.json" in done.stderr, done.stderr


def _native(engine: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    def run(*args: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([str(engine), *map(str, args)], capture_output=True, timeout=280, check=False)

    return run
