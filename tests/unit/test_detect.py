"""detect: sysfs trees, a real responder on loopback, a real SSH banner, a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from colibri_kit.cli import root
from colibri_kit.detect import mdns
from colibri_kit.detect.job import Sight, Wish, look, report
from colibri_kit.detect.sysfs import serial_ports, usb_devices
from colibri_kit.media.disks import disk_of
from colibri_kit.ui import Ui

LSBLK = {
    "name": "sdb",
    "path": "/dev/sdb",
    "type": "disk",
    "size": 31914983424,
    "model": "Ultra",
    "vendor": "SanDisk",
    "serial": "4C530001",
    "rm": True,
    "hotplug": True,
    "ro": False,
    "tran": "usb",
    "maj:min": "8:16",
    "children": [
        {
            "name": "sdb1",
            "path": "/dev/sdb1",
            "type": "part",
            "size": 268435456,
            "fstype": "vfat",
            "label": "boot",
            "mountpoints": ["/media/u/boot"],
            "maj:min": "8:17",
        }
    ],
}
FIXED = {"name": "sda", "path": "/dev/sda", "type": "disk", "size": 512 << 30, "rm": False, "hotplug": False}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A sysfs with an FTDI adapter, a hub, a Pi in USB boot mode, a real and an empty ttyS."""
    sysfs = tmp_path / "sys"
    ftdi = sysfs / "devices/pci0/usb1/1-2"
    _write(ftdi / "idVendor", "0403")
    _write(ftdi / "idProduct", "6001")
    _write(ftdi / "manufacturer", "FTDI")
    _write(ftdi / "product", "FT232R USB UART")
    _write(ftdi / "serial", "A50285BI")
    tty = ftdi / "1-2:1.0/ttyUSB0"
    _write(tty / "tty/ttyUSB0/type", "0")
    (sysfs / "bus/usb-serial/drivers/ftdi_sio").mkdir(parents=True)
    (tty / "driver").symlink_to(sysfs / "bus/usb-serial/drivers/ftdi_sio")
    (tty / "tty/ttyUSB0/device").symlink_to(tty)
    hub = sysfs / "devices/pci0/usb1"
    _write(hub / "idVendor", "1d6b")
    _write(hub / "idProduct", "0002")
    _write(hub / "bDeviceClass", "09")
    pi = sysfs / "devices/pci0/usb1/1-3"
    _write(pi / "idVendor", "0a5c")
    _write(pi / "idProduct", "2711")
    bus = sysfs / "bus/usb/devices"
    bus.mkdir(parents=True)
    for name, at in (("usb1", hub), ("1-2", ftdi), ("1-2:1.0", ftdi / "1-2:1.0"), ("1-3", pi)):
        (bus / name).symlink_to(at)
    (sysfs / "bus/platform/drivers/serial8250").mkdir(parents=True)
    for name, kind in (("ttyS0", "4"), ("ttyS1", "0")):
        device = sysfs / f"devices/platform/{name}"
        _write(device / f"tty/{name}/type", kind)
        (device / "driver").symlink_to(sysfs / "bus/platform/drivers/serial8250")
        (device / f"tty/{name}/device").symlink_to(device)
    (sysfs / "class/tty").mkdir(parents=True)
    (sysfs / "class/tty/ttyUSB0").symlink_to(tty / "tty/ttyUSB0")
    for name in ("ttyS0", "ttyS1"):
        (sysfs / f"class/tty/{name}").symlink_to(sysfs / f"devices/platform/{name}/tty/{name}")
    (sysfs / "class/tty/tty0").mkdir()
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_ports_and_usb_from_sysfs(tree: Path) -> None:
    ports = serial_ports(tree / "sys", tree / "dev")
    assert [Path(p.device).name for p in ports] == ["ttyS0", "ttyUSB0"]
    usb = ports[1].usb
    assert usb is not None and (usb.id, usb.serial) == ("0403:6001", "A50285BI")
    assert ports[1].driver == "ftdi_sio" and ports[1].permitted is False  # no node in dev
    seen = {u.id: u.known for u in usb_devices(tree / "sys")}
    assert seen == {"0403:6001": "FTDI FT232R serial adapter", "0a5c:2711": "Raspberry Pi 4 in USB boot mode"}


def _name(text: str) -> bytes:
    return b"".join(bytes([len(p)]) + p.encode() for p in text.split(".")) + b"\0"


def _record(name: bytes, kind: int, data: bytes) -> bytes:
    return name + struct.pack(">HHIH", kind, 1, 120, len(data)) + data


