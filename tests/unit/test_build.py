"""The tool chain: reproducible, scanned, stripped, cached; run on small sources and on the engine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from colibri_kit import resources
from colibri_kit.config import Board, load_board
from colibri_kit.errors import BuildError, ConfigError
from colibri_kit.toolchain import build_engine, elf, pe, plan_engine, scan
from colibri_kit.toolchain.sources import find_sources
from colibri_kit.toolchain.zig import cc

HEADER = "int cb_answer(int x);\n"
ANSWER = '#include "colibri.h"\nint cb_answer(int x) { return x * 42; }\n'
MAIN = (
    '#include <stdio.h>\n#include "colibri.h"\n'
    'int main(int argc, char **argv) { (void)argv; printf("%d\\n", cb_answer(argc)); return 0; }\n'
)


def tree(base: Path, **files: str) -> Path:
    """A small source tree: a program, and more files given as path__with__slashes=content."""
    native = base / "native"
    wanted = {"include/colibri.h": HEADER, "core/answer.c": ANSWER, "cli/main.c": MAIN}
    wanted |= {name.replace("__", "/") + ".c": text for name, text in files.items()}
    for name, text in wanted.items():
        path = native / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return native


def sha256(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty object cache; zig's own (its libc builds take a minute) stays shared."""
    shared = os.environ.get("ZIG_GLOBAL_CACHE_DIR") or str(resources.cache_dir() / "zig")
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", shared)
    monkeypatch.setenv("ZIG_LOCAL_CACHE_DIR", shared)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "colibri-kit"


# ---- which files, which flags


def test_kernel_folders_follow_the_board(tmp_path: Path) -> None:
    files = {f"kernels__{isa}__k": "int x;" for isa in ("scalar", "sse41", "avx2", "neon")}
    native = tree(tmp_path, tests__checkkern__main="int main(void){}", tests__checkkern__ck="int y;", **files)
    (native / "tests" / "fuzz").mkdir()
    (native / "tests" / "fuzz" / "f.c").write_text("int z;")

    def built(board: str) -> list[str]:
        return [u.source for u in plan_engine(load_board(board), native).units]

    common = ["core/answer.c", "kernels/scalar/k.c", "cli/main.c", "tests/checkkern/ck.c"]
    assert sorted(built("rpi4")) == sorted([*common, "kernels/neon/k.c"])
    assert sorted(built("x86-atom")) == sorted([*common, "kernels/sse41/k.c"])
    assert sorted(built("x86-gateway")) == sorted([*common, "kernels/sse41/k.c", "kernels/avx2/k.c"])


def test_only_kernel_files_get_more_than_the_baseline(tmp_path: Path) -> None:
    native = tree(tmp_path, kernels__sse41__k="int x;", kernels__avx2__k="int x;")
    flags = {u.source: u.flags for u in plan_engine(load_board("host"), native).units}
    assert "-mcpu=x86_64+avx2+fma+f16c" in flags["kernels/avx2/k.c"]
    assert "-mcpu=x86_64+sse3+ssse3+sse4_1" in flags["kernels/sse41/k.c"]
    assert {"-mcpu=x86_64", "-DCB_HAVE_AVX2=1", "-DCB_HAVE_SSE41=1"} <= set(flags["core/answer.c"])
    for some in flags.values():
        assert {"-ffp-contract=off", "-O3", "-std=c11"} <= set(some)
        assert not any("fast-math" in f for f in some)


def test_no_sources_is_a_build_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no C sources"):
        find_sources(tmp_path, ("core",), ())


# ---- building


def test_builds_runs_and_caches(tmp_path: Path, own_cache: Path) -> None:
    native = tree(tmp_path)
    host = load_board("host")
    ticks: list[int] = []
    first = build_engine(host, tmp_path / "out" / "a", native=native, advance=ticks.append)
    assert (first.cached, sum(ticks)) == (False, 2)
    ran = subprocess.run([first.path, "x"], capture_output=True, text=True, check=True)
    assert ran.stdout == "84\n"
    assert first.sha256 == sha256(first.path) and first.size_bytes == Path(first.path).stat().st_size

    objects = {p: p.stat().st_mtime_ns for p in own_cache.rglob("*.o")}
    assert len(objects) == 2
    again = build_engine(host, tmp_path / "b", native=native)
    assert again.cached and again.sha256 == first.sha256 == sha256(again.path)

    (native / "cli" / "main.c").write_text(MAIN.replace("%d", "<%d>"))
    changed = build_engine(host, tmp_path / "c", native=native)
    assert not changed.cached and changed.sha256 != first.sha256
    after = {p: p.stat().st_mtime_ns for p in own_cache.rglob("*.o")}
    assert len(after) == 3 and objects.items() <= after.items()

    (native / "include" / "colibri.h").write_text(HEADER + "#define NEW 1\n")
    assert build_engine(host, native=native).build_id != changed.build_id


