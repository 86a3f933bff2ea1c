"""A service on a virtual board, asked through SSH as a client of the board would ask it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virtual import inside, kit

from colibri_kit.vboard.runtime import Place

PORT = 8080
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
_KEYS = "ActiveState,SubState,MainPID,NRestarts,MemoryMax,UnitFileState,User,Result,WatchdogUSec"


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(name: str, method: str, path: str, body: Any = None, *, seconds: float = 120) -> Answer:
    """One HTTP request to the board's loopback address. Status 0: nobody listens there."""
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    argv = ["ssh", "-F", str(Place(name).ssh_config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=20",
            "-W", f"127.0.0.1:{PORT}", f"root@{name}"]  # fmt: skip
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        assert child.stdin and child.stdout
        try:
            # Its end stays open: a client that closes half a connection takes its request back.
            child.stdin.write(head.encode() + data)
            child.stdin.flush()
            raw = _read(child, seconds)
        except BrokenPipeError:
            raw = b""
        finally:
            child.kill()
    if not raw:
        return Answer(0, b"")
    top, _, rest = raw.partition(b"\r\n\r\n")
    if b"chunked" in top.lower():
        rest = _unchunked(rest)
    return Answer(int(top.split()[1]), rest)


def _read(child: subprocess.Popen[bytes], seconds: float) -> bytes:
    import threading

    assert child.stdout
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        return child.stdout.read()
    finally:
        timer.cancel()


def _unchunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            break
        out += data[:count]
        data = data[count + 2 :]
    return out


def complete(name: str, prompt: str, n: int = 4) -> tuple[str, str]:
    """The likeliest continuation, and the golden's beginning that the answer came with."""
    got = ask(
        name, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": n, "temperature": 0, "seed": 1}
    )
    assert got.status == 200, (got.status, got.body)
    return str(got.json["choices"][0]["text"]), str(got.json["system_fingerprint"]).removeprefix("fp_")


def golden(model: Path) -> str:
    return str(json.loads((model / "manifest.json").read_text())["golden"]["sha256"])


def active(name: str) -> dict[str, str]:
    words = inside(name, f"systemctl show colibri -p {_KEYS}", user="root")
    return dict(line.split("=", 1) for line in words.splitlines())


def journal(name: str, lines: int = 30) -> str:
    return inside(name, f"journalctl -u colibri --no-pager -o cat | tail -{lines}", user="root")


def wait_active(name: str, *, not_pid: str = "0", seconds: float = 240) -> dict[str, str]:
    """Until systemd says that the service is ready, as another process than ``not_pid``."""
    end = time.monotonic() + seconds
    state: dict[str, str] = {}
    while time.monotonic() < end:
        state = active(name)
        if state["ActiveState"] == "active" and state["MainPID"] not in ("0", not_pid):
            return state
        time.sleep(0.5)
    raise AssertionError(f"{state}\n{journal(name)}")


def wait_rebooted(name: str, before: str, seconds: float = 240) -> None:
    """Until the guest answers with another boot's id."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        # A session that began before the reboot would wait for its answer for ever.
        with contextlib.suppress(subprocess.TimeoutExpired):
            ran = kit("board", "ssh", f"root@{name}", BOOT_ID, timeout=30)
            if ran.rc == 0 and ran.out.strip() and ran.out != before:
                return
        time.sleep(0.5)
    raise AssertionError("no SSH after the reboot")
