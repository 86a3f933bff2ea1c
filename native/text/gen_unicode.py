"""Writes unicode_tables.c: a class for every code point, from a Unicode database.

    python gen_unicode.py [--module unicodedata2] > unicode_tables.c

llama.cpp's tables are of Unicode 15.1, so the checked-in file is made with
unicodedata2 15.1.0; Python's own unicodedata of another version also works and the
file says which one it was. The table has two levels: a byte per block of 128 code
points, then 64 bytes a distinct block, two code points a byte (low nibble first).
"""

from __future__ import annotations

import argparse
import importlib
import sys

CLASSES = {"L": 1, "N": 2, "M": 3, "P": 4, "S": 5}
SPACE = 6
BLOCK = 128
# The White_Space property (PropList.txt), what \s means to the pre-tokenizers.
WHITE_SPACE = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F}
WHITE_SPACE |= {0x205F, 0x3000}


def classes(category) -> bytes:  # type: ignore[no-untyped-def]
    """Class of each of the 0x110000 code points."""
    return bytes(SPACE if c in WHITE_SPACE else CLASSES.get(category(chr(c))[0], 0) for c in range(0x110000))


def rows(data: bytes, width: int = 24) -> str:
    return "\n".join(
        "    " + " ".join(f"{b}," for b in data[i : i + width]) for i in range(0, len(data), width)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", default="unicodedata")
    db = importlib.import_module(parser.parse_args().module)
    table = classes(db.category)
    blocks: dict[bytes, int] = {}
    index = bytearray()
    for at in range(0, len(table), BLOCK):
        block = table[at : at + BLOCK]
        index.append(blocks.setdefault(block, len(blocks)))
    packed = b"".join(bytes(b[i] | b[i + 1] << 4 for i in range(0, BLOCK, 2)) for b in blocks)
    sys.stdout.write(
        f"/* unicode_tables.c — written by gen_unicode.py from Unicode {db.unidata_version}. */\n"
        '#include "text/unicode.h"\n\n'
        f'const char cb_uc_version[] = "{db.unidata_version}";\n\n'
        f"const uint8_t cb_uc_index[{len(index)}] = {{\n{rows(bytes(index))}\n}};\n\n"
        f"const uint8_t cb_uc_blocks[{len(packed)}] = {{\n{rows(packed)}\n}};\n"
    )


if __name__ == "__main__":
    main()
