"""The instruction scan: every instruction a board cannot execute is found and named."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_tree import own_cache, tree

from colibri_kit.config import load_board
from colibri_kit.errors import BuildError
from colibri_kit.toolchain import build_engine, scan

__all__ = ["own_cache"]  # a fixture

#: What it shows -> (assembler directive, instruction, the feature's name in the message).
OFFENDERS_A64 = {
    "dotprod": (".arch_extension dotprod", "sdot v0.4s, v1.16b, v2.16b", "dotprod"),
    "udot": (".arch_extension dotprod", "udot v0.4s, v1.16b, v2.4b[1]", "dotprod"),
    "lse add": (".arch_extension lse", "ldaddal w1, w1, [%0]", "lse"),
    "lse cas": (".arch_extension lse", "casal w1, w2, [%0]", "lse"),
    "fp16": (".arch_extension fp16", "fadd h0, h1, h2", "fp16"),
    "fp16 vector": (".arch_extension fp16", "fmla v0.8h, v1.8h, v2.8h", "fp16"),
    "i8mm": (".arch armv8.6-a+i8mm", "smmla v0.4s, v1.16b, v2.16b", "i8mm"),
    "bf16": (".arch armv8.6-a+bf16", "bfdot v0.4s, v1.8h, v2.8h", "bf16"),
    "sve": (".arch_extension sve", "add z0.s, z1.s, z2.s", "sve"),
    "crypto": (".arch_extension crypto", "aese v0.16b, v1.16b", "crypto"),
    "rcpc": (".arch armv8.3-a", "ldapr w1, [%0]", "rcpc"),
}


def offending(tmp_path: Path, statement: str, symbol: str = "cb_offender") -> Path:
    bad = f"int {symbol}(int *p) {{ {statement} return *p; }}\n"
    main = f"int {symbol}(int *p);\nint main(int n, char **v) {{ (void)v; return {symbol}(&n); }}\n"
    native = tree(tmp_path, core__bad=bad)
    (native / "cli" / "main.c").write_text(main)
    return native


@pytest.mark.parametrize("case", sorted(OFFENDERS_A64))
def test_scan_refuses_on_armv80(tmp_path: Path, own_cache: Path, case: str) -> None:
    directive, instruction, feature = OFFENDERS_A64[case]
    asm = f'__asm__ volatile("{directive}\\n {instruction}" :: "r"(p) : "v0", "w1", "memory");'
    native = offending(tmp_path, asm)
    with pytest.raises(BuildError) as caught:
        build_engine(load_board("a53-plc"), tmp_path / "a", native=native)
    err = caught.value
    assert (err.code, err.exit_status) == ("CK-BUILD-ISA", 12)
    first = err.message.splitlines()[1].strip()
    assert first.startswith(instruction.split()[0] + " ")
    assert f"({feature}) in cb_offender at 0x" in first
    assert not (tmp_path / "a").exists()


def test_scan_finds_what_a_compiler_flag_smuggles_in(tmp_path: Path, own_cache: Path) -> None:
    """No inline assembly: a target attribute, as a kernel might carry."""
    native = offending(tmp_path, "return __atomic_fetch_add(p, 1, 5);")
    source = native / "core" / "bad.c"
    source.write_text('__attribute__((target("lse"))) ' + source.read_text())
    with pytest.raises(BuildError, match=r"ldaddal .* \(lse\) in cb_offender"):
        build_engine(load_board("rpi4"), tmp_path / "a", native=native)
    assert build_engine(load_board("rpi5"), tmp_path / "a", native=native).code_bytes_scanned > 0


def test_armv80_conversions_and_crc_pass(tmp_path: Path, own_cache: Path) -> None:
    """fcvt from half precision is ARMv8.0; CRC32 is in the boards' isa list."""
    native = offending(
        tmp_path,
        '__asm__ volatile("fcvt s0, h1\\n fcvtl v0.4s, v1.4h\\n crc32cw w1, w1, w2\\n"'
        ' "mul v0.8h, v1.8h, v2.8h\\n"'
        ' "ldxr w1, [%0]\\n stxr w2, w1, [%0]" :: "r"(p) : "v0", "w1", "w2", "memory");',
    )
    assert build_engine(load_board("a53-plc"), tmp_path / "a", native=native).code_bytes_scanned > 1000


AVX = '__asm__ volatile("vaddps %%ymm1, %%ymm2, %%ymm0" ::: "xmm0");'
SSE41 = '__asm__ volatile("pmulld %%xmm1, %%xmm0" ::: "xmm0");'
SSSE3 = '__asm__ volatile("pshufb %%xmm1, %%xmm0" ::: "xmm0");'
BMI = '__asm__ volatile("shlx %%eax, %%ecx, %%edx" ::: "edx");'
AVX512 = '__asm__ volatile("vaddps %%zmm1, %%zmm2, %%zmm0" ::: "xmm0");'


