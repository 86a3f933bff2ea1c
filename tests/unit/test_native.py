"""The cffi binding: values against llama.cpp's and the gguf package's, and guards that hold."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from colibri_kit import native, resources
from colibri_kit.errors import EngineError, FormatError, KitError, PreflightError, UsageError
from colibri_kit.native import binding
from colibri_kit.toolchain import build_library

REFS = Path(__file__).resolve().parents[1] / "data" / "moe-refs" / "f32"
NAME = "olmoe.t64.f32"
Q8_0, Q4_K, F32 = 8, 12, 0


def reference(kind: str) -> Any:
    return np.load(REFS / f"{NAME}.{kind}.npy")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "olmoe.coli"
    args = ["convert", str(REFS / f"{NAME}.gguf"), "-o", str(out), "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "colibri_kit", *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def engine(model: Path) -> Any:
    with native.Engine(model, kv="f32", threads=1) as one:
        yield one


# ---- the model


def test_eval_agrees_with_llama_cpp(engine: native.Engine) -> None:
    logits, experts = engine.eval(reference("tokens"))
    want = reference("logits")
    assert logits is not None and experts is not None
    assert (logits.dtype, logits.shape) == (np.float32, want.shape)
    assert np.abs(logits - want).max() < 2e-3
    assert experts.dtype == np.int32 and np.array_equal(experts, reference("experts"))
    assert np.array_equal(engine.logits(), logits[-1])


def test_eval_in_pieces_gives_the_same_bits(engine: native.Engine) -> None:
    tokens = reference("tokens")
    whole, _experts = engine.eval(tokens)
    engine.reset()
    parts = [engine.eval(tokens[:3], want_experts=False)[0], engine.eval(tokens[3:].tolist())[0]]
    assert engine.position() == len(tokens)
    assert np.array_equal(np.concatenate([p for p in parts if p is not None]), whole)
    assert engine.eval(tokens[:1], want_all=False, want_experts=False) == (None, None)


def test_info_and_ledger(engine: native.Engine) -> None:
    info, ledger = engine.info(), engine.ledger()
    experts = reference("experts")
    assert info["arch"] == "olmoe"
    assert (info["n_moe_layer"], info["n_expert_used"]) == (experts.shape[0], experts.shape[2])
    assert info["n_vocab"] == reference("logits").shape[1]
    assert info["experts_loaded"] == info["n_expert"] * info["n_moe_layer"]
    assert sum(ledger["lines"].values()) == ledger["total"] > 0
    assert info["isa"] in ("scalar", "sse41", "avx2", "neon")


def test_golden_is_the_manifests(engine: native.Engine) -> None:
    assert engine.golden() == engine.info()["golden"]
    assert len(engine.golden()) == 64


def test_generate_is_greedy_and_repeatable(engine: native.Engine) -> None:
    prompt = [int(t) for t in reference("tokens")[:4]]
    ids, text, facts = engine.generate(prompt, 6)
    assert (facts["n_prompt"], facts["n_gen"]) == (4, len(ids))
    assert facts["finish"] in ("length", "eog")
    engine.reset()
    engine.eval(prompt)
    expected = []
    for _ in ids:
        expected.append(int(engine.logits().argmax()))
        engine.eval(expected[-1:])
    assert ids == expected
    assert engine.decode(ids).decode("utf-8", "replace") == text


def test_generate_stops_when_the_callback_says_so_or_fails(engine: native.Engine) -> None:
    prompt = [int(t) for t in reference("tokens")[:4]]
    ids, _text, facts = engine.generate(prompt, 20, temperature=1.0, seed=7, on_text=lambda _t: True)
    assert facts["finish"] == "cancel" and len(ids) < 20

    def broken(_text: str) -> bool:
        raise RuntimeError("from the callback")

    engine.reset()
    with pytest.raises(RuntimeError, match="from the callback"):
        engine.generate(prompt, 20, temperature=1.0, seed=7, on_text=broken)


def test_sampling_depends_on_the_seed_alone(engine: native.Engine) -> None:
    prompt = [int(t) for t in reference("tokens")[:4]]
    seen = []
    for seed in (1, 1, 2, 3):
        engine.reset()
        seen.append(engine.generate(prompt, 12, temperature=1.5, seed=seed)[0])
    assert seen[0] == seen[1] and len({tuple(s) for s in seen}) > 1


def test_encode_and_decode(engine: native.Engine) -> None:
    tokens = gguf.GGUFReader(REFS / f"{NAME}.gguf").get_field("tokenizer.ggml.tokens").contents()
    ids = engine.encode("ab ba")
    assert engine.decode(ids) == b"ab ba"
    assert "".join(tokens[i] for i in ids) == "abĠba"  # the vocabulary writes a space as Ġ
    with pytest.raises(UsageError) as caught:
        engine.encode(b"ok \xff no")
    assert caught.value.code == "CK-ENGINE-UTF8" and "3" in caught.value.message
    with pytest.raises(UsageError, match="not in the vocabulary"):
        engine.decode([10**6])


def test_counters_and_routing(engine: native.Engine) -> None:
    tokens = reference("tokens")
    engine.eval(tokens)
    counters = engine.counters()
    assert counters["tokens_prefill"] == len(tokens)
    layers = engine.info()["n_moe_layer"]
    assert counters["routes"] == len(tokens) * layers
    assert len(engine.route_ns()) == layers and all(n > 0 for n in engine.route_ns())
    experts, weights = engine.last_experts()
    assert np.array_equal(experts, reference("experts")[:, -1, :])
    assert (weights > 0).all() and (weights <= 1).all()


# ---- errors by code


def test_errors_have_classes_and_codes(model: Path, tmp_path: Path, engine: native.Engine) -> None:
    cases: list[tuple[type[KitError], str, Any]] = [
        (PreflightError, "CK-ENGINE-BUDGET", lambda: native.Engine(model, budget=4096)),
        (EngineError, "CK-ENGINE-UNSUPPORTED", lambda: native.Engine(model, isa="neon5")),
        (UsageError, "CK-ENGINE-INVALID", lambda: engine.eval([-1])),
        (UsageError, "CK-ENGINE-INVALID", lambda: engine.generate([], 1)),
        (UsageError, "CK-USAGE", lambda: native.Engine(model, kv="f8")),
        (UsageError, "CK-USAGE", lambda: native.Engine(model, threads=1 << 40)),
        (UsageError, "CK-USAGE", lambda: engine.eval([1 << 40])),
    ]
    for kind, code, act in cases:
        with pytest.raises(kind) as caught:
            act()
        assert caught.value.code == code, caught.value.message
    damaged = tmp_path / "damaged.coli"
    damaged.mkdir()
    for path in model.iterdir():
        data = bytearray(path.read_bytes())
        if path.name == "experts-0000.coli":
            data[len(data) // 2] ^= 1
        (damaged / path.name).write_bytes(data)
    with pytest.raises(FormatError) as caught_format:
        native.Engine(damaged)
    assert caught_format.value.exit_status == 8
    with pytest.raises(KitError):
        native.Engine(tmp_path / "nowhere.coli")


def test_context_is_bounded(model: Path) -> None:
    with native.Engine(model, ctx=16, threads=1) as small:
        with pytest.raises(UsageError) as caught:
            small.eval([1] * 17)
        assert caught.value.code == "CK-ENGINE-CONTEXT"


def test_plan_shows_the_sum_even_when_it_does_not_fit(model: Path) -> None:
    fits, tight = native.plan(model, ctx=16), native.plan(model, ctx=16, budget=4096)
    assert fits["fits"] and not tight["fits"]
    assert tight["ledger"]["budget"] == 4096
    assert tight["ledger"]["total"] == sum(tight["ledger"]["lines"].values()) > 4096
    assert "needs" in tight["message"]


def test_closed_engine_is_an_error(model: Path) -> None:
    engine = native.Engine(model)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.info()


# ---- quantising and checksums


def test_q8_0_and_f16_are_ggmls() -> None:
    x = np.random.default_rng(5).standard_normal((37, 96), dtype=np.float32)
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16):
        raw = native.quantise_rows(int(kind), x)
        want = gguf.quants.quantize(x, kind)
        assert np.array_equal(raw, want.view(np.uint8).reshape(raw.shape))
        back = native.dequantise_rows(int(kind), raw, 37, 96)
        assert np.array_equal(back, gguf.quants.dequantize(want, kind))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_dequantising_is_ggmls(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    x = np.random.default_rng(6).standard_normal((9, 512), dtype=np.float32)
    raw = native.quantise_rows(int(kind), x)
    back = native.dequantise_rows(int(kind), raw.tobytes(), 9, 512)
    assert np.allclose(back, gguf.quants.dequantize(raw, kind), rtol=1e-6, atol=1e-7)
    rms = float(np.sqrt(np.mean((back - x) ** 2)))
    assert rms < {"4": 0.12, "5": 0.06, "6": 0.03}[name[1]]


def test_threads_and_row_splits_do_not_matter() -> None:
    x = np.random.default_rng(7).standard_normal((600, 1024), dtype=np.float32)
    one = native.quantise_rows(Q4_K, x, threads=1)
    assert np.array_equal(one, native.quantise_rows(Q4_K, x, threads=3))
    assert np.array_equal(one[100:200], native.quantise_rows(Q4_K, x[100:200], threads=1))
    assert native.quantise_rows(Q4_K, x[:0]).shape == (0, native.row_bytes(Q4_K, 1024))


def test_bad_shapes_and_values() -> None:
    with pytest.raises(UsageError):
        native.row_bytes(Q4_K, 100)
    with pytest.raises(UsageError):
        native.row_bytes(99, 256)
    with pytest.raises(UsageError, match="matrix"):
        native.quantise_rows(Q8_0, np.zeros(32, np.float32))
    with pytest.raises(UsageError, match="importance"):
        native.quantise_rows(Q4_K, np.zeros((1, 256), np.float32), importance=np.ones(255))
    with pytest.raises(UsageError, match="rows need"):
        native.dequantise_rows(Q8_0, b"x" * 33, 1, 32)
    x = np.zeros((4, 32), np.float32)
    x[3, 5] = np.inf
    with pytest.raises(EngineError) as caught:
        native.quantise_rows(Q8_0, x)
    assert caught.value.code == "CK-ENGINE-NUMERIC"


def test_row_bytes_are_ggmls() -> None:
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"):
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        assert native.row_bytes(int(kind), 512) == 512 // block * size


def test_crc32c() -> None:
    assert native.crc32c(b"123456789") == 0xE3069283  # the check value of the CRC catalogues
    data = np.random.default_rng(8).integers(0, 256, 10_000, dtype=np.uint8)
    assert native.crc32c(data) == bitwise_crc32c(data.tobytes())
    assert native.crc32c(data[5000:], native.crc32c(data[:5000])) == native.crc32c(data)
    assert native.crc32c(b"") == 0 and native.crc32c(data) != zlib.crc32(data.tobytes())


def bitwise_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# ---- the guards


def test_declarations_come_from_the_header() -> None:
    text = binding.declarations(
        '#ifndef X\n#define X 1\n#ifdef __cplusplus\nextern "C" {\n#endif\n/* c */ int f(int a) // d\n'
        "#if defined(__GNUC__)\n    __attribute__((pure))\n#endif\n    ;\n#endif\n"
    )
    assert text.split() == ["int", "f(int", "a)", ";"]


def test_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    """A library whose struct grew and one whose ABI number differs."""
    for struct_bytes, abi in ((17, 1), (0, 99)):
        source = tmp_path / f"lib{abi}.c"
        source.write_text(
            "#include <string.h>\n#include <stddef.h>\n#include <stdint.h>\n"
            '#include "colibri.h"\n'
            f"uint32_t cb_abi(void) {{ return {abi} == 1 ? CB_ABI : {abi}; }}\n"
            "size_t cb_sizeof(const char *n) {\n"
            f'    if (!strcmp(n, "cb_info")) return sizeof(struct cb_info) + {struct_bytes};\n'
            + "".join(
                f'    if (!strcmp(n, "{n}")) return sizeof(struct {n});\n'
                for n in binding.STRUCTS
                if n != "cb_info"
            )
            + "    return 0;\n}\n"
        )
        library = source.with_suffix(".so")
        include = resources.native_dir() / "include"
        subprocess.run(
            [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", f"-I{include}", str(source), "-o",
             str(library)], check=True,
        )  # fmt: skip
        code = "from colibri_kit import native; native.crc32c(b'x')"
        env = {**__import__("os").environ, "COLIBRI_LIBRARY": str(library)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )
        assert "EngineError" in done.stderr and "built from other sources" in done.stderr
        assert ("cb_info" in done.stderr) if abi == 1 else ("ABI 99" in done.stderr)


def test_unloadable_library_is_an_engine_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "lib.so"
    fake.write_bytes(b"not a library")
    monkeypatch.setenv("COLIBRI_LIBRARY", str(fake))
    with pytest.raises(EngineError) as caught:
        binding.load.__wrapped__()
    assert caught.value.code == "CK-ENGINE-LOAD"


def test_library_is_cached_by_content() -> None:
    first = build_library()
    stamp = first.stat().st_mtime_ns
    assert build_library() == first and first.stat().st_mtime_ns == stamp
