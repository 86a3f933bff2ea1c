"""Strict YAML: what it refuses, what it keeps as written, and where it points."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_kit import resources
from colibri_kit.cli import root
from colibri_kit.config import find_boards, format_size, load_board, load_recipe, parse_size
from colibri_kit.config.loader import MAX_NODES, parse
from colibri_kit.errors import ConfigError

RPI4 = (resources.boards_dir() / "rpi4.yaml").read_text()
REQUIRED = {"rpi4", "rpi5", "a53-plc", "x86-gateway", "x86-atom", "host", "windows-x86"}


def board_with(tmp_path: Path, old: str, new: str) -> Path:
    """rpi4's profile with one replacement, as a file of its own."""
    assert RPI4.count(old) == 1
    path = tmp_path / "rpi4.yaml"
    path.write_text(RPI4.replace(old, new))
    return path


def line_of(text: str, needle: str) -> int:
    return text[: text.index(needle)].count("\n") + 1


def refuse(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_board(str(path))
    assert caught.value.exit_status == 3
    return caught.value.message


def test_every_shipped_board_loads() -> None:
    assert set(find_boards()) >= REQUIRED
    boards = {name: load_board(name) for name in REQUIRED}
    assert (boards["rpi4"].target, boards["rpi4"].mcpu) == ("aarch64-linux-musl", "cortex_a72")
    assert (boards["a53-plc"].mcpu, boards["rpi5"].mcpu) == ("cortex_a53", "cortex_a76")
    assert (boards["x86-gateway"].mcpu, boards["x86-atom"].mcpu) == ("x86_64_v3", "x86_64")
    assert boards["windows-x86"].target == "x86_64-windows-gnu"
    assert boards["rpi4"].kernels == ("neon",)
    assert boards["x86-atom"].kernels == ("sse41",)
    assert boards["x86-gateway"].kernels == ("sse41", "avx2")
    assert boards["rpi4"].memory_bandwidth_gb_s == 3.7
    assert boards["rpi4"].budget == 3 * 2**30
    assert boards["host"].transport == "local"
    # Only a CPU that is sure to have them may name them: Pi 4 and A53 parts are ARMv8.0-A.
    assert not {"lse", "fp16", "dotprod", "crypto"} & set(boards["rpi4"].isa + boards["a53-plc"].isa)


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_figures_have_a_comment_above(name: str) -> None:
    lines = (resources.boards_dir() / f"{name}.yaml").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("memory_bandwidth_gb_s"))
    assert lines[at - 1].startswith("#")


def test_shipped_recipe_loads() -> None:
    recipe, model = load_recipe("demo")
    assert recipe.board == "host"
    assert model.is_absolute() and model.suffix == ".coli"


def test_duplicate_key_names_both_places(tmp_path: Path) -> None:
    path = board_with(tmp_path, "cores: 4\n", "cores: 4\nram: 2GiB\n")
    text = path.read_text()
    first, second = line_of(text, "ram: 2GiB"), line_of(text, "ram: 4GiB")
    assert refuse(path) == (f"{path}:{second}:1: duplicate key 'ram', first given at line {first}, column 1")


def test_duplicate_key_in_a_nested_mapping(tmp_path: Path) -> None:
    path = board_with(tmp_path, "  kind: sd\n", "  kind: sd\n  kind: nvme\n")
    line = line_of(path.read_text(), "  kind: nvme")
    assert f"{path}:{line}:3: duplicate key 'kind'" in refuse(path)


def test_unknown_key_suggests(tmp_path: Path) -> None:
    path = board_with(tmp_path, "transport: ssh", "tranport: ssh")
    message = refuse(path)
    line = line_of(path.read_text(), "tranport")
    assert f"{path}:{line}:1: unknown key 'tranport'; did you mean 'transport'?" in message
    assert "missing key 'transport'" in message


def test_all_errors_at_once(tmp_path: Path) -> None:
    path = board_with(tmp_path, "cores: 4\nram: 4GiB", "cores: many\nram: 4\nextra: 1")
    message = refuse(path)
    assert message.startswith("3 errors in ")
    text = path.read_text()
    assert f":{line_of(text, 'cores')}:8: cores: expected a whole number, got 'many'" in message
    assert f":{line_of(text, 'ram: ')}:6: ram: expected a size with a unit" in message
    assert f":{line_of(text, 'extra')}:1: unknown key 'extra'" in message


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("0755", "looks octal"),
        ("0o17", "looks octal, hexadecimal"),
        ("0x10", "looks octal, hexadecimal"),
        ("12:30:00", "looks sexagesimal"),
        ("1_000", "expected a whole number"),
        ("yes", "expected a whole number, got 'yes'"),
        ("1.5", "expected a whole number"),
        ("'4'", "remove the quotes"),
        ("[4]", "got list"),
        ("", "got nothing"),
        ("-1", "greater than or equal to 1"),
    ],
)
def test_integer_traps(tmp_path: Path, value: str, what: str) -> None:
    path = board_with(tmp_path, "cores: 4", f"cores: {value}")
    message = refuse(path)
    assert what in message
    assert f"{path}:{line_of(path.read_text(), 'cores:')}:" in message


