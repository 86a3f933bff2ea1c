"""inspect: what a GGUF or a .coli folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import VERBS, ui_options

if TYPE_CHECKING:
    from colibri_kit.ui import Ui


@click.command("inspect", help=VERBS["inspect"])
@ui_options
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.option("--tensors", is_flag=True, help="List every tensor and expert.")
def command(ui: Ui, model: Path, tensors: bool) -> None:
    data = inspect_coli(model) if model.is_dir() else inspect_gguf(model)
    ui.result(data, to_text(data, ui, tensors=tensors))


def inspect_gguf(path: Path) -> dict[str, Any]:
    """Header, keys and tensors; whether this kit can convert it, and if not why."""
    from dataclasses import asdict

    from colibri_kit.convert.adapters import map_model
    from colibri_kit.errors import FormatError
    from colibri_kit.gguf.reader import GgufFile

    with GgufFile(path) as gguf:
        counts: dict[str, int] = {}
        for t in gguf.tensors.values():
            counts[t.type.name] = counts.get(t.type.name, 0) + 1
        data: dict[str, Any] = {
            "kind": "gguf",
            "file": str(path),
            "version": gguf.version,
            "bytes": gguf.size,
            "alignment": gguf.alignment,
            "keys": {k: show_value(v) for k, v in gguf.kv.items()},
            "types": counts,
            "tensors": [
                {"name": t.name, "shape": list(t.dims), "type": t.type.name, "bytes": t.size}
                for t in gguf.tensors.values()
            ],
        }
        try:
            model = map_model(gguf)
            data["convertible"] = True
            data["geometry"], data["features"] = asdict(model.geometry), asdict(model.features)
        except FormatError as err:
            data["convertible"], data["reason"] = False, err.message
    return data


def show_value(value: Any) -> Any:
    """A JSON value; long arrays as their length and first elements."""
    if isinstance(value, bytes):
        return value[:256].hex()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        if len(value) > 8:
            return {"length": len(value), "first": [show_value(v) for v in value[:4]]}
        return [show_value(v) for v in value]
    return value[:4096] if isinstance(value, str) else value


def inspect_coli(folder: Path) -> dict[str, Any]:
    """The manifest and every directory; reads no payload."""
    from colibri_kit.convert import manifest as mf
    from colibri_kit.convert.check import check_head, check_listing, read_directories
    from colibri_kit.gguf.types import type_name

    manifest = mf.read(folder)
    check_listing(folder, manifest)
    tensors: list[dict[str, Any]] = []
    experts: list[dict[str, Any]] = []
    for fact in manifest.files:
        header, dense, records = read_directories(folder / fact.name)
        check_head(fact.name, header, manifest)
        tensors += [
            {"name": t.name, "shape": [t.rows, t.cols], "type": type_name(t.type_id), "bytes": t.size}
            for t in dense
        ]
        experts += [
            {
                "layer": r.layer,
                "expert": r.expert,
                "file": fact.name,
                "offset": r.offset,
                "bytes": r.size,
                "types": [type_name(p.type_id) for p in r.parts],
            }
            for r in records
        ]
    raw = manifest.raw
    return {
        "kind": "coli",
        "file": str(folder),
        "bytes": sum(f.bytes for f in manifest.files),
        **{k: raw.get(k) for k in ("name", "arch", "source", "model_id", "geometry", "features")},
        "types": raw.get("quant"),
        "tokenizer": raw.get("tokenizer"),
        "chat": raw.get("chat"),
        "golden": manifest.golden,
        "files": raw["files"],
        "tensors": tensors,
        "experts": experts,
    }


def to_text(data: dict[str, Any], ui: Ui, *, tensors: bool) -> str:
    """Tables for people; control characters never reach the terminal."""
    lines = [f"{data['file']}: {data['kind']}, {data['bytes'] / 1e6:.1f} MB"]
    if data["kind"] == "gguf":
        lines += ["", ui.table(["key", "value"], [[k, _cell(v)] for k, v in data["keys"].items()])]
        verdict = "yes" if data["convertible"] else f"no: {data['reason']}"
        lines += ["", f"convertible: {verdict}"]
    else:
        for key in ("name", "arch", "source", "model_id", "golden", "tokenizer", "chat"):
            lines.append(f"{key:10} {_cell(data[key])}")
        rows = [[f["name"], f["bytes"], f["sha256"][:16]] for f in data["files"]]
        lines += ["", ui.table(["file", "bytes", "sha256"], rows)]
    for title in ("geometry", "features", "types"):
        if data.get(title):
            rows = [[k, _cell(v)] for k, v in data[title].items()]
            lines += ["", ui.table([title, ""], rows)]
    if tensors:
        rows = [
            [_cell(t["name"]), " × ".join(map(str, t["shape"])), t["type"], t["bytes"]]
            for t in data["tensors"]
        ]
        lines += ["", ui.table(["tensor", "shape", "type", "bytes"], rows)]
        rows = [
            [e["layer"], e["expert"], e["file"], e["offset"], e["bytes"], " ".join(e["types"])]
            for e in data.get("experts", [])
        ]
        if rows:
            lines += ["", ui.table(["layer", "expert", "file", "offset", "bytes", "types"], rows)]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:200])
    return text if len(text) <= 96 else text[:95] + "…"
