"""Reads GGUF version 2 and 3. The file is hostile: every count, length, product and
offset is checked as a Python integer before it is used, and each error says at which
byte of the file it was found and what was being read.

Format: ggml's docs/gguf.md. Magic, version, tensor count, key count; the key-values;
the tensor infos; padding to ``general.alignment``; tensor data.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from colibri_kit.errors import FormatError
from colibri_kit.gguf.types import TYPES, TensorType

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
VALUE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
#: value type -> numpy's little-endian code
NUMPY_CODES = {
    U8: "<u1", I8: "<i1", U16: "<u2", I16: "<i2", U32: "<u4", I32: "<i4",
    F32: "<f4", BOOL: "<u1", U64: "<u8", I64: "<i8", F64: "<f8",
}  # fmt: skip
_SCALARS = {
    U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f",
    BOOL: "<B", U64: "<Q", I64: "<q", F64: "<d",
}  # fmt: skip
_STRUCTS = {k: struct.Struct(v) for k, v in _SCALARS.items()}

MAX_KEY = 65535
MAX_NAME = 255
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 24  # elements of a string array
MAX_DEPTH = 4  # arrays in arrays
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_OTHER_MAGIC = {
    b"FUGG": "its bytes are swapped",
    b"lmgg": "it is an unversioned GGML file from 2023",
    b"tjgg": "it is a GGJT file from 2023",
    b"fmgg": "it is a GGMF file from 2023",
    b"COLI": "it is a .coli file, already converted",
    b"PK\x03\x04": "it is a zip archive, perhaps a PyTorch checkpoint",
}


@dataclass(frozen=True)
class Tensor:
    """A tensor's place in the file.

    Attributes:
        dims: in ggml's order, fastest first: (cols, rows, experts, …).
        offset: from the start of the file.
        size: bytes.
    """

    name: str
    dims: tuple[int, ...]
    type: TensorType
    offset: int
    size: int

    @property
    def cols(self) -> int:
        return self.dims[0]

    @property
    def rows(self) -> int:
        """Product of all dimensions but the first."""
        n = 1
        for d in self.dims[1:]:
            n *= d
        return n


@dataclass(frozen=True)
class KeyInfo:
    """A key's type and the bytes of its value (type word excluded) in the file."""

    type: int
    start: int
    end: int


class _Cursor:
    """A position in the mapped file; every read is checked against the end."""

    def __init__(self, data: mmap.mmap | bytes, name: str) -> None:
        self.data, self.name, self.at, self.end = data, name, 0, len(data)

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        where = self.at if at is None else at
        raise FormatError(f"{self.name}: at byte {where}: {what}", code="CK-FORMAT-GGUF", state="unchanged")

    def need(self, n: int, what: str) -> None:
        if n > self.end - self.at:
            self.fail(f"truncated while reading {what}: {n} bytes needed, {self.end - self.at} left")

    def number(self, kind: int, what: str) -> Any:
        s = _STRUCTS[kind]
        self.need(s.size, what)
        value = s.unpack_from(self.data, self.at)[0]
        self.at += s.size
        return value

    def raw_string(self, limit: int, what: str) -> bytes:
        at = self.at
        n: int = self.number(U64, f"the length of {what}")
        if n > limit:
            self.fail(f"{what} claims {n} bytes; the limit is {limit}", at)
        self.need(n, what)
        out = self.data[self.at : self.at + n]
        self.at += n
        return out

    def text(self, limit: int, what: str) -> str:
        at = self.at
        raw = self.raw_string(limit, what)
        try:
            out = raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8: {raw[:40]!r}", at)
        if "\0" in out or not out:
            self.fail(f"{what} is empty or holds a NUL", at)
        return out


