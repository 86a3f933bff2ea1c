"""Real SSH servers on loopback, run as an ordinary user, and a proxy that breaks links."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

SFTP_SERVERS = ("/usr/lib/sftp-server", "/usr/lib/openssh/sftp-server", "/usr/libexec/sftp-server")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_banner(port: int, child: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server says SSH-…; at most ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if child.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as sock:
            if sock.recv(4) == b"SSH-":
                return
        time.sleep(0.01)
    raise AssertionError(f"no SSH server on port {port}: {log.read_text()}")


def as_user(user: str) -> list[str]:
    """A prefix that drops from root to ``user``; nothing when we are that user."""
    entry = pwd.getpwnam(user)
    if os.geteuid() == entry.pw_uid:
        return []
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]


@dataclass
class Server:
    """A running server. ``args`` are the SSH options that let the kit log in."""

    kind: str
    user: str
    port: int
    folder: Path
    child: subprocess.Popen[bytes]
    identity: Path
    known_hosts: Path

    @property
    def target(self) -> str:
        return f"{self.user}@127.0.0.1:{self.port}"

    @property
    def args(self) -> list[str]:
        return [
            "--identity", str(self.identity), "--known-hosts", str(self.known_hosts), "--no-agent",
            "--ssh-config", str(self.folder / "empty_config"),
        ]  # fmt: skip

    def sessions(self) -> list[int]:
        """Pids of the server's session processes, deepest last."""
        found: list[int] = []
        todo = [self.child.pid]
        while todo:
            pid = todo.pop()
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    kids = [int(k) for k in (task / "children").read_text().split()]
                    found += kids
                    todo += kids
        return found

    def stop(self) -> None:
        self.child.terminate()
        try:
            self.child.wait(5)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def keygen(path: Path, kind: str = "ed25519") -> Path:
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path)], check=True)
    return path


def known_line(port: int, public: Path) -> str:
    kind, blob = public.read_text().split()[:2]
    return f"[127.0.0.1]:{port} {kind} {blob}\n"


def start_sshd(
    folder: Path,
    user: str,
    identity: Path,
    *,
    extra: str = "",
    key: str = "ed25519",
    wrap: Sequence[str] = (),
) -> Server:
    """OpenSSH's sshd without sftp, which lets in only ``user``; ``wrap`` goes before its command."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    host_key = keygen(folder / "hostkey", key)
    authorized = folder / "authorized_keys"
    shutil.copy(identity.with_name(identity.name + ".pub"), authorized)
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nAuthorizedKeysFile {authorized}\n"
        f"PidFile none\nUsePAM no\nStrictModes no\nPrintMotd no\n{extra}"
    )
    (folder / "empty_config").write_text("")
    known = folder / "known_hosts"
    known.write_text(known_line(port, folder / "hostkey.pub"))
    if os.geteuid() == 0:
        for path in (host_key, authorized, config):
            shutil.chown(path, user)
    log = folder / "log"
    with log.open("wb") as out:
        child = subprocess.Popen(
            [*wrap, *as_user(user), "/usr/sbin/sshd", "-D", "-e", "-f", str(config)], stdout=out, stderr=out
        )
    wait_banner(port, child, log)
    return Server("sshd", user, port, folder, child, identity, known)


def start_dropbear(folder: Path, user: str, identity: Path, *, as_root: bool = False) -> Server:
    """dropbear with sftp-server out of reach (when we may hide it)."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    host_key = folder / "hostkey"
    made = subprocess.run(
        ["dropbearkey", "-t", "ed25519", "-f", str(host_key)], check=True, capture_output=True, text=True
    )
    public = next(line for line in made.stdout.splitlines() if line.startswith("ssh-ed25519 "))
    (folder / "hostkey.pub").write_text(public + "\n")
    (folder / "empty_config").write_text("")
    known = folder / "known_hosts"
    known.write_text(known_line(port, folder / "hostkey.pub"))
    serve = ["/usr/sbin/dropbear", "-F", "-E", "-r", str(host_key), "-p", f"127.0.0.1:{port}"]
    serve += ["-P", str(folder / "pid")]
    if os.geteuid() == 0:
        shutil.chown(host_key, user)
        folder.chmod(0o777)
        hide = " ".join(f"[ -e {p} ] && mount --bind /dev/null {p};" for p in SFTP_SERVERS)
        drop = [] if as_root else as_user(user)
        serve = [
            "unshare",
            "-m",
            "--propagation",
            "slave",
            "sh",
            "-c",
            f'{hide} exec "$@"',
            "sh",
            *drop,
            *serve,
        ]
    log = folder / "log"
    with log.open("wb") as out:
        child = subprocess.Popen(serve, stdout=out, stderr=out)
    wait_banner(port, child, log)
    return Server("dropbear", user, port, folder, child, identity, known)


@dataclass
class Listening:
    """In front of a server's ``port``: ``_serve()`` accepts at ``listen_port`` while the block lasts."""

    port: int
    listener: socket.socket = field(default_factory=socket.socket, kw_only=True)

    def __enter__(self) -> Self:
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.listener.close()

    @property
    def listen_port(self) -> int:
        return int(self.listener.getsockname()[1])

    def _serve(self) -> None:
        raise NotImplementedError


@dataclass
class Proxy(Listening):
    """A TCP proxy in front of ``port``; after ``limit`` bytes towards the server it acts.

    ``action``: ``cut`` (both sides closed), ``stall`` (nothing moves any more, the
    connection stays up), or a function that is called once while the rest goes on.
    """

    limit: int
    action: str | Callable[[], None]
    passed: int = 0

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.port))
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, client), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                self.passed += len(data)
                if self.passed > self.limit:
                    if self.action == "stall":
                        return  # neither reads on nor closes
                    if self.action == "cut":
                        # Shut down first: a close alone waits for the other thread's recv.
                        for sock in (client, server):
                            sock.shutdown(socket.SHUT_RDWR)
                            sock.close()
                        return
                    assert callable(self.action)
                    self.action()
                    self.limit = 1 << 62
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)
