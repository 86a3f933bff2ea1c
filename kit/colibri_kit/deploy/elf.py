"""What an executable is for, from its first 20 bytes."""

from __future__ import annotations

from dataclasses import dataclass

_MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv", 8: "mips", 20: "powerpc"}

#: Bytes that :func:`identify` needs.
HEAD_BYTES = 20


@dataclass(frozen=True)
class Kind:
    """``arch`` as ``uname -m`` spells it; ``bits`` 32 or 64."""

    arch: str
    bits: int

    def __str__(self) -> str:
        return f"{self.arch}, {self.bits}-bit"


def identify(head: bytes) -> Kind | None:
    """The kind of an ELF file, or None when it is none."""
    if len(head) < HEAD_BYTES or head[:4] != b"\x7fELF" or head[4] not in (1, 2) or head[5] not in (1, 2):
        return None
    machine = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return Kind(_MACHINES.get(machine, f"ELF machine {machine}"), 32 * head[4])
