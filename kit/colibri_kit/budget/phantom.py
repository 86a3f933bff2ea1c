"""A GGUF as the .coli it would become, without its weights: headers and holes.

The engine's plan reads the manifest and the files' heads only, so it can be asked about a
model that was not converted yet. The files are sparse: they take a few megabytes of disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_kit.convert import container as box
from colibri_kit.convert import manifest

if TYPE_CHECKING:
    from colibri_kit.convert.plan import FilePlan, Plan
    from colibri_kit.convert.tokenizer import ExportedTokenizer

_IDENTITY = bytes(16)


@contextmanager
def phantom(source: Path, quant: str | None) -> Iterator[Path]:
    """A folder that the engine can plan with; gone afterwards.

    Args:
        source: the GGUF. quant: as ``convert --quant``.

    Raises:
        FormatError: convert would refuse it too.
    """
    from colibri_kit.convert.adapters import map_model
    from colibri_kit.convert.plan import make_plan
    from colibri_kit.convert.tokenizer import export_tokenizer
    from colibri_kit.gguf.reader import GgufFile

    with GgufFile(source) as gguf, tempfile.TemporaryDirectory(prefix="colibri-plan-") as name:
        folder = Path(name)
        plan = make_plan(map_model(gguf), quant.lower() if quant else None)
        write(plan, export_tokenizer(gguf.kv), folder)
        yield folder


def write(plan: Plan, tokenizer: ExportedTokenizer, folder: Path) -> None:
    """Manifest and files of their true sizes; payloads are holes."""
    dense = [
        box.DenseEntry(
            d.source.name, d.choice.type.id, d.source.rows, d.source.cols, 0, d.offset, d.size,
            box.layout_of(d.choice.type.id) if not d.source.vector else box.LAYOUT_ROWS,
        )
        for d in plan.dense
    ]  # fmt: skip
    facts = [_file(folder, plan.dense_file, box.pack_dense(dense))]
    for file, records in plan.shards:
        entries = [
            box.ExpertEntry(r.layer.layer, r.expert, r.offset, r.size, 0, _parts(r.parts)) for r in records
        ]
        facts.append(_file(folder, file, box.pack_experts(entries)))
    head = box.pack_head(
        box.KIND_TOKENIZER, 0, tokenizer.entries, tokenizer.directory, len(tokenizer.payload), _IDENTITY
    )
    (folder / "tokenizer.coli").write_bytes(head + tokenizer.payload)
    facts.append(manifest.FileFact("tokenizer.coli", len(head) + len(tokenizer.payload), "0" * 64))
    document = manifest.make(
        plan.model,
        source={"file": "planned", "sha256": "0" * 64},
        model_id=_IDENTITY,
        quant=plan.type_counts(),
        tokenizer=tokenizer.manifest,
        chat={"template": "none"},
        files=facts,
        golden=None,
    )
    (folder / manifest.NAME).write_bytes(document)


def _parts(parts: tuple[object, ...]) -> tuple[box.Part, box.Part, box.Part]:
    from colibri_kit.convert.plan import PartPlan

    out = [
        box.Part(p.choice.type.id, p.rows, p.cols, 0, p.offset, p.size)
        for p in parts
        if isinstance(p, PartPlan)
    ]
    return out[0], out[1], out[2]


def _file(folder: Path, file: FilePlan, directory: bytes) -> manifest.FileFact:
    head = box.pack_head(
        file.kind, file.index, file.entries, directory, file.payload_bytes, _IDENTITY,
        payload_offset=file.payload_offset,
    )  # fmt: skip
    path = folder / file.name
    path.write_bytes(head)
    os.truncate(path, file.size)
    return manifest.FileFact(file.name, file.size, "0" * 64)
