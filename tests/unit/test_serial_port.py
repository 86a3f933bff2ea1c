"""Ports, lines, answers and YMODEM without a board: pseudo-terminals and lrzsz's receivers."""

from __future__ import annotations

import os
import pty
import random
import subprocess
import sys
import threading
import time
import tty
import zlib
from pathlib import Path

import pytest

from colibri_kit.deploy.model import Part
from colibri_kit.errors import AuthError, PreflightError, UnreachableError, UsageError
from colibri_kit.serialflash import plan
from colibri_kit.serialflash.bootscript import boot_commands, script_image
from colibri_kit.serialflash.medium import parse_place
from colibri_kit.transport.base import ConnectionLost
from colibri_kit.transport.serial_answer import classify
from colibri_kit.transport.serial_console import cksum, quote
from colibri_kit.transport.serial_line import EchoLost
from colibri_kit.transport.serial_modem import crc16, next_block, packet
from colibri_kit.transport.serial_port import holders, open_line, permission_remedy

posix = pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are POSIX")


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (b"\r\nU-Boot 2023.01\r\nHit any key to stop autoboot:  0\r\n=> ", "uboot"),
        (b"\r\nstm32mp U-Boot> ", "uboot"),
        (b"STM32MP> ", "shell"),  # told apart by asking
        (b"Debian GNU/Linux 12 plc ttyS2\r\n\r\nplc login: ", "login"),
        (b"Password: ", "password"),
        (b"\x1b[?2004hroot@plc:~# ", "shell"),
        (b"\x1b]0;x\x07\x1b[01;32mme@x\x1b[00m:~$ \x1b[K", "shell"),
        (b"[   12.345678] random: crng init done\r\n", "text"),
        (b"\x00\x00", "silent"),
        (b"", "silent"),
        (bytes([0xF8, 0x80, 0xFE, 0x00, 0x98, 0x9E, 0xE6, 0x80]), "garbled"),
        ("größer\r\n".encode(), "text"),
    ],
)
def test_what_answers(seen: bytes, kind: str) -> None:
    assert classify(seen).kind == kind


@posix
def test_no_such_port_and_no_port_at_all(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError) as missing:
        open_line(str(tmp_path / "ttyUSB9"))
    assert missing.value.code == "CK-SERIAL-PORT" and "detect" in str(missing.value.hint)
    plain = tmp_path / "file"
    plain.write_text("x")
    with pytest.raises(UsageError):
        open_line(str(plain))
    with pytest.raises(UnreachableError):
        open_line("socket://127.0.0.1:9")


@posix
def test_a_port_that_another_program_holds() -> None:
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    code = "import serial,sys,time; s=serial.Serial(sys.argv[1],exclusive=True); print(1,flush=True)"
    code += "; time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        assert any(f"(pid {other.pid})" in h for h in holders(name))
        with pytest.raises(UnreachableError) as busy:
            open_line(name)
        assert busy.value.code == "CK-SERIAL-BUSY"
        assert f"pid {other.pid}" in busy.value.message
    finally:
        other.kill()
        other.wait()
        assert other.stdout is not None
        other.stdout.close()
    line = open_line(name)  # free again
    line.close()
    os.close(master)
    os.close(slave)


@posix
def test_permission_denied_names_the_remedy() -> None:
    if os.geteuid() == 0:
        master, slave = pty.openpty()
        name = os.ttyname(slave)
        os.fchmod(slave, 0o600)
        code = (
            "import os,sys\n"
            "from colibri_kit.transport.serial_port import open_line\n"
            "from colibri_kit.errors import AuthError\n"
            "import serial, grp\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "try: open_line(sys.argv[1])\n"
            "except AuthError as e: print(e.code, e.hint)\n"
        )
        import colibri_kit

        env = {**os.environ, "PYTHONPATH": str(Path(colibri_kit.__file__).parent.parent)}
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, env=env)
        os.close(master)
        os.close(slave)
        assert "CK-SERIAL-PERMISSION" in done.stdout, done.stderr
        assert "usermod -aG" in done.stdout or "udev rule" in done.stdout
    else:
        with pytest.raises(AuthError):
            open_line("/dev/console")
    assert "udev" in permission_remedy("/dev/null")


@posix
def test_a_port_that_goes_away() -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    line = open_line(os.ttyname(slave))
    os.close(slave)
    os.close(master)
    with pytest.raises(ConnectionLost) as gone:
        line.read(1)
        line.write(b"x")
    assert gone.value.code == "CK-SERIAL-LOST"
    line.close()


def _echoing(master: int, stop: threading.Event, drop: int) -> threading.Thread:
    """Echoes like a terminal, but loses every ``drop``-th byte."""

    def work() -> None:
        count = 0
        while not stop.is_set():
            try:
                data = os.read(master, 100)
            except OSError:
                return
            for byte in data:
                count += 1
                if drop and count % drop == 0:
                    continue
                os.write(master, b"\r\n" if byte == 13 else b"" if byte == 3 else bytes([byte]))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@posix
