"""manifest.json: made by convert, read by inspect, verify and deploy (docs/format.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from colibri_kit.convert.model import Features, Geometry, Model, Window
from colibri_kit.errors import FormatError

NAME = "manifest.json"
FORMAT = 1
MAX_BYTES = 1 << 20
GOLDEN_TOKENS = 16
#: The longest attention window, as in native/model/manifest.c.
MAX_WINDOW = 1 << 30
_WINDOW_KEYS = ("window", "window_layers")
_FILE_NAME = re.compile(r"(dense|tokenizer|experts-\d{4,6})\.coli\Z")
_HEX = re.compile(r"[0-9a-f]+\Z")


@dataclass(frozen=True)
class FileFact:
    """A file as the manifest lists it."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checked manifest; ``raw`` is the whole document, ``window`` None where every layer sees all."""

    raw: dict[str, Any]
    model_id: bytes
    geometry: Geometry
    features: Features
    files: tuple[FileFact, ...]
    golden: str | None
    window: Window | None = None

    @property
    def n_moe_layer(self) -> int:
        return self.geometry.n_layer - self.geometry.n_dense_layer if self.geometry.n_expert else 0


def make(
    model: Model,
    *,
    source: dict[str, str],
    model_id: bytes,
    quant: dict[str, int],
    tokenizer: dict[str, Any],
    chat: dict[str, Any],
    files: Sequence[FileFact],
    golden: str | None,
) -> bytes:
    """The document as UTF-8. The same input gives the same bytes: no dates, no machine names."""
    doc: dict[str, Any] = {
        "format": FORMAT,
        "name": model.name,
        "arch": model.arch,
        "source": source,
        "model_id": model_id.hex(),
        "geometry": asdict(model.geometry),
        "features": asdict(model.features),
        "quant": quant,
        "tokenizer": tokenizer,
        "chat": chat,
        "files": [asdict(f) for f in files],
    }
    if model.ignored_keys:
        doc["ignored_keys"] = list(model.ignored_keys)
    if golden is not None:
        doc["golden"] = {"tokens": GOLDEN_TOKENS, "kv": "f16", "sha256": golden}
    data = (json.dumps(doc, ensure_ascii=False, indent=1) + "\n").encode("utf-8")
    if len(data) > MAX_BYTES:
        raise FormatError(f"the manifest would have {len(data)} bytes, more than {MAX_BYTES}")
    return data


def read(folder: Path) -> Manifest:
    """Reads and checks FOLDER/manifest.json.

    Raises:
        FormatError: missing, too large, not JSON, or a value that cannot be.
    """
    path = folder / NAME
    try:
        with path.open("rb") as f:
            data = f.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise FormatError(
            f"{folder}: no {NAME}: not a .coli model, or an incomplete copy", code="CK-FORMAT-COLI"
        ) from None
    except OSError as err:
        raise FormatError(f"{path}: cannot be read: {err.strerror}", code="CK-FORMAT-COLI") from err
    return parse(data)


def parse(data: bytes) -> Manifest:
    """Checks a manifest document; see :func:`read`."""
    if len(data) > MAX_BYTES:
        _fail(f"larger than {MAX_BYTES} bytes")
    try:
        doc = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as err:
        _fail(f"at byte {err.start}: not UTF-8")
    except json.JSONDecodeError as err:
        _fail(f"at byte {err.pos}: not JSON: {err.msg}")
    except RecursionError:
        _fail("nested too deeply")
    if not isinstance(doc, dict):
        _fail("not a JSON object")
    if doc.get("format") != FORMAT or isinstance(doc.get("format"), bool):
        _fail(f"format {doc.get('format')!r}; this kit reads format {FORMAT}")
    for key in ("name", "arch"):
        if not isinstance(doc.get(key), str):
            _fail(f"{key} is missing or not text")
    files = _files(doc.get("files"))
    golden = doc.get("golden")
    if golden is not None:
        golden = _hex(golden.get("sha256") if isinstance(golden, dict) else None, 64, "golden.sha256")
    geometry = _geometry(doc.get("geometry"))
    features = doc.get("features")
    return Manifest(
        raw=doc,
        model_id=bytes.fromhex(_hex(doc.get("model_id"), 32, "model_id")),
        geometry=geometry,
        features=_features(features),
        files=files,
        golden=golden,
        window=_window(features, geometry.n_layer),
    )


