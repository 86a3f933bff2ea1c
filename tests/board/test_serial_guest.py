"""A virtual board's own console: an emulated UART, a real kernel, busybox's shell."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import virtual

from colibri_kit.config import load_board
from colibri_kit.detect.job import Wish, look
from colibri_kit.doctor import board as doctor
from colibri_kit.transport.serial_console import Console
from colibri_kit.transport.serial_port import open_line
from colibri_kit.transport.serial_shell import SerialTransport


@pytest.fixture(scope="module")
def console(board_dir: Path) -> Iterator[str]:
    with virtual.board("virt-a53", "a53-serial", "--ram", "256MiB", "--pty") as told:
        yield told["console"]


def test_programs_files_doctor_and_detect(console: str, tmp_path: Path) -> None:
    made = Console(open_line(console))
    made.start("root", lambda: None)
    transport = SerialTransport(made, method="base64")
    try:
        assert transport.run(["uname", "-m"]).text == "aarch64"
        data = random.Random(1).randbytes(60_000)
        transport.put_stream(io.BytesIO(data), len(data), "/root/w", mode=0o600)
        assert transport.run(["sha256sum", "/root/w"]).text.split()[0] == hashlib.sha256(data).hexdigest()
        assert transport.read("/root/w", limit=3000) == data[:3000]
        # A kernel message in the middle is neither seen nor in the way: the level is 1.
        transport.run(["sh", "-c", "echo '<3>colibri test message' >/dev/kmsg"])
        assert transport.run(["sh", "-c", "dmesg | grep -c 'colibri test'"]).text == "1"
        found = {f.what: f for f in doctor.check(transport, load_board("a53-plc"), "/root/c", lambda t: None)}
        assert found["CPU for a53-plc"].level == "ok" and found["userland"].found == "aarch64, 64-bit"
        assert found["memory"].level == "warn"  # 256 MiB, the profile's budget is 1280
    finally:
        transport.close()

    dev, sysfs = tmp_path / "dev", tmp_path / "sys/class/tty/ttyUSB0"
    dev.mkdir()
    (dev / "ttyUSB0").symlink_to(console)
    (tmp_path / "driver").mkdir()
    (sysfs / "device").mkdir(parents=True)
    (sysfs / "device/driver").symlink_to(tmp_path / "driver")
    seen = look(Wish(True, network=False, sysfs=tmp_path / "sys", dev=dev), list, lambda t: None)
    assert [(p.device, p.answers) for p in seen.ports] == [(str(dev / "ttyUSB0"), "shell")]
