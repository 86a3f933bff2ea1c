"""Brings virtual boards up and down."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_kit.errors import PreflightError, TransferError, UnreachableError
from colibri_kit.vboard import devicetree, guest, images, keys, machine, packages, rootfs
from colibri_kit.vboard.packages import Store
from colibri_kit.vboard.runtime import (
    Place,
    Qmp,
    Running,
    Say,
    free_port,
    has_banner,
    kill,
    start_ticks,
    tail,
    wait_gone,
)

if TYPE_CHECKING:
    from colibri_kit.config.board import Board, Vm

#: Less than this and the kernel cannot unpack its initramfs.
MIN_RAM = 128 << 20


@dataclass(frozen=True)
class Options:
    """What `board up` was told. Sizes in bytes; 0 = the profile's.

    ``data``: a folder whose files a new data disk begins with, below /data.
    """

    ram: int = 0
    disk: int = 0
    cpus: int = 1
    init: str = "none"
    ssh: str = "openssh"
    deterministic: bool = False
    pty: bool = False
    fresh: bool = False
    refresh: bool = False
    timeout: float = 180.0
    data: Path | None = None


def check(board: Board, options: Options) -> Vm:
    """Refuses what cannot work, before anything is fetched. Raises PreflightError."""
    vm = board.vm
    nothing = "nothing was changed"
    if vm is None:
        raise PreflightError(
            f"board {board.name} is a real board: its profile has no vm section",
            hint="virtual ones: virt-a53, virt-a72, virt-x86, qemu-rpi3, qemu-rpi4",
            state=nothing,
            code="CK-VBOARD-PROFILE",
        )
    raspi = vm.machine.startswith("raspi")
    ram = options.ram or board.ram
    if ram < MIN_RAM:
        raise PreflightError(
            f"{ram >> 20} MiB of memory is too little; at least {MIN_RAM >> 20} MiB", state=nothing
        )
    if raspi and ram > board.ram:
        raise PreflightError(f"{board.name} has {board.ram >> 20} MiB of memory, not more", state=nothing)
    if raspi and options.init == "systemd":
        raise PreflightError(
            f"{board.name} has one disk, its SD card: --init systemd needs virt-a53, virt-a72 or virt-x86",
            state=nothing,
        )
    if options.data is not None and not options.data.is_dir():
        raise PreflightError(f"--data {options.data} is no folder", state=nothing)
    if options.ssh == "dropbear" and options.init == "systemd":
        raise PreflightError("--ssh dropbear is for --init none", state=nothing)
    return vm


def up(board: Board, name: str, options: Options, say: Say) -> tuple[Place, Running, bool]:
    """Starts a board and waits until its SSH server answers.

    Returns:
        Its place, what runs, and whether it was started now (False: it was up already).

    Raises:
        PreflightError, TransferError, VerifyError: see Store. UnreachableError: it does
            not come up; nothing is left running.
    """
    vm = check(board, options)
    place = Place(name)
    place.make()
    with packages.locked(place.folder):
        found = place.running()
        if found is not None:
            return place, found, False
        if options.fresh:
            purge_files(place)
        try:
            want, program, kernel_version = _prepare(board, vm, place, options, say)
        except OSError as err:
            raise TransferError(
                f"cannot make {name}: {err}",
                hint="is the disk full? the cache and the board's folder need about 1 GiB",
                state="nothing was started",
                code="CK-VBOARD-FILES",
            ) from err
        argv = [*program.argv, *machine.arguments(want)]
        run = _start(argv, program, place, want, board, kernel_version)
    try:
        return place, _wait(place, run, options.timeout, say), True
    except BaseException:
        kill(run)
        raise


def _prepare(
    board: Board, vm: Vm, place: Place, options: Options, say: Say
) -> tuple[machine.Wanted, packages.Program, str]:
    binary, arch, _, module_set = machine.MACHINES[vm.machine]
    store = Store(say, refresh=options.refresh)
    program = packages.find_qemu(store, binary, vm.machine)
    kernel_set = packages.kernel(arch, vm.kernel)
    kernel_root = store.get(kernel_set)
    small = store.get(packages.small(arch))
    image = next(iter(sorted(kernel_root.glob("boot/vmlinuz-*"))), None)
    if image is None:
        raise TransferError(f"no kernel in {kernel_root}", hint="colibri-kit board up … --refresh")
    keys.make(place)
    _initrd(store, place, small, kernel_root, module_set)
    mke2fs = packages.find_tool(store, "mke2fs", "e2fsprogs")
    raspi = vm.machine.startswith("raspi")
    size = options.disk or vm.disk
    size = images.next_power_of_two(size) if raspi else size
    if not place.data_disk.is_file():
        images.make_ext4(mke2fs, place.data_disk, size, "ck-data", options.data, owner=1000)
    elif options.data is not None or (options.disk and place.data_disk.stat().st_size != size):
        raise PreflightError(
            f"{place.name} has a data disk of {place.data_disk.stat().st_size >> 20} MiB already",
            hint="--fresh makes a new board: disk and keys are lost",
            state="nothing was changed",
        )
    root_disk = None
    if options.init == "systemd":
        root_disk = place.root_disk
        if not root_disk.is_file():
            images.copy_sparse(_root_image(store, arch, mke2fs, say), root_disk)
    dtb = None
    if vm.machine in machine.DEVICE_TREES:
        dtb = _device_tree(store, vm.machine, kernel_root, place)
    before = place.read()
    want = machine.Wanted(
        vm=vm, name=place.name, ram=options.ram or board.ram, cpus=options.cpus,
        port=free_port(before.port if before else 0), kernel=image, initrd=place.initrd, dtb=dtb,
        data_disk=place.data_disk, root_disk=root_disk, console=place.console, console_log=place.console_log,
        qmp=place.qmp, init=options.init, ssh=options.ssh, deterministic=options.deterministic,
        pty=options.pty, time=int(time.time()),
    )  # fmt: skip
    return want, program, image.name.removeprefix("vmlinuz-")


def _initrd(store: Store, place: Place, small: Path, kernel_root: Path, module_set: str) -> None:
    """The shared part from the cache (made when missing), and this board's own behind it."""
    names = guest.MODULES[module_set]
    manifests = [(root / ".packages.json").read_text() for root in (small, kernel_root)]
    cached = store.folder / "images" / f"initrd-{module_set}-{guest.recipe_id(*manifests, *names)}.gz"
    if not cached.is_file():
        cached.parent.mkdir(parents=True, exist_ok=True)
        temp = cached.with_name(f"{cached.name}.{os.getpid()}")
        temp.write_bytes(guest.base(small, kernel_root, names))
        temp.replace(cached)
    own = guest.Keys(
        host_key=place.host_key.read_text(),
        authorized=place.identity.with_name(place.identity.name + ".pub").read_text(),
        machine_id=place.machine_id.read_text().strip(),
    )
    shared = cached.read_bytes()
    # The kernel wants each archive at a multiple of four bytes, with zeros between.
    with os.fdopen(os.open(place.initrd, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(shared + bytes(-len(shared) % 4) + guest.personal(own))


def _root_image(store: Store, arch: str, mke2fs: packages.Program, say: Say) -> Path:
    """The systemd root disk from the cache, made when missing."""
    root = store.get(packages.systemd(arch))
    source = Path(rootfs.__file__).read_text()
    mark = guest.recipe_id((root / ".packages.json").read_text(), source)
    image = store.folder / "images" / f"systemd-{arch}-{mark}.ext4"
    with packages.locked(store.folder):
        if not image.is_file():
            image.parent.mkdir(parents=True, exist_ok=True)
            say("making a root disk with systemd")
            rootfs.build(root, image, mke2fs, packages.find_tool(store, "debugfs", "e2fsprogs"))
            for older in image.parent.glob(f"systemd-{arch}-*.ext4"):
                if older != image:  # of other packages or another recipe; boards have copies
                    older.unlink(missing_ok=True)
    return image


def _device_tree(store: Store, name: str, kernel_root: Path, place: Place) -> Path:
    source = next(kernel_root.glob(f"usr/lib/linux-image-*/{machine.DEVICE_TREES[name]}"))
    if name == "raspi3b":
        shutil.copyfile(source, place.dtb)
    else:
        fdt = [packages.find_tool(store, tool, "device-tree-compiler") for tool in ("fdtput", "fdtget")]
        devicetree.raspi4b(source, place.dtb, *fdt)
    return place.dtb


def _start(
    argv: list[str],
    program: packages.Program,
    place: Place,
    want: machine.Wanted,
    board: Board,
    kernel_version: str,
) -> Running:
    for path in (place.console, place.qmp, place.console_log):
        path.unlink(missing_ok=True)
    keys.write_ssh(place, want.port)
    with place.qemu_log.open("wb") as log:
        log.write(" ".join(argv).encode() + b"\n")
        log.flush()
        # Its own session: Ctrl-C here is ours to handle, and it outlives this command.
        child = subprocess.Popen(
            argv, env=program.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        run = Running(
            name=place.name,
            board=board.name,
            pid=child.pid,
            ticks=start_ticks(child.pid) or 0,
            port=want.port,
            ram=want.ram,
            cpu=want.vm.cpu,
            machine=want.vm.machine,
            init=want.init,
            ssh=want.ssh,
            deterministic=want.deterministic,
            qemu=program.version,
            kernel=kernel_version,
            console="" if want.pty else str(place.console),
        )
        place.write(run)
    except BaseException:
        child.kill()
        child.wait()
        raise
    return run


def _wait(place: Place, run: Running, seconds: float, say: Say) -> Running:
    start = time.monotonic()
    shown = 0
    while not has_banner(run.port):
        marks = [w for w in tail(place.console_log, 400).splitlines() if w.startswith("board: ")]
        for mark in marks[shown:]:
            say(mark)
        shown = max(shown, len(marks))
        if not run.alive() or wait_gone(run, 0):
            raise UnreachableError(
                f"QEMU ended while {place.name} was starting:\n{tail(place.qemu_log, 5)}",
                state="nothing is left running",
                code="CK-VBOARD-START",
            )
        if time.monotonic() - start > seconds:
            raise UnreachableError(
                f"{place.name} had no SSH server after {seconds:.0f} s; its console says:\n"
                f"{tail(place.console_log)}",
                hint="give it more --timeout, or look at its console with `colibri-kit board console`",
                state="nothing is left running",
                code="CK-VBOARD-START",
            )
        time.sleep(0.1)
    done = replace(run, boot_seconds=round(time.monotonic() - start, 2))
    if not done.console:
        done = replace(done, console=_pty(place))
    place.write(done)
    return done


def _pty(place: Place) -> str:
    """The terminal that QEMU made for the console."""
    qmp = Qmp(place.qmp)
    try:
        for device in qmp.call("query-chardev"):
            if device["label"] == "console":
                return str(device["filename"]).removeprefix("pty:")
    finally:
        qmp.close()
    return ""


def down(place: Place, *, power_cut: bool = False, patience: float = 60.0) -> str:
    """Ends a board: asks it, then QEMU, then kills it. Returns how it ended: off, quit, killed, or not up.

    Args:
        power_cut: kill at once; what the guest had not written is lost.
    """
    run = place.running()
    if run is None:
        return "not up"
    if power_cut:
        kill(run)
        return "killed"
    # A Raspberry Pi cannot switch itself off: it is left halted with its disk written.
    raspi = run.machine.startswith("raspi")
    if _farewell(place, "halt" if raspi else "poweroff") and not raspi and wait_gone(run, patience):
        return "off"
    with contextlib.suppress(OSError):
        qmp = Qmp(place.qmp)
        qmp.call("quit")
        qmp.close()
        if wait_gone(run, 10):
            return "quit"
    kill(run)
    return "killed"


def _farewell(place: Place, how: str) -> bool:
    """Asks the guest to write everything and, for ``poweroff``, to switch itself off."""
    if shutil.which("ssh") is None:
        return False
    end = "(sleep 0.2; poweroff -f) >/dev/null 2>&1 &" if how == "poweroff" else ":"
    words = (
        "if [ -d /run/systemd/system ]; then systemctl --no-block poweroff; else sync; "
        f"umount /opt/colibri /data 2>/dev/null || mount -o remount,ro /data; sync; {end} fi"
    )
    try:
        done = subprocess.run(
            ["ssh", "-F", str(place.ssh_config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5",
             f"root@{place.name}", words],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def purge_files(place: Place) -> None:
    """Forgets disks and keys of a board that is down."""
    for path in place.folder.iterdir():
        if path.name != ".lock":
            path.unlink()


def purge(place: Place) -> None:
    shutil.rmtree(place.folder, ignore_errors=True)
