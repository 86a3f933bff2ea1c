"""Loads the engine's library and checks that its structs are the ones this kit was made for.

The cffi declarations are made from the C headers themselves, so they cannot
drift; what a loaded library was compiled with is compared all the same
(``cb_abi``, ``cb_sizeof``), as ``COLIBRI_LIBRARY`` may name a foreign one.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from colibri_kit import resources
from colibri_kit.errors import EngineError, FormatError, KitError, PreflightError, UsageError, VerifyError

STRUCTS = (
    "cb_err", "cb_options", "cb_ledger", "cb_info", "cb_counters", "cb_sampling", "cb_gen_result",
    "cb_offload_info",
)  # fmt: skip
QUANT_NAMES = ("cb_row_bytes", "cb_quantise_rows", "cb_dequantise_rows")

#: Negative return code -> (class, short code).
_CODES: dict[int, tuple[type[KitError], str]] = {
    -1: (UsageError, "CK-ENGINE-INVALID"),
    -2: (EngineError, "CK-ENGINE-IO"),
    -3: (FormatError, "CK-FORMAT"),
    -4: (PreflightError, "CK-ENGINE-BUDGET"),
    -5: (VerifyError, "CK-ENGINE-GOLDEN"),
    -6: (EngineError, "CK-ENGINE-NUMERIC"),
    -7: (UsageError, "CK-ENGINE-UTF8"),
    -8: (UsageError, "CK-ENGINE-CONTEXT"),
    -9: (EngineError, "CK-ENGINE-UNSUPPORTED"),
    -10: (EngineError, "CK-ENGINE-CANCEL"),
    -11: (FormatError, "CK-ENGINE-EXPERT"),
}


def declarations(header: str) -> str:
    """What cffi can parse of a C header: no preprocessor lines, no attributes, no comments."""
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text).replace("\\\n", " ")
    text = re.sub(
        r"^\s*#\s*(?:ifdef\s+__cplusplus|if\s+defined\(__(?:GNUC__|cplusplus)\)).*?^\s*#\s*endif[^\n]*$",
        "",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    return re.sub(r"^\s*#[^\n]*$", "", text, flags=re.MULTILINE)


def _prototypes(header: str, names: tuple[str, ...]) -> str:
    text = declarations(header)
    found = [re.search(rf"^[\w ]+[ *]{name}\s*\([^;]*\)\s*;", text, re.MULTILINE) for name in names]
    return "\n".join(match.group(0) for match in found if match)


def _cdef(native: Path) -> str:
    parts = [declarations((native / "include" / "colibri.h").read_text())]
    parts.append(_prototypes((native / "kernels" / "kernels.h").read_text(), ("cb_crc32c",)))
    quant = native / "quant" / "quant.h"
    if quant.is_file():
        parts.append(_prototypes(quant.read_text(), QUANT_NAMES))
    return "\n".join(parts)


@lru_cache(maxsize=1)
def load() -> tuple[Any, Any]:
    """(ffi, lib) of the engine's library, built first if need be.

    Raises:
        BuildError: it does not compile.
        EngineError: it does not load, or was compiled from other headers.
    """
    import cffi

    from colibri_kit.toolchain.library import build_library

    native = resources.native_dir()
    given = os.environ.get("COLIBRI_LIBRARY")
    path = Path(given) if given else build_library(native)
    ffi = cffi.FFI()
    try:
        ffi.cdef(_cdef(native))
        lib = ffi.dlopen(str(path))
        abi = int(lib.cb_abi())
    except (OSError, AttributeError, cffi.CDefError) as err:
        raise EngineError(f"cannot load the engine's library {path}: {err}", code="CK-ENGINE-LOAD") from err
    check_abi(ffi, lib, abi, native)
    return ffi, lib


def check_abi(ffi: Any, lib: Any, abi: int, native: Path) -> None:
    """Compares version and struct sizes with the headers'.

    Raises:
        EngineError: they differ; calling into the library would corrupt memory.
    """
    match = re.search(r"#define CB_ABI (\d+)", (native / "include" / "colibri.h").read_text())
    want = int(match.group(1)) if match else 0
    problems = [f"ABI {abi}, expected {want}"] if abi != want else []
    for name in STRUCTS:
        here, there = ffi.sizeof(f"struct {name}"), int(lib.cb_sizeof(name.encode()))
        if here != there:
            problems.append(f"struct {name} has {there} bytes, expected {here}")
    if problems:
        raise EngineError(
            f"the engine's library was built from other sources: {'; '.join(problems)}",
            hint="unset COLIBRI_LIBRARY or rebuild it",
            code="CK-ENGINE-ABI",
        )


def raise_for(ffi: Any, rc: int, err: Any, doing: str) -> None:
    """Turns a negative return code and its ``struct cb_err`` into an exception; else nothing."""
    if rc >= 0:
        return
    kind, code = _CODES.get(rc, (EngineError, "CK-ENGINE"))
    message = ffi.string(err.msg).decode("utf-8", "replace") if err != ffi.NULL else ""
    raise kind(f"{doing}: {message or f'engine error {rc}'}", code=code)


def plain_dict(ffi: Any, struct: Any) -> dict[str, Any]:
    """A flat C struct (or a pointer to one) as a dict: char arrays become text, numbers stay."""
    out: dict[str, Any] = {}
    ctype = ffi.typeof(struct)
    for name, kind in (ctype.item if ctype.kind == "pointer" else ctype).fields:
        value = getattr(struct, name)
        is_text = kind.type.kind == "array" and kind.type.item.cname == "char"
        out[name] = ffi.string(value).decode("utf-8", "replace") if is_text else value
    return out
