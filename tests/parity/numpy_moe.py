"""An independent reference: the transformer in numpy float64, from GGUF by the gguf package alone.

Shares no code with the kit. Slow and plain; reads F32 and quantised tensors by dequantising them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

NEOX = {"olmoe", "qwen2moe", "qwen3moe"}
NO_RENORM = {"olmoe", "qwen2moe"}


class Model:
    """Weights as float64 and the metadata of one GGUF."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.kv = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("tokenizer.")}
        self.arch = self.kv["general.architecture"]
        self.w = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
        }

    def get(self, key: str, default: Any = None) -> Any:
        return self.kv.get(f"{self.arch}.{key}", default)


def _rms(x: Any, w: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def _silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _rope(x: Any, base: float, n: int, neox: bool) -> Any:
    """x [T, heads, hd]: rotates the first n dimensions."""
    pos = np.arange(x.shape[0])[:, None, None]
    angle = pos * base ** (-np.arange(0, n, 2) / n)
    c, s = np.cos(angle), np.sin(angle)
    out = x.copy()
    a, b = (slice(0, n // 2), slice(n // 2, n)) if neox else (slice(0, n, 2), slice(1, n, 2))
    out[..., a] = x[..., a] * c - x[..., b] * s
    out[..., b] = x[..., a] * s + x[..., b] * c
    return out


def _attention(m: Model, x: Any, i: int, window: int) -> Any:
    p, eps = f"blk.{i}.", m.get("attention.layer_norm_rms_epsilon")
    heads, kv_heads = m.get("attention.head_count"), m.get("attention.head_count_kv")
    t = x.shape[0]

    def project(name: str) -> Any:
        y = x @ m.w[f"{p}attn_{name}.weight"].T
        return y + m.w.get(f"{p}attn_{name}.bias", 0.0)

    q, k, v = project("q"), project("k"), project("v")
    hd = q.shape[1] // heads
    norm_q, norm_k = m.w.get(f"{p}attn_q_norm.weight"), m.w.get(f"{p}attn_k_norm.weight")
    if norm_q is not None and norm_q.size == q.shape[1]:
        q, k = _rms(q, norm_q, eps), _rms(k, norm_k, eps)
    q, k, v = q.reshape(t, heads, hd), k.reshape(t, kv_heads, hd), v.reshape(t, kv_heads, hd)
    if norm_q is not None and norm_q.size == hd:
        q, k = _rms(q, norm_q, eps), _rms(k, norm_k, eps)
    base, n_rot, neox = m.get("rope.freq_base", 10000.0), m.get("rope.dimension_count", hd), m.arch in NEOX
    q, k = _rope(q, base, n_rot, neox), _rope(k, base, n_rot, neox)
    scale = m.get("attention.scale", hd**-0.5)
    out = np.empty_like(q)
    mask = np.triu(np.full((t, t), -np.inf), 1)
    if window:
        mask += np.tril(np.full((t, t), -np.inf), -window)
    for h in range(heads):
        g = h // (heads // kv_heads)
        out[:, h] = _softmax(q[:, h] @ k[:, g].T * scale + mask) @ v[:, g]
    return out.reshape(t, heads * hd) @ m.w[f"{p}attn_output.weight"].T


def _ffn(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return (_silu(x @ gate.T) * (x @ up.T)) @ down.T


def _moe(m: Model, x: Any, i: int) -> tuple[Any, Any]:
    p, used = f"blk.{i}.ffn_", m.get("expert_used_count")
    prob = _softmax(x @ m.w[f"{p}gate_inp.weight"].T)
    chosen = np.argsort(-prob, axis=1, kind="stable")[:, :used]
    weight = np.take_along_axis(prob, chosen, 1)
    if m.arch not in NO_RENORM:
        weight = weight / weight.sum(1, keepdims=True)
    gate, up, down = (m.w[f"{p}{n}_exps.weight"] for n in ("gate", "up", "down"))
    y = np.zeros_like(x)
    for t in range(x.shape[0]):
        for r, e in enumerate(chosen[t]):
            y[t] += weight[t, r] * _ffn(x[t], gate[e], up[e], down[e])
    if f"{p}gate_shexp.weight" in m.w:
        shared = _ffn(x, *(m.w[f"{p}{n}_shexp.weight"] for n in ("gate", "up", "down")))
        if f"{p}gate_inp_shexp.weight" in m.w:
            shared *= 1 / (1 + np.exp(-(x @ m.w[f"{p}gate_inp_shexp.weight"].reshape(-1))))[:, None]
        y += shared
    return y, chosen


def run(m: Model, tokens: Any, windows: Any = None) -> tuple[Any, Any]:
    """(logits float64 [T, vocab], experts [MoE layers, T, used]) for int tokens [T].

    windows: positions that each layer sees, its own included; 0 = all.
    """
    eps, resid = m.get("attention.layer_norm_rms_epsilon"), m.get("residual_scale", 1.0)
    x = m.w["token_embd.weight"][tokens] * m.get("embedding_scale", 1.0)
    experts = []
    for i in range(m.get("block_count")):
        x = x + resid * _attention(
            m, _rms(x, m.w[f"blk.{i}.attn_norm.weight"], eps), i, windows[i] if windows else 0
        )
        y, chosen = _moe(m, _rms(x, m.w[f"blk.{i}.ffn_norm.weight"], eps), i)
        x = x + resid * y
        experts.append(chosen)
    head = m.w.get("output.weight", m.w["token_embd.weight"])
    logits = _rms(x, m.w["output_norm.weight"], eps) @ head.T
    return logits / m.get("logit_scale", 1.0), np.stack(experts)
