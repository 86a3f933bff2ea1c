"""Checks a Windows executable: what it imports must be on every Windows 10."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from colibri_kit.errors import BuildError

_ALLOWED = re.compile(r"(kernel32|ntdll|advapi32|ws2_32|psapi|bcrypt|api-ms-win-.*)\.dll", re.IGNORECASE)
IMAGE_FILE_MACHINE_AMD64 = 0x8664
MAX_IMPORTS = 256


def imports(path: Path) -> list[str]:
    """Names of the libraries a PE32+ file imports, sorted.

    Raises:
        ValueError: not a PE32+ file for x86-64, or its tables point outside it.
    """
    raw = path.read_bytes()
    try:
        pe = struct.unpack_from("<I", raw, 0x3C)[0]
        magic, machine, n_sections = struct.unpack_from("<4sHH", raw, pe)
        optional_size = struct.unpack_from("<H", raw, pe + 20)[0]
        if magic != b"PE\0\0" or machine != IMAGE_FILE_MACHINE_AMD64:
            raise ValueError("not a PE file for x86-64")
        if struct.unpack_from("<H", raw, pe + 24)[0] != 0x20B:
            raise ValueError("not PE32+")
        table = struct.unpack_from("<I", raw, pe + 24 + 112 + 8)[0]
        sections = [
            struct.unpack_from("<8xIIII", raw, pe + 24 + optional_size + 40 * i) for i in range(n_sections)
        ]

        def offset(address: int) -> int:
            for virtual_size, virtual, size, pointer in sections:
                if virtual <= address < virtual + max(size, virtual_size):
                    return int(pointer + address - virtual)
            raise ValueError(f"address {address:#x} is in no section")

        out = []
        for i in range(MAX_IMPORTS):
            name = struct.unpack_from("<12xI", raw, offset(table) + 20 * i)[0]
            if name == 0:
                break
            start = offset(name)
            out.append(raw[start : raw.index(b"\0", start)].decode("ascii"))
        return sorted(out)
    except struct.error as err:
        raise ValueError("truncated PE file") from err


def check(path: Path) -> list[str]:
    """The imports; see :func:`imports`.

    Raises:
        BuildError: it needs a library that Windows itself does not bring.
    """
    found = imports(path)
    foreign = [name for name in found if not _ALLOWED.fullmatch(name)]
    if foreign:
        raise BuildError(
            f"the executable needs libraries that Windows does not bring: {', '.join(foreign)}",
            code="CK-BUILD-IMPORTS",
        )
    return found
