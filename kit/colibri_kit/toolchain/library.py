"""Builds the engine as a shared library for this machine, for the cffi binding."""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path

from colibri_kit import resources
from colibri_kit.config.board import KERNEL_ISA
from colibri_kit.errors import BuildError
from colibri_kit.toolchain.objects import compile_units, publish, scratch
from colibri_kit.toolchain.sources import ENGINE, plan_units, present_kernels
from colibri_kit.toolchain.zig import link, zig_version


def host_target() -> tuple[str, str, str]:
    """(architecture, triple, cpu) for code that this Python can load.

    Raises:
        BuildError: a system the engine's library is not built for.
    """
    arch = {"x86_64": "x86_64", "AMD64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}.get(
        platform.machine(), ""
    )
    if sys.platform != "linux" or not arch:
        raise BuildError(
            f"the engine's library is built on Linux x86-64 or aarch64 only, "
            f"not on {sys.platform} {platform.machine()}"
        )
    musl = "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "")
    # 2.28: the oldest glibc that the Python versions supported here run on.
    triple = f"{arch}-linux-musl" if musl else f"{arch}-linux-gnu.2.28"
    return arch, triple, "x86_64" if arch == "x86_64" else "generic"


def build_library(native: Path | None = None) -> Path:
    """The shared library's path; builds it when sources, flags or compiler changed.

    Raises:
        BuildError: the compiler refused.
    """
    native = (native or resources.native_dir()).resolve()
    arch, target, mcpu = host_target()
    version = zig_version()
    units = plan_units(
        native,
        ENGINE,
        target=target,
        mcpu=mcpu,
        kernels=present_kernels(native, KERNEL_ISA[arch]),
        extra=("-fPIC",),
        version=version,
    )
    flags = ("-target", target, f"-mcpu={mcpu}", "-O3", "-g", "-shared", "-Wl,-z,defs")
    digest = hashlib.sha256()
    for part in (version, *flags, *(u.key for u in units)):
        digest.update(part.encode() + b"\0")
    final = resources.cache_dir() / "libraries" / f"libcolibri-{digest.hexdigest()[:40]}.so"
    if final.is_file():
        return final
    objects = compile_units(native, units, lambda _n: None)
    temporary = scratch(final)
    try:
        names = final.with_suffix(".list")
        link([*flags, "-lm", "-lpthread"], objects, temporary, names)
        publish(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    return final
