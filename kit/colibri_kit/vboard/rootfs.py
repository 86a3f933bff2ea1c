"""A small Debian root with systemd on an ext4 image, from unpacked packages, without root.

No maintainer script runs. What those would have made, and the system needs, is
written here: users, the merged /usr, links of alternatives, our units.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from colibri_kit.vboard import initscript
from colibri_kit.vboard.images import make_ext4, own_by_root
from colibri_kit.vboard.packages import Program

SIZE = 1 << 30
_MERGED = ("bin", "sbin", "lib", "lib64")
_LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian",
             "usr/share/bash-completion", "usr/share/zsh", "usr/lib/udev/hwdb.d")  # fmt: skip

_FOLDERS = ("proc", "sys", "dev", "run", "tmp", "data", "opt/colibri", "var/log/journal", "var/tmp", "root",
            "etc/ssh", "var/lib/systemd")  # fmt: skip

#: Work at boot that a guest needs not, and that an emulated CPU takes seconds for.
_MASKED = (
    "getty.target", "serial-getty@.service", "getty@.service", "systemd-networkd-wait-online.service",
    "systemd-update-utmp.service", "systemd-update-utmp-runlevel.service", "systemd-sysusers.service",
    "systemd-udev-trigger.service", "systemd-pcrphase.service", "systemd-pcrphase-sysinit.service",
    "systemd-hwdb-update.service", "systemd-journal-catalog-update.service", "systemd-update-done.service",
    "systemd-logind.service", "systemd-random-seed.service", "systemd-modules-load.service",
    "modprobe@.service", "sys-kernel-debug.mount", "sys-kernel-tracing.mount", "dev-hugepages.mount",
    "dev-mqueue.mount",
)  # fmt: skip
_GENERATORS = "usr/lib/systemd/system-generators"

_CONSOLE_UNIT = """[Unit]
Description=Root shell on the console
After=multi-user.target

[Service]
ExecStart=-/bin/sh -i
StandardInput=tty
StandardOutput=tty
StandardError=tty
TTYPath=/dev/console
KillSignal=SIGHUP
TimeoutStopSec=3
Restart=always
RestartSec=1

[Install]
WantedBy=multi-user.target
"""

_SSH_UNIT = """[Unit]
Description=OpenSSH server

[Service]
RuntimeDirectory=sshd
ExecStart=/usr/sbin/sshd -D -e
KillMode=process
Restart=always

[Install]
WantedBy=multi-user.target
"""

_PASSWD = initscript.PASSWD + (
    "messagebus:x:101:101::/nonexistent:/bin/false\n"
    "systemd-network:x:998:998::/:/bin/false\nsystemd-resolve:x:997:997::/:/bin/false\n"
    "colibri:x:900:900::/opt/colibri:/bin/false\n"
)
_GROUP = initscript.GROUP + (
    "messagebus:x:101:\nsystemd-journal:x:999:\nsystemd-network:x:998:\nsystemd-resolve:x:997:\n"
    "colibri:x:900:\n"
    "adm:x:4:\ndisk:x:6:\nkmem:x:15:\ndialout:x:20:\ncdrom:x:24:\naudio:x:29:\nvideo:x:44:\ninput:x:996:\n"
    "render:x:995:\nsgx:x:994:\nkvm:x:993:\nlp:x:7:\ntape:x:26:\nutmp:x:43:\nshadow:x:42:\n"
)


def _merge(source: Path, target: Path) -> None:
    """Copies an unpacked set into a merged-/usr tree; hard links where it can."""
    for top in _MERGED:
        (target / "usr" / top).mkdir(parents=True, exist_ok=True)
        (target / top).symlink_to(f"usr/{top}")
    for folder, subs, files in os.walk(source):
        here = Path(folder).relative_to(source)
        there = here
        if here.parts and here.parts[0] in _MERGED:
            there = Path("usr", *here.parts)
        if str(there) in _LEFT_OUT:
            subs.clear()
            continue
        out = target / there
        out.mkdir(parents=True, exist_ok=True)
        for name in list(subs) + files:
            path = Path(folder) / name
            if path.is_symlink():
                _link(here, there, path, out / name)
            elif path.is_file() and not (out / name).exists():
                try:
                    os.link(path, out / name)
                except OSError:
                    shutil.copy2(path, out / name)


def _link(here: Path, there: Path, path: Path, out: Path) -> None:
    words = str(path.readlink())
    if here != there and words.startswith("../"):
        words = os.path.normpath("/" + str(here / words))  # it would climb from another depth
    if not out.exists() and not out.is_symlink():
        out.symlink_to(words)


def _text(root: Path, path: str, text: str, mode: int = 0o644) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # it may be a hard link into the package cache
    file.write_text(text)
    file.chmod(mode)


def stage(packages: Path, root: Path) -> None:
    """The whole tree under ``root``, which must be new."""
    root.mkdir()
    _merge(packages, root)
    for folder in (*_FOLDERS, f"home/{initscript.USER}"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "root").chmod(0o700)
    _text(root, "etc/passwd", _PASSWD)
    _text(root, "etc/group", _GROUP)
    _text(root, "etc/shadow", initscript.SHADOW, 0o600)
    _text(root, "etc/nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    _text(root, "etc/hosts", "127.0.0.1 localhost\n")
    _text(root, "etc/fstab", "")
    _text(root, "etc/ssh/sshd_config", initscript.SSHD_CONFIG)
    _text(root, "etc/systemd/system/console-shell.service", _CONSOLE_UNIT)
    _text(root, "etc/systemd/system/ssh.service", _SSH_UNIT)
    _text(root, "etc/systemd/journald.conf.d/small.conf", "[Journal]\nSystemMaxUse=16M\n")
    units = root / "etc/systemd/system"
    wants = units / "multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    for unit in ("console-shell.service", "ssh.service"):
        (wants / unit).symlink_to(f"/etc/systemd/system/{unit}")
    (units / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
    for unit in _MASKED:
        mask = units / unit
        mask.unlink(missing_ok=True)
        mask.symlink_to("/dev/null")
    for link, target in (
        ("usr/bin/awk", "mawk"),
        ("usr/bin/sh", "dash"),
        ("etc/mtab", "../proc/self/mounts"),
        ("var/run", "/run"),
    ):
        if not (root / link).is_symlink():
            if (root / link).is_dir():
                shutil.rmtree(root / link)
            (root / link).unlink(missing_ok=True)
            (root / link).symlink_to(target)


def _no_generators(root: Path) -> None:
    """Nothing here has crypt tabs, GPT disks or gettys to generate units for."""
    for path in (root / _GENERATORS).iterdir():
        path.unlink()


def build(packages: Path, image: Path, mke2fs: Program, debugfs: Program) -> None:
    """``image``: the root disk, labelled ck-root."""
    tree = image.with_name(image.name + ".tree")
    shutil.rmtree(tree, ignore_errors=True)
    made = image.with_name(image.name + ".made")
    try:
        stage(packages, tree)
        _no_generators(tree)
        make_ext4(mke2fs, made, SIZE, "ck-root", tree)
        if os.geteuid() != 0:
            own_by_root(debugfs, made, _all_paths(tree))
        made.replace(image)
    finally:
        made.unlink(missing_ok=True)
        shutil.rmtree(tree, ignore_errors=True)


def _all_paths(tree: Path) -> dict[str, int]:
    """Every path below the tree as debugfs wants it; symlinks' owners do not matter."""
    out = {}
    for folder, subs, files in os.walk(tree):
        for name in subs + files:
            path = Path(folder) / name
            if not path.is_symlink():
                out[f'"/{path.relative_to(tree)}"'] = 0
    return out
