"""The tool chain: reproducible, scanned, stripped, cached; run on small sources and on the engine."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from small_tree import HEADER, MAIN, own_cache, tree

__all__ = ["own_cache"]  # a fixture

from colibri_kit import resources
from colibri_kit.config import Board, load_board
from colibri_kit.errors import BuildError, ConfigError
from colibri_kit.toolchain import build_engine, elf, pe, plan_engine
from colibri_kit.toolchain.engine import SIZE_AIM_BYTES
from colibri_kit.toolchain.sources import find_sources
from colibri_kit.toolchain.zig import cc


def sha256(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


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
        assert {"-ffp-contract=off", "-std=c11"} <= set(some) and {"-O3", "-Os"} & set(some)
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
    for damage in (good[:-100], good[:5000] + bytes([good[5000] ^ 1]) + good[5001:], b""):
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
        assert data["size_bytes"] <= SIZE_AIM_BYTES and data["warnings"] == []
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
