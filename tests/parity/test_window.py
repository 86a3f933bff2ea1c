"""Sliding-window layers: a ring as long as the window gives what a masked float64 model gives.

No family that the kit converts has such layers yet, so the feature is added to a converted manifest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from colibri_kit.native import Engine

from . import numpy_moe
from .conftest import reference


@pytest.mark.parametrize(("window", "layers"), [(5, "wf"), (1, "ww"), (16, "fw"), (400, "ww")])
def test_window(window: int, layers: str, convert: Callable[..., Path], tmp_path: Path) -> None:
    ref = reference("qwen2moe", "f32")
    tokens = np.concatenate([ref.tokens, ref.tokens[::-1], ref.tokens])
    model = tmp_path / "m.coli"
    shutil.copytree(convert(ref.gguf), model)
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["features"] |= {"window": window, "window_layers": layers}
    (model / "manifest.json").write_text(json.dumps(manifest))
    want, chosen = numpy_moe.run(
        numpy_moe.Model(ref.gguf), tokens, [window if c == "w" else 0 for c in layers]
    )
    hashes = set()
    for batch, kv in [(1, "f32"), (4, "f32"), (64, "f32"), (1, "f16"), (7, "f16")]:
        with Engine(model, kv=kv, batch=batch, threads=2) as engine:
            kv_bytes = engine.ledger()["lines"]["KV cache"]
            logits, experts = engine.eval(tokens)
        if kv == "f32":
            assert np.abs(logits - want).max() <= 1e-4
            assert np.array_equal(experts, chosen)
        hashes.add((kv, logits.tobytes()))
        item = 4 if kv == "f32" else 2
        rows = [min(window + batch, 512) if c == "w" else 512 for c in layers]
        # key and value, 2 heads of 16; never less than the golden's 16 rows of F16
        assert kv_bytes <= sum(max(r * item, 16 * 2) for r in rows) * 2 * 2 * 16 + 4 * 64
    assert len(hashes) == 2  # one answer per KV type, whatever the batch
