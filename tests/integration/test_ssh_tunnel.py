"""`colibri-kit tunnel` over OpenSSH and dropbear: the real service behind it, and one that does as told."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import ssh_servers
from kit_cli import kit
from serving_rig import Said, Verb, small_chat
from ssh_servers import Server, start_sshd
from tests.service.rig import Service

ASK: dict[str, Any] = {"model": "colibri", "prompt": "The board is small", "max_tokens": 60}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_chat(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def service(chat_model: Path) -> Iterator[Service]:
    with Service(chat_model, "--sequences", "4", "--queue", "40", "--connections", "64") as running:
        yield running


@contextlib.contextmanager
def tunnel(server: Server, remote: object, *more: object, args: list[str] | None = None) -> Iterator[Verb]:
    login = server.args if args is None else args
    with Verb("tunnel", server.target, *login, "--remote", remote, "--json", *more) as verb:
        verb.until(lambda: "Ctrl-C" in verb.err, "open tunnel")
        yield verb


def local(verb: Verb) -> int:
    return int(verb.lines()[0]["local"])


def connect(verb: Verb) -> socket.socket:
    return socket.create_connection(("127.0.0.1", local(verb)), 20)


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0, timeout=60)


def stream(url: str, seed: int) -> str:
    parts = client(url).completions.create(stream=True, seed=seed, **ASK)
    return "".join(p.choices[0].text for p in parts)


def test_the_openai_client_whole_streaming_and_twenty_at_once(server: Server, service: Service) -> None:
    plain = [client(service.url).completions.create(seed=s, **ASK).choices[0].text for s in range(20)]
    with tunnel(server, service.port) as verb:
        opened = verb.lines()[0]
        assert opened["target"] == server.target and opened["health"] == "ok"
        assert opened["model"] == service.json("/health")["model"]
        assert opened["remote"] == f"127.0.0.1:{service.port}"
        url = opened["url"]
        assert client(url).completions.create(seed=3, **ASK).choices[0].text == plain[3]
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            through = list(pool.map(lambda s: stream(url, s), range(20)))
        assert through == plain
        assert verb.interrupt() == 0
        assert "closed: 21 connection(s) were carried" in verb.err
        with pytest.raises(OSError):
            connect(verb)


def test_dropbear_forwards_no_unix_sockets(dropbear: Server) -> None:
    ran = kit("tunnel", dropbear.target, *dropbear.args, "--remote", "/x.sock", "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (4, "CK-FORWARD-REFUSED")
    assert "listen on 127.0.0.1" in ran.json["error"]["hint"]


def test_a_unix_socket_there(sshd: Server, chat_model: Path, user: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ck-sock-"))
    folder.chmod(0o755)
    path = folder / "serve.sock"
    try:
        with Service(chat_model, "--unix", str(path)) as running:
            if os.geteuid() == 0:
                shutil.chown(path, user)
            with tunnel(sshd, path) as verb:
                assert verb.lines()[0]["remote"] == str(path)
                direct = client(running.url).completions.create(seed=5, **ASK).choices[0].text
                assert stream(verb.lines()[0]["url"], 5) == direct
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_events_pass_one_by_one_and_ends_pass_alone(server: Server) -> None:
    """The server sends its second event only after the client has the first; then each side ends
    its own half and the other half still works."""
    first_seen = threading.Event()
    heard: list[bytes] = []
    done = threading.Event()

    def handler(sock: socket.socket, head: bytes) -> None:
        sock.sendall(b"data: 1\n\n")
        assert first_seen.wait(20)
        sock.sendall(b"data: 2\n\n")
        if b"/service-ends-first" in head:
            sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(4096):
            heard.append(piece)
        if b"/client-ends-first" in head:
            sock.sendall(b"after your end")
        done.set()

    with Said(handler) as said, tunnel(server, said.port) as verb:
        for path in (b"/service-ends-first", b"/client-ends-first"):
            first_seen.clear(), done.clear(), heard.clear()
            with connect(verb) as sock:
                sock.sendall(b"GET " + path + b" HTTP/1.1\r\n\r\n")
                assert sock.recv(100) == b"data: 1\n\n"
                first_seen.set()
                assert sock.recv(100) == b"data: 2\n\n"
                if path == b"/service-ends-first":
                    assert sock.recv(100) == b""
                sock.sendall(b"more from the client")
                sock.shutdown(socket.SHUT_WR)
                if path == b"/client-ends-first":
                    assert sock.recv(100) == b"after your end"
                assert done.wait(20)
                assert b"".join(heard) == b"more from the client"


def test_a_client_that_leaves_is_seen_by_the_service(server: Server) -> None:
    gone = threading.Event()

    def handler(sock: socket.socket, head: bytes) -> None:
        sock.sendall(b"x")
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass
        gone.set()

    with Said(handler) as said, tunnel(server, said.port) as verb:
        sock = connect(verb)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert sock.recv(1) == b"x"
        sock.close()
        assert gone.wait(20)


def test_much_is_carried_whole_while_a_slow_reader_waits(server: Server) -> None:
    """16 MiB on each of four connections, one of whose readers does not read for a while."""
    size = 16 << 20
    pattern = bytes(range(256)) * 256

    def handler(sock: socket.socket, head: bytes) -> None:
        for _ in range(size // len(pattern)):
            sock.sendall(pattern)

    def take(verb: Verb, pause: float) -> int:
        with connect(verb) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            time.sleep(pause)
            at = 0
            while piece := sock.recv(1 << 16):
                shift = at % 256
                assert piece == (pattern * 2)[shift : shift + len(piece)]
                at += len(piece)
            return at

    pauses = (0, 0, 0, 3.0)
    with (
        Said(handler) as said,
        tunnel(server, said.port) as verb,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        assert list(pool.map(lambda p: take(verb, p), pauses)) == [size] * 4


def waiting(sock: socket.socket, head: bytes) -> None:
    """Answers one byte, then holds the connection."""
    sock.sendall(b"x")
    with contextlib.suppress(OSError):
        while sock.recv(4096):
            pass


def held(verb: Verb) -> socket.socket:
    """A connection with one byte come through."""
    sock = connect(verb)
    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert sock.recv(1) == b"x"
    return sock


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_link_is_opened_again(server: Server, how: signal.Signals) -> None:
    """The session dies, or goes silent with the connection up; other sessions are let in."""
    before = set(server.sessions())
    with Said(waiting) as said, tunnel(server, said.port, "--stall-timeout", "2") as verb:
        ours = [pid for pid in server.sessions() if pid not in before]
        assert ours
        sock = held(verb)
        for pid in reversed(ours):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        try:
            # A stream that was cut must not look like one that ended.
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
            verb.until(lambda: "was lost; connecting again" in verb.err, "word of the loss")
            verb.until(lambda: "open again" in verb.err, "word of the return")
            held(verb).close()
            assert len(verb.lines()) == 1
        finally:
            for pid in ours:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert verb.interrupt() == 0


def cut(server: Server, before: set[int]) -> None:
    for pid in server.sessions():
        if pid not in before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_no_reconnect_ends_with_its_own_error(sshd: Server) -> None:
    before = set(sshd.sessions())
    with Said(waiting) as said, tunnel(sshd, said.port, "--no-reconnect") as verb:
        cut(sshd, before)
        assert verb.child.wait(30) == 7
        assert verb.lines()[1]["error"]["code"] == "CK-SSH-LOST"


def test_another_host_key_after_a_loss_ends_it(sshd: Server, tmp_path: Path) -> None:
    """Who stands there when the link comes back must be who stood there before."""
    known = tmp_path / "known_hosts"
    known.write_text(sshd.known_hosts.read_text())
    args = [str(known) if a == str(sshd.known_hosts) else a for a in sshd.args]
    other = ssh_servers.keygen(tmp_path / "other")
    before = set(sshd.sessions())
    with Said(waiting) as said, tunnel(sshd, said.port, args=args) as verb:
        known.write_text(ssh_servers.known_line(sshd.port, other.with_name("other.pub")))
        cut(sshd, before)
        assert verb.child.wait(30) == 5
        assert verb.lines()[1]["error"]["code"] == "CK-SSH-CHANGED-KEY"


def test_while_nothing_answers_connections_are_reset(sshd: Server) -> None:
    with Said(waiting) as said, tunnel(sshd, said.port) as verb:
        said.__exit__()
        sock = connect(verb)
        with pytest.raises(ConnectionResetError):
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n"), sock.recv(1)


def test_nothing_listens_or_something_else_does(server: Server) -> None:
    port = ssh_servers.free_port()
    for remote, code, words in (
        (port, "CK-SERVICE-DOWN", f"nothing listens at 127.0.0.1:{port}; no service is installed there"),
        (server.port, "CK-SERVICE-ANSWER", "is not `colibri serve`"),
    ):
        ran = kit("tunnel", server.target, *server.args, "--remote", remote, "--json")
        assert (ran.rc, ran.json["error"]["code"]) == (4, code), ran.err
        assert words in ran.json["error"]["message"]
        assert ran.json["error"]["hint"]


def test_no_such_socket(sshd: Server) -> None:
    ran = kit("tunnel", sshd.target, *sshd.args, "--remote", "/nonexistent/s.sock", "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (4, "CK-SERVICE-DOWN"), ran.err
    assert "no socket /nonexistent/s.sock" in ran.json["error"]["message"]


def test_a_server_that_forwards_nothing(open_dir: Path, user: str, identity: Path) -> None:
    closed = start_sshd(open_dir / "closed", user, identity, extra="AllowTcpForwarding no\n")
    try:
        with Said(waiting) as said:
            ran = kit("tunnel", closed.target, *closed.args, "--remote", said.port, "--json")
            assert (ran.rc, ran.json["error"]["code"]) == (4, "CK-FORWARD-REFUSED"), ran.err
            assert "AllowTcpForwarding" in ran.json["error"]["hint"]
    finally:
        closed.stop()


def test_only_this_machine_and_the_port_that_was_named(sshd: Server) -> None:
    port = ssh_servers.free_port()
    with Said(waiting) as said, tunnel(sshd, said.port, "--local", port) as verb:
        assert verb.lines()[0]["url"] == f"http://127.0.0.1:{port}"
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        at = [row[1] for row in listening if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
        assert at == [f"0100007F:{port:04X}"]
        again = kit("tunnel", sshd.target, *sshd.args, "--remote", said.port, "--local", port, "--json")
        assert (again.rc, again.json["error"]["code"]) == (2, "CK-TUNNEL-LOCAL")
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 8080)):
            pass  # 8080 is free, or somebody else's: either way the next one must find a place
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", 8080)))
            with tunnel(sshd, said.port) as second:
                assert local(second) not in (8080, port)
                assert f"port 8080 is in use here: taking {local(second)}" in second.err