def _fail(what: str) -> NoReturn:
    raise FormatError(f"{NAME}: {what}", code="CK-FORMAT-COLI")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
        _fail(f"key {twice!r} appears twice in one object")
    return out


def _hex(value: Any, digits: int, what: str) -> str:
    if not isinstance(value, str) or len(value) != digits or not _HEX.match(value):
        _fail(f"{what} is not {digits} hex digits")
    return value


def _geometry(value: Any) -> Geometry:
    if not isinstance(value, dict):
        _fail("geometry is missing")
    numbers = {}
    for f in fields(Geometry):
        v = value.get(f.name)
        if isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 1 << 31:
            _fail(f"geometry.{f.name} is {v!r}, not a number from 0")
        numbers[f.name] = v
    g = Geometry(**numbers)
    if min(g.n_layer, g.n_embd, g.n_head, g.n_head_kv, g.head_dim, g.n_vocab, g.ctx_train) < 1:
        _fail("geometry holds a 0 where none can be")
    if g.n_layer > 512 or g.n_expert > 1024 or g.n_expert_used > g.n_expert or g.n_dense_layer > g.n_layer:
        _fail("geometry: the numbers do not agree")
    return g


def _features(value: Any) -> Features:
    if not isinstance(value, dict):
        _fail("features is missing")
    want = {f.name: f.type for f in fields(Features)}
    for key in value:
        if key not in want and key not in _WINDOW_KEYS:
            _fail(f"features.{key} is unknown to this kit, and it would change the result")
    for key, kind in want.items():
        v = value.get(key)
        fits = {
            "str": isinstance(v, str),
            "bool": isinstance(v, bool),
            "float": isinstance(v, (int, float)) and not isinstance(v, bool),
        }
        if not fits[str(kind)]:
            _fail(f"features.{key} is missing or not a {kind}")
    return Features(**{key: value[key] for key in want})


def _window(features: Any, n_layer: int) -> Window | None:
    """The sliding window of checked features; None where there is none."""
    positions, layers = (features.get(key) for key in _WINDOW_KEYS)
    if all(key not in features for key in _WINDOW_KEYS):
        return None
    if isinstance(positions, bool) or not isinstance(positions, int) or not 1 <= positions <= MAX_WINDOW:
        _fail(f"features.window is {positions!r}, not a number from 1 to {MAX_WINDOW}")
    if not isinstance(layers, str) or len(layers) != n_layer or set(layers) - set("wf"):
        _fail(f"features.window_layers needs {n_layer} letters w or f")
    return Window(positions, layers)


def _files(value: Any) -> tuple[FileFact, ...]:
    if not isinstance(value, list):
        _fail("files is missing")
    out: dict[str, FileFact] = {}
    for i, f in enumerate(value):
        if not isinstance(f, dict):
            _fail(f"files[{i}] is not an object")
        name, size = f.get("name"), f.get("bytes")
        if not isinstance(name, str) or not _FILE_NAME.match(name) or name in out:
            _fail(f"files[{i}].name {name!r} cannot be")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            _fail(f"files[{i}].bytes is {size!r}")
        out[name] = FileFact(name, size, _hex(f.get("sha256"), 64, f"files[{i}].sha256"))
    shards = [n for n in out if n.startswith("experts-")]
    want = ["dense.coli", *[f"experts-{i:04d}.coli" for i in range(len(shards))], "tokenizer.coli"]
    if list(out) != want:
        _fail(f"files lists {', '.join(out) or 'nothing'}; expected {', '.join(want)}")
    return tuple(out.values())
