"""Modules (``colibri expertd``) and relays between them and an engine, for the offload tests."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

import engine_build as eb

from colibri_kit.native import Engine
from tests.parity.conftest import FAMILIES, convert, reference  # noqa: F401

START_S = 60
#: What tests of one family use: it has a shared expert as well.
FAMILY = "qwen2moe"


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return [int(t) for t in reference(FAMILY, "q4_k_m").tokens]


@pytest.fixture(scope="module")
def model(convert: Callable[..., Path]) -> Path:  # noqa: F811
    return convert(reference(FAMILY, "q4_k_m").gguf)


@pytest.fixture(scope="module")
def want(model: Path, tokens: list[int]) -> Any:
    """The local logits."""
    with Engine(model, threads=1) as local:
        return local.eval(tokens)[0]


class Module:
    """One ``colibri expertd``; ``stop()`` gives its counters."""

    def __init__(self, model: Path, *link: str, threads: int = 1) -> None:
        argv = [eb.tool(), "expertd", "--model", model, "--threads", threads, "--json", *link]
        self._process = subprocess.Popen(
            [str(a) for a in argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._listening.wait(START_S), self.said

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append(line.rstrip())
            if "listening" in line:
                self._listening.set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> dict[str, Any]:
        self._process.terminate()
        assert self._process.stdout is not None
        out = self._process.stdout.read()
        assert self._process.wait(30) == 0, self.said
        self._reader.join()
        return dict(json.loads(out))


class PtyPair:
    """Two serial devices joined by a thread: what goes into one comes out of the other."""

    def __init__(self) -> None:
        import tty

        pairs = [os.openpty(), os.openpty()]
        self._masters = [m for m, _ in pairs]
        self._slaves = [s for _, s in pairs]  # held open: no hang-up when a side closes
        for slave in self._slaves:
            tty.setraw(slave)
        self.names = [os.ttyname(s) for s in self._slaves]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        a, b = self._masters
        while not self._stop.is_set():
            for fd in select.select([a, b], [], [], 0.1)[0]:
                data, to = os.read(fd, 65536), b if fd == a else a
                while data and not self._stop.is_set():
                    if select.select([], [to], [], 0.1)[1]:
                        data = data[os.write(to, data[:1024]) :]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for fd in (*self._masters, *self._slaves):
            os.close(fd)


@pytest.fixture
def module() -> Iterator[Any]:
    """``module(model, "--listen", …)`` -> Module; all are ended after the test."""
    made: list[Module] = []

    def make(model: Path, *link: str, **more: int) -> Module:
        made.append(Module(model, *link, **more))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            one.resume()
            one.kill()


@pytest.fixture
def ptys() -> Iterator[PtyPair]:
    pair = PtyPair()
    yield pair
    pair.close()


def eventually(what: Any, seconds: float = 20.0) -> None:
    """Waits until ``what()`` is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