@pytest.mark.parametrize("value", ["1:30", "010", "1e3", ".5", "inf", "nan", "on"])
def test_float_traps(tmp_path: Path, value: str) -> None:
    path = board_with(tmp_path, "memory_bandwidth_gb_s: 3.7", f"memory_bandwidth_gb_s: {value}")
    assert "memory_bandwidth_gb_s:" in refuse(path)


@pytest.mark.parametrize("value", ["no", "on", "0755", "12:30:00", "1.10", "null", "~", "2026-01-02"])
def test_text_stays_as_written(tmp_path: Path, value: str) -> None:
    old = next(line for line in RPI4.splitlines() if line.startswith("title:"))
    path = board_with(tmp_path, old, f"title: {value}")
    assert load_board(str(path)).title == value


def test_bool_takes_only_true_and_false() -> None:
    from pydantic import BaseModel

    from colibri_kit.config.loader import validate
    from colibri_kit.config.scalars import Bool

    class Flag(BaseModel):
        on_air: Bool

    assert validate(parse("on_air: true", "f"), Flag).on_air is True
    assert validate(parse("on_air: false", "f"), Flag).on_air is False
    for value in ("yes", "no", "on", "off", "True", "1", "'true'", "y"):
        with pytest.raises(ConfigError, match="f:1:9: on_air: expected true or false"):
            validate(parse(f"on_air: {value}", "f"), Flag)


def test_budget_above_ram_and_foreign_isa(tmp_path: Path) -> None:
    assert "budget is larger than ram" in refuse(board_with(tmp_path, "budget: 3GiB", "budget: 5GiB"))
    assert "'avx2' is not one of neon" in refuse(board_with(tmp_path, "[neon, crc]", "[neon, avx2]"))


@pytest.mark.parametrize("prefix", ["relative/path", "/opt/../etc", "/opt/$(id)", "/opt/a b", "/"])
def test_unsafe_prefix(tmp_path: Path, prefix: str) -> None:
    assert "prefix" in refuse(board_with(tmp_path, "prefix: /opt/colibri", f"prefix: {prefix}"))


@pytest.mark.parametrize(
    ("machine", "want"),
    [
        ("x86_64", ("x86_64-linux-musl", "x86_64", ("sse41", "avx2"))),
        ("aarch64", ("aarch64-linux-musl", "generic", ("neon",))),
    ],
)
def test_native_target(monkeypatch: pytest.MonkeyPatch, machine: str, want: tuple[object, ...]) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    board = load_board("host")
    assert (board.target, board.mcpu, board.isa) == want


def test_native_target_elsewhere_or_with_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = board_with(tmp_path, "target: aarch64-linux-musl", "target: native")
    assert "target: native takes no mcpu" in refuse(both)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="this machine \\(riscv64\\) is not one of"):
        load_board("host")


def test_name_must_match_file(tmp_path: Path) -> None:
    assert "differs from the file name" in refuse(board_with(tmp_path, "name: rpi4", "name: rpi9"))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: !!python/object/apply:os.system [id]", "f:1:4: tags are not allowed"),
        ("a: !!int 3", "f:1:4: tags are not allowed"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("a: [1, 2", "f:1:9"),
        ("a: b: c", "f:1:5"),
        ("- a", "expected 'key: value' lines"),
        ("", "expected 'key: value' lines"),
        ("? [a]\n: 1", "a key must be plain text"),
        ("a: &x [*x]", "f:1"),
        ("[" * 5000, "nested"),
        ("a: *nowhere", "undefined alias"),
    ],
)
def test_hostile_or_malformed(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f")
    assert what in caught.value.message


def test_alias_bomb_is_bounded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 10):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    with pytest.raises(ConfigError, match=f"more than {MAX_NODES} values"):
        parse("\n".join(lines), "f")


def test_not_utf8_points_at_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "rpi4.yaml"
    path.write_bytes(b"name: rpi4\ntitle: \xff\n")
    assert refuse(path) == f"{path}:2:8: not UTF-8"


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0B", 0),
        ("900MiB", 943718400),
        ("1.2GiB", 1288490188),
        ("64 KiB", 65536),
        ("2GB", 2000000000),
        ("1TiB", 2**40),
        ("0.1KiB", 102),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["1", "1 G", "1gib", "-1MiB", "1e3MiB", "01MiB", "9999999999TiB", "MiB", "1  MiB"]
)
def test_not_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def size_options() -> list[tuple[str, click.Option]]:
    """Every option that takes a size, with its verb."""
    context = click.Context(root)
    found = []
    for verb in root.list_commands(context):
        command = root.get_command(context, verb)
        assert command is not None
        for one in command.commands.values() if isinstance(command, click.Group) else [command]:
            options = (p for p in one.params if isinstance(p, click.Option))
            found += [
                (verb if one is command else str(one.name), p)
                for p in options
                if "SIZE" in (p.type.name, p.metavar)
            ]
    return found


