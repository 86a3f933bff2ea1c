"""Sparse upcycling: a dense llama GGUF becomes a Mixture-of-Experts one.

Every expert starts as a copy of the dense FFN and the router is random (Komatsuzaki et
al., "Sparse Upcycling", ICLR 2023). The router's weights over the chosen experts sum to 1,
so without noise the MoE computes what the dense model computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_kit.convert.adapters import clean_name, map_model
from colibri_kit.convert.elements import convert, from_f32, to_f32
from colibri_kit.convert.hparams import unsupported
from colibri_kit.errors import UsageError
from colibri_kit.gguf.reader import U32
from colibri_kit.gguf.types import F32, TYPES
from colibri_kit.gguf.writer import GgufHeader, OutTensor, pad

if TYPE_CHECKING:
    from colibri_kit.gguf.reader import GgufFile, Tensor

_PARTS = ("ffn_gate", "ffn_up", "ffn_down")
_CHUNK = 16 << 20
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Recipe:
    """What to make.

    Attributes:
        noise: standard deviation added to each expert's weights, in units of the tensor's
            root mean square; 0 = exact copies.
        router_scale: standard deviation of the router's weights.
        f32: store every tensor as F32 instead of its own type.
    """

    experts: int
    used: int
    noise: float = 0.0
    seed: int = 0
    router_scale: float = 0.02
    f32: bool = False


@dataclass(frozen=True)
class Item:
    """An output tensor and its source; ``source`` is None for a router."""

    out: OutTensor
    source: Tensor | None
    layer: int
    copies: int


@dataclass(frozen=True)
class UpcyclePlan:
    """Header and tensors of the file to be written."""

    recipe: Recipe
    header: GgufHeader
    items: tuple[Item, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header.pack()) + self.header.data_bytes()


def make_plan(gguf: GgufFile, recipe: Recipe, name: str | None) -> UpcyclePlan:
    """Checks the source and lays the new file out.

    Raises:
        FormatError: not a dense llama model. UsageError: experts and used do not agree.
    """
    if not 2 <= recipe.experts <= 1024 or not 1 <= recipe.used <= min(recipe.experts, 64):
        raise UsageError(
            f"--experts {recipe.experts} --used {recipe.used}: 2 to 1024 experts, 1 to 64 of them used"
        )
    model = map_model(gguf)
    if model.arch != "llama" or model.geometry.n_expert:
        raise unsupported(
            f"{gguf.name}: {model.arch} with {model.geometry.n_expert} experts; "
            "upcycle takes a dense llama model"
        )
    header = GgufHeader(gguf.alignment)
    for key in gguf.keys:
        header.copy(gguf, key)
    header.set("llama.expert_count", recipe.experts, U32)
    header.set("llama.expert_used_count", recipe.used, U32)
    header.set("general.name", clean_name(name or f"{model.name} {recipe.experts}x{recipe.used}"))
    if recipe.f32 and "general.file_type" in gguf.keys:
        header.set("general.file_type", 0, U32)
    items = tuple(_items(gguf, recipe, model.geometry.n_embd))
    header.tensors = [i.out for i in items]
    return UpcyclePlan(recipe, header, items)


def _items(gguf: GgufFile, recipe: Recipe, n_embd: int) -> Iterator[Item]:
    for t in gguf.tensors.values():
        kind = F32.id if recipe.f32 else t.type.id
        block, _, role = t.name.rpartition(".weight")[0].rpartition(".")
        if role not in _PARTS:
            yield Item(OutTensor(t.name, t.dims, kind), t, 0, 1)
            continue
        layer = int(block.split(".")[1])
        if role == _PARTS[0]:
            router = OutTensor(f"{block}.ffn_gate_inp.weight", (n_embd, recipe.experts), F32.id)
            yield Item(router, None, layer, 1)
        dims = (t.dims[0], t.dims[1], recipe.experts)
        yield Item(OutTensor(f"{block}.{role}_exps.weight", dims, kind), t, layer, recipe.experts)


def write(gguf: GgufFile, plan: UpcyclePlan, path: Path, threads: int, advance: Advance) -> None:
    """Writes the file and brings it to the disk.

    Args:
        advance: called with the bytes written.
    """
    with path.open("wb") as stream:
        stream.write(plan.header.pack())
        for item in plan.items:
            for piece in _pieces(gguf, plan.recipe, item, threads):
                stream.write(piece)
                advance(len(piece))
            pad(stream, item.out.size, plan.header.alignment)
        stream.flush()
        os.fsync(stream.fileno())


def _pieces(gguf: GgufFile, recipe: Recipe, item: Item, threads: int) -> Iterator[Any]:
    if item.source is None:
        yield router(recipe, item.layer, item.out.dims[0])
        return
    noisy = recipe.noise > 0 and item.copies > 1
    rms = _rms(gguf, item.source) if noisy else 0.0
    part = next((i for i, n in enumerate(_PARTS) if f".{n}." in item.source.name), 0)
    for copy in range(item.copies):
        rng = _rng(recipe.seed, 1 + part, item.layer, copy) if noisy else None
        for raw, rows in _rows(gguf, item.source):
            cols, kind = item.source.cols, item.source.type.id
            if rng is None:
                yield convert(kind, item.out.type_id, raw, rows, cols, threads, item.source.name).data
                continue
            x = to_f32(kind, raw, rows, cols)
            x = x + rng.standard_normal(x.shape, dtype=x.dtype) * x.dtype.type(recipe.noise * rms)
            yield from_f32(item.out.type_id, x, threads, item.source.name).data


def _rows(gguf: GgufFile, t: Tensor) -> Iterator[tuple[Any, int]]:
    """(GGUF bytes, rows) of a tensor, some rows at a time."""
    row_bytes = t.type.row_bytes(t.cols)
    step = max(1, _CHUNK // max(row_bytes, t.cols * 4))
    for at in range(0, t.rows, step):
        n = min(step, t.rows - at)
        yield gguf.read(t.offset + at * row_bytes, n * row_bytes), n


def _rms(gguf: GgufFile, t: Tensor) -> float:
    total = 0.0
    for raw, rows in _rows(gguf, t):
        x = to_f32(t.type.id, raw, rows, t.cols)
        total += float((x.astype("f8") ** 2).sum())
    return float((total / (t.rows * t.cols)) ** 0.5)


def router(recipe: Recipe, layer: int, n_embd: int) -> bytes:
    """F32 [experts][n_embd], normal with the recipe's scale: a function of seed and layer."""
    import numpy as np

    x = _rng(recipe.seed, 0, layer, 0).standard_normal((recipe.experts, n_embd), dtype=np.float32)
    return bytes((x * np.float32(recipe.router_scale)).astype("<f4").tobytes())


def _rng(seed: int, *stream: int) -> Any:
    """An own stream for each (part, layer, copy): the order of writing changes nothing."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *stream])))


def check_written(path: Path, plan: UpcyclePlan) -> None:
    """Reads the new file's header back with the reader that refuses everything odd.

    Raises:
        FormatError: it is not the model that was planned.
    """
    from colibri_kit.gguf.reader import GgufFile

    with GgufFile(path) as made:
        model = map_model(made)
        if model.geometry.n_expert != plan.recipe.experts or path.stat().st_size != plan.size:
            raise unsupported(f"{path.name}: not what was planned")


def plan_rows(plan: UpcyclePlan) -> list[dict[str, Any]]:
    """One row a tensor for --dry-run."""
    return [
        {
            "name": i.out.name,
            "shape": list(i.out.dims),
            "from": i.source.type.name if i.source else "random",
            "to": TYPES[i.out.type_id].name,
            "bytes": i.out.size,
        }
        for i in plan.items
    ]
