"""The fuzz targets: a harness in C, what it is built from, where its seeds lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
FUZZ = NATIVE / "tests" / "fuzz"

_CONTAINER = ("core/err.c", "core/container.c", "core/os_posix.c", "kernels/crc32c.c", "kernels/types.c")


@dataclass(frozen=True)
class Target:
    """One fuzzer.

    Attributes:
        sources: C files relative to native/, patterns allowed; empty for the Python target.
        max_len: bytes of an input at most.
        defines: preprocessor symbols of the harness.
    """

    name: str
    what: str
    sources: tuple[str, ...]
    max_len: int
    defines: tuple[str, ...] = ()
    seeds_in: str = ""

    @property
    def seeds(self) -> Path:
        return FUZZ / (self.seeds_in or f"seeds/{self.name}")


TARGETS = {
    t.name: t
    for t in (
        Target(
            "http",
            "HTTP request heads, Host and Origin",
            ("tests/fuzz/fuzz_http.c", "serve/http.c", "serve/access.c", "core/sha256.c", "core/err.c"),
            9000,
        ),
        Target(
            "json",
            "JSON texts and their strings",
            ("tests/fuzz/fuzz_json.c", "core/json.c", "serve/buf.c", "text/utf8.c", "core/err.c"),
            8192,
        ),
        Target(
            "api",
            "bodies of completions and chat requests",
            (
                "tests/fuzz/fuzz_api.c",
                "serve/api.c",
                "model/chat.c",
                "serve/http.c",
                "core/json.c",
                "core/err.c",
                "core/sample.c",
                "core/emit.c",
                "text/utf8.c",
                "kernels/math.c",
            ),
            8192,
        ),
        Target(
            "text",
            "UTF-8, tokenizer.coli and the text it encodes",
            ("tests/fuzz/fuzz_text.c", "text/*.c", *_CONTAINER),
            40_000,
        ),
        Target(
            "manifest",
            "manifest.json",
            ("tests/fuzz/fuzz_files.c", "core/json.c", "model/manifest.c", *_CONTAINER),
            20_000,
        ),
        Target(
            "coli",
            "headers and directories of .coli files",
            ("tests/fuzz/fuzz_files.c", *_CONTAINER),
            60_000,
            ("FUZZ_COLI",),
        ),
        Target("gguf", "GGUF files (the kit's reader, in Python, with atheris)", (), 40_000),
        Target(
            "frame",
            "frames of the offload link",
            (
                "tests/fuzz/fuzz_frame.c",
                "offload/frame.c",
                "core/err.c",
                "kernels/crc32c.c",
                "kernels/types.c",
            ),
            20_000,
            seeds_in="seeds_frame",
        ),
    )
}
