"""What a decoded token costs on the link: docs/offload.md's formulas and table, against counted bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colibri_kit.native import Engine

from .conftest import FAMILIES, reference

DOC = (Path(__file__).resolve().parents[2] / "docs/offload.md").read_text()
#: Bytes of a token's activations by form, of d values: K-quants, Q4_0 … Q8_0, float.
FORMS: tuple[Callable[[int], int], ...] = (lambda d: d // 256 * 292, lambda d: d // 32 * 40, lambda d: 4 * d)


def decision(used: int) -> int:
    """Frame, head and rows of an EXEC."""
    return 28 + -(-(16 + 8 * used) // 16) * 16


def back(d: int, used: int) -> int:
    """RESULT, without the 32 bytes of CREDIT."""
    return 44 + 4 * d * used


def test_the_table() -> None:
    rows = re.findall(
        r"^\| `(\w+)`[^|]*\| (\d+) \| (\d+) \| (\d+) \| (\d+) / (\d+) / (\d+) \| (\d+) \|$", DOC, re.MULTILINE
    )
    assert {row[0] for row in rows} == {family.split("-")[0] for family in FAMILIES}
    for _, *numbers in rows:
        d, used, head, *acts, up = map(int, numbers)
        assert (head, up) == (decision(used), back(d, used))
        assert acts == [form(d) for form in FORMS]
    limit = int(re.search(r"below 1 KB up to K = (\d+)", DOC).group(1))  # type: ignore[union-attr]
    assert decision(limit) < 1024 <= decision(limit + 1)


@pytest.mark.parametrize(("kind", "form"), [("q4_k_m", 0), ("f32", 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_counted(
    family: str, kind: str, form: int, convert: Callable[..., Path], module: Any, tmp_path: Path
) -> None:
    """The engine's counters over six tokens, one at a time, all experts there."""
    model, path = convert(reference(family, kind).gguf), tmp_path / "s"
    there = module(model, "--listen", f"unix:{path}")
    link = {"offload": f"unix:{path}", "offload_share": 100, "offload_deadline_ms": 20000}
    with Engine(model, threads=1, **link) as engine:
        engine.eval([1])  # the trial
        info, before = engine.info(), engine.counters()
        for token in (5, 9, 2, 7, 3, 8):
            engine.eval([token])
        after = engine.counters()
    d, used, layers = (int(info[k]) for k in ("n_embd", "n_expert_used", "n_moe_layer"))
    got = {k: after[k] - before[k] for k in ("offload_bytes_out", "offload_bytes_in", "offload_experts")}
    assert got["offload_experts"] == 6 * layers * used
    assert got["offload_bytes_out"] == 6 * layers * (decision(used) + FORMS[form](d))
    # The CREDIT of the last layer before and after may still be on its way.
    there_to_here = 6 * layers * (back(d, used) + 32)
    assert abs(got["offload_bytes_in"] - there_to_here) in (0, 32)
    assert there.stop()["failed"] == 0
