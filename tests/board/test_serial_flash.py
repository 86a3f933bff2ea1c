"""``flash --serial`` as a user runs it: a shell on a terminal, a real U-Boot, and what is refused."""

from __future__ import annotations

import json
import os
import pty
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import serial_rig
import virtual
from serial_proxy import Proxy
from serial_shells import PtyShell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[PtyShell]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PS1": "plc# ", "TERM": "xterm"}
    made = PtyShell(["bash", "--norc", "-i"], env)
    yield made
    made.close()


@pytest.fixture(scope="session")
def host_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engine") / "colibri-host"
    ran = virtual.kit("build", "--board", "host", "-o", out)
    assert ran.rc == 0, ran.err
    return out


def _flash(port: str, model: Path, *options: object) -> virtual.Ran:
    return virtual.kit("flash", "--serial", port, "--model", model, "--json", *options)


def _json(ran: virtual.Ran) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(ran.out)
    return made


def test_a_deployment_over_a_console_cut_and_resumed(
    shell: PtyShell, host_engine: Path, olmoe: Path, tmp_path: Path
) -> None:
    """The real engine checks its golden on the other side of the console."""
    prefix = tmp_path / "opt"
    proxy = Proxy(shell.port, cut_after=300_000)
    words = ("--board", "host", "--engine", host_engine, "--prefix", prefix, "--method", "base64")
    try:
        plan = _json(_flash(f"socket://127.0.0.1:{shell.port}", olmoe, *words, "--dry-run"))
        assert plan["way"] == "linux" and plan["send_bytes"] > 300_000 and not prefix.exists()
        cut = _flash(proxy.url, olmoe, *words)
        assert cut.rc == 7 and _json(cut)["error"]["code"] == "CK-SERIAL-LOST", cut.err
        done = _flash(proxy.url, olmoe, *words)
        assert done.rc == 0, done.err
    finally:
        proxy.close()
    told = _json(done)
    assert told["sent"]["bytes_resumed"] > 0
    assert told["sent"]["bytes_sent"] + told["sent"]["bytes_resumed"] <= plan["send_bytes"]
    golden = json.loads((olmoe / "manifest.json").read_text())["golden"]["sha256"]
    assert told["golden"] == golden
    assert (prefix / "current/colibri").read_bytes() == host_engine.read_bytes()
    status = virtual.kit("status", "--board", "host", "--prefix", prefix, "--check", "--json")
    assert status.rc == 0 and json.loads(status.out)["health"] == "ok"


def test_uboot_end_to_end(a53_engine: Path, olmoe: Path, tmp_path: Path) -> None:
    """A dry run and a too slow line against a real U-Boot, then bytes that were written."""
    disk = tmp_path / "disk.img"
    serial_rig.fat_disk(disk)
    guest = serial_rig.start_uboot(disk)
    small = tmp_path / "vmlinuz"
    small.write_bytes(os.urandom(3000))
    words = ("--board", "virt-a53", "--engine", a53_engine, "--extra", f"{small}=vmlinuz")
    try:
        url = f"socket://127.0.0.1:{guest.port}"
        plan = _json(_flash(url, olmoe, *words, "--dry-run"))
        assert plan["place"] == "virtio 0:1" and plan["dry_run"] is True
        names = {f["name"]: f["bytes"] for f in plan["files"]}
        assert names["colibri/colibri"] == a53_engine.stat().st_size and names["vmlinuz"] == 3000
        slow = _flash(url, olmoe, *words, "--max-hours", "0.0001")
        assert slow.rc == 6 and _json(slow)["error"]["code"] == "CK-SERIAL-SLOW"
        wrong = _flash(url, olmoe, *words, "--place", "mmc 0:1")
        assert wrong.rc == 6 and _json(wrong)["error"]["code"] == "CK-UBOOT-MEDIUM"
    finally:
        guest.stop()


def test_refusals(olmoe: Path, host_engine: Path, tmp_path: Path) -> None:
    words = ("--board", "host", "--engine", host_engine, "--wait", "4")
    missing = _flash("/dev/ttyUSB77", olmoe, *words)
    assert missing.rc == 4 and _json(missing)["error"]["code"] == "CK-SERIAL-PORT"
    master, slave = pty.openpty()
    silent = _flash(os.ttyname(slave), olmoe, *words)
    assert silent.rc == 4 and _json(silent)["error"]["code"] == "CK-SERIAL-SILENT"

    def noise() -> None:
        try:
            while os.read(master, 100):
                os.write(master, bytes([0xFE, 0x80, 0x00, 0xF8, 0x9C, 0xE0, 0x06]) * 4)
        except OSError:
            return

    threading.Thread(target=noise, daemon=True).start()
    garbled = _flash(os.ttyname(slave), olmoe, *words)
    assert garbled.rc == 4 and _json(garbled)["error"]["code"] == "CK-SERIAL-NOISE"
    wrong = _flash(os.ttyname(slave), olmoe, "--board", "rpi4", "--engine", host_engine)
    assert wrong.rc == 6 and _json(wrong)["error"]["code"] == "CK-PREFLIGHT-ENGINE"
    os.close(slave)
    os.close(master)
