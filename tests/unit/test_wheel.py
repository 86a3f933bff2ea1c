"""A wheel alone, in an empty environment, is enough to list boards and build an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from colibri_kit import resources

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git would hand out plus the working tree's changes."""
    out = tmp_path_factory.mktemp("wheel")
    copy = out / "src"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode().split("\0")  # fmt: skip
    for name in filter(None, names):
        source = ROOT / name
        if source.is_file() and not name.startswith("tests/"):
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    args = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel. Its dependencies come from this interpreter's
    site-packages, so no network is needed; the kit itself must not (checked below)."""
    base = tmp_path_factory.mktemp("empty")
    venv.create(base, with_pip=False)
    python = base / "bin" / "python"
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()
    )  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # A plain path line adds the folder without reading its .pth files: an editable
    # install of the kit over there stays invisible.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COLIBRI"))}
    return subprocess.run(
        [python, "-m", "colibri_kit", *args], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


def test_wheel_carries_everything(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, base in (("native", resources.native_dir()), ("boards", resources.boards_dir())):
        for path in base.rglob("*"):
            if path.suffix in (".c", ".h", ".inc", ".yaml") and "fuzz" not in path.parts:
                assert f"colibri_kit/_data/{folder}/{path.relative_to(base).as_posix()}" in names
    assert {"colibri_kit/_data/recipes/demo.yaml", "colibri_kit/py.typed"} <= names
    assert not [n for n in names if n.endswith((".o", ".obj", ".so", ".pyc", ".pdb"))]
    assert not [n for n in names if n.split("/")[0] in ("tests", "native", "boards")]


def test_kit_runs_from_the_wheel(python: Path, tmp_path: Path) -> None:
    code = "import colibri_kit.resources as r; print(r.native_dir())"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("site-packages/colibri_kit/_data/native")
    assert str(python.parent.parent) in done.stdout

    done = run(python, tmp_path, "boards", "--json")
    assert done.returncode == 0, done.stderr
    boards = {b["name"]: b["file"] for b in json.loads(done.stdout)["boards"]}
    assert {"rpi4", "host"} <= set(boards)
    assert all(str(python.parent.parent) in file for file in boards.values())


@pytest.mark.timeout(600)
def test_wheel_builds_the_same_engine(python: Path, tmp_path: Path) -> None:
    from colibri_kit.config import load_board
    from colibri_kit.toolchain import plan_engine

    done = run(python, tmp_path, "build", "--board", "host", "-o", "engine", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["build_id"] == plan_engine(load_board("host")).build_id
    version = subprocess.run([tmp_path / "engine", "version"], capture_output=True, text=True, check=True)
    assert "colibri" in version.stdout
