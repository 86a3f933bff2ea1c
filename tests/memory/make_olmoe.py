"""Writes a GGUF of OLMoE's geometry with random weights: ``python -m tests.memory.make_olmoe OUT``.

Blocks are made directly as bytes. Scales are chosen so that a weight has standard
deviation 1/sqrt(cols) times a gain: activations keep their size and stay finite. Everything is
a function of the seed. The embedding's gain keeps the residual stream mostly the token's
own, so that routing follows the token; without it every token chooses the same experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colibri_kit.convert.quantmix import use_more_bits
from colibri_kit.gguf.reader import I32, STRING, U32
from colibri_kit.gguf.types import BY_NAME, F32
from colibri_kit.gguf.writer import GgufHeader, OutTensor, pad

Q4_K, Q6_K = BY_NAME["Q4_K"].id, BY_NAME["Q6_K"].id
_BLOCKS = 1 << 16  # at a time: 9 to 14 MB
#: of weights that write to the residual stream; all others have 1, token_embd its scale's
GAINS = {"attn_output": 0.7, "ffn_down_exps": 0.7}


@dataclass(frozen=True)
class Scale:
    """One geometry; as allenai/OLMoE-1B-7B's config.json where it is "full".

    embd is the gain of the token embedding: with 9 in "small", LRU with slots for half of the
    experts hits 63 %, about what was measured on OLMoE itself.
    """

    n_layer: int
    d: int
    heads: int
    n_expert: int
    used: int
    ff: int
    vocab: int
    ctx: int
    embd: float


SCALES = {
    "full": Scale(16, 2048, 16, 64, 8, 1024, 50304, 4096, 40.0),
    "small": Scale(4, 512, 4, 32, 8, 1024, 2048, 4096, 9.0),
    "wide": Scale(6, 512, 4, 232, 4, 1024, 2048, 4096, 9.0),
    "tiny": Scale(3, 256, 4, 16, 4, 256, 512, 2048, 9.0),
}


def q4_k(rng: np.random.Generator, blocks: int, std: float) -> Any:
    """uint8 [blocks][144]: weight = d·sc·(q − 7.5), as each minimum equals its scale.

    q is uniform in 0…15 (deviation 4.61) and sc in 0…63 (root mean square 36.5).
    """
    raw = _random(rng, blocks, 144)
    raw[:, 8:12] = raw[:, 4:8]  # minima 0…3 = scales 0…3, and the high bits of 4…7
    raw[:, 12:16] = (raw[:, 12:16] & 15) * 17  # low bits of 4…7, twice
    _put(raw, 0, d := _scales(rng, blocks, std / (36.5 * 4.61)))
    _put(raw, 2, 7.5 * d)
    return raw


def q6_k(rng: np.random.Generator, blocks: int, std: float) -> Any:
    """uint8 [blocks][210]: weight = d·sc·(q − 32), sc in −16…15 (9.25), q in 0…63 (18.5)."""
    raw = _random(rng, blocks, 210)
    raw[:, 192:208] = ((raw[:, 192:208] >> 3).astype(np.int8) - 16).view(np.uint8)
    _put(raw, 208, _scales(rng, blocks, std / (9.25 * 18.5)))
    return raw


def _random(rng: np.random.Generator, blocks: int, size: int) -> Any:
    words = rng.integers(0, 1 << 64, -(-blocks * size // 8), np.uint64)
    return words.view(np.uint8)[: blocks * size].reshape(blocks, size)


def _scales(rng: np.random.Generator, blocks: int, mean: float) -> Any:
    return rng.uniform(0.8, 1.2, blocks) * mean


def _put(raw: Any, at: int, value: Any) -> None:
    raw[:, at : at + 2] = value.astype("<f2").view(np.uint8).reshape(-1, 2)


_MAKE: dict[int, Callable[[np.random.Generator, int, float], Any]] = {Q4_K: q4_k, Q6_K: q6_k}


def _tensors(s: Scale) -> Iterator[OutTensor]:
    def mat(name: str, cols: int, rows: int, kind: int = Q4_K, *more: int) -> OutTensor:
        return OutTensor(f"{name}.weight", (cols, rows, *more), kind)

    def vec(name: str, n: int) -> OutTensor:
        return OutTensor(f"{name}.weight", (n,), F32.id)

    yield mat("token_embd", s.d, s.vocab)
    for i in range(s.n_layer):
        b, best = f"blk.{i}", Q6_K if use_more_bits(i, s.n_layer) else Q4_K
        yield vec(f"{b}.attn_norm", s.d)
        for part, kind in (("q", Q4_K), ("k", Q4_K), ("v", best), ("output", Q4_K)):
            yield mat(f"{b}.attn_{part}", s.d, s.d, kind)
        for part in ("attn_q_norm", "attn_k_norm", "ffn_norm"):
            yield vec(f"{b}.{part}", s.d)
        yield mat(f"{b}.ffn_gate_inp", s.d, s.n_expert, F32.id)
        yield mat(f"{b}.ffn_gate_exps", s.d, s.ff, Q4_K, s.n_expert)
        yield mat(f"{b}.ffn_up_exps", s.d, s.ff, Q4_K, s.n_expert)
        yield mat(f"{b}.ffn_down_exps", s.ff, s.d, best, s.n_expert)
    yield vec("output_norm", s.d)
    yield mat("output", s.d, s.vocab, Q6_K)


def _alphabet() -> list[str]:
    """GPT-2's bytes_to_unicode."""
    keep = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(b if b in keep else next(rest)) for b in range(256)]


