"""Flashing at the prompt of a real U-Boot (Debian's qemu_arm64 build, Cortex-A53, in QEMU)."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import serial_rig
from serial_proxy import Proxy

from colibri_kit.errors import PreflightError
from colibri_kit.serialflash.medium import FatFiles, choose
from colibri_kit.serialflash.options import SerialOptions
from colibri_kit.serialflash.plan import Item
from colibri_kit.serialflash.uboot import UBoot
from colibri_kit.serialflash.uboot_job import UBootFlash
from colibri_kit.transport.base import ConnectionLost
from colibri_kit.transport.serial_answer import identify
from colibri_kit.transport.serial_line import Line
from colibri_kit.transport.serial_port import open_line
from colibri_kit.ui import Ui


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk.img"
    serial_rig.fat_disk(path)
    return path


@pytest.fixture
def guest(disk: Path) -> Iterator[serial_rig.Guest]:
    made = serial_rig.start_uboot(disk)
    yield made
    made.stop()


def _items(folder: Path, engine: int, weights: int) -> list[Item]:
    made = []
    for name, size, seed in (("colibri/colibri", engine, 1), ("colibri/m.coli/dense.coli", weights, 2)):
        path = folder / name.rsplit("/", 1)[-1]
        path.write_bytes(random.Random(seed).randbytes(size))
        made.append(Item(name, path, size))
    return made


def _check(disk: Path, items: list[Item]) -> None:
    """What lies on the disk, read by mtools, is what was sent."""
    for item in items:
        assert serial_rig.fat_read(disk, item.name) == item.path.read_bytes(), item.name


def _prompt(url: str) -> Line:
    line = open_line(url)
    assert identify(line, 20).kind == "uboot"
    return line


def _flash(url: str, items: list[Item], **options: object) -> UBootFlash:
    line = _prompt(url)
    try:
        job = UBootFlash(Ui(quiet=True), line, SerialOptions(**options))  # type: ignore[arg-type]
        job.run(items)
        return job
    finally:
        line.close()


def test_files_boot_command_and_boot(guest: serial_rig.Guest, disk: Path, tmp_path: Path) -> None:
    items = _items(tmp_path, 100_000, 5_000)
    url = f"socket://127.0.0.1:{guest.port}"
    job = _flash(url, items, bootcmd="echo one; echo the colibri boots", boot=True)
    _check(disk, items)
    script = serial_rig.fat_read(disk, "boot.scr")
    assert job.done.sent_bytes == 105_000 + len(script) and job.done.kept_bytes == 0
    assert job.done.booted is True
    # mkimage's layout: the header's CRC over itself with that field zero, then the data's CRC.
    assert zlib.crc32(script[:4] + bytes(4) + script[8:64]) == int.from_bytes(script[4:8], "big")
    assert zlib.crc32(script[64:]) == int.from_bytes(script[24:28], "big")

    again = _flash(url, items, bootcmd="echo one; echo the colibri boots")
    assert again.done.sent_bytes == 0 and again.done.kept_bytes == 105_000 + len(script)

    # After a reset the environment is gone here; distro boot finds our script by itself.
    line = _prompt(url)
    uboot = UBoot(line)
    line.type_line("reset", kill=b"\x03")
    assert identify(line, 20).kind == "uboot"
    assert uboot.variable("bootcmd") == "run distro_bootcmd"
    _, words = uboot.command("run distro_bootcmd", timeout=30)
    assert "Found U-Boot script /boot.scr" in words and "the colibri boots" in words
    line.close()


def test_a_damaged_piece_is_found_and_sent_again(
    guest: serial_rig.Guest, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FatFiles, "piece", 32_768)
    items = _items(tmp_path, 10_000, 50_000)
    url = f"socket://127.0.0.1:{guest.port}"
    _flash(url, items)
    line = _prompt(url)
    uboot = UBoot(line)
    # One byte in the second piece of the second file changes on the medium.
    uboot.ask("load virtio 0:1 42000000 /colibri/m.coli/dense.coli")
    uboot.ask(f"mw.b {0x42000000 + 32_768 + 777:x} 11 1")
    uboot.ask(f"fatwrite virtio 0:1 42000000 /colibri/m.coli/dense.coli {50_000:x} 0")
    line.close()
    job = _flash(url, items)
    assert job.done.kept_bytes == 10_000 + 32_768
    assert job.done.sent_bytes == 50_000 - 32_768
    _check(disk, items)


def test_one_percent_of_bytes_lost_each_way(guest: serial_rig.Guest, disk: Path, tmp_path: Path) -> None:
    items = _items(tmp_path, 2_500, 700)
    proxy = Proxy(guest.port, loss=0.01, seed=7)
    try:
        job = _flash(proxy.url, items, max_hours=24.0, bootcmd="echo hello")
    finally:
        proxy.close()
    assert proxy.dropped > 100
    assert job.done.repeats + job.done.retyped > 10
    _check(disk, items)


def test_cut_in_the_middle_and_resumed(guest: serial_rig.Guest, disk: Path, tmp_path: Path) -> None:
    items = _items(tmp_path, 40_000, 60_000)
    proxy = Proxy(guest.port, cut_after=75_000)
    try:
        with pytest.raises(ConnectionLost):
            _flash(proxy.url, items)
        assert proxy.cuts == 1
        job = _flash(proxy.url, items)
    finally:
        proxy.close()
    assert job.done.kept_bytes == 40_000 and job.done.sent_bytes == 60_000
    _check(disk, items)


def test_bare_sectors_hold_a_tar(guest: serial_rig.Guest, disk: Path, tmp_path: Path) -> None:
    import io
    import tarfile

    items = _items(tmp_path, 20_000, 3_000)
    _flash(f"socket://127.0.0.1:{guest.port}", items, to="virtio 0@0x1a000")
    data = disk.read_bytes()[0x1A000 * 512 :]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for item in items:
            member = archive.extractfile(item.name)
            assert member is not None and member.read() == item.path.read_bytes()


def test_over_a_pty_and_what_is_refused(disk: Path, tmp_path: Path) -> None:
    guest = serial_rig.start_uboot(disk, pty=True)
    try:
        assert guest.pty is not None
        line = _prompt(guest.pty)
        uboot = UBoot(line)
        data = random.Random(3).randbytes(50_000)
        uboot.load(0x42000000, data)
        assert uboot.crc32(0x42000000, 50_000) == zlib.crc32(data)
        assert uboot.set_baud(230_400) is False and uboot.alive()
        assert uboot.can("fatwrite", "mmc", "ext4write", "virtio") == {"fatwrite", "virtio"}
        for place in ("mmc 0:1", "mmc 0@0x100", "virtio 0:2", "virtio 7:1"):
            with pytest.raises(PreflightError):
                choose(uboot, place)
        assert choose(uboot, None).place.text == "virtio 0:1"
        line.close()
    finally:
        guest.stop()
