"""What a conversion will write: every tensor's type, place and size, before a byte is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colibri_kit.convert import container as box
from colibri_kit.convert.hparams import unsupported
from colibri_kit.convert.model import ExpertLayer, Model, Source
from colibri_kit.convert.quantmix import Choice, choose, choose_dense

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class DensePlan:
    """A tensor of dense.coli; ``offset`` from the start of the file."""

    source: Source
    choice: Choice
    offset: int
    size: int


@dataclass(frozen=True)
class PartPlan:
    """gate, up or down of every expert of a layer; ``offset`` inside the record."""

    choice: Choice
    rows: int
    cols: int
    offset: int
    size: int


@dataclass(frozen=True)
class RecordPlan:
    """One expert record; ``offset`` from the start of its shard."""

    layer: ExpertLayer
    expert: int
    parts: tuple[PartPlan, PartPlan, PartPlan]
    offset: int
    size: int


@dataclass(frozen=True)
class FilePlan:
    """A file's head and size in bytes."""

    name: str
    kind: int
    index: int
    entries: int
    payload_offset: int
    payload_bytes: int

    @property
    def size(self) -> int:
        return self.payload_offset + self.payload_bytes


@dataclass(frozen=True)
class Plan:
    """All of it. ``shards[i]`` are the records of ``experts-i``."""

    model: Model
    quant: str | None
    dense: tuple[DensePlan, ...]
    dense_file: FilePlan
    shards: tuple[tuple[FilePlan, tuple[RecordPlan, ...]], ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight files; the tokenizer and the manifest come on top."""
        return self.dense_file.size + sum(f.size for f, _ in self.shards)

    @property
    def read_bytes(self) -> int:
        """GGUF tensor bytes that the conversion reads."""
        return sum(d.source.tensor.size for d in self.dense) + sum(
            t.size for layer in self.model.experts for t in layer.parts
        )

    def type_counts(self) -> dict[str, int]:
        """Tensors (an expert part of a whole layer counts once) by type, most first."""
        count: dict[str, int] = {}
        for choice in self.choices():
            count[choice.type.name] = count.get(choice.type.name, 0) + 1
        return dict(sorted(count.items(), key=lambda kv: (-kv[1], kv[0])))

    def choices(self) -> Iterator[Choice]:
        yield from (d.choice for d in self.dense)
        seen = set()
        for _, records in self.shards:
            for r in records:
                if r.layer.layer not in seen:
                    seen.add(r.layer.layer)
                    yield from (p.choice for p in r.parts)


def make_plan(model: Model, quant: str | None) -> Plan:
    """Lays the files out. Pure: reads no tensor data."""
    count = len(model.dense)
    start = box.payload_start(box.KIND_DENSE, count * box.DENSE_ENTRY_BYTES)
    at, dense = start, []
    for source in model.dense:
        choice = choose_dense(quant, source, model)
        size = box.tensor_bytes(choice.type.id, source.rows, source.cols)
        if not source.vector and source.rows == 1:
            size = 0
        if size == 0:
            raise unsupported(f"{source.name}: a matrix of {source.rows} × {source.cols} {choice.type.name}")
        dense.append(DensePlan(source, choice, at, size))
        at = box.align(at + size, box.TENSOR_ALIGN)
    payload = at - start
    file = FilePlan("dense.coli", box.KIND_DENSE, 0, count, start, payload)
    return Plan(model, quant, tuple(dense), file, tuple(_shards(model, quant)))


def _shards(model: Model, quant: str | None) -> Iterator[tuple[FilePlan, tuple[RecordPlan, ...]]]:
    """Fills shards of at most SHARD_BYTES, records in (layer, expert) order."""
    waiting: list[tuple[ExpertLayer, int, tuple[PartPlan, PartPlan, PartPlan], int]] = []
    index = total = 0
    for layer in model.experts:
        parts, size = _parts(layer, model, quant)
        for expert in range(model.geometry.n_expert):
            head = box.payload_start(box.KIND_EXPERTS, (len(waiting) + 1) * box.EXPERT_ENTRY_BYTES)
            if waiting and head + total + size > box.SHARD_BYTES:
                yield _shard(index, waiting)
                waiting, total, index = [], 0, index + 1
            waiting.append((layer, expert, parts, size))
            total += size
    if waiting:
        yield _shard(index, waiting)


def _parts(
    layer: ExpertLayer, model: Model, quant: str | None
) -> tuple[tuple[PartPlan, PartPlan, PartPlan], int]:
    at, out = 0, []
    for role, tensor in zip(("ffn_gate", "ffn_up", "ffn_down"), layer.parts, strict=True):
        cols, rows = tensor.dims[0], tensor.dims[1]
        choice = choose(quant, tensor.type, role, cols, layer.layer, model)
        size = box.mat_bytes(choice.type.id, rows, cols)
        out.append(PartPlan(choice, rows, cols, at, size))
        at = box.align(at + size, box.TENSOR_ALIGN)
    return (out[0], out[1], out[2]), box.align(at, box.RECORD_ALIGN)


def _shard(
    index: int, waiting: list[tuple[ExpertLayer, int, tuple[PartPlan, PartPlan, PartPlan], int]]
) -> tuple[FilePlan, tuple[RecordPlan, ...]]:
    start = box.payload_start(box.KIND_EXPERTS, len(waiting) * box.EXPERT_ENTRY_BYTES)
    at, records = start, []
    for layer, expert, parts, size in waiting:
        records.append(RecordPlan(layer, expert, parts, at, size))
        at += size
    name = f"experts-{index:04d}.coli"
    file = FilePlan(name, box.KIND_EXPERTS, index, len(records), start, at - start)
    return file, tuple(records)


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row a tensor for --dry-run: name, shape, types, bytes, why."""
    rows: list[dict[str, Any]] = [
        {
            "name": d.source.name,
            "rows": d.source.rows,
            "cols": d.source.cols,
            "from": d.source.tensor.type.name,
            "to": d.choice.type.name,
            "bytes": d.size,
            "why": d.choice.why,
        }
        for d in plan.dense
    ]
    seen = set()
    for _, records in plan.shards:
        for r in records:
            if r.layer.layer in seen:
                continue
            seen.add(r.layer.layer)
            for name, part, tensor in zip(box.PART_NAMES, r.parts, r.layer.parts, strict=True):
                rows.append(
                    {
                        "name": f"blk.{r.layer.layer}.experts.{name}",
                        "rows": part.rows,
                        "cols": part.cols,
                        "from": tensor.type.name,
                        "to": part.choice.type.name,
                        "bytes": part.size * plan.model.geometry.n_expert,
                        "why": part.choice.why,
                    }
                )
    return rows
