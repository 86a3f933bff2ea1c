"""The parts of virtual boards that need no guest."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from virtual import kit

from colibri_kit.config import load_board
from colibri_kit.errors import PreflightError, UsageError
from colibri_kit.vboard import act, apt, guest, images, machine, packages, runtime
from colibri_kit.vboard.cpio import Cpio

DEB822 = """# comment
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://off.example/
Suites: trixie
Components: main
"""
ONE_LINE = """
# deb http://commented.example/ bookworm main
deb-src http://source.example/ bookworm main
deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian trixie main non-free # why
deb http://mirror.example/debian-security trixie-security main
"""


def test_sources_of_both_styles() -> None:
    found = apt.find_debian(apt.parse_deb822(DEB822))
    assert (found.suite, found.uri) == ("bookworm", "http://mirror.example/debian")
    assert found.security_uri == "http://security.example/debian-security"
    assert found.signed_by == "/usr/share/keyrings/debian-archive-keyring.gpg"
    found = apt.find_debian(apt.parse_list(ONE_LINE))
    assert (found.suite, found.uri, found.signed_by) == ("trixie", "http://mirror.example/debian", "/k.gpg")
    assert "deb [signed-by=/k.gpg] http://mirror.example/debian trixie-backports main" in found.lines(
        backports=True
    )


def test_no_debian_mirror_is_an_error_with_a_way_out() -> None:
    ubuntu = apt.parse_list("deb http://archive.ubuntu.com/ubuntu jammy main\n")
    with pytest.raises(PreflightError, match="no Debian mirror") as caught:
        apt.find_debian(ubuntu)
    assert apt.MIRROR_VARIABLE in str(caught.value.hint)
    assert apt.find_debian(ubuntu, "http://m.example/debian trixie").suite == "trixie"


def test_cpio_is_read_by_busybox(tmp_path: Path) -> None:
    cpio = Cpio()
    cpio.file("etc/odd name", b"hello\n", 0o640, owner=1000)
    cpio.link("bin/sh", "busybox")
    cpio.folder("tmp", 0o1777)
    data = cpio.pack(compress=False)
    assert len(data) % 4 == 0 and data == cpio.pack(compress=False)
    busybox = shutil.which("busybox")
    assert busybox, "tests need busybox"
    told = subprocess.run(
        [busybox, "cpio", "-tv"], input=data, capture_output=True, check=True
    ).stdout.decode()
    assert "-rw-r-----" in told and "1000" in told and "etc/odd name" in told
    assert "bin/sh -> busybox" in told and "drwxrwxrwt" in told
    subprocess.run([busybox, "cpio", "-idm"], input=data, cwd=tmp_path, capture_output=True, check=True)
    assert (tmp_path / "etc" / "odd name").read_bytes() == b"hello\n"


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    folder = tmp_path / "lib" / "modules" / "6.1" / "kernel" / "fs"
    folder.mkdir(parents=True)
    for name, needs in (("ext4", "mbcache,jbd2"), ("jbd2", ""), ("mbcache", ""), ("virtio-net", "failover")):
        (folder / f"{name}.ko").write_bytes(b"\x7fELF\0depends=" + needs.encode() + b"\0name=x\0")
    names = [name for name, _ in guest.modules(tmp_path, ("ext4", "virtio_net", "built_in"))]
    assert names == ["mbcache", "jbd2", "ext4", "virtio_net"]


def test_sparse_copies_and_ext4(tmp_path: Path) -> None:
    mke2fs = packages.Program((shutil.which("mke2fs", path="/usr/sbin:/sbin") or "mke2fs",), {}, "")
    image = tmp_path / "data.img"
    images.make_ext4(mke2fs, image, 64 << 20, "ck-data", owner=1000)
    copy = tmp_path / "copy.img"
    images.copy_sparse(image, copy)
    assert copy.read_bytes() == image.read_bytes() and copy.stat().st_size == 64 << 20
    assert copy.stat().st_blocks * 512 < 16 << 20
    with copy.open("rb") as stream:
        stream.seek(1024 + 56)
        assert stream.read(2) == b"\x53\xef"  # ext4's magic
        stream.seek(1024 + 120)
        assert stream.read(8) == b"ck-data\0"
    checked = subprocess.run(["/usr/sbin/e2fsck", "-fn", str(copy)], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout
    with pytest.raises(PreflightError, match="too small"):
        images.make_ext4(mke2fs, image, 1 << 20, "x")


def test_damaged_package_sets_are_noticed(tmp_path: Path) -> None:
    root = tmp_path / "set"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tool").write_bytes(b"x" * 100)
    (root / "bin" / "link").symlink_to("tool")
    assert not packages.intact(root)
    (root / ".packages.json").write_text(f'{{"packages": {{}}, "files": "{packages.fingerprint(root)}"}}')
    assert packages.intact(root)
    (root / "bin" / "tool").write_bytes(b"x" * 50)
    assert not packages.intact(root)
    (root / "bin" / "tool").write_bytes(b"x" * 100)
    assert packages.intact(root)
    (root / "bin" / "link").unlink()
    assert not packages.intact(root)


def wanted(board: str, tmp_path: Path, **more: object) -> list[str]:
    vm = load_board(board).vm
    assert vm is not None
    given: dict[str, object] = {
        "vm": vm, "name": "b", "ram": 512 << 20, "cpus": 1, "port": 2222, "kernel": tmp_path / "k",
        "initrd": tmp_path / "i", "dtb": None, "data_disk": tmp_path / "a,b.img", "root_disk": None,
        "console": tmp_path / "c", "console_log": tmp_path / "l", "qmp": tmp_path / "q", "init": "none",
        "ssh": "openssh", "deterministic": False, "pty": False, "time": 1,
    }  # fmt: skip
    return machine.arguments(machine.Wanted(**{**given, **more}))  # type: ignore[arg-type]


def test_command_lines(tmp_path: Path) -> None:
    args = wanted("virt-a53", tmp_path)
    assert args[args.index("-m") + 1] == "512M" and args[args.index("-cpu") + 1] == "cortex-a53"
    assert any("a,,b.img" in a for a in args), "a comma in a path is doubled"
    assert "user,id=net0,restrict=on,hostfwd=tcp:127.0.0.1:2222-:22" in args
    assert "-icount" not in args and "-icount" in wanted("virt-a53", tmp_path, deterministic=True)
    pi = wanted("qemu-rpi3", tmp_path)
    # The Pi 3's console is its second serial port; its memory is cut by the kernel.
    assert pi.index("null") < pi.index("chardev:console") and "mem=512M" in pi[pi.index("-append") + 1]
    assert not any(a.startswith("virtio") for a in pi)


def test_bad_wishes_are_refused_before_anything(board_dir: Path) -> None:
    before = sorted(board_dir.glob("*/state.json"))  # another file's board may be up
    for args, code, words in (
        (("rpi4",), 6, "CK-VBOARD-PROFILE"),
        (("virt-a35",), 3, "virt-a53"),
        (("virt-a53", "--ram", "16MiB"), 6, "too little"),
        (("virt-a53", "--ram", "lots"), 2, "expected a size"),
        (("qemu-rpi3", "--ram", "2GiB"), 6, "960 MiB"),
        (("qemu-rpi4", "--init", "systemd"), 6, "SD card"),
        (("virt-a53", "--as", "../x"), 2, "no name"),
    ):
        ran = kit("board", "up", *args)
        assert ran.rc == code and words in ran.err, ran.err
    assert sorted(board_dir.glob("*/state.json")) == before
    assert kit("board", "down", "never").out.strip() == "never: not up"


def test_a_recycled_pid_is_not_taken_for_a_board(board_dir: Path) -> None:
    place = runtime.Place("recycled")
    place.make()
    run = runtime.Running(
        "recycled", "virt-a53", os.getpid(), 1, 1, 1, "c", "virt", "none", "openssh", False, "7", "6", ""
    )
    place.write(run)
    assert place.running() is None
    assert act.down(place) == "not up"
    with pytest.raises(PreflightError, match="not up"):
        runtime.alias("root@@recycled")
    act.purge(place)
    assert runtime.alias("pi@host") is None and runtime.alias("host") is None
    with pytest.raises(UsageError):
        runtime.Place("Bad Name")


def test_sockets_of_a_deep_folder_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLIBRI_VBOARD_DIR", str(tmp_path / ("d" * 100)))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    sockets = runtime.Place("x").sockets
    assert sockets.stat().st_mode & 0o077 == 0
    assert len(str(runtime.Place("x").console)) < 108
    sockets.rmdir()
