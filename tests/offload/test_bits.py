"""Bar 1: two processes over a pty pair and over sockets give the local hash, whatever share is remote."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import FAMILIES, PtyPair, eb, reference

SHARES = (0, 1, 50, 100)


def tokens_of(family: str, kind: str) -> Path:
    return Path(str(reference(family, kind).gguf)[: -len(".gguf")] + ".tokens.npy")


def run(model: Path, tokens: Path, out: Path, *more: object) -> tuple[str, Any]:
    """sha256 over logits and experts of ``colibri logits``, and its JSON."""
    files = [out / "l.npy", out / "e.npy"]
    said = eb.ok_json(
        "logits", "--model", model, "--tokens", tokens, "-o", files[0], "--experts", files[1],
        *map(str, more),
    )  # fmt: skip
    return hashlib.sha256(b"".join(np.load(f).tobytes() for f in files)).hexdigest(), said


def sweep(link: str, model: Path, tokens: Path, out: Path, batches: tuple[int, ...] = (1, 32)) -> None:
    """Every share and batch: the local hash, and as many experts there as the share says."""
    for batch in batches:
        want, local = run(model, tokens, out, "--batch", batch, "--threads", 1)
        assert local["offload"] is None
        total = local["cache"]["hits"] + local["cache"]["misses"]
        for share in SHARES:
            got, said = run(
                model, tokens, out, "--batch", batch, "--threads", 2, "--offload", link,
                "--offload-share", share, "--offload-deadline", 20000,
            )  # fmt: skip
            assert got == want, (batch, share)
            link_says = said["offload"]
            # One trial after greeting: its layer is computed here.
            first = local["cache"]["records"] // 2
            assert link_says["connects"] == 1 and link_says["local"] == 0 and link_says["wrong"] == 0
            assert (total - first) * share // 100 - 1 <= link_says["experts"] <= total * share // 100
            assert share < 50 or link_says["experts"] > 0


@pytest.mark.parametrize("kind", ["f32", "q4_k_m"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unix_socket(
    family: str, kind: str, convert: Callable[..., Path], module: Any, tmp_path: Path
) -> None:
    model, path = convert(reference(family, kind).gguf), tmp_path / "s"
    there = module(model, "--listen", f"unix:{path}")
    sweep(f"unix:{path}", model, tokens_of(family, kind), tmp_path)
    stats = there.stop()
    assert stats["connections"] == 8 and stats["failed"] == 0 and stats["crc"] == 0
    assert stats["rows"] > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_pty(family: str, convert: Callable[..., Path], module: Any, ptys: PtyPair, tmp_path: Path) -> None:
    """Serial devices on both sides, in raw mode: no byte is changed or swallowed on the way."""
    model = convert(reference(family, "q4_k_m").gguf)
    there = module(model, "--device", ptys.names[1])
    sweep(ptys.names[0], model, tokens_of(family, "q4_k_m"), tmp_path)
    assert there.stop()["failed"] == 0


def test_tcp(convert: Callable[..., Path], module: Any, tmp_path: Path) -> None:
    model = convert(reference("olmoe", "q4_k_m").gguf)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        link = f"tcp:127.0.0.1:{probe.getsockname()[1]}"
    there = module(model, "--listen", link)
    sweep(link, model, tokens_of("olmoe", "q4_k_m"), tmp_path, batches=(5,))
    assert there.stop()["connections"] == 4


@pytest.mark.parametrize("isa", ["scalar", "sse41"])
def test_other_kernels_there(isa: str, convert: Callable[..., Path], module: Any, tmp_path: Path) -> None:
    """The module's CPU may be another one: its kernels give the same bits."""
    model, path = convert(reference("granitemoe-shared", "q4_k_m").gguf), tmp_path / "s"
    module(model, "--listen", f"unix:{path}", "--isa", isa, threads=2)
    tokens = tokens_of("granitemoe-shared", "q4_k_m")
    want, _ = run(model, tokens, tmp_path)
    got, said = run(model, tokens, tmp_path, "--offload", f"unix:{path}", "--offload-share", 100)
    assert got == want
    assert said["offload"]["module"].endswith(isa)
    assert said["offload"]["experts"] > 0


def test_no_module_at_all(convert: Callable[..., Path], tmp_path: Path) -> None:
    model, tokens = convert(reference("llama", "q4_k_m").gguf), tokens_of("llama", "q4_k_m")
    want, _ = run(model, tokens, tmp_path)
    got, said = run(model, tokens, tmp_path, "--offload", f"unix:{tmp_path}/nobody")
    assert got == want
    assert said["offload"]["state"] == "down" and said["offload"]["connects"] == 0
    assert "connecting to the module" in said["offload"]["why"]
    got, said = run(model, tokens, tmp_path, "--offload", f"{tmp_path}/ttyACM9")
    assert got == want
    assert "opening" in said["offload"]["why"]


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("pcie:0000:01:00.0", "pcie has no implementation"),
        ("altmode:dp", "altmode has no implementation"),
        ("usb4:0", "usb4 has no implementation"),
        ("tcp:8.8.8.8:80", "no authentication"),
        ("tcp:localhost:80", "no numeric IPv4"),
        ("tcp:127.0.0.1:0", "tcp:ADDRESS:PORT"),
        ("tty:/dev/ttyS0@7", "baud rate"),
        ("carrier-pigeon", "neither"),
    ],
)
def test_refused_by_name(link: str, words: str, convert: Callable[..., Path], tmp_path: Path) -> None:
    model = convert(reference("llama", "q4_k_m").gguf)
    done = eb.colibri("check", "--model", model, "--offload", link)
    assert done.returncode in (2, 3)
    assert words in done.stderr.decode()


def test_expertd_refuses(convert: Callable[..., Path], tmp_path: Path) -> None:
    model = convert(reference("llama", "q4_k_m").gguf)
    for words, args in {
        "either --device TTY or --listen LINK": [],
        "goes with --listen": ["--device", "unix:/x"],
        "is opened, not listened on": ["--listen", "/dev/null"],
        "is no serial device": ["--device", "/dev/null"],
    }.items():
        done = eb.colibri("expertd", "--model", model, *args)
        assert done.returncode != 0 and words in done.stderr.decode(), done.stderr
