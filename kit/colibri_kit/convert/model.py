"""What an adapter makes of a GGUF: geometry, feature flags and where each tensor comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colibri_kit.gguf.reader import Tensor


@dataclass(frozen=True)
class Geometry:
    """manifest.json's ``geometry``, in its order."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ff: int
    n_expert: int
    n_expert_used: int
    n_expert_ff: int
    n_shexp_ff: int
    n_dense_layer: int
    ctx_train: int
    rope_dim: int


@dataclass(frozen=True)
class Features:
    """manifest.json's ``features``: everything that changes the arithmetic."""

    rope: str
    rope_base: float
    rope_scale: float
    norm_eps: float
    qk_norm: str
    router: str
    router_renorm: bool
    embd_scale: float
    resid_scale: float
    attn_scale: float
    logit_scale: float


@dataclass(frozen=True)
class Window:
    """manifest.json's ``features.window`` and ``features.window_layers``, which only go together.

    Attributes:
        positions: how many a windowed layer sees, its own included.
        layers: one letter a layer, ``w`` windowed or ``f`` full.
    """

    positions: int
    layers: str


@dataclass(frozen=True)
class Source:
    """A .coli tensor and the GGUF tensor that it comes from.

    Attributes:
        name: its name in dense.coli (docs/format.md).
        rows, cols: as in y = W·x; rows is 1 for vectors.
        vector: stored as F32, not padded.
        keep_f32: the router: a matrix that is always F32.
    """

    name: str
    tensor: Tensor
    rows: int
    cols: int
    vector: bool = False
    keep_f32: bool = False


@dataclass(frozen=True)
class ExpertLayer:
    """The three expert tensors of a block, dims (cols, rows, n_expert) each."""

    layer: int
    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate, self.up, self.down


@dataclass(frozen=True)
class Model:
    """A GGUF as the engine sees it."""

    arch: str
    name: str
    geometry: Geometry
    features: Features
    dense: tuple[Source, ...]
    experts: tuple[ExpertLayer, ...]
    tied: bool
    ignored_keys: tuple[str, ...] = field(default=())
