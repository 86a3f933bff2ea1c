"""Puts the guest's initramfs together: programs with their libraries, kernel modules, keys."""

from __future__ import annotations

import hashlib
import lzma
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_kit.errors import VerifyError
from colibri_kit.vboard import initscript
from colibri_kit.vboard.cpio import Cpio

_PROGRAMS = (
    "usr/sbin/sshd",
    "usr/lib/openssh/sftp-server",
    "usr/sbin/dropbear",
    "usr/lib/dropbear/dropbearconvert",
    "usr/bin/dropbearconvert",
)

#: Modules to load, in this order, after what they depend on.
MODULES = {
    "virt": ("virtio_mmio", "virtio_net", "virtio_blk", "crc32c_generic", "ext4"),
    "q35": ("virtio_pci", "virtio_net", "virtio_blk", "crc32c_generic", "ext4"),
    "raspi": (
        "fixed", "gpio_regulator", "phy_generic", "bcm2835", "sdhci_iproc", "dwc2", "usbnet", "cdc_ether",
        "rndis_host", "crc32c_generic", "ext4",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Keys:
    """What makes one guest itself. Texts of files."""

    host_key: str
    authorized: str
    machine_id: str


def needed(path: Path) -> tuple[list[str], str]:
    """DT_NEEDED of an ELF file and its interpreter ('' for none)."""
    from elftools.elf.elffile import ELFFile

    names: list[str] = []
    interpreter = ""
    with path.open("rb") as stream:
        elf: Any = ELFFile(stream)
        for segment in elf.iter_segments():
            if segment["p_type"] == "PT_INTERP":
                interpreter = segment.get_interp_name()
            elif segment["p_type"] == "PT_DYNAMIC":
                names += [t.needed for t in segment.iter_tags() if t.entry.d_tag == "DT_NEEDED"]
    return names, interpreter


class _Programs:
    """Adds programs and, once each, the libraries that they need."""

    def __init__(self, cpio: Cpio, root: Path) -> None:
        self._cpio, self._root = cpio, root
        self._seen: set[str] = set()

    def add(self, path: str) -> None:
        source = self._root / path
        self._cpio.file(path, source.read_bytes(), 0o755)
        self._libraries(source)

    def _libraries(self, source: Path) -> None:
        names, interpreter = needed(source)
        if interpreter and interpreter not in self._seen:
            self._seen.add(interpreter)
            self._cpio.file(interpreter.lstrip("/"), self._find(Path(interpreter).name).read_bytes(), 0o755)
        for name in names:
            if name in self._seen or name.startswith("ld-linux"):
                continue
            self._seen.add(name)
            found = self._find(name)
            triplet = next(p.name for p in found.parents if p.name.endswith("-linux-gnu"))
            self._cpio.file(f"usr/lib/{triplet}/{name}", found.read_bytes(), 0o755)
            self._libraries(found)

    def _find(self, name: str) -> Path:
        for pattern in (f"lib/*-linux-gnu/{name}", f"usr/lib/*-linux-gnu/{name}"):
            for found in self._root.glob(pattern):
                return found.resolve()
        raise VerifyError(f"the guest's packages lack {name}", hint="colibri-kit board up … --refresh")


def modules(kernel: Path, wanted: Iterable[str]) -> list[tuple[str, bytes]]:
    """Kernel modules with those that they depend on before them, as (name, bytes).

    Names that the kernel has not are built in, and are left out.
    """
    files = {}
    for path in kernel.glob("lib/modules/*/kernel/**/*.ko*"):
        files[path.name.split(".ko")[0].replace("-", "_")] = path
    out: dict[str, bytes] = {}

    def add(name: str) -> None:
        name = name.replace("-", "_")
        if name in out or name not in files:
            return
        path = files[name]
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        depends = re.search(rb"(?:^|\0)depends=([^\0]*)\0", data)
        for other in depends.group(1).decode().split(",") if depends else []:
            if other:
                add(other)
        out[name] = data

    for name in wanted:
        add(name)
    return list(out.items())


def base(programs: Path, kernel: Path, module_names: Sequence[str]) -> bytes:
    """The part of the initramfs that every guest of a kind shares, compressed."""
    cpio = Cpio()
    for path in ("proc", "sys", "dev", "run", "etc", "data", "opt/colibri", "var/empty", "usr/lib"):
        cpio.folder(path)
    cpio.folder("tmp", 0o1777)
    cpio.folder("root", 0o700)
    cpio.folder(f"home/{initscript.USER}", 0o755, initscript.UID)
    cpio.file("bin/busybox", (programs / "bin" / "busybox").read_bytes(), 0o755)
    cpio.link("bin/sh", "busybox")
    for name in ("sbin", "usr/bin", "usr/sbin"):
        cpio.folder(name)
    adder = _Programs(cpio, programs)
    for path in _PROGRAMS:
        if (programs / path).is_file():
            adder.add(path)
    names = []
    for name, data in modules(kernel, module_names):
        cpio.file(f"mods/{name}.ko", data)
        names.append(name)
    cpio.file("mods/list", ("\n".join(names) + "\n").encode())
    texts = {
        "etc/passwd": initscript.PASSWD,
        "etc/group": initscript.GROUP,
        "etc/shells": "/bin/sh\n",
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\n",
        "etc/ssh/sshd_config": initscript.SSHD_CONFIG,
    }
    for path, text in texts.items():
        cpio.file(path, text.encode())
    cpio.file("etc/shadow", initscript.SHADOW.encode(), 0o600)
    cpio.file("init", initscript.INIT.encode(), 0o755)
    return cpio.pack()


def personal(keys: Keys, extra: dict[str, bytes] | None = None) -> bytes:
    """The part that belongs to one guest. The kernel unpacks archives one after the other."""
    cpio = Cpio()
    cpio.folder("keys", 0o700)
    cpio.file("keys/ssh_host_ed25519_key", keys.host_key.encode(), 0o600)
    cpio.file("keys/authorized_keys", keys.authorized.encode(), 0o600)
    cpio.file("keys/machine-id", keys.machine_id.encode() + b"\n", 0o444)
    for path, data in (extra or {}).items():
        cpio.file(path, data, 0o755)
    return cpio.pack(compress=False)


def recipe_id(*parts: str) -> str:
    """Names a cached build after everything that went into it."""
    return hashlib.sha256("\0".join((initscript.INIT, initscript.SSHD_CONFIG, *parts)).encode()).hexdigest()[
        :16
    ]