def _header(s: Scale, name: str) -> GgufHeader:
    head = GgufHeader()
    head.set("general.architecture", "olmoe")
    head.set("general.name", name)
    for key, value in (
        ("context_length", s.ctx), ("embedding_length", s.d), ("block_count", s.n_layer),
        ("feed_forward_length", s.ff), ("attention.head_count", s.heads),
        ("attention.head_count_kv", s.heads), ("expert_count", s.n_expert),
        ("expert_used_count", s.used), ("attention.layer_norm_rms_epsilon", 1e-5),
        ("rope.freq_base", 10000.0),
    ):  # fmt: skip
        head.set(f"olmoe.{key}", value)
    words = [f"{'abcdefghij'[i % 10]}{i:x}" for i in range(s.vocab - 257)]
    head.set("tokenizer.ggml.model", "gpt2")
    head.set("tokenizer.ggml.pre", "olmo")
    head.set_array("tokenizer.ggml.tokens", STRING, [*_alphabet(), *words, "<|endoftext|>"])
    head.set_array("tokenizer.ggml.token_type", I32, [1] * (s.vocab - 1) + [3])
    head.set_array("tokenizer.ggml.merges", STRING, ["h e"])
    head.set("tokenizer.ggml.eos_token_id", s.vocab - 1, U32)
    head.set("tokenizer.ggml.add_bos_token", False)
    head.tensors = list(_tensors(s))
    return head


def _data(rng: np.random.Generator, t: OutTensor, scale: Scale) -> Iterator[Any]:
    count = int(np.prod(t.dims))
    if t.type_id == F32.id:
        x = rng.standard_normal(count, np.float32)
        yield x / np.float32(t.dims[0] ** 0.5) if len(t.dims) > 1 else 1 + np.float32(0.1) * x
        return
    std = deviation(t, scale)
    for at in range(0, count // 256, _BLOCKS):
        yield _MAKE[t.type_id](rng, min(_BLOCKS, count // 256 - at), std)


def deviation(t: OutTensor, scale: Scale) -> float:
    """Standard deviation of a matrix's weights."""
    role = t.name.removesuffix(".weight").rpartition(".")[2]
    gain = scale.embd if role == "token_embd" else GAINS.get(role, 1.0)
    return gain / t.dims[0] ** 0.5


def write(path: Path, scale: str = "full", seed: int = 1) -> Path:
    """Writes the file; the same bytes for the same scale and seed.

    Args:
        scale: a key of SCALES: full 4.2 GB, wide 1.3 GB (little to compute), small 110 MB, tiny 6 MB.
    """
    head = _header(SCALES[scale], f"random OLMoE {scale} {seed}")
    rng = np.random.Generator(np.random.SFC64(seed))
    with path.open("wb") as out:
        out.write(head.pack())
        for t in head.tensors:
            for piece in _data(rng, t, SCALES[scale]):
                out.write(np.ascontiguousarray(piece).data.cast("B"))
            pad(out, t.size, head.alignment)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Random weights in OLMoE's geometry.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write(args.out, args.scale, args.seed)


if __name__ == "__main__":
    main()
