"""Real U-Boot in QEMU with a FAT disk, its console on a loopback port or a pseudo-terminal."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.vboard.packages import Program, Store, find_qemu, find_tool, tool_set

FAT_START = 2048  # sectors


def store() -> Store:
    return Store(lambda text: None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mtool(name: str, *args: str) -> bytes:
    tool = find_tool(store(), name, "mtools")
    env = {**tool.environment, "MTOOLS_SKIP_CHECK": "1"}
    done = subprocess.run([*tool.argv, *args], env=env, capture_output=True, check=False)
    assert done.returncode == 0, (name, args, done.stderr)
    return done.stdout


def fat_disk(path: Path) -> None:
    """A 64 MiB disk: MBR, one FAT16 partition of 48 MiB."""
    with path.open("wb") as out:
        out.truncate(64 << 20)
        entry = bytes([0x80, 0, 0, 0, 0x0E, 0, 0, 0])
        entry += FAT_START.to_bytes(4, "little") + (48 << 11).to_bytes(4, "little")
        out.seek(446)
        out.write(entry + bytes(48) + b"\x55\xaa")
    mtool("mformat", "-i", f"{path}@@{FAT_START * 512}", "-T", str(48 << 11), "-h", "16", "-s", "63")


def fat_read(disk: Path, name: str) -> bytes:
    return mtool("mcopy", "-i", f"{disk}@@{FAT_START * 512}", f"::{name}", "-")


@dataclass
class Guest:
    """A running QEMU; ``port`` is its console's TCP port, ``pty`` its path, one of them."""

    process: subprocess.Popen[bytes]
    port: int
    pty: str | None

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def start_uboot(disk: Path, *, pty: bool = False, cpu: str = "cortex-a53") -> Guest:
    """U-Boot's qemu_arm64 build on ``-M virt``; the disk is virtio 0."""
    found = store()
    qemu: Program = find_qemu(found, "qemu-system-aarch64", "virt")
    bios = Path("/usr/lib/u-boot/qemu_arm64/u-boot.bin")
    if not bios.exists():
        bios = found.get(tool_set("u-boot-qemu")) / str(bios)[1:]
    port = 0 if pty else free_port()
    console = "pty" if pty else f"tcp:127.0.0.1:{port},server=on,wait=off"
    process = subprocess.Popen(
        [
            *qemu.argv,
            *("-M", "virt", "-cpu", cpu, "-m", "256", "-nodefaults", "-nographic", "-monitor", "none"),
            *("-bios", str(bios), "-serial", console),
            *("-drive", f"if=none,id=d0,file={disk},format=raw,cache=unsafe"),
            *("-device", "virtio-blk-device,drive=d0"),
        ],
        env=qemu.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    path = None
    if pty:
        assert process.stdout is not None
        words = process.stdout.readline().decode()
        match = re.search(r"redirected to (\S+)", words)
        assert match, words
        path = match.group(1)
    else:
        _wait(lambda: _listens(port))
    return Guest(process, port, path)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


def _wait(ready: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "the emulator does not start"
        time.sleep(0.05)
