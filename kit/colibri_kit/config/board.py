"""Board profiles: what a board is, what code it runs, where things go on it."""

from __future__ import annotations

import platform
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from colibri_kit.config.scalars import Count, Positive, Size, Str

#: Instruction sets a board may name, per architecture. The first group has kernel
#: folders; the rest only tells the instruction scan what the CPU is sure to have.
KERNEL_ISA = {"aarch64": ("neon",), "x86_64": ("sse41", "avx2")}
EXTRA_ISA = {
    "aarch64": ("crc", "lse", "fp16", "dotprod", "rdm", "rcpc", "crypto", "i8mm", "bf16"),
    "x86_64": (),
}

#: What ``target: native`` means on each architecture: the baseline CPU and its kernels.
NATIVE = {"x86_64": ("x86_64", KERNEL_ISA["x86_64"]), "aarch64": ("generic", KERNEL_ISA["aarch64"])}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Storage(_Strict):
    """The medium weights are read from; read_mb_s is 10^6 bytes a second, sequential."""

    kind: Literal["sd", "emmc", "usb", "sata", "nvme", "disk"]
    read_mb_s: Positive
    source: Str


class Vm(_Strict):
    """How QEMU stands in for the board; such a profile is brought up by `colibri-kit board up`.

    Attributes:
        machine, cpu: as QEMU names them. A Raspberry Pi machine brings its own CPU.
        kernel: Debian's cloud kernel, or the full one with every driver.
        disk: size of the data disk unless told otherwise, bytes.
    """

    machine: Literal["virt", "raspi3b", "raspi4b", "q35"]
    cpu: Str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,+=-]*$")
    kernel: Literal["cloud", "full"]
    disk: Size


class Board(_Strict):
    """One board profile. Sizes are bytes.

    Attributes:
        target: triple for the compiler; always a static libc.
        mcpu: CPU name as zig spells it.
        isa: instruction sets the binary may use; kernels are built for those that have them.
        budget: memory the engine may take unless a recipe or flag says otherwise.
        prefix: folder on the board that holds releases; None where nothing is deployed.
        memory_bandwidth_gb_s: 10^9 bytes a second, reads, all cores.
        vm: set for boards that QEMU plays.
    """

    name: Str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: Str
    target: Literal["aarch64-linux-musl", "x86_64-linux-musl", "x86_64-windows-gnu"]
    mcpu: Str = Field(pattern=r"^[a-z0-9_]+$")
    isa: tuple[Str, ...]
    cores: Count
    ram: Size
    memory_bandwidth_gb_s: Positive
    memory_bandwidth_source: Str
    storage: Storage
    service: Literal["systemd", "openrc", "sysv", "none"]
    transport: Literal["ssh", "local", "serial", "none"]
    budget: Size
    prefix: Str | None = None
    notes: Str | None = None
    vm: Vm | None = None

    @property
    def arch(self) -> str:
        """``aarch64`` or ``x86_64``, as ``uname -m`` prints it."""
        return self.target.split("-", 1)[0]

    @property
    def os(self) -> str:
        """``linux`` or ``windows``."""
        return self.target.split("-")[1]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernel folders to build, weakest first; scalar is always there."""
        return tuple(k for k in KERNEL_ISA[self.arch] if k in self.isa)

    @model_validator(mode="before")
    @classmethod
    def _native(cls, data: Any) -> Any:
        """``target: native`` stands for this machine, with kernels picked at run time."""
        if not isinstance(data, dict) or data.get("target") != "native":
            return data
        arch = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
        if arch not in NATIVE:
            raise ValueError(f"target: native: this machine ({arch}) is not one of {', '.join(NATIVE)}")
        if "mcpu" in data or "isa" in data:
            raise ValueError("target: native takes no mcpu and no isa")
        mcpu, isa = NATIVE[arch]
        return {**data, "target": f"{arch}-linux-musl", "mcpu": mcpu, "isa": list(isa)}

    @model_validator(mode="after")
    def _agree(self) -> Board:
        known = KERNEL_ISA[self.arch] + EXTRA_ISA[self.arch]
        for name in self.isa:
            if name not in known:
                raise ValueError(f"isa: '{name}' is not one of {', '.join(known)} for {self.arch}")
        if self.budget > self.ram:
            raise ValueError("budget is larger than ram")
        if self.transport != "none" and self.prefix is None:
            raise ValueError("prefix is needed unless transport is none")
        if self.prefix is not None and not re.match(r"^(/|~/)[A-Za-z0-9._/-]+$", self.prefix):
            raise ValueError("prefix must be an absolute path (or ~/…) of letters, digits and . _ - /")
        if self.prefix is not None and ".." in self.prefix.split("/"):
            raise ValueError("prefix must not contain '..'")
        return self
