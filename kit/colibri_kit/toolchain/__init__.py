"""Builds the C engine: for a board (one static binary) or for this machine (a shared library).

from colibri_kit.toolchain import build_engine, build_library
"""

from colibri_kit.toolchain.engine import BuildResult, build_engine, plan_engine
from colibri_kit.toolchain.library import build_library

__all__ = ["BuildResult", "build_engine", "build_library", "plan_engine"]
