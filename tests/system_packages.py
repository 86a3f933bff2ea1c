"""Installs the Debian packages that tests need when run as root; else names the missing ones and fails.

A test must never be skipped because a tool is absent, so this runs before pytest.
Only the standard library is used: it runs before the virtual environment exists.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: package -> programs or files, any of which shows that it is there.
NEEDED: dict[str, tuple[str, ...]] = {
    "gcc": ("gcc",),
    "libc6-dev": ("/usr/include/stdio.h",),
    "binutils": ("readelf",),
    "openssh-server": ("/usr/sbin/sshd",),
    "openssh-client": ("ssh-keygen",),
    "dropbear-bin": ("/usr/sbin/dropbear", "dropbear"),
    "busybox-static": ("busybox",),
    "curl": ("curl",),
    "qemu-user": ("qemu-aarch64",),
    "qemu-user-static": ("qemu-aarch64-static",),
    "gcc-aarch64-linux-gnu": ("aarch64-linux-gnu-gcc",),
    "mtools": ("mcopy",),
    "dosfstools": ("/usr/sbin/mkfs.vfat",),
    "fdisk": ("/usr/sbin/sfdisk", "/sbin/sfdisk"),
    "e2fsprogs": ("/usr/sbin/debugfs", "/sbin/debugfs"),
    "systemd": ("systemd-analyze",),
    "zstd": ("zstd",),
    "clang": ("clang",),
    "libclang-rt-14-dev": ("/usr/lib/llvm-14/lib/clang/14.0.6/lib/linux",),
    "chromium": ("chromium",),
    "wine": ("wine",),
    "wine64": ("/usr/lib/wine/wine64",),
    "libc6-dev-arm64-cross": ("/usr/aarch64-linux-gnu/include/stdio.h",),
}


def present(marks: tuple[str, ...]) -> bool:
    return any(Path(m).exists() if m.startswith("/") else shutil.which(m) is not None for m in marks)


def missing() -> list[str]:
    return [package for package, marks in NEEDED.items() if not present(marks)]


def main() -> int:
    wanted = missing()
    if not wanted:
        return 0
    command = ["apt-get", "install", "-y", "--no-install-recommends", *wanted]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"tests need these packages: {' '.join(wanted)}", file=sys.stderr)
        print(f"  next:  sudo {' '.join(command)}", file=sys.stderr)
        return 1
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-qq"], command):
        done = subprocess.run(step, env=env, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            print(f"{' '.join(step)} failed with status {done.returncode}", file=sys.stderr)
            return 1
    left = missing()
    if left:
        print(f"still missing after installing: {' '.join(left)}", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
