"""What runs where: one folder for each virtual board, its state, its keys, its process."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from colibri_kit.errors import ConfigError, PreflightError, UsageError

FOLDER_VARIABLE = "COLIBRI_VBOARD_DIR"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
#: sun_path holds 108 bytes, one of them NUL.
_MAX_SOCKET_PATH = 100


def base_folder() -> Path:
    """``$COLIBRI_VBOARD_DIR``, else under ``$XDG_STATE_HOME`` or ``~/.local/state``."""
    own = os.environ.get(FOLDER_VARIABLE)
    if own:
        return Path(own).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    except RuntimeError as err:
        raise ConfigError(f"no home folder: {err}", hint=f"{FOLDER_VARIABLE}=/some/folder") from err
    return home / "colibri-kit" / "vboard"


@dataclass(frozen=True)
class Running:
    """A started QEMU. ``ticks`` is the process's start time, so that a recycled pid is not taken for it."""

    name: str
    board: str
    pid: int
    ticks: int
    port: int
    ram: int
    cpu: str
    machine: str
    init: str
    ssh: str
    deterministic: bool
    qemu: str
    kernel: str
    console: str
    boot_seconds: float = 0.0

    def alive(self) -> bool:
        return start_ticks(self.pid) == self.ticks


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None when there is none (or only a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


class Place:
    """The folder of one virtual board and the paths in it."""

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise UsageError(f"'{name}' is no name for a virtual board: a-z, 0-9 and - only")
        self.name = name
        self.folder = base_folder() / name
        self.state = self.folder / "state.json"
        self.known_hosts = self.folder / "known_hosts"
        self.ssh_config = self.folder / "ssh_config"
        self.identity = self.folder / "id_ed25519"
        self.host_key = self.folder / "ssh_host_ed25519_key"
        self.machine_id = self.folder / "machine-id"
        self.data_disk = self.folder / "data.img"
        self.root_disk = self.folder / "root.img"
        self.initrd = self.folder / "initrd"
        self.dtb = self.folder / "board.dtb"
        self.console_log = self.folder / "console.log"
        self.qemu_log = self.folder / "qemu.log"

    def make(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as err:
            raise ConfigError(
                f"no folder for virtual boards: {err}", hint=f"{FOLDER_VARIABLE}=/some/folder"
            ) from err

    @property
    def sockets(self) -> Path:
        """Where the unix sockets are: here, or in a short private folder when this path is too long."""
        if len(os.fsencode(str(self.folder / "console.sock"))) <= _MAX_SOCKET_PATH:
            return self.folder
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        top = Path(runtime) if runtime.startswith("/") else Path(tempfile.gettempdir())
        mine = hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]
        folder = top / f"colibri-kit-{os.geteuid()}" / mine
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.parent.stat()
        if owner.st_uid != os.geteuid() or owner.st_mode & 0o077:
            raise ConfigError(f"{folder.parent} is not private to us", hint="set XDG_RUNTIME_DIR")
        return folder

    @property
    def console(self) -> Path:
        return self.sockets / "console.sock"

    @property
    def qmp(self) -> Path:
        return self.sockets / "qmp.sock"

    def read(self) -> Running | None:
        """The state that was left, whether or not the process lives."""
        try:
            return Running(**json.loads(self.state.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def running(self) -> Running | None:
        found = self.read()
        return found if found is not None and found.alive() else None

    def write(self, run: Running) -> None:
        temp = self.state.with_suffix(".new")
        temp.write_text(json.dumps(asdict(run), indent=1))
        temp.replace(self.state)


def all_boards() -> list[tuple[str, Running | None]]:
    """Every virtual board that has a folder, with what runs."""
    top = base_folder()
    if not top.is_dir():
        return []
    names = sorted(p.name for p in top.iterdir() if p.is_dir() and _NAME.fullmatch(p.name))
    return [(name, Place(name).running()) for name in names]


def must_run(name: str) -> tuple[Place, Running]:
    """The place and the process of a board that is up.

    Raises:
        PreflightError: it is not.
    """
    place = Place(name)
    found = place.running()
    if found is None:
        up = [other for other, run in all_boards() if run is not None]
        close = difflib.get_close_matches(name, up, 1, 0.5)
        more = f"; did you mean '{close[0]}'?" if close else f"; up: {', '.join(up)}" if up else ""
        raise PreflightError(
            f"virtual board {name} is not up{more}",
            hint=f"colibri-kit board up {name}",
            state="nothing was changed",
            code="CK-VBOARD-DOWN",
        )
    return place, found


def alias(host: str) -> tuple[str, Path] | None:
    """``@NAME`` or ``user@@NAME`` as a host of the board's own ssh_config; None when it is neither."""
    match = re.fullmatch(r"(?:([A-Za-z0-9_.-]+)@)?@([a-z0-9][a-z0-9-]*)", host)
    if match is None:
        return None
    place, _ = must_run(match.group(2))
    user = f"{match.group(1)}@" if match.group(1) else ""
    return f"{user}{place.name}", place.ssh_config


def free_port(wanted: int = 0) -> int:
    """``wanted`` if it is free on loopback, else another that is."""
    for port in (wanted, 0):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return int(sock.getsockname()[1])
    raise PreflightError("no free port on 127.0.0.1")


def kill(run: Running, *, patience: float = 10.0) -> None:
    """Ends the process at once, as a power cut would."""
    if run.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGKILL)
    wait_gone(run, patience)


def wait_gone(run: Running, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while run.alive():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(run.pid, os.WNOHANG)
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class Qmp:
    """QEMU's control socket."""

    def __init__(self, path: Path, timeout: float = 10.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rw")
        self._file.readline()
        self.call("qmp_capabilities")

    def call(self, command: str, **arguments: Any) -> Any:
        """Runs a command. Raises OSError when QEMU refuses or is gone."""
        self._file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self._file.flush()
        while True:
            line = self._file.readline()
            if not line:
                raise OSError("QEMU closed its control socket")
            answer = json.loads(line)
            if "error" in answer:
                raise OSError(answer["error"].get("desc", "refused"))
            if "return" in answer:
                return answer["return"]

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def has_banner(port: int, timeout: float = 2.0) -> bool:
    """Does an SSH server answer? QEMU accepts connections before the guest listens."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout) as sock:
        sock.settimeout(timeout)
        return sock.recv(4) == b"SSH-"
    return False


def tail(path: Path, lines: int = 12) -> str:
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.replace("\r", "").strip().splitlines()[-lines:])


Say = Callable[[str], None]