class Responder:
    """An mDNS responder on loopback: answers every query as avahi does for a legacy client."""

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.bind(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._sock.getsockname()
        self.asked: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                packet, sender = self._sock.recvfrom(9000)
            except OSError:
                return
            self.asked.append(packet)
            number = struct.unpack_from(">H", packet)[0]
            self._sock.sendto(b"\x00garbage", sender)
            self._sock.sendto(answer(number), sender)

    def close(self) -> None:
        self._sock.close()


def answer(number: int) -> bytes:
    """PTR, SRV and A; the service's name comes back through a compression pointer."""
    service, host = _name("_ssh._tcp.local"), _name("plc7.local")
    head = struct.pack(">6H", number, 0x8400, 0, 1, 0, 2)
    pointer = b"\xc0\x0c"  # to the service's name, the first thing after the header
    instance = b"\x05plc-7" + pointer
    body = _record(service, 12, instance)
    body += _record(instance, 33, struct.pack(">HHH", 0, 0, 2222) + host)
    body += _record(host, 1, bytes([192, 0, 2, 17]))
    return head + body


@pytest.fixture
def responder() -> Iterator[Responder]:
    made = Responder()
    yield made
    made.close()


def test_hosts_by_mdns(responder: Responder) -> None:
    found = mdns.browse(0.6, group=responder.address)
    assert [(f.name, f.addresses, f.services) for f in found] == [
        ("plc7.local", ["192.0.2.17"], {"_ssh": 2222})
    ]
    asked = responder.asked[0]
    assert asked[2:6] == b"\0\0\0\3" and _name("_ssh._tcp.local") + b"\0\x0c\x80\x01" in asked


def test_a_pointer_loop_and_random_bytes_end() -> None:
    loop = struct.pack(">6H", 0, 0x8400, 0, 1, 0, 0) + b"\xc0\x0c" + struct.pack(">HHIH", 12, 1, 1, 0)
    found: dict[str, mdns.Found] = {}
    mdns.merge(found, loop, "127.0.0.1")
    assert found == {}
    for pointed in (b"\xc0\xff", b"\xc0", b"\x40a", b"\x05ab"):
        with pytest.raises(ValueError):
            mdns.read_name(pointed, 0)


@given(st.binary(max_size=200), st.integers(0, 1 << 30))
def test_damaged_answers_never_raise(tail: bytes, seed: int) -> None:
    whole = bytearray(answer(7))
    rng = random.Random(seed)
    for _ in range(rng.randrange(6)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    mdns.merge({}, bytes(whole[: rng.randrange(len(whole) + 1)]) + tail, "192.0.2.1")


def _banner_server(words: bytes) -> tuple[socket.socket, int]:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            client, _ = server.accept()
            with client:
                client.sendall(words)
        except OSError:
            return

    threading.Thread(target=serve, daemon=True).start()
    return server, server.getsockname()[1]


def test_everything_together(tree: Path, responder: Responder) -> None:
    good, port = _banner_server(b"SSH-2.0-dropbear_2022.83\r\n")
    web, web_port = _banner_server(b"HTTP/1.0 400\r\n")
    wish = Wish(
        seconds=0.4,
        hosts=(f"127.0.0.1:{port}", f"127.0.0.1:{web_port}", "127.0.0.1:1"),
        sysfs=tree / "sys",
        dev=tree / "dev",
        group=responder.address,
    )
    disks = [disk_of(row, "", "") for row in (LSBLK, FIXED)]
    sight = look(wish, lambda: disks, lambda text: None)
    good.close()
    web.close()
    assert [m["path"] for m in sight.media] == ["/dev/sdb"]
    assert [(h.banner, h.error is None) for h in sight.hosts] == [
        (None, True), ("SSH-2.0-dropbear_2022.83", True), (None, False), (None, False)
    ]  # fmt: skip
    assert all(p.answers is None for p in sight.ports)
    doc = json.loads(json.dumps(sight.as_json()))
    assert set(doc) == {"media", "ports", "usb", "typec", "hosts", "notes"}
    text = report(sight, Ui.table)
    for word in ("SanDisk Ultra", "4C530001", "FTDI FT232R", "plc7.local", "dropbear", "not asked"):
        assert word in text
    assert report(Sight(), Ui.table).count("none") == 5


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are POSIX")
def test_ports_are_opened_only_when_asked(tree: Path) -> None:
    """A console behind a pseudo-terminal hears nothing without --probe-ports, one Return with it."""
    master, slave = pty.openpty()
    (tree / "dev/ttyUSB0").symlink_to(os.ttyname(slave))
    heard = bytearray()

    def board() -> None:
        while True:
            try:
                data = os.read(master, 100)
            except OSError:
                return
            heard.extend(data)
            os.write(master, b"\r\nDebian GNU/Linux 12 plc ttyS2\r\n\r\nplc login: ")

    threading.Thread(target=board, daemon=True).start()
    wish = {"network": False, "sysfs": tree / "sys", "dev": tree / "dev"}
    look(Wish(**wish), list, lambda text: None)  # type: ignore[arg-type]
    assert heard == b""
    sight = look(Wish(probe_ports=True, **wish), list, lambda text: None)  # type: ignore[arg-type]
    found = {Path(p.device).name: (p.answers, p.words) for p in sight.ports}
    assert found["ttyUSB0"] == ("login", "plc login:")
    assert found["ttyS0"][0] == "unopened"
    assert set(heard) <= {13, 10}
    os.close(slave)
    os.close(master)


def test_the_verb_prints_one_object() -> None:
    done = CliRunner().invoke(root, ["detect", "--no-network", "--json"])
    assert done.exit_code == 0, done.output
    assert set(json.loads(done.stdout)) == {"media", "ports", "usb", "typec", "hosts", "notes"}
