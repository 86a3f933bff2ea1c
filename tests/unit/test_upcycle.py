"""upcycle: the file by the ``gguf`` package's eyes, and that the MoE is the dense model."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_maker import make

from colibri_kit import cli

Q = gguf.GGMLQuantizationType


def run(*argv: object) -> int:
    try:
        cli.main([str(a) for a in argv])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def tensors(path: Path) -> dict[str, gguf.gguf_reader.ReaderTensor]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return make(tmp_path / "dense.gguf", "llama", n_expert=0, kind=Q.Q4_1)


def test_experts_are_copies_and_the_rest_is_untouched(tmp_path: Path, dense: Path) -> None:
    out = tmp_path / "moe.gguf"
    assert run("upcycle", "-q", dense, "--experts", 4, "--used", 2, "--seed", 5, "-o", out) == 0
    before, after = tensors(dense), tensors(out)
    for i in range(2):
        for part in ("gate", "up", "down"):
            old = before.pop(f"blk.{i}.ffn_{part}.weight")
            new = after.pop(f"blk.{i}.ffn_{part}_exps.weight")
            assert new.tensor_type == old.tensor_type == Q.Q4_1
            assert [int(n) for n in new.shape] == [*(int(n) for n in old.shape), 4]
            for e in range(4):
                assert (new.data[e] == old.data).all()
        router = after.pop(f"blk.{i}.ffn_gate_inp.weight")
        assert router.tensor_type == Q.F32 and router.data.shape == (4, 64)
        assert 0.01 < router.data.std() < 0.03 and abs(router.data.mean()) < 0.01
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].data.tobytes() == after[name].data.tobytes()
    old_keys = {k: f.contents() for k, f in gguf.GGUFReader(dense).fields.items() if "." in k[:9]}
    new_keys = {k: f.contents() for k, f in gguf.GGUFReader(out).fields.items()}
    assert (new_keys["llama.expert_count"], new_keys["llama.expert_used_count"]) == (4, 2)
    for key in old_keys.keys() - {"general.name", "GGUF.tensor_count", "GGUF.kv_count"}:
        assert new_keys[key] == old_keys[key]


def test_the_seed_decides_and_nothing_else(tmp_path: Path, dense: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert (
            run("upcycle", "-q", dense, "--seed", seed, "--noise", 0.1, "-o", tmp_path / f"{name}.gguf") == 0
        )
    a, b, c = ((tmp_path / f"{n}.gguf").read_bytes() for n in "abc")
    assert a == b != c
    routers = [tensors(tmp_path / "a.gguf")[f"blk.{i}.ffn_gate_inp.weight"].data for i in (0, 1)]
    assert not (routers[0] == routers[1]).all()


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.Q8_0])
def test_noise_is_relative_and_differs_between_experts(tmp_path: Path, kind: Q) -> None:
    dense, out = make(tmp_path / "d.gguf", "llama", n_expert=0, kind=kind), tmp_path / "m.gguf"
    assert run("upcycle", "-q", dense, "--experts", 3, "--used", 1, "--noise", 0.1, "-o", out) == 0
    before, after = tensors(dense), tensors(out)
    w = gguf.quants.dequantize(before["blk.1.ffn_down.weight"].data, kind)
    noisy = after["blk.1.ffn_down_exps.weight"]
    assert noisy.tensor_type == kind
    x = gguf.quants.dequantize(noisy.data.reshape(-1, noisy.data.shape[-1]), kind).reshape(3, *w.shape)
    rms = np.sqrt((w**2).mean())
    for e in range(3):
        assert 0.08 < np.sqrt(((x[e] - w) ** 2).mean()) / rms < 0.12
    noises = [(x[e] - w).ravel() for e in range(3)]
    assert abs(np.corrcoef(noises[0], noises[1])[0, 1]) < 0.1
    assert after["blk.1.attn_q.weight"].data.tobytes() == before["blk.1.attn_q.weight"].data.tobytes()


def test_the_moe_computes_what_the_dense_model_computes(tmp_path: Path) -> None:
    """--dtype f32, so that no activation is quantised: logits agree to rounding."""
    dense = make(tmp_path / "d.gguf", "llama", n_expert=0, kind=Q.Q8_0)
    moe = tmp_path / "m.gguf"
    assert run("upcycle", "-q", dense, "--experts", 8, "--dtype", "f32", "-o", moe) == 0
    assert {t.tensor_type for t in tensors(moe).values()} == {Q.F32}
    ids = np.random.default_rng(1).integers(0, 264, 24).astype(np.int32)
    np.save(tmp_path / "ids.npy", ids)
    for name, source in (("d", dense), ("m", moe)):
        out = tmp_path / f"{name}.coli"
        assert run("convert", "-q", "--quant", "f32", source, "-o", out) == 0
        args = ["--tokens", tmp_path / "ids.npy", "-o", tmp_path / f"{name}.npy", "--kv", "f32"]
        assert run("logits", "-q", out, *args, "--experts", tmp_path / f"{name}.experts.npy") == 0
    d, m = np.load(tmp_path / "d.npy"), np.load(tmp_path / "m.npy")
    assert d.shape == (24, 264) and d.dtype == np.float32 and np.abs(d).max() > 0.5
    assert np.abs(d - m).max() < 2e-5
    experts = np.load(tmp_path / "m.experts.npy")
    assert experts.shape == (2, 24, 2) and experts.dtype == np.int32
    assert len(np.unique(experts)) > 2 and (experts[..., 0] != experts[..., 1]).all()


def test_dry_run_and_refusals(tmp_path: Path, dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    assert run("upcycle", "--dry-run", "--json", dense, "-o", out) == 0
    data = json.loads(capsys.readouterr().out)
    assert not out.exists()
    assert run("upcycle", "-q", dense, "-o", out) == 0
    assert out.stat().st_size == data["bytes"]
    assert run("upcycle", "-q", dense, "-o", out) == 6
    assert run("upcycle", "-q", dense, "-o", out, "--force") == 0
    assert run("upcycle", "-q", dense, "-o", dense, "--force") == 6
    assert run("upcycle", "-q", out, "-o", tmp_path / "x.gguf") == 8  # already a MoE
    assert run("upcycle", "-q", dense, "--experts", 1, "-o", tmp_path / "x.gguf") == 2
    assert run("upcycle", "-q", dense, "--experts", 4, "--used", 5, "-o", tmp_path / "x.gguf") == 2
    assert run("upcycle", "-q", dense, "-o", tmp_path / "x.bin") == 2
    err = capsys.readouterr().err
    assert "upcycle takes a dense llama model" in err and "Traceback" not in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense.gguf", "m.gguf"]
