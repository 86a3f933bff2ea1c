"""Writes the first seeds of the file formats anew: python -m tests.fuzz.seeds.

Needed when a format changes; what fuzzing added since lies beside them under hashes.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from gguf_maker import FAMILIES, make

from tests.fuzz.targets import TARGETS

TEXTS = {
    "plain": b"hello <|im_start|>the helpful hello<|im_end|>\n  12345 don't",
    "wide": "naïve Ωμέγα 日本語 \U0001f600\u200d\u0301 \u00a0\ufeff".encode(),
    "broken": b"ab\xc3\x28\xe2\x82 \xf0\x9f\x98 \xed\xa0\x80 \xc0\xaf\xff\x80",
    "empty": b"",
}


def save(target: str, name: str, data: bytes) -> None:
    TARGETS[target].seeds.mkdir(parents=True, exist_ok=True)
    (TARGETS[target].seeds / name).write_bytes(data)


def from_models(folder: Path) -> None:
    for arch in FAMILIES:
        n_expert = 0 if arch == "llama" else 2
        path = make(
            folder / f"{arch}.gguf", arch, d=8, ff=8, n_layer=1, n_expert=n_expert, used=min(1, n_expert),
            tied=True,
        )  # fmt: skip
        out = folder / f"{arch}.coli"
        words = [sys.executable, "-m", "colibri_kit", "convert", "-q", str(path), "-o", str(out)]
        subprocess.run(words, check=True, timeout=200, capture_output=True)
        save("manifest", arch, (out / "manifest.json").read_bytes())
        tokenizer = (out / "tokenizer.coli").read_bytes()
        if arch != "qwen3moe":
            continue
        save("gguf", arch, path.read_bytes())
        for kind, name in enumerate(("tokenizer", "dense", "experts-0000")):
            save("coli", name, bytes([kind]) + (out / f"{name}.coli").read_bytes())
        for name, text in TEXTS.items():
            save("text", name, struct.pack("<I", len(tokenizer)) + tokenizer + text)


def by_hand() -> None:
    """GGUF files of a few hundred bytes with values of every type."""
    from colibri_kit.gguf import reader as r
    from colibri_kit.gguf.writer import GgufHeader, OutTensor

    numbers = {
        r.U8: 1, r.I8: -1, r.U16: 2, r.I16: -2, r.U32: 3, r.I32: -3, r.F32: 0.5, r.U64: 4, r.I64: -4,
        r.F64: 0.25,
    }  # fmt: skip
    h = GgufHeader()
    for kind, value in numbers.items():
        h.set(f"scalar.{kind}", value, kind)
        h.set_array(f"array.{kind}", kind, [value] * 3)
    h.set("yes", True)
    h.set_array("flags", r.BOOL, [True, False])
    h.set_array("words", r.STRING, ["a", "", "é", b"\xff"])
    save("gguf", "values", h.pack())
    for alignment in (32, 64):
        h = GgufHeader(alignment)
        h.set("general.architecture", "llama")
        h.set("general.alignment", alignment)
        h.tensors = [OutTensor("a", (32, 2), 8), OutTensor("b", (4, 3, 2), 0), OutTensor("c", (256,), 12)]
        save("gguf", f"tensors{alignment}", h.pack() + bytes(h.data_bytes()))
    nested = struct.pack("<IQ", r.ARRAY, 2) + 2 * struct.pack("<IQ2H", r.U16, 2, 1, 2)
    key = struct.pack("<Q", 6) + b"nested" + struct.pack("<I", r.ARRAY) + nested
    save("gguf", "nested", struct.pack("<4sIQQ", b"GGUF", 2, 0, 1) + key)
    save("gguf", "swapped", struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        from_models(Path(folder))
    by_hand()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
