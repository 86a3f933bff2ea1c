"""Programs and files over real shells on terminals, with lrzsz there and absent, on bad lines."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from serial_proxy import Proxy
from serial_shells import PtyShell

from colibri_kit.transport.base import CommandTimeout, ConnectionLost
from colibri_kit.transport.serial_console import Console
from colibri_kit.transport.serial_port import open_line
from colibri_kit.transport.serial_shell import SEGMENT, SerialTransport
from colibri_kit.vboard.packages import Store, tool_set

SHELLS = {
    "bash": ["bash", "--norc", "-i"],
    "dash": ["dash", "-i"],
    "busybox": ["busybox", "sh", "-i"],
}


@pytest.fixture(scope="session")
def lrzsz() -> Path:
    """The folder with rx and rb."""
    import shutil

    found = shutil.which("rx")
    return Path(found).parent if found else Store(lambda t: None).get(tool_set("lrzsz")) / "usr/bin"


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[list[PtyShell]]:
    made: list[PtyShell] = []
    yield made
    for shell in made:
        shell.close()


def _shell(made: list[PtyShell], tmp_path: Path, name: str, *extra: Path) -> PtyShell:
    path = ":".join([*map(str, extra), "/usr/bin", "/bin"])
    env = {"PATH": path, "HOME": str(tmp_path), "PS1": "board$ ", "TERM": "xterm"}
    made.append(PtyShell(SHELLS[name], env))
    return made[-1]


def _transport(url: str, method: str) -> SerialTransport:
    console = Console(open_line(url))
    console.start("root", lambda: None)
    return SerialTransport(console, method=method)


@pytest.mark.parametrize("name", sorted(SHELLS))
def test_programs_and_files(shells: list[PtyShell], tmp_path: Path, name: str) -> None:
    shell = _shell(shells, tmp_path, name)
    transport = _transport(f"socket://127.0.0.1:{shell.port}", "base64")
    done = transport.run(["sh", "-c", 'printf "%s|" "$@"; cat; echo bad >&2; exit 7', "sh", "a b", "ü'$x\n"],
                         stdin=b"\0in\xff")  # fmt: skip
    assert (done.rc, done.out, done.err) == (7, "a b|ü'$x\n|".encode() + b"\0in\xff", b"bad\n")
    big = transport.run(["seq", "20000"])
    assert big.out == b"".join(b"%d\n" % i for i in range(1, 20001))
    assert transport.run(["no-such-program"]).rc == 127
    target = tmp_path / "o'ut ü"
    data = random.Random(1).randbytes(SEGMENT * 2 + 77)
    counted: list[int] = []
    transport.put_stream(io.BytesIO(data), len(data), str(target), mode=0o755, progress=counted.append)
    assert target.read_bytes() == data and target.stat().st_mode & 0o777 == 0o755
    assert sum(counted) == len(data)
    transport.put_stream(io.BytesIO(b"more"), 4, str(target), offset=len(data))
    assert target.read_bytes() == data + b"more"
    assert transport.read(str(target), limit=10) == data[:10]
    assert transport.read(str(tmp_path / "none")) is None
    transport.close()
    assert transport.scratch.startswith("/tmp/ck.") and not Path(transport.scratch).exists()


@pytest.mark.parametrize("programs", [("rx",), ("rb",)])
def test_by_xmodem_and_ymodem(
    shells: list[PtyShell], tmp_path: Path, lrzsz: Path, programs: tuple[str, ...]
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in programs:
        (folder / program).symlink_to(lrzsz / program)
    shell = _shell(shells, tmp_path, "bash", folder)
    transport = _transport(f"socket://127.0.0.1:{shell.port}", "rx")
    assert transport.method.split()[0] == programs[0]
    data = random.Random(2).randbytes(SEGMENT + 5000)
    transport.put_stream(io.BytesIO(data), len(data), str(tmp_path / "f"))
    assert (tmp_path / "f").read_bytes() == data
    assert transport.sent_by == {"modem": len(data), "base64": 0}
    transport.close()


def test_one_percent_of_bytes_lost_each_way(shells: list[PtyShell], tmp_path: Path) -> None:
    shell = _shell(shells, tmp_path, "dash")
    proxy = Proxy(shell.port, loss=0.01, seed=5)
    try:
        transport = _transport(proxy.url, "base64")
        data = random.Random(3).randbytes(3000)
        transport.put_stream(io.BytesIO(data), len(data), str(tmp_path / "f"))
        assert (tmp_path / "f").read_bytes() == data
        assert transport.run(["seq", "60"]).out == b"".join(b"%d\n" % i for i in range(1, 61))
    finally:
        proxy.close()
    assert proxy.dropped > 50


def test_cut_and_resumed(shells: list[PtyShell], tmp_path: Path) -> None:
    """A second connection meets the shell still in its loop, and the file's whole segments."""
    shell = _shell(shells, tmp_path, "bash")
    proxy = Proxy(shell.port, cut_after=70_000)
    data = random.Random(4).randbytes(SEGMENT * 3)
    target = tmp_path / "f"
    try:
        transport = _transport(proxy.url, "base64")
        with pytest.raises(ConnectionLost):
            transport.put_stream(io.BytesIO(data), len(data), str(target))
        transport.close()
        kept = target.stat().st_size
        assert kept == SEGMENT and target.read_bytes() == data[:kept]
        again = _transport(proxy.url, "base64")
        again.put_stream(io.BytesIO(data[kept:]), len(data) - kept, str(target), offset=kept)
        again.close()
    finally:
        proxy.close()
    assert target.read_bytes() == data


def test_kernel_messages_in_between(shells: list[PtyShell], tmp_path: Path) -> None:
    shell = _shell(shells, tmp_path, "bash")
    transport = _transport(f"socket://127.0.0.1:{shell.port}", "base64")
    for _ in range(10):
        shell.inject(b"\r\n[   99.9] usb 1-1: new device\r\n")
        assert transport.run(["echo", "unhurt"]).out == b"unhurt\n"
    transport.close()


def test_a_program_that_does_not_end(shells: list[PtyShell], tmp_path: Path) -> None:
    shell = _shell(shells, tmp_path, "bash")
    transport = _transport(f"socket://127.0.0.1:{shell.port}", "base64")
    with pytest.raises(CommandTimeout):
        transport.run(["sleep", "100"], timeout=1)
    assert transport.run(["echo", "still here"]).out == b"still here\n"
    transport.close()


def test_rate_is_changed_and_kept(shells: list[PtyShell], tmp_path: Path) -> None:
    shell = _shell(shells, tmp_path, "dash")
    transport = _transport(f"socket://127.0.0.1:{shell.port}", "base64")
    console = transport._console
    assert console.set_baud(57600) is True
    assert transport.run(["sh", "-c", "stty speed </dev/tty"]).text == "57600"
    transport.close()
