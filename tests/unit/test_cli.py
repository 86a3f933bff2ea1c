"""The command line's shell: help is fast and true, errors keep their statuses."""

from __future__ import annotations

import importlib
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from colibri_kit import errors
from colibri_kit.cli import VERBS, main, root
from colibri_kit.ui import Ui

HELP_BUDGET_S = 0.150


def run_kit(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "colibri_kit", *args], capture_output=True, text=True, check=False
    )


def test_help_is_fast() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        done = run_kit("--help")
        times.append(time.perf_counter() - start)
        assert done.returncode == 0
    assert statistics.median(times) < HELP_BUDGET_S, times


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from colibri_kit.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(set(sys.modules) & {'numpy','paramiko','pydantic','rich','cffi','yaml','fabric'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_lists_every_verb() -> None:
    text = run_kit("--help").stdout
    for verb, line in VERBS.items():
        assert any(row.split(maxsplit=1) == [verb, line] for row in text.splitlines()), verb


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_verb_help_equals_the_table(verb: str) -> None:
    module = importlib.import_module(f"colibri_kit.commands.{verb.replace('-', '_')}")
    command: click.Command = module.command
    assert command.get_short_help_str(limit=200) == VERBS[verb]
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    for one in commands:
        if one.context_settings.get("ignore_unknown_options"):  # its words belong to another program
            continue
        options = {name for p in one.params if isinstance(p, click.Option) for name in p.opts}
        assert {"--json", "--quiet", "--verbose"} <= options


def test_unknown_verb_and_flag_are_usage_errors() -> None:
    for args in (["fly"], ["boards", "--fly"], ["build"]):
        done = run_kit(*args)
        assert done.returncode == 2, args
        assert "Error" in done.stderr


def test_version() -> None:
    from colibri_kit import __version__

    assert run_kit("--version").stdout.strip().endswith(__version__)


def test_errors_reach_json_and_stderr() -> None:
    done = run_kit("boards", "nowhere", "--json")
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "CK-CONFIG-BOARD"
    assert "rpi4" in error["hint"]
    assert done.stderr.startswith("error CK-CONFIG-BOARD: unknown board 'nowhere'")


@pytest.mark.parametrize(
    ("args", "words", "next_"),
    [
        (["fly", "--json"], "No such command 'fly'", "colibri-kit --help"),
        (["boards", "--fly", "--json"], "No such option", "colibri-kit boards --help"),
        (["build", "--json"], "Missing option '--board'", "colibri-kit build --help"),
        (["board", "up", "--ram", "3", "x", "--json"], "with a unit", "colibri-kit board up --help"),
        (["logs", "a", "b", "--json"], "unexpected extra argument", "colibri-kit logs --help"),
    ],
)
def test_a_wrong_command_line_is_an_object_too(args: list[str], words: str, next_: str) -> None:
    done = run_kit(*args)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["hint"], error["exit_status"]) == ("CK-USAGE", next_, 2)
    assert words in error["message"] and error["state"] == "nothing was done"
    assert "error CK-USAGE" in done.stderr
    plain = run_kit(*[a for a in args if a != "--json"])
    assert (plain.returncode, plain.stdout) == (2, "") and plain.stderr.startswith("Usage: colibri-kit")


def test_json_of_another_program_is_not_ours() -> None:
    done = run_kit("boards", "--fly", "--", "--json")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, click.Abort])
def test_ctrl_c_is_an_object_too(
    stop: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_args: object, **_more: object) -> None:
        raise stop

    monkeypatch.setattr(root, "main", interrupted)
    for args in (["boards"], ["boards", "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(args)
        said = capsys.readouterr()
        assert ended.value.code == 130 and said.err == "interrupted\n"
        if "--json" not in args:
            assert said.out == ""
        else:
            error = json.loads(said.out)["error"]
            assert (error["code"], error["exit_status"]) == ("CK-INTERRUPTED", 130)
            assert set(error) == {"code", "message", "hint", "state", "exit_status"}


def test_leaving_a_verb_that_prints_lines_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C is the way out of `top --json`: its stdout holds its own objects only."""
    from colibri_kit.commands import top

    def objects(ui: Ui, *_: object) -> None:
        ui.result({"time": 1})
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "_objects", objects)
    main(["top", "--json", "--url", "http://127.0.0.1:9"])
    assert capsys.readouterr() == ('{"time": 1}\n', "")


def test_exit_statuses_are_distinct() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.KitError)]
    own = [c for c in classes if "exit_status" in vars(c)]
    statuses = [c.exit_status for c in own]
    assert len(statuses) == len(set(statuses)) == 13


def test_group_knows_only_table_verbs() -> None:
    context = click.Context(root)
    assert root.list_commands(context) == sorted(VERBS)
    assert root.get_command(context, "os") is None


def test_every_code_has_an_anchor() -> None:
    """Codes in the sources and anchors in docs/errors.md are the same set."""
    root_dir = Path(__file__).resolve().parents[2]
    page = (root_dir / "docs" / "errors.md").read_text()
    anchors = set(re.findall(r"^### (CK-[A-Z0-9-]+)$", page, re.MULTILINE))
    used: set[str] = set()
    made: set[str] = set()
    for path in (root_dir / "kit" / "colibri_kit").rglob("*.py"):
        for code in re.findall(r"[\"'](CK-[A-Z0-9-]+)(?=[\"'{])", path.read_text()):
            (made if code.endswith("-") else used).add(code)
    assert used - anchors == set()
    for prefix in made:
        assert any(a.startswith(prefix) for a in anchors), prefix
    stale = {a for a in anchors - used if not a.startswith(tuple(made))}
    assert stale == set()
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.KitError) and cls is not errors.KitError:
            assert f"| {cls.exit_status} | " in page and cls.__name__ in page
