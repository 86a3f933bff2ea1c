"""The GGUF reader under atheris: libFuzzer's engine with coverage of Python code.

The input is a whole file. It must be refused with FormatError, or what it is read as
must be true: tensors inside the file, apart from each other, every value in its range.
What the converter makes of its keys may only fail with the kit's own errors.
"""

from __future__ import annotations

import contextlib
import os
import sys

import atheris

with atheris.instrument_imports(include=["colibri_kit.gguf", "colibri_kit.convert"]):
    from colibri_kit.convert.adapters import map_model
    from colibri_kit.convert.plan import make_plan
    from colibri_kit.convert.tokenizer import export_tokenizer
    from colibri_kit.errors import FormatError, KitError
    from colibri_kit.gguf import reader

MEMORY = os.memfd_create("fuzz.gguf")
PATH = f"/proc/self/fd/{MEMORY}"


def check(g: reader.GgufFile, size: int) -> None:
    assert g.version in (2, 3)
    assert len(g.kv) == len(g.keys) <= reader.MAX_KEYS
    end = 0
    for t in sorted(g.tensors.values(), key=lambda t: t.offset):
        assert t.offset >= max(end, g.data_offset)
        assert t.offset % g.alignment == 0
        assert t.rows * t.type.row_bytes(t.cols) == t.size > 0
        end = t.offset + t.size
        assert end <= size
        assert len(g.read(t.offset, t.size)) == t.size
    for key, value in g.kv.items():
        info = g.keys[key]
        assert 0 < info.start < info.end <= size
        assert isinstance(value, bool) == (info.type == reader.BOOL)
        if info.type == reader.ARRAY:
            assert len(value) <= info.end - info.start


def convert(g: reader.GgufFile) -> None:
    with contextlib.suppress(KitError):
        make_plan(map_model(g), None)
    with contextlib.suppress(KitError):
        export_tokenizer(g.kv)


def test_one_input(data: bytes) -> None:
    os.ftruncate(MEMORY, 0)
    os.pwrite(MEMORY, data, 0)
    try:
        g = reader.GgufFile(PATH)
    except FormatError as error:
        assert error.code == "CK-FORMAT-GGUF"
        assert "at byte " in str(error) or not data
        return
    with g:
        check(g, len(data))
        convert(g)


if __name__ == "__main__":
    sys.argv[0] = os.environ.get("FUZZ_SELF", sys.argv[0])
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
