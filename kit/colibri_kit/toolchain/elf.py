"""Reads and strips ELF files without binutils (zig's objcopy cannot strip)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_SHDR = struct.Struct("<IIQQQQIIQQ")
SHF_ALLOC, SHF_EXEC = 2, 4
SHT_STRTAB, SHT_NOBITS = 3, 8


@dataclass(frozen=True)
class Region:
    """A run of code that belongs to one symbol: [address, address + len(code))."""

    symbol: str
    address: int
    code: bytes


def machine(path: Path) -> str:
    """``aarch64`` or ``x86_64``."""
    with path.open("rb") as stream:
        elf: Any = ELFFile(stream)
        return {"EM_AARCH64": "aarch64", "EM_X86_64": "x86_64"}.get(elf["e_machine"], str(elf["e_machine"]))


def is_static(path: Path) -> bool:
    """No interpreter and no needed library."""
    with path.open("rb") as stream:
        elf: Any = ELFFile(stream)
        kinds = {segment["p_type"] for segment in elf.iter_segments()}
        return "PT_INTERP" not in kinds and "PT_DYNAMIC" not in kinds


def alloc_sections(path: Path) -> dict[str, tuple[int, bytes]]:
    """Name -> (address, content) of what is loaded into memory; .bss has no content."""
    with path.open("rb") as stream:
        elf: Any = ELFFile(stream)
        return {
            s.name: (s["sh_addr"], b"" if s["sh_type"] == "SHT_NOBITS" else s.data())
            for s in elf.iter_sections()
            if s["sh_flags"] & SHF_ALLOC
        }


def code_regions(path: Path) -> Iterator[Region]:
    """Every byte of every executable section, cut at its symbols.

    A byte before the first symbol belongs to the section's name. AArch64 data
    in code (mapping symbols ``$d``) is left out.
    """
    with path.open("rb") as stream:
        elf: Any = ELFFile(stream)
        table = elf.get_section_by_name(".symtab")
        symbols = list(table.iter_symbols()) if table is not None else []
        for index, section in enumerate(elf.iter_sections()):
            if not section["sh_flags"] & SHF_EXEC or section["sh_type"] != "SHT_PROGBITS":
                continue
            yield from _section_regions(section, [s for s in symbols if s["st_shndx"] == index])


def _section_regions(section: Any, symbols: list[Any]) -> Iterator[Region]:
    start, data = section["sh_addr"], section.data()
    names: dict[int, str] = {start: section.name}
    marks: dict[int, bool] = {start: False}  # address -> data starts here
    for symbol in symbols:
        address, name = symbol["st_value"], symbol.name
        if name.startswith(("$d", "$x")):
            marks[address] = name.startswith("$d")
        elif symbol["st_info"]["type"] in ("STT_FUNC", "STT_NOTYPE", "STT_LOOS") and name:
            better = symbol["st_info"]["type"] == "STT_FUNC" or address not in names
            if better or names[address] == section.name:
                names[address] = name
    cuts = sorted(set(names) | set(marks))
    name, is_data = section.name, False
    for address, after in zip(cuts, [*cuts[1:], start + len(data)], strict=True):
        name = names.get(address, name)
        is_data = marks.get(address, is_data)
        if not is_data and after > address:
            yield Region(name, address, data[address - start : after - start])


def strip(source: Path, target: Path) -> None:
    """Writes source without symbols and debug sections; loaded bytes stay as they are.

    lld puts all loaded sections before the rest, so the file is cut after the
    last of them and gets a new section table. Headers and segments are copied.
    """
    raw = source.read_bytes()
    head = list(_EHDR.unpack_from(raw))
    n, entry, table = head[12], head[11], head[6]
    if raw[:6] != b"\x7fELF\x02\x01" or entry != _SHDR.size:
        raise ValueError("not a little-endian ELF64 file")
    sections = [list(_SHDR.unpack_from(raw, table + i * entry)) for i in range(n)]
    strings = sections[head[13]][4]
    kept = [s for s in sections[1:] if s[2] & SHF_ALLOC]
    end = max(s[4] + (0 if s[1] == SHT_NOBITS else s[5]) for s in kept)
    end = max(end, head[5] + head[9] * head[10])
    if any(s[4] < end for s in sections[1:] if not s[2] & SHF_ALLOC and s[5]):
        raise ValueError("loaded and other sections are interleaved")
    # Section links point at sections by number: renumber what stays, drop what goes.
    number = {i: k + 1 for k, i in enumerate(i for i in range(1, n) if sections[i][2] & SHF_ALLOC)}
    names = b"\0"
    rows = [_SHDR.pack(*([0] * 10))]
    for section in kept:
        name = raw[strings + section[0] : raw.index(b"\0", strings + section[0])]
        row = [len(names), *section[1:]]
        row[6] = number.get(section[6], 0)
        names += name + b"\0"
        rows.append(_SHDR.pack(*row))
    shstr = len(names)
    names += b".shstrtab\0"
    rows.append(_SHDR.pack(shstr, SHT_STRTAB, 0, 0, end, len(names), 0, 0, 1, 0))
    pad = -(end + len(names)) % 8
    head[6], head[12], head[13] = end + len(names) + pad, len(rows), len(rows) - 1
    target.write_bytes(_EHDR.pack(*head) + raw[_EHDR.size : end] + names + b"\0" * pad + b"".join(rows))
