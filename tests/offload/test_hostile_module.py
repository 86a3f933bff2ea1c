"""A module that lies: whatever it sends, the board's output stays, and no token waits beyond a deadline."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colibri_kit.native import Engine
from colibri_kit.offload import frames
from colibri_kit.offload.frames import CREDIT, ERROR, HELLO, PING, PONG, RESULT, Frame

from .conftest import PtyPair, eventually
from .faulty import TO_BOARD, FaultyRelay, other_bits
from .test_faults import linked, same
from .test_python_side import CReader, lib  # noqa: F401

Pieces = "list[bytes | float | None]"


@pytest.fixture
def lying(model: Path, module: Any, tmp_path: Path) -> Iterator[Any]:
    """``lying(kind, harm, which)`` -> the path of a link to a real module whose frames are harmed."""
    made: list[FaultyRelay] = []
    module(model, "--listen", f"unix:{tmp_path}/s")

    def make(kind: int, harm: Any, which: range = range(3, 1 << 30)) -> Path:
        made.append(FaultyRelay(tmp_path / "r", tmp_path / "s", kind, TO_BOARD, harm, which))
        return tmp_path / "r"

    make.made = made  # type: ignore[attr-defined]
    yield make
    for one in made:
        one.close()


def payload(frame: Frame, at: int, data: bytes) -> bytes:
    return replace(frame, payload=frame.payload[:at] + data + frame.payload[at + len(data) :]).pack()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800000, 0xFF800001, 0x7149F2CA, 0xFF7FFFFF, 0x53800000])
def test_no_number_is_no_result(bits: int, model: Path, lying: Any, tokens: list[int], want: Any) -> None:
    """NaN, infinities, numbers whose squares are some (1e30, 2^40): not believed, computed here."""
    path = lying(RESULT, lambda f: [payload(f, len(f.payload) - 4, struct.pack("<I", bits))])
    with linked(model, path) as engine:
        for _ in range(3):
            same(engine, tokens, want)
        count = engine.counters()
        assert count["offload_wrong"] >= 1 and count["offload_local"] >= 1
        assert engine.offload()["why"] in (
            "the module returns what no expert does", "the module computes other bits"
        )  # fmt: skip


def test_huge_numbers_behind_right_trials(model: Path, lying: Any, tokens: list[int], want: Any) -> None:
    """Every row but those of trials, which come alone, is 1e30: no token fails, no bit differs."""

    def harm(frame: Frame) -> list[bytes | float | None]:
        if struct.unpack_from("<H", frame.payload, 2)[0] == 1:
            return [frame.pack()]
        return [payload(frame, 16, struct.pack("<f", 1e30) * ((len(frame.payload) - 16) // 4))]

    with linked(model, lying(RESULT, harm)) as engine:
        for _ in range(3):
            same(engine, tokens, want)
        assert engine.counters()["offload_wrong"] >= 1


def test_a_module_that_goes_bad_later(model: Path, lying: Any, tokens: list[int], want: Any) -> None:
    """Right at first, other bits from the 40th RESULT on: found at the next trial, then not asked."""
    path = lying(RESULT, other_bits, range(40, 1 << 30))
    with linked(model, path, offload_deadline_ms=2000) as engine:
        for _ in range(300):  # 256 layers between two trials
            engine.reset()
            engine.eval(tokens[:4])
            if engine.counters()["offload_wrong"]:
                break
        count = engine.counters()
        assert count["offload_wrong"] == 1 and count["offload_experts"] > 2 * 200
        assert engine.offload()["why"] == "the module computes other bits"
        same(engine, tokens, want)
        assert engine.counters()["offload_experts"] == count["offload_experts"]


@pytest.mark.parametrize(("first", "rows"), [(0, 0), (60000, 1), (0, 65535), (65535, 65535), (1, 2), (0, 3)])
def test_rows_that_were_not_asked(
    first: int, rows: int, model: Path, lying: Any, tokens: list[int], want: Any
) -> None:
    """A RESULT whose rows are not the EXEC's; its size is that of the rows it claims."""

    def harm(frame: Frame) -> list[bytes | float | None]:
        head = struct.pack("<HHI8x", first, rows, 5)
        some = replace(frame, payload=head + bytes(min(rows, 60) * 1024))
        return [some.pack(), frame.pack()]

    with linked(model, lying(RESULT, harm)) as engine:
        same(engine, tokens, want)
        count = engine.counters()
        assert count["offload_errors"] >= 1 and count["offload_wrong"] == 0
        assert count["offload_experts"] > 0  # the true RESULT behind it counts


