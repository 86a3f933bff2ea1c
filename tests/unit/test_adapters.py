"""Architectures to feature flags, what is refused, and the types that --quant chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_maker import FAMILIES, make

from colibri_kit.convert.adapters import map_model
from colibri_kit.convert.model import Model
from colibri_kit.convert.plan import make_plan
from colibri_kit.errors import FormatError
from colibri_kit.gguf.reader import GgufFile

Q = gguf.GGMLQuantizationType
DATA = Path(__file__).parent.parent / "data" / "gguf"

EXPECTED: dict[str, dict[str, Any]] = {
    "llama": {"rope": "norm", "qk_norm": "none", "router_renorm": True, "attn_scale": 0.25},
    "olmoe": {"rope": "neox", "qk_norm": "row", "router_renorm": False, "attn_scale": 0.25},
    "granitemoe": {
        "rope": "norm", "qk_norm": "none", "router_renorm": True, "attn_scale": 0.0625,
        "embd_scale": 12.0, "resid_scale": 0.22, "logit_scale": 6.0,
    },
    "qwen2moe": {"rope": "neox", "qk_norm": "none", "router_renorm": False, "attn_scale": 0.25},
    "qwen3moe": {"rope": "neox", "qk_norm": "head", "router_renorm": True, "attn_scale": 0.25},
}  # fmt: skip


def mapped(path: Path, **kwargs: Any) -> Model:
    with GgufFile(path) as g:
        return map_model(g, **kwargs)


@pytest.mark.parametrize("arch", FAMILIES)
def test_family_features(tmp_path: Path, arch: str) -> None:
    model = mapped(make(tmp_path / "m.gguf", arch))
    scales = {"embd_scale": 1.0, "resid_scale": 1.0, "logit_scale": 1.0}
    for key, want in (scales | EXPECTED[arch]).items():
        assert getattr(model.features, key) == want, key
    g = model.geometry
    assert (g.n_layer, g.n_embd, g.n_head, g.head_dim, g.n_vocab) == (2, 64, 4, 16, 264)
    assert (g.n_expert, g.n_expert_used, g.n_expert_ff) == (4, 2, 64)
    assert g.n_shexp_ff == (128 if arch == "qwen2moe" else 0)
    assert model.features.norm_eps == 1e-5 and model.features.rope_base == 10000.0


def test_defaults_and_options(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = mapped(make(path, "llama", n_expert=0, tied=True))
    assert model.geometry.n_expert == 0 and model.tied and not model.experts
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0,
            "llama.rope.freq_base": 1e6, "llama.rope.dimension_count": 8}  # fmt: skip
    extra = {"rope_freqs.weight": np.ones(4, np.float32)}
    model = mapped(make(path, "llama", keys=keys, extra=extra))
    assert (model.features.rope_scale, model.features.rope_base, model.geometry.rope_dim) == (0.25, 1e6, 8)
    assert "rope_freqs" in [s.name for s in model.dense]
    model = mapped(make(path, "granitemoe", keys={"granitemoe.rope.scaling.finetuned": False}))
    assert model.features.rope == "none"
    model = mapped(make(path, "llama", keys={"llama.attention.head_count_kv": [2, 2]}))
    assert model.geometry.n_head_kv == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"arch": "gpt9"}, "unknown architecture 'gpt9'; supported: granitemoe, llama"),
    "yarn": ({"keys": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}}, "'yarn'"),
    "sliding window": ({"keys": {"llama.attention.sliding_window": 64}}, "attention.sliding_window"),
    "weights scale": ({"keys": {"llama.expert_weights_scale": 2.5}}, "expert_weights_scale: is 2.5"),
    "sigmoid gating": ({"keys": {"llama.expert_gating_func": 2}}, "expert_gating_func"),
    "softcap": ({"keys": {"llama.final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
    "unknown key": ({"keys": {"llama.new.trick": 3}}, "llama.new.trick: is 3; this kit does not know"),
    "granite's scale": ({"keys": {"llama.residual_scale": 0.5}}, "llama.residual_scale"),
    "value length": ({"keys": {"llama.attention.value_length": 32}}, "attention.value_length"),
    "no heads": ({"keys": {"llama.attention.head_count": 0}}, "attention.head_count: is 0"),
    "heads": ({"keys": {"llama.attention.head_count_kv": 3}}, "does not divide"),
    "per layer": ({"keys": {"llama.attention.head_count_kv": [2, 4]}}, "differs between layers"),
    "missing key": ({"skip": ("llama.embedding_length",)}, "llama.embedding_length: is missing"),
    "text for number": ({"keys": {"llama.block_count": "two"}}, "not a whole number"),
    "NaN": ({"keys": {"llama.rope.freq_base": float("nan")}}, "not a finite number"),
    "too many used": ({"keys": {"llama.expert_used_count": 5}}, "5 of 4 experts"),
    "one expert": ({"n_expert": 1, "used": 1}, "expert_count: is 1"),
    "dense qwen": ({"arch": "qwen3moe", "n_expert": 0}, "expert_count"),
    "split": ({"keys": {"split.count": 3}}, "split.count"),
    "missing tensor": ({"skip": ("blk.1.attn_k.weight",)}, "blk.1.attn_k.weight is missing"),
    "odd tensor": ({"extra": {"blk.0.ssm.weight": np.ones(4, np.float32)}}, "blk.0.ssm.weight"),
    "shape": ({"keys": {"llama.feed_forward_length": 32}}, "has the shape [64, 64, 4], expected [64, 32, 4]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_matters_and_is_unsupported_is_refused_by_name(tmp_path: Path, case: str) -> None:
    args, said = REFUSED[case]
    path = make(tmp_path / "m.gguf", **({"arch": "llama"} | args))
    with pytest.raises(FormatError) as err:
        mapped(path)
    assert said in err.value.message and "m.gguf" in err.value.message


def test_harmless_values_pass(tmp_path: Path) -> None:
    keys = {"llama.expert_weights_scale": 1.0, "llama.attention.sliding_window": 4096,
            "llama.vocab_size": 264, "llama.attention.causal": True}  # fmt: skip
    mapped(make(tmp_path / "m.gguf", "llama", keys=keys))
    odd = make(tmp_path / "o.gguf", "llama", keys={"llama.new.trick": 3})
    assert mapped(odd, ignore_keys=["llama.new.trick"]).ignored_keys == ("llama.new.trick",)


def test_a_type_that_the_engine_lacks_is_refused_by_name(tmp_path: Path) -> None:
    path = make(tmp_path / "m.gguf", "llama", d=256, ff=256, kind=Q.Q3_K)
    with pytest.raises(FormatError, match=r"token_embd\.weight has the type Q3_K; supported: F32, F16, Q4_0"):
        mapped(path)


# ---- --quant ---------------------------------------------------------------


def test_q4_k_m_is_what_llama_quantize_chooses(tmp_path: Path) -> None:
    """Types of every tensor of six models, as llama-quantize wrote them."""
    for name, ref in json.loads((DATA / "q4_k_m_types.json").read_text())["models"].items():
        arch, want = ref["arch"], {n: t for n, (_, t) in ref["tensors"].items()}
        path = make(
            tmp_path / f"{name}.gguf", arch, d=256, ff=256, n_expert=8, tied="output.weight" not in want
        )
        plan = make_plan(mapped(path), "q4_k_m")
        got = {d.source.tensor.name: d.choice.type.name for d in plan.dense}
        for _, records in plan.shards:
            for r in records:
                pairs = zip(r.parts, r.layer.parts, strict=True)
                got |= {t.name: p.choice.type.name for p, t in pairs}
        same = {n: t for n, t in got.items() if n in want}
        assert same == {n: want[n] for n in same}, name
        assert len(same) >= len(want) - 6  # granitemoe-shared's shared expert is not in ours


def test_mixes_fall_back_where_blocks_do_not_fit(tmp_path: Path) -> None:
    model = mapped(make(tmp_path / "m.gguf", "llama", d=64, ff=96, n_layer=8))

    def types(quant: str) -> dict[str, str]:
        return {d.source.name: d.choice.type.name for d in make_plan(model, quant).dense}

    assert types("q4_k_m")["blk.0.attn_q"] == "Q5_0"
    assert types("q4_k_m")["blk.0.attn_v"] == "Q8_0"  # Q6_K does not fit 64 columns
    assert types("q5_k")["blk.3.attn_q"] == "Q5_1"
    assert types("q8_0")["token_embd"] == "Q8_0"
    assert types("q4_0")["output"] == "Q8_0"
    for quant in ("q4_0", "q4_k_m", "q6_k"):
        assert types(quant)["blk.0.router"] == types(quant)["blk.0.attn_norm"] == "F32"


def test_quantised_tensors_stay(tmp_path: Path) -> None:
    model = mapped(make(tmp_path / "m.gguf", "llama", kind=Q.Q4_1))
    plan = make_plan(model, "q8_0")
    choice = {d.source.name: d.choice for d in plan.dense}["blk.0.attn_q"]
    assert (choice.type.name, choice.why) == ("Q4_1", "already quantised: stays")
    wide = {d.source.name: d.choice for d in make_plan(model, "f32").dense}["blk.0.attn_q"]
    assert (wide.type.name, wide.why) == ("F32", "dequantised from Q4_1")
