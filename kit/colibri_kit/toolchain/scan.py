"""The instruction scan: a binary may hold only what its board's CPU can execute.

Compilers, libc and inline assembly can all smuggle in an instruction that
crashes one board in the field. So the linked binary is disassembled whole and
every instruction is put into a feature class; classes the board lacks are
refused by mnemonic, symbol and address. Where kernels are picked at run time
(x86-64 baseline), AVX may stand only in functions named ``…_avx2`` and SSSE3 or
SSE4.1 only in ``…_sse41`` (or stronger).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.errors import BuildError
from colibri_kit.toolchain.elf import code_regions, machine

MAX_SHOWN = 10

_LSE = re.compile(r"(casp?|swpp?)(a|al|l)?(b|h)?|(ld|st)(add|clr|eor|set|smax|smin|umax|umin)(a|al|l)?(b|h)?")
_A64_NAMES = {
    "dotprod": {"sdot", "udot"},
    "i8mm": {"usdot", "sudot", "smmla", "ummla", "usmmla"},
    "bf16": {"bfdot", "bfmmla", "bfmlalb", "bfmlalt", "bfcvt", "bfcvtn", "bfcvtn2"},
    "rdm": {"sqrdmlah", "sqrdmlsh"},
    "rcpc": {"ldapr", "ldaprb", "ldaprh"},
    "crypto": {"aese", "aesd", "aesmc", "aesimc", "eor3", "rax1", "xar", "bcax"},
    "fcma": {"fcmla", "fcadd"},
    "jscvt": {"fjcvtzs"},
    "fhm": {"fmlal", "fmlal2", "fmlsl", "fmlsl2"},
    "pauth": {"retaa", "retab", "braa", "brab", "blraa", "blrab", "ldraa", "ldrab"},
}
_A64 = {name: feature for feature, names in _A64_NAMES.items() for name in names}
_F16_CONVERSIONS = {"fcvt", "fcvtl", "fcvtl2", "fcvtn", "fcvtn2"}
_F16_OPERAND = re.compile(r"\bh(?:[0-9]|[12][0-9]|3[01])\b|\.(?:4|8)h\b")
_SVE_OPERAND = re.compile(r"(?:^|[\s,{\[])[zp](?:[0-9]|[12][0-9]|3[01])(?:\.[bhsdq]|/[mz])|\bvl\b")

_BMI = "andn bextr blsi blsmsk blsr bzhi mulx pdep pext rorx sarx shlx shrx"
_SSE3 = "addsubpd addsubps haddpd haddps hsubpd hsubps lddqu movddup movshdup movsldup fisttp"
_SSSE3 = (
    "pabsb pabsd pabsw palignr phaddd phaddsw phaddw phsubd phsubsw phsubw "
    "pmaddubsw pmulhrsw pshufb psignb psignd psignw"
)
_SSE41 = re.compile(
    r"blendv?p[ds]|dpp[ds]|extractps|insertps|movntdqa|mpsadbw|packusdw|pblendvb|pblendw|pcmpeqq|pextr[bdq]|"
    r"phminposuw|pinsr[bdq]|p(max|min)(sb|sd|ud|uw)|pmov[sz]x(bd|bq|bw|dq|wd|wq)|pmuldq|pmulld|ptest|round[ps][ds]"
)
_SSE42 = "crc32 pcmpestri pcmpestrm pcmpgtq pcmpistri pcmpistrm"
_AES = "aesenc aesenclast aesdec aesdeclast aesimc aeskeygenassist"
_X86_NAMES = {
    "bmi": _BMI,
    "sse3": _SSE3,
    "ssse3": _SSSE3,
    "sse42": _SSE42,
    "abm": "lzcnt popcnt movbe",
    "adx": "adcx adox",
    "aes": _AES,
    "pclmul": "pclmulqdq pclmullqlqdq pclmulhqhqdq pclmulhqlqdq pclmullqhqdq",
}
_X86 = {name: feature for feature, names in _X86_NAMES.items() for name in names.split()}
#: Names that begin with v but are old or about virtual machines.
_NOT_AVX = re.compile(
    r"ver[rw]|vm(call|clear|func|launch|load|mcall|ptrld|ptrst|read|resume|run|save|write|xoff|xon)"
)
_AVX512 = re.compile(r"\bzmm|\b[xy]mm(?:1[6-9]|2[0-9]|3[01])\b|\{k[0-7]\}|\bk[0-7]\b")

_V2 = frozenset({"sse3", "ssse3", "sse41", "sse42", "abm"})
_V3 = _V2 | {"avx", "bmi"}
_X86_CPU = {"x86_64": frozenset[str](), "x86_64_v2": _V2, "x86_64_v3": _V3, "haswell": _V3}
_TO_SSE41 = frozenset({"sse3", "ssse3", "sse41"})
_TO_SSE42 = _TO_SSE41 | {"sse42"}
_X86_SUFFIX = {
    "sse41": {"_sse41": _TO_SSE41, "_sse42": _TO_SSE42},
    "avx2": {"_avx2": _TO_SSE42 | {"avx"}},
}


@dataclass(frozen=True)
class Finding:
    """An instruction the board may not execute."""

    mnemonic: str
    operands: str
    feature: str
    symbol: str
    address: int

    def __str__(self) -> str:
        return f"{self.mnemonic} {self.operands} ({self.feature}) in {self.symbol} at {self.address:#x}"


def feature_aarch64(mnemonic: str, operands: str) -> str | None:
    """The extension beyond ARMv8.0-A that an instruction needs; None = baseline."""
    if _SVE_OPERAND.search(operands):
        return "sve"
    if mnemonic in _A64:
        return _A64[mnemonic]
    if mnemonic.startswith(("crc32",)):
        return "crc"
    if mnemonic.startswith(("sha1", "sha256", "sha512", "sm3", "sm4")):
        return "crypto"
    if mnemonic in ("pmull", "pmull2") and ".1q" in operands:
        return "crypto"
    if _LSE.fullmatch(mnemonic):
        return "lse"
    floating = mnemonic.startswith("f") or mnemonic in ("scvtf", "ucvtf")
    if floating and mnemonic not in _F16_CONVERSIONS and _F16_OPERAND.search(operands):
        return "fp16"
    return None


def feature_x86(mnemonic: str, operands: str) -> str | None:
    """The extension beyond x86-64 (SSE2) that an instruction needs; None = baseline.

    ``tzcnt`` is not a class: compilers emit it on purpose for the baseline,
    where old CPUs execute it as ``bsf`` with the same result.
    """
    mnemonic = mnemonic.split()[-1]
    if mnemonic in _X86:
        return _X86[mnemonic]
    if mnemonic == "pextrw" and operands.split(",")[0].endswith("]"):
        return "sse41"
    if _SSE41.fullmatch(mnemonic):
        return "sse41"
    if _AVX512.search(operands):
        return "avx512"
    if mnemonic.startswith("vpdp"):
        return "avxvnni"
    if mnemonic.startswith("v") and not _NOT_AVX.fullmatch(mnemonic):
        return "avx"
    return None


def _allowed(arch: str, mcpu: str, isa: tuple[str, ...], symbol: str) -> frozenset[str]:
    if arch == "aarch64":
        return frozenset(isa)
    allowed = _X86_CPU.get(mcpu, frozenset())
    base = symbol.split(".", 1)[0]
    for name in isa:
        for suffix, features in _X86_SUFFIX.get(name, {}).items():
            if base.endswith(suffix):
                allowed = allowed | features
    return allowed


def scan(path: Path, *, mcpu: str, isa: tuple[str, ...]) -> Iterator[Finding]:
    """Every instruction of an unstripped ELF that a board with this CPU and ISA list lacks.

    Undecodable bytes are skipped four (AArch64) or one (x86) at a time.
    """
    import capstone

    arch = machine(path)
    if arch == "aarch64":
        engine = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
        classify = feature_aarch64
    elif arch == "x86_64":
        engine = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
        classify = feature_x86
    else:
        raise BuildError(f"cannot scan a binary for {arch}")
    engine.skipdata = True
    for region in code_regions(path):
        allowed = _allowed(arch, mcpu, isa, region.symbol)
        for address, _size, mnemonic, operands in engine.disasm_lite(region.code, region.address):
            feature = classify(mnemonic, operands)
            if feature is not None and feature not in allowed:
                yield Finding(mnemonic, operands, feature, region.symbol, address)


def check(path: Path, *, board: str, mcpu: str, isa: tuple[str, ...]) -> int:
    """Scans; returns the number of code bytes looked at.

    Raises:
        BuildError: names the instructions outside the board's ISA.
    """
    found = list(scan(path, mcpu=mcpu, isa=isa))
    if found:
        shown = "\n".join(f"  {f}" for f in found[:MAX_SHOWN])
        more = f"\n  … and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
        raise BuildError(
            f"{len(found)} instructions are outside what board '{board}' can execute:\n{shown}{more}",
            hint="compile that file for the board's baseline, or name the feature in the board's isa list",
            code="CK-BUILD-ISA",
        )
    return sum(len(region.code) for region in code_regions(path))