@pytest.mark.parametrize(
    "harm",
    [
        lambda f: [f.pack(), f.pack(), f.pack()],
        lambda f: [replace(f, ref=f.ref ^ 0x55).pack(), replace(f, ref=0).pack(), f.pack()],
        lambda f: [replace(f, seq=f.seq ^ 0x80000000).pack()],
        lambda f: [replace(f, type=77).pack(), replace(f, type=0).pack(), f.pack()],
        lambda f: [payload(f, 4, b"\xff" * 4)],  # it says that it worked for 71 minutes
        lambda f: [payload(f, 4, bytes(4))],
    ],
    ids=["twice", "other refs", "other sequence", "unknown types", "busy for ever", "busy never"],
)
def test_results_out_of_order(harm: Any, model: Path, lying: Any, tokens: list[int], want: Any) -> None:
    with linked(model, lying(RESULT, harm), offload_deadline_ms=2000) as engine:
        same(engine, tokens, want)
        same(engine, tokens, want)
        count = engine.counters()
        assert count["offload_experts"] > 0 and count["offload_late"] == count["offload_wrong"] == 0


@pytest.mark.parametrize("limit", [0xFFFFFFFF, 0x7FFFFFFF, 0x80000010, 0])
def test_lies_about_credit(limit: int, model: Path, lying: Any, tokens: list[int], want: Any) -> None:
    """Credit for 2**31 EXECs, for none, in CREDIT and in PONGs that nobody asked for."""
    lie = struct.pack("<I", limit)

    def harm(frame: Frame) -> list[bytes | float | None]:
        pong = Frame(PONG, frame.seq, 0, lie)
        return [replace(frame, payload=lie).pack(), pong.pack(), replace(frame, payload=b"x").pack()]

    with linked(model, lying(CREDIT, harm, range(1 << 30))) as engine:
        same(engine, tokens, want)
        assert engine.counters()["offload_experts"] > 0


def test_credit_that_never_comes_is_asked_for(
    model: Path, lying: Any, tokens: list[int], want: Any
) -> None:  # fmt: skip
    """Every CREDIT is lost. The window of 16 EXECs is used up; a PONG tells it anew."""
    with linked(model, lying(CREDIT, lambda f: [], range(1 << 30)), offload_deadline_ms=5000) as engine:
        whys = set()

        def more() -> bool:
            same(engine, tokens[:12], want[:12])
            whys.add(engine.offload()["why"])
            return bool(engine.counters()["offload_experts"] > 2 * 40)  # 16 EXECs hold at most 32

        eventually(more, 40)
        assert "the module gives no credit" in whys
        assert engine.counters()["offload_late"] == 0


def test_a_hello_that_nobody_asked_for(model: Path, lying: Any, tokens: list[int], want: Any) -> None:
    """With windows and sizes of 0 and of 4 GiB: what the greeting said stays."""

    def harm(frame: Frame) -> list[bytes | float | None]:
        small = replace(frames.QUESTION, role=1, max_payload=0, window=0)
        huge = replace(small, max_payload=0xFFFFFFFF, max_row=0xFFFFFFFF, max_token=0xFFFFFFFF)
        return [Frame(HELLO, frame.seq, ref, h.pack()).pack() for h in (small, huge) for ref in (0, 1)] + [
            Frame(ERROR, frame.seq, 0, struct.pack("<HH", 2, 0) + b"\x1b[2J" * 60).pack(), frame.pack()
        ]  # fmt: skip

    with linked(model, lying(RESULT, harm, range(3, 6)), offload_deadline_ms=2000) as engine:
        same(engine, tokens, want)
        count = engine.counters()
        assert count["offload_errors"] >= 12 and count["offload_local"] == 0
        assert count["offload_experts"] > 2 * 10
        assert "\x1b" not in engine.offload()["why"]


