"""Runs a shell script on a Linux guest with little memory: a limit that the page cache obeys too.

The guest is the virtual board `virt-x86` without network: QEMU's q35, emulated, a Debian
kernel, BusyBox, and one ext4 disk with the given files at /data. Times in it mean nothing.
Its storage can be throttled, so that a fast host disk or the host's own page cache does
not stand in for a board's. The script's output comes back over the serial console.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.errors import EngineError, PreflightError

Say = Callable[[str], None]
_BEGIN, _END = "bench: begin", "bench: end"
_AUTORUN = f"""#!/bin/sh
cd /data
echo "{_BEGIN}"
sh /script.sh 2>&1
echo "{_END} $?"
sync
poweroff -f
"""


@dataclass(frozen=True)
class Limits:
    """What the guest has.

    Attributes:
        ram: bytes, kernel included (it keeps about 100 MB of them).
        read_bytes_s: storage's reads; 0 = as fast as the host's.
    """

    ram: int
    cpus: int = 2
    read_bytes_s: int = 0


def make_disk(files: Mapping[str, Path], image: Path, say: Say) -> Path:
    """An ext4 image with the files and folders under the given names; hard links, no second copy.

    Raises:
        PreflightError: no room for it.
    """
    from colibri_kit.vboard import images, packages

    size = sum(f.stat().st_size for p in files.values() for f in ([p] if p.is_file() else p.rglob("*")))
    free = shutil.disk_usage(image.parent).free
    if free < size + (256 << 20):
        raise PreflightError(f"{image.parent} has {free >> 20} MiB free; the disk needs {size >> 20}")
    stage = image.with_suffix(".files")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    try:
        for name, source in files.items():
            target = stage / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, copy_function=_link)
            else:
                _link(source, target)
        mke2fs = packages.find_tool(packages.Store(say), "mke2fs", "e2fsprogs")
        images.make_ext4(mke2fs, image, size + size // 16 + (128 << 20), "ck-data", stage)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return image


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def run(disk: Path, script: str, limits: Limits, say: Say, *, timeout: float = 1800) -> str:
    """Boots, runs ``script`` in /data as root, powers off; returns what it wrote.

    Raises:
        EngineError: it did not come to its end, or the script failed.
    """
    from colibri_kit.config import load_board
    from colibri_kit.vboard import guest, machine, packages

    board = load_board("virt-x86")
    assert board.vm is not None
    work = disk.with_suffix(".run")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    store = packages.Store(say)
    program = packages.find_qemu(store, "qemu-system-x86_64", board.vm.machine)
    kernel_root, small = (
        store.get(packages.kernel("amd64", board.vm.kernel)),
        store.get(packages.small("amd64")),
    )
    base = guest.base(small, kernel_root, guest.MODULES[board.vm.machine])
    keys = guest.Keys(host_key="", authorized="", machine_id="0" * 32)
    own = guest.personal(keys, {"autorun": _AUTORUN.encode(), "script.sh": script.encode()})
    (work / "initrd").write_bytes(base + bytes(-len(base) % 4) + own)
    want = machine.Wanted(
        vm=board.vm, name="bench", ram=limits.ram, cpus=limits.cpus, port=1, kernel=_kernel(kernel_root),
        initrd=work / "initrd", dtb=None, data_disk=disk, root_disk=None, console=work / "console",
        console_log=work / "log", qmp=work / "qmp", init="none", ssh="none", deterministic=False, pty=False,
        time=int(time.time()),
    )  # fmt: skip
    return _boot(
        [*program.argv, *_arguments(machine.arguments(want), limits)], program.environment, work, timeout
    )


def _kernel(root: Path) -> Path:
    return sorted(root.glob("boot/vmlinuz-*"))[0]


def _arguments(args: list[str], limits: Limits) -> list[str]:
    """The board's own, with a serial console on a file, no network, and throttled reads."""
    out: list[str] = []
    skip = False
    for key, value in zip(args, [*args[1:], ""], strict=True):
        if skip:
            skip = False
            continue
        if key in ("-netdev", "-qmp", "-chardev", "-serial") or (key == "-device" and "netdev" in value):
            skip = True
        elif key == "-drive":
            slow = f",throttling.bps-read={limits.read_bytes_s}" if limits.read_bytes_s else ""
            out += ["-drive", f"{value},cache=none,snapshot=on{slow}"]
            skip = True
        else:
            out.append(key)
    return [*out, "-serial", "file:log", "-no-reboot"]


def _boot(argv: list[str], environment: dict[str, str], work: Path, timeout: float) -> str:
    with (work / "qemu").open("wb") as errors:
        child = subprocess.Popen(
            argv, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        )
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired as err:
            raise EngineError(f"the guest did not finish within {timeout:.0f} s:\n{_tail(work)}") from err
        finally:
            child.kill()
            child.wait()
    log = (work / "log").read_text(errors="replace").replace("\r", "") if (work / "log").is_file() else ""
    if _BEGIN not in log or f"{_END} 0" not in log:
        raise EngineError(f"the guest's script failed (QEMU ended with {child.returncode}):\n{_tail(work)}")
    return log.split(_BEGIN, 1)[1].split(_END, 1)[0].strip("\n")


def _tail(work: Path) -> str:
    text = "".join((work / n).read_text(errors="replace") for n in ("qemu", "log") if (work / n).is_file())
    return "\n".join(text.splitlines()[-15:])
