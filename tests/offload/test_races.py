"""ThreadSanitizer sees no race: three threads compute while the link is cut, stalls and comes back."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import ENV, SANITIZE
from test_sanitizers import need

from colibri_kit.offload.frames import EXEC, RESULT, Frame

from . import faulty
from .conftest import eb, eventually, reference
from .faulty import TO_BOARD, TO_MODULE, FaultyRelay


@functools.cache
def tool() -> Path:
    """The whole engine with ThreadSanitizer; it ends at the first report."""
    need("thread")
    extra, link = SANITIZE["thread"]
    sources = [*eb.engine_sources(), *eb.cli_sources()]
    built: Path = eb._link(sources, (*eb._macros(), *extra), link, "colibri-tsan")
    return built


@contextlib.contextmanager
def running(log: Path, *args: object) -> Iterator[subprocess.Popen[bytes]]:
    """A program of this build; it must end well at SIGTERM, with nothing to report."""
    with log.open("wb") as err:
        process = subprocess.Popen(
            [str(tool()), *map(str, args)], stdout=subprocess.DEVNULL, stderr=err, env={**os.environ, **ENV}
        )
    try:
        yield process
    finally:
        process.terminate()
        rc = process.wait(60)
    assert rc == 0 and "ThreadSanitizer" not in log.read_text(), log.read_text()[-4000:]


def harm(frame: Frame) -> list[bytes | float | None]:
    """In turn: late, twice, damaged, cut."""
    which = frame.seq % 4
    if which == 0:
        return [0.3, frame.pack()]
    return [faulty.twice, faulty.flip, faulty.cut][which - 1](frame)


@pytest.mark.parametrize("batch", [1, 7])
def test_logits_over_a_bad_link(batch: int, model: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "t.npy"
    np.save(tokens, np.resize(reference("qwen2moe", "q4_k_m").tokens, 400).astype(np.int32))
    options = ["--model", str(model), "--tokens", str(tokens), "--threads", "3", "--batch", str(batch)]
    want = tmp_path / "want.npy"
    eb.ok("logits", *options, "-o", want)
    expertd = ("expertd", "--model", model, "--threads", 3, "--listen", f"unix:{tmp_path}/s")
    with running(tmp_path / "module.log", *expertd):
        eventually(lambda: "listening" in (tmp_path / "module.log").read_text(), 60)
        relay = FaultyRelay(tmp_path / "r", tmp_path / "s", RESULT, TO_BOARD, harm, range(5, 1 << 30, 25))
        try:
            done = subprocess.run(
                [str(tool()), "logits", *options, "-o", tmp_path / "got.npy", "--json", "--offload",
                 f"unix:{tmp_path}/r", "--offload-share", "60", "--offload-deadline", "100"],
                capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **ENV},
            )  # fmt: skip
        finally:
            relay.close()
    assert done.returncode == 0 and "ThreadSanitizer" not in done.stderr, done.stderr[-6000:]
    assert (tmp_path / "got.npy").read_bytes() == want.read_bytes()
    link = json.loads(done.stdout)["offload"]
    assert relay.done > 0 and link["experts"] > 0 and link["local"] > 0, link


def test_serving_metrics_meanwhile(model: Path, tmp_path: Path) -> None:
    """/metrics reads the link's counters from another thread; SIGTERM comes while the link is dialled."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
        return False

    body = json.dumps({"prompt": "ab", "max_tokens": 30, "temperature": 0}).encode()
    ask = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    expertd = ("expertd", "--model", model, "--threads", 2, "--listen", f"unix:{tmp_path}/s")
    serve = ("serve", "--model", model, "--threads", 3, "--listen", f"127.0.0.1:{port}",
             "--offload", f"unix:{tmp_path}/r", "--offload-share", 100)  # fmt: skip
    relay = FaultyRelay(tmp_path / "r", tmp_path / "s", EXEC, TO_MODULE, faulty.cut, range(9, 1 << 30, 30))
    texts: set[Any] = set()
    try:
        with running(tmp_path / "serve.log", *serve):
            eventually(answers, 60)
            with running(tmp_path / "module.log", *expertd):
                for _ in range(8):
                    texts.add(json.load(urllib.request.urlopen(ask, timeout=60))["choices"][0]["text"])
                    said = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
            texts.add(json.load(urllib.request.urlopen(ask, timeout=60))["choices"][0]["text"])
    finally:
        relay.close()
    assert len(texts) == 1 and relay.done >= 1
    counts = dict(line.rsplit(" ", 1) for line in said.splitlines() if line[0] != "#")
    assert int(counts["colibri_offload_experts_total"]) > 0