def test_damaged_cache_is_built_anew(tmp_path: Path, own_cache: Path) -> None:
    native = tree(tmp_path)
    first = build_engine(load_board("host"), native=native)
    good = Path(first.path).read_bytes()
    for damage in (good[:-100], good[:5000] + b"\0" + good[5001:], b""):
        Path(first.path).write_bytes(damage)
        again = build_engine(load_board("host"), native=native)
        assert not again.cached and Path(again.path).read_bytes() == good
    Path(first.path).with_name("info.json").write_text("{")
    assert not build_engine(load_board("host"), native=native).cached


def test_output_that_cannot_be_written(tmp_path: Path, own_cache: Path) -> None:
    native = tree(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BuildError, match="cannot write") as caught:
        build_engine(load_board("host"), tmp_path / "file" / "engine", native=native)
    assert caught.value.code == "CK-BUILD-OUTPUT"


def test_cache_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="no folder for caches") as caught:
        resources.cache_dir()
    assert caught.value.hint is not None and "XDG_CACHE_HOME" in caught.value.hint


@pytest.mark.parametrize("board", ["host", "rpi4"])
def test_same_bytes_from_two_folders(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, board: str
) -> None:
    results = []
    for name in ("one", "another/deeper"):
        native = tree(tmp_path / name)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name / "cache"))
        monkeypatch.chdir(tmp_path / name)
        result = build_engine(load_board(board), Path("out"), native=native)
        assert not result.cached
        results.append(result)
    assert results[0].sha256 == results[1].sha256
    assert results[0].build_id == results[1].build_id
    assert str(tmp_path).encode() not in Path(results[0].path).read_bytes()


def test_folders_with_spaces_and_quotes(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build_engine(load_board("host"), native=tree(tmp_path / "plain"))
    odd = tmp_path / 'it\'s a "folder"'
    monkeypatch.setenv("XDG_CACHE_HOME", str(odd / "cache"))
    result = build_engine(load_board("host"), odd / "out", native=tree(odd))
    assert not result.cached and result.sha256 == plain.sha256


def test_stripped_file_is_the_debug_file_less_symbols(tmp_path: Path, own_cache: Path) -> None:
    result = build_engine(load_board("rpi4"), tmp_path / "a", native=tree(tmp_path))
    full, stripped = elf.alloc_sections(Path(result.debug)), elf.alloc_sections(Path(result.path))
    assert full == stripped and len(full[".text"][1]) > 1000
    with Path(result.path).open("rb") as stream:
        image = ELFFile(stream)
        assert image.get_section_by_name(".symtab") is None
        assert not any(s.name.startswith(".debug") for s in image.iter_sections())
    with Path(result.debug).open("rb") as stream:
        image = ELFFile(stream)
        names = {s.name for s in image.get_section_by_name(".symtab").iter_symbols()}
        assert {"cb_answer", "main"} <= names
        assert image.has_dwarf_info()
        cu = next(
            c for c in image.get_dwarf_info().iter_CUs()
            if c.get_top_DIE().attributes["DW_AT_name"].value == b"core/answer.c"
        )  # fmt: skip
        assert cu.get_top_DIE().attributes["DW_AT_comp_dir"].value in (b".", b"./")
    assert elf.is_static(Path(result.path))
    note = subprocess.run(["readelf", "-n", result.path], capture_output=True, text=True, check=True).stdout
    assert f"Build ID: {result.build_id}" in note


def test_stripped_file_keeps_valid_tables(tmp_path: Path, own_cache: Path) -> None:
    result = build_engine(load_board("host"), tmp_path / "a", native=tree(tmp_path))
    for path in (result.path, result.debug):
        done = subprocess.run(["readelf", "-W", "-S", "-l", path], capture_output=True, text=True, check=True)
        assert "Warning" not in done.stderr and "Error" not in done.stderr and ".text" in done.stdout


def test_windows_executable(tmp_path: Path, own_cache: Path) -> None:
    result = build_engine(load_board("windows-x86"), tmp_path / "a.exe", native=tree(tmp_path))
    names = pe.imports(Path(result.path))
    assert any(n.lower() == "kernel32.dll" for n in names)
    pe.check(Path(result.path))
    assert Path(result.debug).read_bytes().startswith(b"Microsoft C/C++ MSF 7.00")


def test_windows_foreign_import_is_refused(tmp_path: Path, own_cache: Path) -> None:
    main = "#include <windows.h>\nint main(void) { return MessageBoxA(0, 0, 0, 0); }\n"
    (tmp_path / "m.c").write_text(main)
    cc(
        ["-target", "x86_64-windows-gnu", "-mcpu=x86_64", "-O3", "-s", "m.c", "-luser32", "-o", "m.exe"],
        tmp_path,
    )
    with pytest.raises(BuildError, match=r"(?i)user32\.dll"):
        pe.check(tmp_path / "m.exe")
    (tmp_path / "short.exe").write_bytes((tmp_path / "m.exe").read_bytes()[:300])
    with pytest.raises(ValueError):
        pe.imports(tmp_path / "short.exe")


def test_compiler_error_shows_first_errors_and_the_command(tmp_path: Path, own_cache: Path) -> None:
    native = tree(tmp_path, core__bad="int f(void) { return undeclared_name; }\n")
    with pytest.raises(BuildError) as caught:
        build_engine(load_board("host"), tmp_path / "a", native=native)
    err = caught.value
    assert (err.exit_status, err.code) == (12, "CK-BUILD-CC")
    assert "core/bad.c:1:22: error:" in err.message and "undeclared_name" in err.message
    assert err.hint is not None and err.hint.startswith(f"cd {native} && ")
    again = subprocess.run(["bash", "-c", err.hint], capture_output=True, text=True, check=False)
    assert again.returncode != 0 and "undeclared_name" in again.stderr
    assert not (tmp_path / "a").exists()


def test_missing_function_is_a_build_error(tmp_path: Path, own_cache: Path) -> None:
    native = tree(tmp_path, core__bad="int gone(void); int cb_f(void) { return gone(); }\n")
    (native / "cli" / "main.c").write_text("int cb_f(void); int main(void) { return cb_f(); }\n")
    with pytest.raises(BuildError, match="undefined symbol: gone"):
        build_engine(load_board("host"), tmp_path / "a", native=native)


# ---- the instruction scan

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


# ---- the engine itself


def run_kit(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "colibri_kit", *args], capture_output=True, text=True, check=False, cwd=cwd
    )


