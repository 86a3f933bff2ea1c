"""Links that are slow, far, or go away again and again: a deployment finishes or resumes, and never hangs.

The proxy works on both directions: a delay for every byte, a rate, a pause now and then, a cut.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import parcel_maker
from kit_cli import Ran
from ssh_servers import Listening, Server
from test_ssh_deploy import link, tree

Deploy = Callable[..., Ran]
KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Line(Listening):
    """A TCP proxy in front of ``port``.

    Attributes:
        delay: seconds that every byte is late, in each direction. rate: bytes a second
            towards the server, 0 = as fast as it goes.
        pause: after each so many bytes towards the server, so many seconds of silence.
        cut: both ends are closed after so many bytes towards the server, 0 = never.
    """

    delay: float = 0.0
    rate: int = 0
    pause: tuple[int, float] = (0, 0.0)
    cut: int = 0
    passed: int = 0
    paused: int = 0

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * KIB)
                server = socket.create_connection(("127.0.0.1", self.port))
                for source, sink, up in ((client, server, True), (server, client, False)):
                    queue: deque[tuple[float, bytes]] = deque()
                    args = (source, sink, queue, up)
                    threading.Thread(target=self._take, args=args, daemon=True).start()
                    threading.Thread(target=self._give, args=args, daemon=True).start()

    def _take(
        self, source: socket.socket, sink: socket.socket, queue: deque[tuple[float, bytes]], up: bool
    ) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(8 * KIB)
            except OSError:
                data = b""
            queue.append((time.monotonic() + self.delay, data))
            while len(queue) > 64:
                time.sleep(0.002)
            if up and data:
                if self.rate:
                    time.sleep(len(data) / self.rate)
                self.passed += len(data)
                if self.cut and self.passed > self.cut:
                    for sock in (source, sink):
                        with contextlib.suppress(OSError):
                            sock.shutdown(socket.SHUT_RDWR)
                    return
                every, seconds = self.pause
                if every and self.passed // every > self.paused:
                    self.paused += 1
                    time.sleep(seconds)

    def _give(
        self, source: socket.socket, sink: socket.socket, queue: deque[tuple[float, bytes]], up: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                while not queue:
                    time.sleep(0.001)
                due, data = queue[0]
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
                queue.popleft()


def through(line: Line, server: Server, tmp_path: Path) -> dict[str, object]:
    """Deploy's arguments for this line, which is another host to known_hosts."""
    args = [*server.args, "--known-hosts", str(tmp_path / f"hosts-{id(line)}"), "--accept-new-host-key"]
    return {"target": f"{server.user}@127.0.0.1:{line.listen_port}", "args": args}


def large(tmp_path: Path, mib: int, seed: int) -> Path:
    return parcel_maker.write(tmp_path / f"{seed}.coli", seed=seed, shards=1, shard_bytes=mib * MIB)


def test_a_far_board(sshd: Server, deploy: Deploy, prefix: Path, tmp_path: Path) -> None:
    """Every answer is 0.16 s late: late is not silent."""
    with Line(sshd.port, delay=0.08) as line:
        began = time.monotonic()
        ran = deploy(sshd, "--json", "--stall-timeout", "2", **through(line, sshd, tmp_path))
    assert ran.rc == 0, ran.err
    assert time.monotonic() - began > 2 and link(prefix) == ran.json["release"]


def test_a_slow_line(sshd: Server, deploy: Deploy, prefix: Path, tmp_path: Path) -> None:
    """4 MiB at 512 KiB/s take longer than the limit for silence: bytes move all the time."""
    with Line(sshd.port, rate=512 * KIB) as line:
        began = time.monotonic()
        folder = large(tmp_path, 4, 3)
        ran = deploy(sshd, "--json", "--stall-timeout", "3", folder=folder, **through(line, sshd, tmp_path))
    assert ran.rc == 0, ran.err
    assert time.monotonic() - began > 8 and link(prefix) == ran.json["release"]
    assert ran.json["sent"]["bytes_sent"] > 4 * MIB


def test_a_line_that_pauses(sshd: Server, deploy: Deploy, prefix: Path, tmp_path: Path) -> None:
    """Silences shorter than the limit are waited through; one that is longer ends it, and it resumes."""
    folder = large(tmp_path, 8, 4)
    with Line(sshd.port, pause=(2 * MIB, 1.0)) as line:
        ran = deploy(sshd, "--json", "--stall-timeout", "8", folder=folder, **through(line, sshd, tmp_path))
    assert ran.rc == 0, ran.err
    assert line.paused >= 4
    good = link(prefix)
    folder = large(tmp_path, 8, 5)
    with Line(sshd.port, pause=(6 * MIB, 60.0)) as line:
        began = time.monotonic()
        ran = deploy(sshd, "--json", "--stall-timeout", "3", folder=folder, **through(line, sshd, tmp_path))
        took = time.monotonic() - began
    assert (ran.rc, ran.json["error"]["code"]) == (7, "CK-SSH-LOST") and took < 40, ran.err
    assert link(prefix) == good
    again = deploy(sshd, "--json", folder=folder)
    assert again.rc == 0 and again.json["sent"]["bytes_resumed"] >= 4 * MIB, again.err


def test_cut_again_and_again(server: Server, deploy: Deploy, prefix: Path, tmp_path: Path) -> None:
    """Each try gets 2 to 4 MiB further, at a random byte; what is current is always whole."""
    good = deploy(server, "--json").json["release"]
    before = tree(prefix / "releases" / good)
    folder = large(tmp_path, 12, 6)
    rng = random.Random(5)
    cuts = 0
    while True:
        with Line(server.port, cut=rng.randrange(2 * MIB, 4 * MIB)) as line:
            ran = deploy(
                server, "--json", "--stall-timeout", "10", folder=folder, **through(line, server, tmp_path)
            )
        if ran.rc == 0:
            break
        assert ran.rc == 7 and ran.json["error"]["code"] == "CK-SSH-LOST", ran.err
        assert link(prefix) == good and tree(prefix / "releases" / good) == before
        cuts += 1
        assert cuts < 12, "no progress from try to try"
    assert cuts >= 3
    assert link(prefix) == ran.json["release"]
    shard = "experts-0000.coli"
    assert (prefix / "current/model.coli" / shard).read_bytes() == (folder / shard).read_bytes()