@pytest.mark.parametrize(
    ("board", "statement", "symbol", "refused"),
    [
        ("host", AVX, "cb_dot", "vaddps .* \\(avx\\) in cb_dot at 0x"),
        ("host", AVX, "cb_dot_avx2", None),
        ("host", AVX, "cb_dot_sse41", "\\(avx\\) in cb_dot_sse41"),
        ("host", SSE41, "cb_dot", "pmulld .* \\(sse41\\) in cb_dot"),
        ("host", SSE41, "cb_dot_sse41", None),
        ("host", SSE41, "cb_dot_avx2", None),
        ("host", SSSE3, "cb_dot", "pshufb .* \\(ssse3\\)"),
        ("host", SSSE3, "cb_dot_sse41", None),
        ("host", BMI, "cb_dot_avx2", "shlx .* \\(bmi\\)"),
        ("x86-atom", AVX, "cb_dot_avx2", "\\(avx\\) in cb_dot_avx2"),
        ("x86-atom", AVX, "cb_dot", "\\(avx\\) in cb_dot"),
        ("x86-atom", SSE41, "cb_dot_sse41", None),
        ("x86-gateway", AVX, "cb_dot", None),
        ("x86-gateway", BMI, "cb_dot", None),
        ("x86-gateway", AVX512, "cb_dot_avx2", "vaddps .* \\(avx512\\)"),
    ],
)
def test_scan_on_x86(
    tmp_path: Path, own_cache: Path, board: str, statement: str, symbol: str, refused: str | None
) -> None:
    native = offending(tmp_path, statement, symbol)
    if refused is None:
        assert build_engine(load_board(board), tmp_path / "a", native=native).code_bytes_scanned > 1000
    else:
        with pytest.raises(BuildError, match=refused):
            build_engine(load_board(board), tmp_path / "a", native=native)


def test_scan_looks_at_all_code(tmp_path: Path, own_cache: Path) -> None:
    """Static functions, code without a symbol and hand-written sections are scanned too."""
    hidden = (
        '__asm__(".section .text.hidden,\\"axR\\",@progbits\\n .byte 0x90,0x90\\n vzeroall\\n .text");\n'
        "int cb_f(void) { return 0; }\n"
    )
    native = tree(tmp_path, core__bad=hidden)
    with pytest.raises(BuildError, match=r"vzeroall\s+\(avx\) in "):
        build_engine(load_board("host"), tmp_path / "a", native=native)


@pytest.mark.parametrize(
    ("mnemonic", "operands", "feature"),
    [
        ("tzcnt", "eax, ecx", None),
        ("movaps", "xmm0, xmm1", None),
        ("verr", "ax", None),
        ("vmcall", "", None),
        ("vmovaps", "xmm0, xmm1", "avx"),
        ("vmulps", "ymm0, ymm1, ymm2", "avx"),
        ("vfmadd231ps", "ymm0, ymm1, ymm2", "avx"),
        ("vpdpbusd", "ymm0, ymm1, ymm2", "avxvnni"),
        ("vmovups", "xmm17, xmm1", "avx512"),
        ("kmovw", "k1, eax", "avx512"),
        ("pextrw", "eax, xmm1, 2", None),
        ("pextrw", "word ptr [rax], xmm1, 2", "sse41"),
        ("crc32", "eax, ecx", "sse42"),
        ("popcnt", "eax, ecx", "abm"),
        ("lock cmpxchg", "dword ptr [rax], ecx", None),
        ("blendvps", "xmm0, xmm1, xmm0", "sse41"),
        ("roundss", "xmm0, xmm1, 9", "sse41"),
    ],
)
def test_x86_classes(mnemonic: str, operands: str, feature: str | None) -> None:
    assert scan.feature_x86(mnemonic, operands) == feature


@pytest.mark.parametrize(
    ("mnemonic", "operands", "feature"),
    [
        ("ldar", "w0, [x1]", None),
        ("ldadd", "w0, w1, [x2]", "lse"),
        ("stset", "w0, [x2]", "lse"),
        ("swpalb", "w0, w1, [x2]", "lse"),
        ("caspal", "x0, x1, x2, x3, [x4]", "lse"),
        ("sttr", "w0, [x1]", None),
        ("strb", "w0, [x1]", None),
        ("fcvt", "s0, h1", None),
        ("fcvtzs", "w0, h1", "fp16"),
        ("scvtf", "h0, w1", "fp16"),
        ("fmov", "s0, w1", None),
        ("fmov", "h0, w1", "fp16"),
        ("smlal", "v0.4s, v1.4h, v2.h[3]", None),
        ("fmul", "v0.4s, v1.4s, v2.s[0]", None),
        ("pmull", "v0.8h, v1.8b, v2.8b", None),
        ("pmull", "v0.1q, v1.1d, v2.1d", "crypto"),
        ("crc32cx", "w0, w0, x1", "crc"),
        ("sqrdmlah", "v0.4s, v1.4s, v2.4s", "rdm"),
        ("ld1w", "{z0.s}, p0/z, [x0]", "sve"),
        ("ptrue", "p0.b", "sve"),
        ("paciasp", "", None),
        ("adrp", "x0, #0x1000", None),
    ],
)
def test_aarch64_classes(mnemonic: str, operands: str, feature: str | None) -> None:
    assert scan.feature_aarch64(mnemonic, operands) == feature