BOARDS = ["rpi4", "a53-plc", "rpi5", "x86-gateway", "x86-atom", "host", "windows-x86"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("board", BOARDS)
def test_engine_builds_for(board: str, tmp_path: Path) -> None:
    done = run_kit("build", "--board", board, "-o", "engine", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["sha256"] == sha256(tmp_path / "engine")
    assert data["kernels"] == ["scalar", *load_board(board).kernels]
    assert (tmp_path / "engine.debug").is_file()
    if board in ("rpi4", "a53-plc", "rpi5"):
        assert data["size_bytes"] <= 400_000 and data["warnings"] == []
    if board in ("host", "x86-atom"):
        done = subprocess.run([tmp_path / "engine", "version"], capture_output=True, text=True, check=True)
        assert "scalar" in done.stdout and "sse41" in done.stdout
        assert ("avx2" in done.stdout.splitlines()[1]) == (board == "host")
    if board in ("rpi4", "a53-plc"):
        qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
        assert qemu, "apt-get install qemu-user"
        cpu = {"rpi4": "cortex-a72", "a53-plc": "cortex-a53"}[board]
        args = [qemu, "-cpu", cpu, str(tmp_path / "engine"), "version"]
        done = subprocess.run(args, capture_output=True, text=True, check=True)
        assert "neon" in done.stdout


@pytest.mark.timeout(600)
def test_engine_is_the_same_from_another_checkout(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = load_board("rpi4")
    copy = tmp_path / "some" / "other" / "place"
    shutil.copytree(resources.native_dir(), copy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    other = build_engine(board, native=copy)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert not other.cached
    assert other.sha256 == build_engine(board).sha256


def test_dry_run_lists_and_writes_nothing(tmp_path: Path) -> None:
    done = run_kit("build", "--board", "rpi4", "--dry-run", "--json", cwd=tmp_path)
    data = json.loads(done.stdout)
    sources = [u["source"] for u in data["units"]]
    assert "core/err.c" in sources and not any("fuzz" in s or "avx2" in s for s in sources)
    assert list(tmp_path.iterdir()) == []


def test_board_isa_is_part_of_the_identity(tmp_path: Path) -> None:
    native = tree(tmp_path)
    board = load_board("rpi4")
    other = Board.model_validate({**board.model_dump(), "isa": ("neon", "crc", "lse")})
    assert plan_engine(board, native).build_id != plan_engine(other, native).build_id
