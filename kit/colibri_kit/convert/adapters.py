"""GGUF architectures -> feature flags. A family is one entry of FAMILIES.

The flags and the defaults for missing keys are llama.cpp's (src/llama-model.cpp:
load_hparams, load_tensors and the graph builders of each architecture).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri_kit.convert.hparams import HParams, shortest, unsupported
from colibri_kit.convert.model import ExpertLayer, Features, Geometry, Model, Source
from colibri_kit.errors import FormatError
from colibri_kit.gguf.types import ENGINE_TYPES, FLOATS, TYPES

if TYPE_CHECKING:
    from colibri_kit.gguf.reader import GgufFile, Tensor


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the common transformer.

    Attributes:
        rope: "norm" (pairs 2i, 2i+1) or "neox" (pairs i, i + rope_dim/2).
        moe: "always", or "optional": dense when expert_count is absent or 0.
        renorm: the chosen experts' softmax weights are divided by their sum.
        qk_norm: "none", "head" (head_dim weights) or "row" (the whole projected row).
        expert_ff: the experts' width: "own" key (expert_feed_forward_length, default
            feed_forward_length / experts used) or "shared" with feed_forward_length.
        shared: a shared expert: "none", "optional" (added plainly) or "gated" (sigmoid).
        scales: embedding_scale, residual_scale, logit_scale, attention.scale are read.
        rope_switch: rope.scaling.finetuned = false turns RoPE off.
        bias: attn_q/k/v biases may exist (attn_output's too).
    """

    rope: str
    moe: str
    renorm: bool
    qk_norm: str = "none"
    expert_ff: str = "shared"
    shared: str = "none"
    scales: bool = False
    rope_switch: bool = False
    bias: bool = False


#: general.architecture -> family
FAMILIES: dict[str, Family] = {
    "llama": Family(rope="norm", moe="optional", renorm=True, bias=True),
    "olmoe": Family(rope="neox", moe="always", renorm=False, qk_norm="row"),
    "granitemoe": Family(
        rope="norm",
        moe="always",
        renorm=True,
        shared="optional",
        scales=True,
        rope_switch=True,
        bias=True,
    ),
    "qwen2moe": Family(rope="neox", moe="always", renorm=False, expert_ff="own", shared="gated", bias=True),
    "qwen3moe": Family(rope="neox", moe="always", renorm=True, qk_norm="head", expert_ff="own"),
}

#: tensors that old converters left behind; computed, never read
_DEAD = re.compile(r"(blk\.\d+\.attn_rot_embd|.*rotary_emb\.inv_freq|rope\.freqs)(\.weight)?$")


def map_model(gguf: GgufFile, *, name: str | None = None, ignore_keys: Sequence[str] = ()) -> Model:
    """Finds the family, reads the geometry and claims every tensor.

    Args:
        name: overrides general.name.
        ignore_keys: full names of keys that the user declares harmless.

    Raises:
        FormatError: unknown architecture, missing or unsupported key, a tensor that is
            missing, has another shape, an unsupported type, or that nobody claims.
    """
    arch = gguf.kv.get("general.architecture")
    if not isinstance(arch, str):
        raise FormatError(f"{gguf.name}: general.architecture is missing", code="CK-FORMAT-GGUF")
    family = FAMILIES.get(arch)
    if family is None:
        raise unsupported(
            f"{gguf.name}: unknown architecture {arch!r}; supported: {', '.join(sorted(FAMILIES))}"
        )
    parts = gguf.kv.get("split.count", 0)
    if not isinstance(parts, int) or parts not in (0, 1):
        raise unsupported(
            f"{gguf.name}: split.count: this is one of {parts!r} files of a split model",
            "join them first: llama-gguf-split --merge FIRST.gguf WHOLE.gguf",
        )
    hp = HParams(gguf, arch)
    claims = _Claims(gguf)
    geometry = _geometry(hp, family, claims)
    features = _features(hp, family, geometry)
    dense, experts = _tensors(claims, family, geometry)
    claims.check_rest()
    ignored = hp.check_rest(ignore_keys)
    own = gguf.kv.get("general.name")
    return Model(
        arch=arch,
        name=clean_name(name or (own if isinstance(own, str) else "") or gguf.path.stem),
        geometry=geometry,
        features=features,
        dense=tuple(dense),
        experts=tuple(experts),
        tied="output.weight" not in gguf.tensors,
        ignored_keys=tuple(ignored),
    )


def clean_name(text: str) -> str:
    """A name that fits cb_info.name (63 bytes), printable, one line."""
    text = "".join(c if c.isprintable() else " " for c in text).strip()
    return text.encode("utf-8", "replace")[:63].decode("utf-8", "ignore") or "model"