def test_a_trickle_ends_at_the_deadline(model: Path, lying: Any, tokens: list[int], want: Any) -> None:
    """A RESULT a byte every 10 ms: never silent, never done."""

    def harm(frame: Frame) -> list[bytes | float | None]:
        return [piece for byte in frame.pack() for piece in (bytes([byte]), 0.01)]

    with linked(model, lying(RESULT, harm, range(2, 3)), offload_deadline_ms=300) as engine:
        start = time.monotonic()
        same(engine, tokens[:4], want[:4])
        assert time.monotonic() - start < 5
        assert engine.counters()["offload_late"] == 1


# ---- modules that are none ----------------------------------------------------


class Server:
    """A Unix socket whose every connection goes to ``behave(sock)``."""

    def __init__(self, path: Path, behave: Callable[[socket.socket], None]) -> None:
        self.connections, self._behave = 0, behave
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(8)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._one, args=(near,), daemon=True).start()

    def _one(self, near: socket.socket) -> None:
        try:
            self._behave(near)
        except OSError:
            pass
        finally:
            near.close()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    made: list[Server] = []

    def make(behave: Callable[[socket.socket], None]) -> tuple[Server, Path]:
        made.append(Server(tmp_path / "fake", behave))
        return made[-1], tmp_path / "fake"

    yield make
    for one in made:
        one.close()


def greet(near: socket.socket, after: Callable[[Frame], object], window: int = 16) -> None:
    """Answers HELLO with the board's own words, PINGs with PONG; the rest goes to ``after``."""
    reader = frames.Reader()
    while data := near.recv(65536):
        for frame in reader.feed(data):
            if frame.type == HELLO:
                mine = replace(
                    frames.Hello.unpack(frame.payload), role=1, window=window, max_token=64, max_row=512
                )
                near.sendall(Frame(HELLO, 1, frame.seq, mine.pack()).pack())
            elif frame.type == PING:
                near.sendall(Frame(PONG, 1, frame.seq, struct.pack("<I", 16) + frame.payload).pack())
            else:
                after(frame)


