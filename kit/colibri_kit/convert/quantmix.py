"""Which type each tensor gets under ``--quant``.

The mixes are llama-quantize's (llama.cpp, src/llama-quant.cpp: llama_tensor_get_type), so
that a model quantised here has the size and the sensitive tensors that users expect.
A tensor that is already quantised stays as it is: quantising twice only adds error.
The exception is ``f32``, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from colibri_kit.convert.model import Geometry, Model, Source
from colibri_kit.gguf.types import BF16, BY_NAME, F16, F32, FLOATS, TensorType

#: what --quant takes -> base type
QUANTS: dict[str, str] = {
    "q4_k_m": "Q4_K",
    **{n.lower(): n for n in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")},
    **{n.lower(): n for n in ("F16", "BF16", "F32")},
}
#: when the columns do not divide into blocks of 256
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Choice:
    """A tensor's type in the .coli and the reason, for the plan."""

    type: TensorType
    why: str


def use_more_bits(layer: int, n_layer: int) -> bool:
    """The first and last eighth of the layers and every third between get Q6_K."""
    return layer < n_layer // 8 or layer >= 7 * n_layer // 8 or (layer - n_layer // 8) % 3 == 2


def wanted(quant: str, role: str, cols: int, layer: int, model: Model) -> TensorType:
    """llama-quantize's type for a float matrix.

    Args:
        quant: a key of QUANTS.
        role: "token_embd", "output", "attn_v", "ffn_down", … (down of experts and of the
            shared expert are "ffn_down" too).
        cols: columns, to see whether blocks fit.
    """
    base = BY_NAME[QUANTS[quant]]
    if base.id in FLOATS:
        return base
    geo, name = model.geometry, base.name
    if role == "output" or (role == "token_embd" and model.tied):
        name = "Q8_0" if cols % 256 or name == "Q8_0" else "Q6_K"
    elif role in ("attn_v", "attn_k") and geo.n_expert == 8:
        name = "Q8_0"
    elif quant == "q4_k_m":
        name = _q4_k_m(role, layer, geo)
    if cols % BY_NAME[name].block:
        name = _FALLBACK.get(name, name)
    if cols % BY_NAME[name].block:
        name = "F16"
    return BY_NAME[name]


def _q4_k_m(role: str, layer: int, geo: Geometry) -> str:
    if role in ("attn_v", "ffn_down") and use_more_bits(layer, geo.n_layer):
        return "Q6_K"
    if role == "attn_output" and geo.n_expert == 8:
        return "Q5_K"
    return "Q4_K"


def choose(
    quant: str | None, source_type: TensorType, role: str, cols: int, layer: int, model: Model
) -> Choice:
    """The type for a matrix of ``source_type``."""
    if quant is None:
        return Choice(source_type, "as it is")
    if source_type.id not in FLOATS:
        if quant == "f32":
            return Choice(F32, f"dequantised from {source_type.name}")
        return Choice(source_type, "already quantised: stays")
    target = wanted(quant, role, cols, layer, model)
    if target.id == source_type.id:
        return Choice(target, "as it is")
    if target.id == F32.id:
        return Choice(target, f"widened from {source_type.name}")
    verb = "rounded" if target.id in (F16.id, BF16.id) else "quantised"
    return Choice(target, f"{verb} from {source_type.name}")


def choose_dense(quant: str | None, source: Source, model: Model) -> Choice:
    """The type for a tensor of dense.coli; vectors and routers are F32."""
    if source.vector or source.keep_f32:
        kind = source.tensor.type
        why = "as it is" if kind.id == F32.id else f"widened from {kind.name}"
        return Choice(F32, why if kind.id in FLOATS else f"dequantised from {kind.name}")
    role, layer = _role(source.name)
    return choose(quant, source.tensor.type, role, source.cols, layer, model)


def _role(name: str) -> tuple[str, int]:
    """("attn_v", 3) of blk.3.attn_v; shexp_down plays ffn_down's part."""
    if not name.startswith("blk."):
        return name, 0
    _, layer, role = name.split(".", 2)
    return role.replace("shexp_", "ffn_"), int(layer)