def _geometry(hp: HParams, family: Family, claims: _Claims) -> Geometry:
    n_embd = hp.integer("embedding_length", high=1 << 20)
    n_head = hp.integer("attention.head_count", high=1025)
    n_head_kv = hp.integer("attention.head_count_kv", n_head, high=1025)
    if n_head % n_head_kv:
        hp.fail("attention.head_count_kv", f"{n_head_kv} does not divide the {n_head} heads")
    head_dim = hp.integer("attention.key_length", n_embd // n_head, high=4097)
    value_dim = hp.integer("attention.value_length", n_embd // n_head, high=4097)
    if value_dim != head_dim:
        hp.fail("attention.value_length", f"{value_dim} differs from key_length {head_dim}: not supported")
    if head_dim < 1:
        hp.fail("attention.head_count", f"{n_head} heads do not fit {n_embd} columns")
    rope_dim = hp.integer("rope.dimension_count", head_dim, high=4097)
    if rope_dim % 2 or rope_dim > head_dim:
        hp.fail("rope.dimension_count", f"{rope_dim} is odd or above the head's {head_dim}")
    n_expert = hp.integer("expert_count", 0, low=0, high=1025)
    if n_expert == 0 and family.moe == "always":
        hp.fail("expert_count", f"is missing or 0; {hp.arch} is always a Mixture of Experts")
    if n_expert == 1:
        hp.fail("expert_count", "is 1: a dense model in disguise, not supported")
    used = hp.integer("expert_used_count", 0 if n_expert == 0 else None, low=0, high=65)
    if n_expert and not 1 <= used <= n_expert:
        hp.fail("expert_used_count", f"{used} of {n_expert} experts")
    n_ff = hp.integer("feed_forward_length", 0 if family.expert_ff == "own" else None, low=0, high=1 << 24)
    expert_ff = n_ff if n_expert else 0
    if family.expert_ff == "own":
        expert_ff = hp.integer("expert_feed_forward_length", n_ff // max(used, 1), high=1 << 24)
    if max(n_ff, expert_ff) == 0:
        hp.fail("feed_forward_length", "is 0")
    shexp = 0
    if family.shared != "none":
        key = "expert_shared_feed_forward_length"
        shexp = hp.integer(key, n_ff if family.shared == "gated" else 0, low=0, high=1 << 24)
    embd = claims.look("token_embd.weight")
    return Geometry(
        n_layer=hp.integer("block_count", high=513),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_vocab=embd.rows,
        n_ff=n_ff,
        n_expert=n_expert,
        n_expert_used=used if n_expert else 0,
        n_expert_ff=expert_ff,
        n_shexp_ff=shexp,
        n_dense_layer=0,
        ctx_train=hp.integer("context_length", high=1 << 30),
        rope_dim=rope_dim,
    )


def _features(hp: HParams, family: Family, geo: Geometry) -> Features:
    default_scale = shortest(1.0 / math.sqrt(geo.head_dim))
    scales = [1.0, 1.0, 1.0, 0.0]
    if family.scales:
        # 0 means "none" to llama.cpp, for each of the four.
        keys = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
        scales = [hp.number(k, 0.0, positive=False) for k in keys]
    embd, resid, logit, attn = scales
    window = hp.integer("attention.sliding_window", 0, low=0)
    if 0 < window < geo.ctx_train:
        hp.fail("attention.sliding_window", f"{window}: sliding windows are not supported")
    norm_weights = hp.raw("expert_weights_norm")
    if norm_weights is not None and norm_weights is not family.renorm:
        hp.fail("expert_weights_norm", f"is {norm_weights!r}; {hp.arch} has {family.renorm} by definition")
    rope = family.rope
    if family.rope_switch and not hp.flag("rope.scaling.finetuned", True):
        rope = "none"
    return Features(
        rope=rope,
        rope_base=hp.number("rope.freq_base", 10000.0),
        rope_scale=_rope_scale(hp),
        norm_eps=hp.number("attention.layer_norm_rms_epsilon"),
        qk_norm=family.qk_norm,
        router="softmax",
        router_renorm=family.renorm,
        embd_scale=embd or 1.0,
        resid_scale=resid or 1.0,
        attn_scale=attn or default_scale,
        logit_scale=logit or 1.0,
    )


def _rope_scale(hp: HParams) -> float:
    """1 / factor for linear scaling; positions are multiplied by it."""
    kind = hp.text("rope.scaling.type", "linear")
    legacy = hp.number("rope.scale_linear", 1.0, positive=False)
    factor = hp.number("rope.scaling.factor", legacy, positive=False)
    if kind == "none" or factor in (0.0, 1.0):
        if kind not in ("none", "linear"):
            hp.fail("rope.scaling.type", f"{kind!r} is not supported (none and linear are)")
        return 1.0
    if kind != "linear":
        hp.fail("rope.scaling.type", f"{kind!r} is not supported (none and linear are)")
    return shortest(1.0 / factor)


class _Claims:
    """Tensors by name, each taken once; what is left over is refused."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf, self._taken = gguf, set[str]()

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def look(self, name: str) -> Tensor:
        tensor = self.gguf.tensors.get(name)
        if tensor is None:
            raise unsupported(f"{self.gguf.name}: tensor {name} is missing")
        return tensor

    def take(self, name: str, dims: tuple[int, ...]) -> Tensor:
        """The tensor, if it has these dimensions (trailing ones are ignored) and a known type."""
        tensor = self.look(name)
        real = tensor.dims
        while len(real) > len(dims) and real[-1] == 1:
            real = real[:-1]
        if real != dims:
            raise unsupported(
                f"{self.gguf.name}: tensor {name} has the shape {list(tensor.dims)}, expected {list(dims)}"
            )
        if tensor.type.id not in ENGINE_TYPES or (len(dims) == 1 and tensor.type.id not in FLOATS):
            allowed = FLOATS if len(dims) == 1 else ENGINE_TYPES
            names = ", ".join(TYPES[i].name for i in sorted(allowed))
            raise unsupported(
                f"{self.gguf.name}: tensor {name} has the type {tensor.type.name}; supported: {names}",
                "convert from an F16, BF16 or F32 GGUF with --quant",
            )
        self._taken.add(name)
        return tensor

    def vector(self, out: str, name: str, n: int) -> Source:
        return Source(out, self.take(name, (n,)), 1, n, vector=True)

    def matrix(self, out: str, name: str, rows: int, cols: int, *, keep_f32: bool = False) -> Source:
        return Source(out, self.take(name, (cols, rows)), rows, cols, keep_f32=keep_f32)

    def check_rest(self) -> None:
        rest = [n for n in self.gguf.tensors if n not in self._taken and not _DEAD.match(n)]
        if rest:
            shown = ", ".join(rest[:4]) + (f" and {len(rest) - 4} more" if len(rest) > 4 else "")
            raise unsupported(f"{self.gguf.name}: tensors that this architecture does not use: {shown}")


def _tensors(c: _Claims, family: Family, geo: Geometry) -> tuple[list[Source], list[ExpertLayer]]:
    d = geo.n_embd
    dense = [c.matrix("token_embd", "token_embd.weight", geo.n_vocab, d)]
    dense.append(c.vector("output_norm", "output_norm.weight", d))
    if c.has("output.weight"):
        dense.append(c.matrix("output", "output.weight", geo.n_vocab, d))
    if c.has("rope_freqs.weight"):
        dense.append(c.vector("rope_freqs", "rope_freqs.weight", geo.rope_dim // 2))
    experts = []
    for i in range(geo.n_layer):
        dense += _attention(c, family, geo, i)
        if geo.n_expert:
            dense.append(
                c.matrix(f"blk.{i}.router", f"blk.{i}.ffn_gate_inp.weight", geo.n_expert, d, keep_f32=True)
            )
            experts.append(_experts(c, geo, i))
            dense += _shared(c, family, geo, i)
        else:
            dense += _ffn(c, f"blk.{i}.ffn", f"blk.{i}.ffn_{{}}.weight", geo.n_ff, d)
    return dense, experts


def _attention(c: _Claims, family: Family, geo: Geometry, i: int) -> list[Source]:
    b, d, hd = f"blk.{i}.", geo.n_embd, geo.head_dim
    rows = {"attn_q": geo.n_head * hd, "attn_k": geo.n_head_kv * hd, "attn_v": geo.n_head_kv * hd}
    out = [c.vector(b + "attn_norm", b + "attn_norm.weight", d)]
    out += [c.matrix(b + n, f"{b}{n}.weight", r, d) for n, r in rows.items()]
    out.append(c.matrix(b + "attn_output", b + "attn_output.weight", d, geo.n_head * hd))
    if family.bias:
        for n, r in {**rows, "attn_output": d}.items():
            if c.has(f"{b}{n}.bias"):
                out.append(c.vector(f"{b}{n}_bias", f"{b}{n}.bias", r))
    if family.qk_norm != "none":
        for n in ("attn_q", "attn_k"):
            size = hd if family.qk_norm == "head" else rows[n]
            out.append(c.vector(f"{b}{n}_norm", f"{b}{n}_norm.weight", size))
    out.append(c.vector(b + "ffn_norm", b + "ffn_norm.weight", d))
    return out


def _ffn(c: _Claims, out: str, pattern: str, n_ff: int, d: int) -> list[Source]:
    shapes = {"gate": (n_ff, d), "up": (n_ff, d), "down": (d, n_ff)}
    return [c.matrix(f"{out}_{n}", pattern.format(n), r, k) for n, (r, k) in shapes.items()]


def _experts(c: _Claims, geo: Geometry, i: int) -> ExpertLayer:
    d, f, n = geo.n_embd, geo.n_expert_ff, geo.n_expert
    return ExpertLayer(
        i,
        c.take(f"blk.{i}.ffn_gate_exps.weight", (d, f, n)),
        c.take(f"blk.{i}.ffn_up_exps.weight", (d, f, n)),
        c.take(f"blk.{i}.ffn_down_exps.weight", (f, d, n)),
    )


def _shared(c: _Claims, family: Family, geo: Geometry, i: int) -> list[Source]:
    if family.shared == "none" or geo.n_shexp_ff == 0:
        return []
    out = _ffn(c, f"blk.{i}.shexp", f"blk.{i}.ffn_{{}}_shexp.weight", geo.n_shexp_ff, geo.n_embd)
    if family.shared == "gated":
        out.append(c.vector(f"blk.{i}.shexp_router", f"blk.{i}.ffn_gate_inp_shexp.weight", geo.n_embd))
    return out
