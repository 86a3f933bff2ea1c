"""Scalar types for schemas: each says what text it takes, and refuses look-alikes."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from colibri_kit.config.loader import Text

_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?[ ]?([KMGT]i?B|B)")


def _plain(value: Any, what: str) -> str:
    if isinstance(value, Text) and value.quoted:
        raise ValueError(f"expected {what}, got quoted text {str(value)!r}; remove the quotes")
    if not isinstance(value, str):
        raise ValueError(f"expected {what}, got {'nothing' if value is None else type(value).__name__}")
    return str(value)


def _int(value: Any) -> int:
    if type(value) is int:
        return value
    text = _plain(value, "a whole number")
    if re.fullmatch(r"-?(0|[1-9][0-9]*)", text):
        return int(text)
    if re.fullmatch(r"[-+]?0[0-9_]+", text) or re.match(r"[-+]?0[oOxXbB]", text):
        raise ValueError(f"'{text}' looks octal, hexadecimal or binary; write a decimal number")
    if re.fullmatch(r"[-+]?[0-9_]+(:[0-9_.]+)+", text):
        raise ValueError(f"'{text}' looks sexagesimal (YAML 1.1 reads base 60); write a decimal number")
    raise ValueError(f"expected a whole number, got '{text}'")


def _float(value: Any) -> float:
    if type(value) in (int, float):
        return float(value)
    text = _plain(value, "a number")
    if re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", text):
        return float(text)
    if re.fullmatch(r"[-+]?0[0-9_]+", text):
        raise ValueError(f"'{text}' looks octal; write a decimal number")
    if re.fullmatch(r"[-+]?[0-9_]+(:[0-9_.]+)+", text):
        raise ValueError(f"'{text}' looks sexagesimal (YAML 1.1 reads base 60); write a decimal number")
    raise ValueError(f"expected a number, got '{text}'")


def _bool(value: Any) -> bool:
    if type(value) is bool:
        return value
    text = _plain(value, "true or false")
    if text in ("true", "false"):
        return text == "true"
    raise ValueError(f"expected true or false, got '{text}'")


def parse_size(text: str) -> int:
    """Bytes of ``900MiB``, ``1.2GiB``, ``64 KiB``, ``2GB``; the unit is not optional.

    Raises:
        ValueError: anything else.
    """
    match = _SIZE.fullmatch(text)
    if not match:
        raise ValueError(f"expected a size with a unit such as 900MiB or 1.2GiB, got '{text}'")
    whole, fraction, unit = match.groups()
    n_bytes = int(whole) * _UNITS[unit]
    if fraction:
        n_bytes += int(fraction[1:]) * _UNITS[unit] // 10 ** (len(fraction) - 1)
    if n_bytes >= 1 << 63:
        raise ValueError(f"'{text}' is too large")
    return n_bytes


def _size(value: Any) -> int:
    if type(value) is int:
        return value
    return parse_size(_plain(value, "a size"))


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {'nothing' if value is None else type(value).__name__}")
    if not value.strip():
        raise ValueError("expected text, got an empty string")
    return str(value)


Int = Annotated[int, BeforeValidator(_int)]
Count = Annotated[int, BeforeValidator(_int), Field(ge=1, le=1 << 20)]
Positive = Annotated[float, BeforeValidator(_float), Field(gt=0, le=1e6)]
Bool = Annotated[bool, BeforeValidator(_bool)]
Size = Annotated[int, BeforeValidator(_size), Field(ge=0)]
Str = Annotated[str, BeforeValidator(_str), Field(max_length=2000)]


def format_size(n_bytes: int) -> str:
    """``1.2 GiB``: three digits at most, binary units."""
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
