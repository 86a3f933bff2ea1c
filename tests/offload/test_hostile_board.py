"""A board that lies, stalls or dies: the module refuses by name, keeps its size, serves the next."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_kit.native import Engine
from colibri_kit.offload import frames
from colibri_kit.offload.frames import CREDIT, ERROR, EXEC, HELLO, PING, PONG, RESULT, Frame

from .conftest import Module, PtyPair, eb, eventually, reference

D, MALFORMED = 256, 5
Q8_0, Q8_K = 2, 4


@pytest.fixture(scope="module")
def model(convert: Callable[..., Path]) -> Path:
    return convert(reference("olmoe", "q4_k_m").gguf)


def q8_k(rng: random.Random, **wrong: Any) -> bytes:
    """One token as the board's quantiser would make it, or with something wrong in it."""
    q = [rng.randint(-127, 127) for _ in range(D)]
    if "low" in wrong:
        q[77] = -128
    sums = [sum(q[k : k + 16]) for k in range(0, D, 16)]
    if "sum" in wrong:
        sums[5] += wrong["sum"]
    scale = wrong.get("scale", 0.01)
    return struct.pack("<f16h256b", scale, *[max(-32768, min(32767, s)) for s in sums], *q)


def exec_payload(index: int, layer: int, rows: list[tuple[int, int]], acts: bytes, **head: int) -> bytes:
    """EXEC as docs/offload.md has it; ``head`` overrides what follows from the rest."""
    n_row, n_token = head.get("n_row", len(rows)), head.get("n_token", len(acts) // 292)
    out = struct.pack("<IHHHB5x", index, layer, n_row, n_token, head.get("forms", Q8_K))
    out += b"".join(struct.pack("<HHf", expert, token, 0.5) for expert, token in rows)
    return out + bytes(-len(out) % 16) + acts


class Board:
    """A raw client on the module's socket."""

    def __init__(self, path: Path, model: Path) -> None:
        import json

        manifest = json.loads((model / "manifest.json").read_text())
        size = manifest["geometry"]
        self.hello = frames.Hello(
            1, 0, bytes.fromhex(manifest["model_id"]), bytes.fromhex(manifest["golden"]["sha256"]), 2, 0, D,
            size["n_expert"], size["n_expert_used"], size["n_expert_ff"], 1 << 20, 16, 64, 512, b"test",
        )  # fmt: skip
        self.n_expert = int(size["n_expert"])
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(path))
        self._reader, self._seq, self._got = frames.Reader(), 0, list[Frame]()

    def send(self, kind: int, payload: bytes) -> int:
        self._seq += 1
        self.sock.sendall(Frame(kind, self._seq, 0, payload).pack())
        return self._seq

    def answer(self, ref: int, seconds: float = 20) -> list[Frame]:
        """What refers to ``ref``, until its CREDIT, PONG, HELLO or ERROR."""
        end = time.monotonic() + seconds
        while True:
            mine = [f for f in self._got if f.ref == ref]
            if any(f.type in (CREDIT, PONG, HELLO, ERROR) for f in mine):
                return mine
            assert select.select([self.sock], [], [], max(0, end - time.monotonic()))[0], "no answer"
            data = self.sock.recv(65536)
            assert data, "the module hung up"
            self._got += self._reader.feed(data)

    def greet(self) -> Board:
        assert self.answer(self.send(HELLO, self.hello.pack()))[-1].type == HELLO
        return self

    def ask(self, payload: bytes) -> Frame:
        return self.answer(self.send(EXEC, payload))[0]


@pytest.fixture
def there(model: Path, module: Any, tmp_path: Path) -> Module:
    made: Module = module(model, "--listen", f"unix:{tmp_path}/s")
    return made


@pytest.fixture
def board(there: Module, model: Path, tmp_path: Path) -> Iterator[Board]:
    made = Board(tmp_path / "s", model)
    yield made
    made.sock.close()


