"""QEMU's command line for a virtual board. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colibri_kit.config.board import Vm

#: machine -> QEMU binary, Debian architecture, kernel console, modules (guest.MODULES).
MACHINES = {
    "virt": ("qemu-system-aarch64", "arm64", "ttyAMA0", "virt"),
    "raspi3b": ("qemu-system-aarch64", "arm64", "ttyS1,115200", "raspi"),
    "raspi4b": ("qemu-system-aarch64", "arm64", "ttyAMA0,115200", "raspi"),
    "q35": ("qemu-system-x86_64", "amd64", "ttyS0", "q35"),
}

#: Device trees in Debian's kernel packages.
DEVICE_TREES = {
    "raspi3b": "broadcom/bcm2837-rpi-3-b.dtb",
    "raspi4b": "broadcom/bcm2711-rpi-4-b.dtb",
}


@dataclass(frozen=True)
class Wanted:
    """One start of a guest. ram in bytes; paths of what QEMU opens."""

    vm: Vm
    name: str
    ram: int
    cpus: int
    port: int
    kernel: Path
    initrd: Path
    dtb: Path | None
    data_disk: Path
    root_disk: Path | None
    console: Path
    console_log: Path
    qmp: Path
    init: str
    ssh: str
    deterministic: bool
    pty: bool
    time: int


def kernel_line(want: Wanted) -> str:
    """The kernel's command line."""
    console = MACHINES[want.vm.machine][2]
    words = [f"console={console}", "quiet", "net.ifnames=0", f"ck.host={want.name}", f"ck.ssh={want.ssh}"]
    words.append("cryptomgr.notests")  # of ciphers, at boot: an emulated CPU takes seconds for them
    words += [f"ck.init={want.init}", f"ck.time={want.time}"]
    if want.vm.machine.startswith("raspi"):
        words.append(f"mem={want.ram >> 20}M")  # the machine's own memory is fixed
    if want.init == "systemd":
        words += ["systemd.show_status=0", "systemd.log_target=journal-or-kmsg"]
    return " ".join(words)


def _file(path: Path) -> str:
    return str(path).replace(",", ",,")


def arguments(want: Wanted) -> list[str]:
    """Everything after the program's name."""
    vm = want.vm
    raspi = vm.machine.startswith("raspi")
    args = ["-M", vm.machine, "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none"]
    if not raspi:
        args += ["-cpu", vm.cpu, "-smp", str(want.cpus), "-m", f"{want.ram >> 20}M"]
    elif vm.machine == "raspi3b":
        args += ["-m", "1G"]
    if vm.machine == "q35":
        args += ["-accel", "tcg"]
    args += ["-kernel", str(want.kernel), "-initrd", str(want.initrd), "-append", kernel_line(want)]
    if want.dtb is not None:
        args += ["-dtb", str(want.dtb)]
    log = f"logfile={_file(want.console_log)},logappend=off"
    if want.pty:
        args += ["-chardev", f"pty,id=console,{log}"]
    else:
        args += ["-chardev", f"socket,id=console,path={_file(want.console)},server=on,wait=off,{log}"]
    if vm.machine == "raspi3b":
        args += ["-serial", "null"]  # its first serial port is the bluetooth chip's
    args += ["-serial", "chardev:console", "-qmp", f"unix:{_file(want.qmp)},server=on,wait=off"]
    args += ["-netdev", f"user,id=net0,restrict=on,hostfwd=tcp:127.0.0.1:{want.port}-:22"]
    nic = {"virt": "virtio-net-device", "q35": "virtio-net-pci,romfile="}.get(vm.machine, "usb-net")
    args += ["-device", f"{nic},netdev=net0,id=nic0"]
    # The guest's flushes end in this machine's page cache, which outlives QEMU: a power cut (a killed
    # QEMU) costs what the guest had not written, as on a board, and no flush waits for our disk.
    cache = "format=raw,cache=unsafe"
    if raspi:
        args += ["-drive", f"if=sd,file={_file(want.data_disk)},{cache}"]
    else:
        blk = "virtio-blk-device" if vm.machine == "virt" else "virtio-blk-pci"
        for index, disk in enumerate(d for d in (want.data_disk, want.root_disk) if d is not None):
            args += ["-drive", f"if=none,id=disk{index},file={_file(disk)},{cache},discard=unmap"]
            args += ["-device", f"{blk},drive=disk{index}"]
    if want.deterministic:
        args += ["-icount", "shift=1,sleep=on"]
    return args