@pytest.mark.parametrize("window", [1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_any_window(window: int, model: Path, serve: Any, tokens: list[int], want: Any) -> None:
    """Compared as signed numbers, 4 billion EXECs would be none."""
    execs: list[Frame] = []
    _, path = serve(lambda near: greet(near, execs.append, window))
    with linked(model, path, offload_deadline_ms=200) as engine:
        same(engine, tokens[:2], want[:2])
    assert execs and execs[0].type == frames.EXEC


def bomb(size: int) -> bytes:
    """Headers of frames that all end with a bad payload, each inside the one before."""
    out = bytearray(size)
    for at in range(0, size - 52, 24):
        head = frames.HEAD.pack(frames.MAGIC, RESULT, 7, 7, size - at - 28)
        out[at : at + 24] = head + struct.pack("<I", frames.crc32c(head))
    return bytes(out)


def test_nested_frames_cost_no_more_than_their_bytes(lib: Any) -> None:  # noqa: F811
    """1 MiB of 43 000 nested frames: read one by one they are 23 GB to check."""
    reader = CReader(lib, 1 << 20)
    good = Frame(CREDIT, 8, 1, b"abcd")
    data = bomb(1 << 20) + good.pack()
    start, out = time.monotonic(), []
    for at in range(0, len(data), 32768):
        out += reader.feed(data[at : at + 32768])
    assert time.monotonic() - start < 3
    assert out == [good]
    assert reader.counts[1] < 20


def test_a_flood_does_not_stop_tokens(model: Path, serve: Any, tokens: list[int], want: Any) -> None:
    """After HELLO, as fast as the socket takes it: nested frames, noise, RESULTs for nobody."""
    noise = bomb(60000) + os.urandom(30000) + Frame(RESULT, 9, 3, bytes(16 + 1024)).pack() * 30
    flooded = threading.Event()

    def behave(near: socket.socket) -> None:
        def flood() -> None:
            try:
                while True:
                    near.sendall(noise)
                    flooded.set()
            except OSError:
                pass

        def answer(frame: Frame) -> None:
            if not flooded.is_set():
                threading.Thread(target=flood, daemon=True).start()

        greet(near, answer)

    _, path = serve(behave)
    with linked(model, path, offload_deadline_ms=200) as engine:
        same(engine, tokens[:4], want[:4])
        assert flooded.wait(20)
        slowest = 0.0
        for _ in range(20):
            start = time.monotonic()
            same(engine, tokens[:4], want[:4])
            slowest = max(slowest, time.monotonic() - start)
        assert slowest < 2.0
        assert engine.counters()["offload_experts"] == 0
        assert engine.counters()["offload_garbage"] > 0


def test_who_hangs_up_at_once_is_not_stormed(
    model: Path, serve: Any, tokens: list[int], want: Any
) -> None:  # fmt: skip
    """100, 200, 400 ms … between attempts."""
    server, path = serve(lambda near: None)
    with linked(model, path) as engine:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            same(engine, tokens[:8], want[:8])
        assert 2 <= server.connections <= 6
        assert engine.counters()["offload_connects"] == 0


def test_an_echo_is_no_module(model: Path, serve: Any, tokens: list[int], want: Any) -> None:
    """A loop-back plug, or another board's engine: what it says is not an answer."""

    def echo(near: socket.socket) -> None:
        while data := near.recv(65536):
            near.sendall(data)

    _, path = serve(echo)
    with linked(model, path) as engine:
        same(engine, tokens, want)
        eventually(lambda: engine.offload()["why"] == "the module does not answer HELLO")
        assert engine.offload()["state"] == "down" and engine.counters()["offload_experts"] == 0


def test_a_module_that_never_reads(model: Path, serve: Any, tokens: list[int], want: Any) -> None:
    """It greets, then stops reading: the socket fills, no layer blocks in a write."""
    stop = threading.Event()

    def behave(near: socket.socket) -> None:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)

        def never(frame: Frame) -> None:
            stop.wait(30)

        greet(near, never)

    _, path = serve(behave)
    with linked(model, path, offload_deadline_ms=200) as engine:
        start = time.monotonic()
        for _ in range(5):
            same(engine, tokens, want, step=32)
        assert time.monotonic() - start < 10
        assert engine.counters()["offload_late"] >= 1
        start = time.monotonic()
    assert time.monotonic() - start < 3
    stop.set()


def test_a_serial_device_is_put_back(model: Path, ptys: PtyPair, tmp_path: Path) -> None:
    """Raw while it is a link, as it was afterwards; a second engine does not get it meanwhile."""
    import termios

    fd = os.open(ptys.names[0], os.O_RDWR | os.O_NOCTTY)
    try:
        mode = termios.tcgetattr(fd)
        mode[3] |= termios.ECHO | termios.ICANON
        mode[0] |= termios.ICRNL
        termios.tcsetattr(fd, termios.TCSANOW, mode)
        before = termios.tcgetattr(fd)
        with Engine(model, threads=1, offload=ptys.names[0]):
            during = termios.tcgetattr(fd)
            assert not during[3] & (termios.ECHO | termios.ICANON) and not during[0] & termios.ICRNL
            with Engine(model, threads=1, offload=ptys.names[0]) as second:
                assert second.offload()["why"] == f"{ptys.names[0]} is in use by another program"
        assert termios.tcgetattr(fd) == before
    finally:
        os.close(fd)
