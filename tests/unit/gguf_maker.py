"""Small GGUF models for tests, written by the ``gguf`` package: an implementation that is not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

FAMILIES = ("llama", "olmoe", "granitemoe", "qwen2moe", "qwen3moe")
EOS = "<|im_end|>"
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's bytes_to_unicode."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    out, extra = [], 0
    for b in range(256):
        if b in keep:
            out.append(chr(b))
        else:
            out.append(chr(256 + extra))
            extra += 1
    return out


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """(tokens, types, merges): bytes, two merges, three control tokens; 264 in all."""
    tokens = [*byte_alphabet(), "he", "hel", "<|endoftext|>", "<|im_start|>", EOS, "pad0", "pad1", "pad2"]
    types = [1] * 258 + [3] * 3 + [1] * 3
    return tokens, types, ["h e", "he l"]


def quantise(x: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """As bytes of ``kind``; K-quants, which the package cannot make, as random valid blocks."""
    q = gguf.GGMLQuantizationType
    if kind in (q.F32, q.F16, q.BF16, q.Q8_0, q.Q4_0, q.Q4_1, q.Q5_0, q.Q5_1):
        return gguf.quants.quantize(x, kind)
    return random_blocks(kind, x.shape, seed=x.size)


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random quantised rows whose scales are small finite numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    rows, blocks = int(np.prod(shape[:-1])), shape[-1] // block
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    where = {"Q6_K": [208]}.get(kind.name, [0, 2] if kind.name in ("Q4_K", "Q5_K", "Q4_1", "Q5_1") else [0])
    for at in where:
        scale = rng.uniform(0.001, 0.004, (rows, blocks)).astype("<f2")
        raw[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], blocks * size)


def make(
    path: Path,
    arch: str = "llama",
    *,
    d: int = 64,
    ff: int = 64,
    n_layer: int = 2,
    n_expert: int = 4,
    used: int = 2,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    keys: dict[str, Any] | None = None,
    skip: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    tied: bool = False,
    chat: str | None = CHATML,
    seed: int = 1,
) -> Path:
    """Writes a random model of a family.

    Args:
        kind: type of the matrices.
        keys: more scalar keys (full names), typed by Python type; they replace ours.
        skip: tensors and keys to leave out.
        extra: more F32 tensors.
    """
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, arch)
    heads, kv, hd = 4, 4 if arch == "olmoe" else 2, d // 4
    tokens, types, merges = vocabulary()
    numbers: dict[str, Any] = {
        f"{arch}.context_length": 128, f"{arch}.embedding_length": d, f"{arch}.block_count": n_layer,
        f"{arch}.feed_forward_length": ff, f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv, f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.bos_token_id": 258, "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.ggml.add_bos_token": False, "general.name": f"tiny {arch}",
    }  # fmt: skip
    if n_expert:
        numbers |= {f"{arch}.expert_count": n_expert, f"{arch}.expert_used_count": used}
    if arch in ("qwen2moe", "qwen3moe"):
        numbers[f"{arch}.expert_feed_forward_length"] = ff
    if arch == "qwen2moe":
        numbers[f"{arch}.expert_shared_feed_forward_length"] = 2 * ff
    if arch == "granitemoe":
        numbers |= {f"{arch}.embedding_scale": 12.0, f"{arch}.residual_scale": 0.22,
                    f"{arch}.logit_scale": 6.0, f"{arch}.attention.scale": 0.0625}  # fmt: skip
    for key, value in (numbers | (keys or {})).items():
        if key in skip:
            continue
        add = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string}
        if isinstance(value, list):
            w.add_array(key, value)
        else:
            add[type(value)](key, value)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    if chat is not None:
        w.add_chat_template(chat)

    def mat(name: str, *shape: int) -> None:
        if name not in skip:
            x = (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
            w.add_tensor(name, quantise(x, kind), raw_dtype=kind)

    def vec(name: str, n: int, mean: float = 1.0) -> None:
        if name not in skip:
            w.add_tensor(name, (mean + 0.1 * rng.standard_normal(n)).astype(np.float32))

    mat("token_embd.weight", len(tokens), d)
    vec("output_norm.weight", d)
    if not tied:
        mat("output.weight", len(tokens), d)
    for i in range(n_layer):
        b = f"blk.{i}."
        vec(b + "attn_norm.weight", d)
        for n, rows, cols in (("q", heads * hd, d), ("k", kv * hd, d), ("v", kv * hd, d),
                              ("output", d, heads * hd)):  # fmt: skip
            mat(f"{b}attn_{n}.weight", rows, cols)
            if arch == "qwen2moe" and n != "output":
                vec(f"{b}attn_{n}.bias", rows, 0.0)
        if arch in ("olmoe", "qwen3moe"):
            vec(b + "attn_q_norm.weight", d if arch == "olmoe" else hd)
            vec(b + "attn_k_norm.weight", kv * hd if arch == "olmoe" else hd)
        vec(b + "ffn_norm.weight", d)
        if not n_expert:
            for n, shape in (("gate", (ff, d)), ("up", (ff, d)), ("down", (d, ff))):
                mat(f"{b}ffn_{n}.weight", *shape)
            continue
        w.add_tensor(b + "ffn_gate_inp.weight", rng.standard_normal((n_expert, d)).astype(np.float32))
        for n, shape in (("gate", (ff, d)), ("up", (ff, d)), ("down", (d, ff))):
            mat(f"{b}ffn_{n}_exps.weight", n_expert, *shape)
        if arch == "qwen2moe":
            for n, shape in (("gate", (2 * ff, d)), ("up", (2 * ff, d)), ("down", (d, 2 * ff))):
                mat(f"{b}ffn_{n}_shexp.weight", *shape)
            vec(b + "ffn_gate_inp_shexp.weight", d, 0.0)
    for name, x in (extra or {}).items():
        w.add_tensor(name, x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