class GgufFile:
    """An open GGUF file. Use as a context manager.

    Attributes:
        version: 2 or 3.
        kv: key → value. Numbers as int/float/bool; strings as str, or bytes when not
            UTF-8; arrays of numbers as numpy, of strings or arrays as list.
        keys: key → :class:`KeyInfo`.
        tensors: name → :class:`Tensor`, in file order.
        data_offset: where the tensor data begin.

    Raises:
        FormatError: anything wrong in the header; nothing is kept open then.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = self.path.name
        try:
            # Before opening: a pipe without a writer would wait for ever.
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise FormatError(f"{self.path}: not a regular file", code="CK-FORMAT-GGUF")
            self._file = self.path.open("rb")
        except (OSError, ValueError) as err:
            why = err.strerror if isinstance(err, OSError) else str(err)
            raise FormatError(f"{self.path}: cannot be opened: {why}", code="CK-FORMAT-GGUF") from err
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self._parse()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    # ---- tensor data -------------------------------------------------------

    def read(self, offset: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """``size`` bytes at ``offset`` of the file, as a writable uint8 array.

        Raises:
            FormatError: the file has become shorter, or cannot be read.
        """
        import numpy as np

        out = np.empty(size, np.uint8)
        view, done = memoryview(out.data), 0
        try:
            self._file.seek(offset)
            while done < size:
                got = self._file.readinto(view[done:])
                if not got:
                    raise FormatError(
                        f"{self.name}: at byte {offset + done}: the file became shorter while it was read",
                        code="CK-FORMAT-GGUF",
                    )
                done += got
        except OSError as err:
            raise FormatError(
                f"{self.name}: at byte {offset}: cannot be read: {err.strerror}", code="CK-FORMAT-GGUF"
            ) from err
        return out

    # ---- header ------------------------------------------------------------

    def _parse(self) -> None:
        if self.size == 0:
            raise FormatError(f"{self.name}: at byte 0: the file is empty", code="CK-FORMAT-GGUF")
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            c = _Cursor(data, self.name)
            n_tensors, n_keys = self._parse_start(c)
            self.kv: dict[str, Any] = {}
            self.keys: dict[str, KeyInfo] = {}
            for _ in range(n_keys):
                self._parse_key(c)
            self.alignment = self._alignment(c)
            infos = [_parse_tensor_info(c, i) for i in range(n_tensors)]
            self._place(c, infos)

    def _parse_start(self, c: _Cursor) -> tuple[int, int]:
        c.need(4, "the magic")
        magic = c.data[:4]
        if magic != b"GGUF":
            why = _OTHER_MAGIC.get(magic, "it is not a GGUF file")
            c.fail(f"the magic is {magic!r}, not b'GGUF': {why}")
        c.at = 4
        version: int = c.number(U32, "the version")
        if version & 0xFFFF == 0 and version >> 16:
            c.fail("the file is big-endian; convert it to little-endian first", 4)
        if version not in (2, 3):
            c.fail(f"GGUF version {version}; versions 2 and 3 are read", 4)
        self.version = version
        n_tensors: int = c.number(U64, "the tensor count")
        n_keys: int = c.number(U64, "the key count")
        # The smallest key takes 8+1+4+1 bytes, the smallest tensor info 8+1+4+8+4+8.
        if n_keys > MAX_KEYS or n_keys * 14 > self.size:
            c.fail(f"{n_keys} keys cannot be in a file of {self.size} bytes (limit {MAX_KEYS})", 16)
        if n_tensors > MAX_TENSORS or n_tensors * 33 > self.size:
            c.fail(f"{n_tensors} tensors cannot be in a file of {self.size} bytes (limit {MAX_TENSORS})", 8)
        return n_tensors, n_keys

    def _parse_key(self, c: _Cursor) -> None:
        at = c.at
        key = c.text(MAX_KEY, f"key {len(self.kv)}")
        if key in self.kv:
            c.fail(f"key {key!r} appears twice", at)
        kind = c.number(U32, f"the type of {key}")
        if kind > F64:
            c.fail(f"{key}: unknown value type {kind}", c.at - 4)
        start = c.at
        self.kv[key] = _parse_value(c, kind, key, 0)
        self.keys[key] = KeyInfo(kind, start, c.at)

    def _alignment(self, c: _Cursor) -> int:
        info = self.keys.get("general.alignment")
        if info is None:
            return DEFAULT_ALIGNMENT
        value = self.kv["general.alignment"]
        if info.type != U32 or value == 0 or value & (value - 1) or value > MAX_ALIGNMENT:
            c.fail(
                f"general.alignment is {value!r} ({VALUE_NAMES[info.type]}); "
                f"it must be a u32 power of two up to {MAX_ALIGNMENT}",
                info.start,
            )
        return int(value)

    def _place(self, c: _Cursor, infos: list[tuple[int, str, tuple[int, ...], TensorType, int, int]]) -> None:
        """Absolute offsets; refuses duplicates, tensors past the end and overlaps."""
        self.data_offset = (c.at + self.alignment - 1) // self.alignment * self.alignment
        self.tensors: dict[str, Tensor] = {}
        for at, name, dims, kind, size, offset in infos:
            if name in self.tensors:
                c.fail(f"tensor {name!r} appears twice", at)
            if offset % self.alignment:
                c.fail(f"tensor {name!r}: offset {offset} is not a multiple of {self.alignment}", at)
            where = self.data_offset + offset
            if where + size > self.size:
                c.fail(
                    f"tensor {name!r} ends at byte {where + size}, past the end of the file "
                    f"at {self.size}: truncated or damaged",
                    at,
                )
            self.tensors[name] = Tensor(name, dims, kind, where, size)
        last: Tensor | None = None
        for t in sorted(self.tensors.values(), key=lambda t: t.offset):
            if last is not None and t.offset < last.offset + last.size:
                c.fail(f"tensors {last.name!r} and {t.name!r} overlap", t.offset)
            last = t


def _parse_value(c: _Cursor, kind: int, key: str, depth: int) -> Any:
    if kind == STRING:
        return _decode(c.raw_string(c.end, f"the value of {key}"))
    if kind == BOOL:
        at = c.at
        value = c.number(BOOL, f"the value of {key}")
        if value > 1:
            c.fail(f"{key}: a bool of {value}", at)
        return bool(value)
    if kind != ARRAY:
        return c.number(kind, f"the value of {key}")
    if depth == MAX_DEPTH:
        c.fail(f"{key}: arrays nested deeper than {MAX_DEPTH}")
    at = c.at
    element = c.number(U32, f"the element type of {key}")
    if element > F64:
        c.fail(f"{key}: unknown element type {element}", at)
    at = c.at
    n: int = c.number(U64, f"the length of {key}")
    left = c.end - c.at
    if element in NUMPY_CODES:
        return _parse_numbers(c, element, n, key, at)
    smallest = 8 if element == STRING else 12
    if n > left // smallest or n > MAX_STRINGS:
        c.fail(f"{key}: an array of {n} elements cannot fit the {left} bytes left (limit {MAX_STRINGS})", at)
    if element == STRING:
        return list(_strings(c, n, key))
    return [_parse_value(c, ARRAY, key, depth + 1) for _ in range(n)]


def _parse_numbers(c: _Cursor, element: int, n: int, key: str, at: int) -> Any:
    import numpy as np

    dtype = np.dtype(NUMPY_CODES[element])
    if n > (c.end - c.at) // dtype.itemsize:
        c.fail(f"{key}: an array of {n} × {VALUE_NAMES[element]} is past the end of the file", at)
    size = n * dtype.itemsize
    out = np.frombuffer(c.data[c.at : c.at + size], dtype)
    if element == BOOL:
        if n and int(out.max()) > 1:
            c.fail(f"{key}: a bool above 1 in the array", c.at)
        out = out.astype(np.bool_)
    c.at += size
    return out


def _strings(c: _Cursor, n: int, key: str) -> Iterator[str | bytes]:
    """The hot loop of a vocabulary: checked as raw_string does, without its calls."""
    data, at, end, unpack = c.data, c.at, c.end, _STRUCTS[U64].unpack_from
    for i in range(n):
        if end - at < 8:
            c.fail(f"truncated while reading the length of {key}[{i}]", at)
        size = unpack(data, at)[0]
        at += 8
        if size > end - at:
            c.fail(f"{key}[{i}] claims {size} bytes; {end - at} are left", at - 8)
        yield _decode(data[at : at + size])
        at += size
    c.at = at


def _decode(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _parse_tensor_info(c: _Cursor, i: int) -> tuple[int, str, tuple[int, ...], TensorType, int, int]:
    """(file offset of the info, name, dims, type, bytes, offset from the data's start)."""
    at = c.at
    name = c.text(MAX_NAME, f"the name of tensor {i}")
    n_dims = c.number(U32, f"the dimension count of {name}")
    if not 1 <= n_dims <= MAX_DIMS:
        c.fail(f"tensor {name!r} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible", c.at - 4)
    dims = tuple(c.number(U64, f"dimension {k} of {name}") for k in range(n_dims))
    count = 1
    for d in dims:
        count *= d
    if count == 0 or count >= 1 << 63:
        c.fail(f"tensor {name!r} has the dimensions {list(dims)}: zero or too many elements", at)
    type_id = c.number(U32, f"the type of {name}")
    kind = TYPES.get(type_id)
    if kind is None:
        c.fail(f"tensor {name!r} has the unknown type {type_id}", c.at - 4)
    if dims[0] % kind.block:
        c.fail(
            f"tensor {name!r}: {dims[0]} columns do not divide into {kind.name} blocks of {kind.block}", at
        )
    offset = c.number(U64, f"the offset of {name}")
    return at, name, dims, kind, count // kind.block * kind.block_bytes, offset