@pytest.mark.parametrize(("drop", "fine"), [(0, True), (13, True), (3, False)])
def test_typing_is_checked_by_its_echo(drop: int, fine: bool) -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    line = open_line(os.ttyname(slave))
    stop = threading.Event()
    _echoing(master, stop, drop)
    try:
        if fine:
            line.write(b"12345")  # so that the 13th byte is the last of the first attempt
            line.drain(0.5)
            line.type_line("run boot", kill=b"\x03")
            assert (line.retyped > 0) == (drop > 0)
        else:
            with pytest.raises(EchoLost):
                line.type_line("setenv bootcmd run x", kill=b"\x03", tries=6)
    finally:
        stop.set()
        line.close()
        os.close(slave)
        os.close(master)


def test_blocks_and_checksums() -> None:
    assert crc16(b"123456789") == 0x31C3  # CRC-16/XMODEM's check value
    assert cksum(b"123456789") == 930766865  # POSIX cksum's
    assert cksum(b"") == 4294967295
    data = bytes(range(200)) * 12  # 2400 = 2 x 1024 + 352
    made, at = [], 0
    while at < len(data):
        made.append(next_block(data, at, True))
        at += len(made[-1])
    assert [len(b) for b in made] == [1024, 1024, 128, 128, 128]
    assert b"".join(made)[: len(data)] == data and set(b"".join(made)[len(data) :]) == {0x1A}
    assert next_block(data, 1024, False) == data[1024 : 1024 + 128]
    assert packet(257, bytes(128))[:3] == b"\x01\x01\xfe"
    assert len(packet(1, bytes(1024))) == 1029
    assert packet(1, b"\x01" * 128, crc=False)[-1] == 128


@posix
@pytest.mark.parametrize(
    "text", [b"plain", b"it's", b"a\nb\n\n", b"\x01\xff\tx", "ü €".encode(), b"$HOME `id` \\ !!"]
)
def test_quoted_text_survives_a_shell(text: bytes) -> None:
    words = "".join(quote(text))
    assert words.isascii() and "\n" not in words
    script = "N=\"$(printf '\\nx')\";N=${N%x}\nc=" + words + '\nprintf %s "$c"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    assert done.stdout == text


def test_the_sum_and_the_refusal() -> None:
    assert plan.time_text(plan.seconds(4 * 10**9, 115200, 1.0)) == "4.0 days"
    with pytest.raises(PreflightError) as slow:
        plan.check_time(4 * 10**9, 115200 / 10 * plan.YMODEM_SHARE, 2.0, "115200 baud at best")
    assert slow.value.code == "CK-SERIAL-SLOW" and slow.value.exit_status == 6
    assert "3.7 GiB at 10.5 KiB/s = 4.3 days" in slow.value.message
    assert "SD card" in str(slow.value.hint)
    plan.check_time(60 * 10**6, 10_000, 2.0, "")


def test_boot_script_and_commands(tmp_path: Path) -> None:
    image = script_image("echo hi\n")
    assert image[:4] == b"\x27\x05\x19\x56" and image[28:32] == bytes([5, 22, 6, 0])
    assert int.from_bytes(image[4:8], "big") == zlib.crc32(image[:4] + bytes(4) + image[8:64])
    assert int.from_bytes(image[24:28], "big") == zlib.crc32(image[64:])
    assert image[64:] == (8).to_bytes(4, "big") + bytes(4) + b"echo hi\n"
    assert boot_commands("mmc 0:1", ["colibri/colibri"], None) is None
    made = boot_commands("mmc 0:1", ["colibri/colibri", "vmlinuz", "initrd.gz", "x.dtb"], "console=ttyS2")
    assert made is not None
    assert made[0] == "setenv bootargs 'console=ttyS2'"
    assert made[-1] == "booti ${kernel_addr_r} ${ck_rd} ${fdt_addr_r}"
    assert made.index("setenv ck_rd ${ramdisk_addr_r}:${filesize}") < made.index(
        "load mmc 0:1 ${kernel_addr_r} vmlinuz"
    )


def test_places() -> None:
    assert parse_place("mmc 0:1").text == "mmc 0:1"
    assert parse_place("virtio 1@0x8000").sector == 0x8000
    for bad in ("mmc", "/dev/sdb", "mmc 0", "mmc 0:1; reset", "floppy 0:1"):
        with pytest.raises(UsageError):
            parse_place(bad)


def test_tar_is_the_same_each_time(tmp_path: Path) -> None:
    file = tmp_path / "engine"
    file.write_bytes(random.Random(1).randbytes(5000))
    part = Part("colibri", file, 5000, "0" * 64)
    files = plan.items(part, (), "m.coli", ())
    first = plan.tar(files, tmp_path / "a.tar").path.read_bytes()
    os.utime(file, (1, 1))
    time.sleep(0.01)
    assert plan.tar(files, tmp_path / "b.tar").path.read_bytes() == first