def test_sizes_are_read_alike_everywhere() -> None:
    found = [(name, p) for name, p in size_options() if p.type.name == "SIZE"]
    assert {name for name, _ in found} >= {"deploy", "run", "flash", "up"}
    for name, option in found:
        take = partial(option.type.convert, param=option, ctx=None)
        assert [take(text) for text in ("3GB", "3GiB", "64 KiB")] == [3 * 10**9, 3 << 30, 1 << 16], name
        for bad in ("3", "512M", "3gib", "x", ""):
            with pytest.raises(click.BadParameter, match=f"a size with a unit such as .*got '{bad}'"):
                take(bad)
    text = [name for name, p in size_options() if p.type.name != "SIZE"]
    assert text == ["plan"]  # its SIZE is read by budget/report.py, with parse_size too


@given(st.integers(0, 2**50))
def test_size_round_trip_is_close(n_bytes: int) -> None:
    back = parse_size(format_size(n_bytes))
    assert abs(back - n_bytes) <= n_bytes * 0.01


@given(st.text(max_size=200))
def test_any_text_is_data_or_a_config_error(text: str) -> None:
    try:
        parse(text, "f")
    except ConfigError as err:
        assert "f" in err.message


def test_unknown_board_suggests() -> None:
    with pytest.raises(ConfigError, match="unknown board 'rpi-4'; did you mean 'rpi4'"):
        load_board("rpi-4")


def test_user_boards_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "boards"
    mine.mkdir()
    (mine / "rpi4.yaml").write_text(RPI4.replace("cores: 4", "cores: 3"))
    (mine / "my-plc.yaml").write_text(RPI4.replace("name: rpi4", "name: my-plc"))
    assert load_board("rpi4", mine).cores == 3
    monkeypatch.chdir(tmp_path)
    assert load_board("my-plc").name == "my-plc"
    assert load_board("a53-plc").name == "a53-plc"
    monkeypatch.chdir("/")
    monkeypatch.setenv("COLIBRI_BOARDS_DIR", str(mine))
    assert "my-plc" in find_boards()


def test_recipe_with_unknown_board(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("name: r\nmodel: m.coli\nboard: rpi44\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    assert caught.value.message.startswith(f"{path}:3:8: board: unknown board 'rpi44'; did you mean 'rpi4'")


def test_recipe_paths_and_defaults(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "name: r\nmodel: sub/m.coli\nboard: rpi4\nbudget: 1.5GiB\n"
        "service: {restart: always, memory_limit: 2GiB}\n"
    )
    recipe, model = load_recipe(str(path))
    assert model == tmp_path / "sub" / "m.coli"
    assert recipe.budget == 3 * 2**29
    assert (recipe.service.restart, recipe.service.memory_limit) == ("always", 2**31)
    assert recipe.check.prompt == "Hello"
    path.write_text("name: r\nmodel: m\nboard: rpi4\nservice: {restrat: always}\n")
    with pytest.raises(ConfigError, match=r":4:11: unknown key 'service.restrat'; did you mean 'restart'"):
        load_recipe(str(path))


def run_kit(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "colibri_kit", *args], capture_output=True, text=True, check=False, cwd=cwd
    )


def test_boards_verb(tmp_path: Path) -> None:
    listed = run_kit("boards", "--json", cwd=tmp_path)
    assert listed.returncode == 0
    data = json.loads(listed.stdout)
    assert {b["name"] for b in data["boards"]} >= REQUIRED and data["broken"] == []
    one = json.loads(run_kit("boards", "rpi4", "--json", cwd=tmp_path).stdout)
    assert (one["budget"], one["arch"], one["kernels"]) == (3221225472, "aarch64", ["scalar", "neon"])
    text = run_kit("boards", "rpi4", cwd=tmp_path).stdout
    assert "3.7 GB/s" in text and "sbc-bench" in text


def test_boards_verb_says_which_file_is_broken(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: bad\nname: bad\n")
    done = run_kit("boards", "--json", "--boards-dir", str(tmp_path))
    data = json.loads(done.stdout)
    assert done.returncode == 0 and [b["name"] for b in data["broken"]] == ["bad"]
    assert {b["name"] for b in data["boards"]} >= REQUIRED
    done = run_kit("boards", "bad", "--boards-dir", str(tmp_path), "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["exit_status"] == 3
    assert "bad.yaml:2:1: duplicate key" in done.stderr