def resident(module: Module) -> int:
    status = Path(f"/proc/{module.pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def cpu_s(module: Module) -> float:
    words = Path(f"/proc/{module.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_absurd_requests(board: Board, there: Module) -> None:
    """Each is answered ERROR malformed; a good EXEC behind them all is computed."""
    rng = random.Random(3)
    acts, n = q8_k(rng), board.n_expert
    good = exec_payload(1, 0, [(0, 0), (n - 1, 0)], acts)
    assert board.ask(good).type == ERROR  # before HELLO
    board.greet()
    assert board.ask(good).type == RESULT
    before = resident(there)
    bad = {
        "layer 2": exec_payload(2, 2, [(0, 0)], acts),
        "layer 65535": exec_payload(2, 65535, [(0, 0)], acts),
        "expert n": exec_payload(2, 0, [(n, 0)], acts),
        "expert 65535": exec_payload(2, 0, [(65535, 0)], acts),
        "descending": exec_payload(2, 0, [(3, 0), (2, 0)], acts),
        "token 1": exec_payload(2, 0, [(0, 1)], acts),
        "token 65535": exec_payload(2, 0, [(0, 65535)], acts),
        "an expert twice for a token": exec_payload(2, 0, [(1, 0), (1, 0)], acts),
        "an expert 256 times for a token": exec_payload(2, 0, [(1, 0)] * 256, acts),
        "no rows": exec_payload(2, 0, [], acts),
        "no tokens": exec_payload(2, 0, [(0, 0)], b""),
        "rows that are not there": exec_payload(2, 0, [(0, 0)], acts, n_row=65535),
        "tokens that are not there": exec_payload(2, 0, [(0, 0)], acts, n_token=65535),
        "more tokens than promised": exec_payload(2, 0, [(0, 0)], acts * 200),
        "more rows than promised": exec_payload(2, 0, [(0, 0)] * 5000, acts),
        "no form": exec_payload(2, 0, [(0, 0)], acts, forms=0),
        "forms 255": exec_payload(2, 0, [(0, 0)], acts, forms=255),
        "the wrong form": exec_payload(2, 0, [(0, 0)], bytes(8 * 40), forms=Q8_0, n_token=1),
        "a byte too few": exec_payload(2, 0, [(0, 0)], acts)[:-1],
        "a byte too many": exec_payload(2, 0, [(0, 0)], acts) + b"\0",
        "nothing": b"",
        "half a head": bytes(15),
        "-128": exec_payload(2, 0, [(0, 0)], q8_k(rng, low=True)),
        "a sum that is none": exec_payload(2, 0, [(0, 0)], q8_k(rng, sum=1)),
        "a huge sum": exec_payload(2, 0, [(0, 0)], q8_k(rng, sum=30000)),
        "NaN": exec_payload(2, 0, [(0, 0)], q8_k(rng, scale=float("nan"))),
        "infinity": exec_payload(2, 0, [(0, 0)], q8_k(rng, scale=float("inf"))),
    }
    for name, payload in bad.items():
        answer = board.ask(payload)
        assert (answer.type, answer.payload[0]) == (ERROR, MALFORMED), name
    for kind in (RESULT, CREDIT, PONG, ERROR, 0, 77, 255):
        assert board.answer(board.send(kind, b"x" * 40))[0].payload[0] == 8
    assert board.ask(good).type == RESULT
    assert resident(there) == before


def test_more_rows_of_an_expert_than_a_batch(model: Path, module: Any, tmp_path: Path) -> None:
    """512 rows for one expert, as many as all experts of a batch may have: refused, not computed."""
    there = module(model, "--ctx", "512", "--batch", "256", "--listen", f"unix:{tmp_path}/s")
    board = Board(tmp_path / "s", model).greet()
    acts = q8_k(random.Random(1))
    for n_token in (1, 64):
        answer = board.ask(exec_payload(1, 0, [(0, 0)] * 512, acts * n_token))
        assert (answer.type, answer.payload[0]) == (ERROR, MALFORMED)
    most = board.ask(exec_payload(2, 0, [(0, t) for t in range(256)], acts * 256))
    assert most.type == RESULT
    assert resident(there) > 0


def test_a_frame_inside_of_something_else(there: Module, model: Path, tmp_path: Path) -> None:
    """What a web page can make a browser send to a TCP port: closed at once, nothing is answered."""
    board = Board(tmp_path / "s", model)
    post = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n"
    board.sock.sendall(post + Frame(HELLO, 1, 0, board.hello.pack()).pack())
    board.sock.settimeout(10)
    with contextlib.suppress(ConnectionResetError):  # closed with bytes unread
        assert board.sock.recv(100) == b""
    assert Board(tmp_path / "s", model).greet()
    assert resident(there) > 0


def test_no_descriptor_left(there: Module, model: Path, tmp_path: Path) -> None:
    """accept() that fails for want of descriptors is tried again, without spinning."""
    used = {int(fd.name) for fd in Path(f"/proc/{there.pid}/fd").iterdir()}
    free = min(set(range(len(used) + 1)) - used)
    _, hard = resource.prlimit(there.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(there.pid, resource.RLIMIT_NOFILE, (free, hard))
    board = Board(tmp_path / "s", model)
    before = cpu_s(there)
    time.sleep(1)
    assert cpu_s(there) - before < 0.3
    resource.prlimit(there.pid, resource.RLIMIT_NOFILE, (hard, hard))
    board.greet()


def test_random_requests(board: Board, there: Module) -> None:
    """Any field of a good EXEC replaced: RESULT or ERROR, never silence, never more memory."""
    rng = random.Random(8)
    board.greet()
    good = exec_payload(1, 1, [(e, t) for e in range(3) for t in range(2)], q8_k(rng) + q8_k(rng))
    seen = set()
    for i in range(600):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.choice([rng.randrange(16), rng.randrange(16, 80), rng.randrange(len(raw))])
            raw[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        seen.add(board.ask(bytes(raw[: rng.choice([len(raw), len(raw), rng.randrange(len(raw))])])).type)
        if i == 50:
            before = resident(there)
    assert seen == {RESULT, ERROR}
    assert resident(there) == before


def test_results_are_the_engines_own(board: Board, model: Path) -> None:
    """Rows of one EXEC do not depend on what else is in it, nor on what came before."""
    rng = random.Random(1)
    board.greet()
    acts = [q8_k(rng) for _ in range(3)]
    each = {
        (e, t): board.ask(exec_payload(1, 1, [(e, 0)], acts[t])).payload[16:]
        for e in range(3) for t in range(3)
    }  # fmt: skip
    rows = [(e, t) for e in range(3) for t in (2, 0, 1)]
    together = board.ask(exec_payload(2, 1, rows, b"".join(acts))).payload[16:]
    assert together == b"".join(each[row] for row in rows)
    assert np.isfinite(np.frombuffer(together, "<f4")).all() and any(together)


def test_a_board_that_does_not_read(board: Board, there: Module, model: Path, tmp_path: Path) -> None:
    """Its answers fill the socket, more requests wait: no spinning, and it is dropped in the end."""
    board.greet()
    payload = exec_payload(1, 0, [(e, 0) for e in range(board.n_expert)], q8_k(random.Random(2)))
    board.sock.setblocking(False)
    sent = 0
    end = time.monotonic() + 3
    while time.monotonic() < end:  # until nothing more is taken
        try:
            sent += board.sock.send(Frame(EXEC, sent + 5, 0, payload).pack())
        except BlockingIOError:
            time.sleep(0.1)
    before = cpu_s(there)
    time.sleep(2)
    assert cpu_s(there) - before < 0.5
    next_one = Board(tmp_path / "s", model)
    assert next_one.answer(next_one.send(PING, b"hi"), 30)[0].payload[4:] == b"hi"
    next_one.sock.close()


def test_the_end_does_not_wait_for_it(board: Board, there: Module) -> None:
    board.greet()
    board.sock.setblocking(False)
    payload = exec_payload(1, 0, [(e, 0) for e in range(board.n_expert)], q8_k(random.Random(2)))
    end = time.monotonic() + 1
    while time.monotonic() < end:
        try:
            board.sock.send(Frame(EXEC, 5, 0, payload).pack())
        except BlockingIOError:
            time.sleep(0.05)
    start = time.monotonic()
    there.stop()
    assert time.monotonic() - start < 5


def test_a_board_that_lost_its_power(
    there: Module, board: Board, model: Path, tmp_path: Path
) -> None:  # fmt: skip
    """Its connection stays for ever (no FIN comes): another board is served all the same."""
    board.greet()
    with Engine(model, threads=1, offload=f"unix:{tmp_path}/s", offload_share=100) as engine:
        eventually(lambda: engine.eval([1]) is not None and engine.counters()["offload_experts"] > 0)
    assert there.stop()["connections"] >= 2


def test_half_frames_are_forgotten(board: Board) -> None:
    """The first half of a large frame, a pause, then a good one: answered."""
    board.greet()
    raw = Frame(EXEC, 900, 0, bytes(30000)).pack()
    board.sock.sendall(raw[: len(raw) // 2])
    time.sleep(1.5)
    assert board.answer(board.send(PING, b"still there?"))[0].type == PONG


def test_the_socket_goes_with_the_module(model: Path, module: Any, tmp_path: Path) -> None:
    """SIGTERM leaves none behind; a stale one of a killed module is replaced, a live one is not."""
    path = tmp_path / "s"
    first = module(model, "--listen", f"unix:{path}")
    assert stat.S_ISSOCK(path.stat().st_mode)
    done = eb.colibri("expertd", "--model", model, "--listen", f"unix:{path}")
    assert done.returncode != 0
    assert f"listening on unix:{path}: another program does" in done.stderr.decode()
    Board(path, model).greet().sock.close()  # the refused one took nothing away
    first.kill()
    assert path.exists()
    second = module(model, "--listen", f"unix:{path}")
    Board(path, model).greet().sock.close()
    second.stop()
    assert not path.exists()
    (path).write_text("not a socket")
    done = eb.colibri("expertd", "--model", model, "--listen", f"unix:{path}")
    assert done.returncode != 0 and f"unix:{path}: Address already in use" in done.stderr.decode()
    assert path.read_text() == "not a socket"


def test_what_cannot_be_opened_is_named(model: Path, tmp_path: Path) -> None:
    done = eb.colibri("expertd", "--model", model, "--listen", f"unix:{tmp_path}/no/s")
    assert f"listening on unix:{tmp_path}/no/s: No such file or directory" in done.stderr.decode()
    done = eb.colibri("expertd", "--model", model, "--device", f"{tmp_path}/ttyACM7")
    assert f"opening {tmp_path}/ttyACM7: No such file or directory" in done.stderr.decode()
    with Engine(model, threads=1, offload="tcp:127.0.0.1:9") as engine:
        assert engine.offload()["why"] == "connecting to the module at tcp:127.0.0.1:9: Connection refused"


def test_a_serial_device_is_put_back(model: Path, module: Any, ptys: PtyPair) -> None:
    import termios

    fd = os.open(ptys.names[0], os.O_RDWR | os.O_NOCTTY)
    try:
        mode = termios.tcgetattr(fd)
        mode[3] |= termios.ECHO | termios.ICANON
        termios.tcsetattr(fd, termios.TCSANOW, mode)
        before = termios.tcgetattr(fd)
        there = module(model, "--device", ptys.names[0])
        assert not termios.tcgetattr(fd)[3] & termios.ECHO
        there.stop()
        assert termios.tcgetattr(fd) == before
    finally:
        os.close(fd)


def test_many_connections_leave_nothing(there: Module, model: Path, tmp_path: Path) -> None:
    """200 boards come and go, some in mid-frame: same memory, same open files."""

    def files() -> int:
        return len(list(Path(f"/proc/{there.pid}/fd").iterdir()))

    rng = random.Random(5)
    for i in range(200):
        one = Board(tmp_path / "s", model)
        one.greet()
        if i == 20:
            before = resident(there), files()
        one.sock.sendall(Frame(EXEC, 9, 0, bytes(5000)).pack()[: rng.randrange(5028)])
        one.sock.close()
    last = Board(tmp_path / "s", model).greet()
    assert (resident(there), files()) == before
    last.sock.close()
    assert there.stop()["connections"] == 201


def test_sigint_is_an_end_too(model: Path, tmp_path: Path) -> None:
    there = Module(model, "--listen", f"unix:{tmp_path}/s")
    os.kill(there.pid, signal.SIGINT)
    eventually(lambda: not (tmp_path / "s").exists())
    there.kill()
