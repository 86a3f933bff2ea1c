"""Wheels carry the engine's sources, boards and recipes inside the package; the rest is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
DATA = ("native", "boards", "recipes")
JUNK = shutil.ignore_patterns("*.o", "*.obj", "*.pdb", "*.a", "*.so", "__pycache__", "fuzz")


class BuildWithData(build_py):
    """Copies the top-level data folders to colibri_kit/_data; an editable install reads them in place."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        base = Path(self.build_lib) / "colibri_kit" / "_data"
        shutil.rmtree(base, ignore_errors=True)
        for name in DATA:
            shutil.copytree(ROOT / name, base / name, ignore=JUNK)


setup(cmdclass={"build_py": BuildWithData})
