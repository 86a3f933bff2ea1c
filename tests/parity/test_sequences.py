"""Several sequences in one batch: each gives the bits that it gives alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_kit.native import Engine, binding

from .conftest import reference


@contextmanager
def opened(model: Path, **settings: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(ffi, lib, engine) with C options set by name."""
    ffi, lib = binding.load()
    folder = ffi.new("char[]", str(model).encode())
    opt = ffi.new("struct cb_options *", {"model_dir": folder, **settings})
    out, err = ffi.new("struct cb_engine **"), ffi.new("struct cb_err *")
    assert lib.cb_engine_open(opt, out, err) == 0, ffi.string(err.msg)
    try:
        yield ffi, lib, out[0]
    finally:
        lib.cb_engine_close(out[0])


def run(
    ffi: Any, lib: Any, engine: Any, steps: list[tuple[int, np.ndarray]], vocab: int
) -> list[bytes] | str:
    """Logits of each step's last token, or the error's text."""
    tokens = [ffi.new("int32_t[]", t.tolist()) for _, t in steps]
    c = ffi.new("struct cb_step[]", len(steps))
    for i, (seq, t) in enumerate(steps):
        c[i].seq, c[i].tokens, c[i].n = seq, tokens[i], len(t)
    err = ffi.new("struct cb_err *")
    if lib.cb_run(engine, c, len(steps), err) != 0:
        return str(ffi.string(err.msg).decode())
    return [bytes(ffi.buffer(s.logits, vocab * 4)) for s in c]


@pytest.mark.parametrize("kv", [0, 1, 2])
@pytest.mark.parametrize("family", ["qwen2moe", "granitemoe-shared"])
def test_batched_equals_alone(family: str, kv: int, convert: Callable[..., Path]) -> None:
    ref = reference(family, "q4_k_m")
    model, vocab = convert(ref.gguf), ref.logits.shape[1]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, vocab, n).astype(np.int32) for n in (3, 17, 1, 9)]
    tails = [rng.integers(0, vocab, 6).astype(np.int32) for _ in prompts]
    alone: list[list[bytes]] = []
    kv_name = {0: "f16", 1: "f32", 2: "q8_0"}[kv]
    with Engine(model, kv=kv_name, threads=1) as engine:
        for p, t in zip(prompts, tails, strict=True):
            engine.reset()
            logits, _ = engine.eval(np.concatenate([p, t]))
            alone.append([row.tobytes() for row in logits[len(p) - 1 :]])
    with opened(model, kv_type=kv, sequences=4, threads=3, batch=32, cache_experts=3) as (ffi, lib, e):
        # Sequences join one by one: a prefill beside others' decode steps.
        for round_ in range(10):
            steps = []
            for s in range(4):
                at = round_ - s  # sequence s begins at round s
                if at == 0:
                    steps.append((s, prompts[s]))
                elif 0 < at <= 6:
                    steps.append((s, tails[s][at - 1 : at]))
            got = run(ffi, lib, e, steps, vocab)
            assert not isinstance(got, str), got
            for (s, _), logits in zip(steps, got, strict=True):
                assert logits == alone[s][round_ - s], (round_, s)
        assert [lib.cb_seq_position(e, s) for s in range(4)] == [len(p) + 6 for p in prompts]
        lib.cb_seq_reset(e, 2)
        again = run(ffi, lib, e, [(2, prompts[2])], vocab)
        assert again[0] == alone[2][0]


def test_bad_steps_change_nothing(convert: Callable[..., Path]) -> None:
    ref = reference("qwen2moe", "q4_k_m")
    vocab = ref.logits.shape[1]
    one, many = ref.tokens[:1], ref.tokens[:20]
    with opened(convert(ref.gguf), sequences=2, batch=8, ctx=16) as (ffi, lib, e):
        for steps, why in [
            ([], "0 steps"),
            ([(0, one), (0, one)], "twice"),
            ([(2, one)], "does not exist"),
            ([(0, one), (1, one), (0, one)], "3 steps"),
            ([(0, ref.tokens[:5]), (1, ref.tokens[:5])], "10 tokens in one step; the batch is 8"),
            ([(1, many)], "do not fit in the context"),
            ([(0, np.array([vocab], np.int32))], "outside the vocabulary"),
            ([(0, one[:0])], "no tokens"),
        ]:
            got = run(ffi, lib, e, steps, vocab)
            assert isinstance(got, str) and why in got, (steps, got)
            assert [lib.cb_seq_position(e, s) for s in range(2)] == [0, 0]
