"""`detect` finds USB-C ports, our gadget's serial devices, who speaks there; writes to no other port."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from colibri_kit.detect.job import Sight, Wish, look, report
from colibri_kit.detect.sysfs import KNOWN_USB, serial_ports
from colibri_kit.offload import discover, frames, gadget
from colibri_kit.ui import Ui

from .conftest import PtyPair, convert, eb, reference  # noqa: F401


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def usb_tty(sysfs: Path, name: str, usb_at: str, driver: str) -> None:
    """``class/tty/NAME/device`` -> the interface of a USB device, with its driver."""
    interface = sysfs / usb_at / (usb_at.rsplit("/", 1)[1] + ":1.0")
    interface.mkdir(parents=True)
    bound = sysfs / "bus/usb/drivers" / driver
    bound.mkdir(parents=True)
    (interface / "driver").symlink_to(bound)
    folder = sysfs / "class/tty" / name
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(interface)


TYPEC = {
    "port0/data_role": "[host] device", "port0/power_role": "source [sink]",
    "port0-partner/type": "ufp", "port0-partner/port0-partner.0/svid": "ff01",
    "port0-partner/port0-partner.1/svid": "8087",
    "port1/data_role": "host [device]", "port1/power_role": "[source] sink",
}  # fmt: skip


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A PC with our gadget at ttyACM0, an FTDI adapter at ttyUSB0; its own ttyGS0 is another's gadget."""
    root = tmp_path / "sys"
    usb = "devices/pci0/usb1"
    tree(root, {
        f"{usb}/1-1/idVendor": "1209", f"{usb}/1-1/idProduct": "0001", f"{usb}/1-1/serial": "colibri-0",
        f"{usb}/1-1/manufacturer": "colibri", f"{usb}/1-1/product": "colibri offload",
        f"{usb}/1-2/idVendor": "0403", f"{usb}/1-2/idProduct": "6001", f"{usb}/1-2/product": "FT232R",
        f"{usb}/1-3/idVendor": "1209", f"{usb}/1-3/idProduct": "0001", f"{usb}/1-3/product": "a lamp",
        "class/tty/ttyGS0/dev": "240:0", "class/tty/tty1/dev": "4:1",
        "kernel/config/usb_gadget/other/idVendor": "0x1d6b",
        "kernel/config/usb_gadget/other/idProduct": "0x0104",
        "kernel/config/usb_gadget/other/functions/acm.x/port_num": "0",
    })  # fmt: skip
    tree(root / "class/typec", TYPEC)
    usb_tty(root, "ttyACM0", f"{usb}/1-1", "cdc_acm")
    usb_tty(root, "ttyUSB0", f"{usb}/1-2", "ftdi_sio")
    usb_tty(root, "ttyACM1", f"{usb}/1-3", "lamp")
    (tmp_path / "dev").mkdir()
    return root


def see(sysfs: Path, **more: Any) -> Sight:
    wish = Wish(network=False, sysfs=sysfs, dev=sysfs.parent / "dev", **more)
    return look(wish, list, lambda text: None)


def by_name(sight: Sight) -> dict[str, Any]:
    return {Path(p.device).name: p for p in sight.ports}


def test_typec_ports(tmp_path: Path) -> None:
    """As Documentation/ABI/testing/sysfs-class-typec describes them."""
    tree(tmp_path / "class/typec", TYPEC)
    assert discover.typec_ports(tmp_path) == [
        discover.TypecPort("port0", "host", "sink", "ufp", ("8087", "ff01")),
        discover.TypecPort("port1", "device", "source", None, ()),
    ]
    assert discover.typec_ports(tmp_path / "none") == []


def test_typec_in_table_and_json(sysfs: Path) -> None:
    sight = see(sysfs)
    text = report(sight, Ui.table)
    assert "USB-C ports" in text
    assert any(line.split() == ["port0", "host,", "sink", "ufp", "Thunderbolt,", "DisplayPort"]
               for line in text.splitlines()), text  # fmt: skip
    assert "nothing plugged in" in text
    doc = json.loads(json.dumps(sight.as_json()))
    assert doc["typec"][0] == {
        "name": "port0", "data_role": "host", "power_role": "sink", "partner": "ufp",
        "alt_modes": ["8087", "ff01"],
    }  # fmt: skip
    assert "USB-C ports\nnone" in report(Sight(), Ui.table)


def test_which_ports_are_ours(sysfs: Path) -> None:
    assert f"{discover.GADGET_VENDOR:04x}:{discover.GADGET_PRODUCT:04x}" in KNOWN_USB
    ports = {Path(p.device).name: p for p in serial_ports(sysfs, sysfs.parent / "dev")}
    assert set(ports) == {"ttyACM0", "ttyACM1", "ttyUSB0", "ttyGS0"}
    ours = {name for name, port in ports.items() if discover.is_ours(port, sysfs)}
    assert ours == {"ttyACM0"}  # neither a lamp with the same test id nor another gadget's console
    mine = sysfs / "kernel/config/usb_gadget/colibri"
    mine.mkdir()
    done = subprocess.run(
        ["sh", "-c", gadget.script()[: gadget.script().index("case ")] + "start"],
        env={"PATH": os.environ["PATH"], "CONFIGFS": str(sysfs / "kernel/config"),
             "UDC_CLASS": str(sysfs / "class/typec")}, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    (mine / "functions/acm.usb0/port_num").write_text("0\n")  # the kernel's part
    (sysfs / "kernel/config/usb_gadget/other/functions/acm.x/port_num").write_text("1\n")
    assert discover.is_ours(ports["ttyGS0"], sysfs)


class Listener:
    """A pty in dev/NAME; everything that is written to it is kept."""

    def __init__(self, dev: Path, name: str) -> None:
        self._master, self.slave = os.openpty()
        (dev / name).symlink_to(os.ttyname(self.slave))
        self.heard = bytearray()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stop.is_set():
            if select.select([self._master], [], [], 0.05)[0]:
                self.heard += os.read(self._master, 4096)

    def say(self, data: bytes) -> None:
        os.write(self._master, data)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        os.close(self._master)
        os.close(self.slave)


@pytest.fixture
def listen(sysfs: Path) -> Iterator[Callable[[str], Listener]]:
    made: list[Listener] = []

    def make(name: str) -> Listener:
        made.append(Listener(sysfs.parent / "dev", name))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_only_our_port_hears_anything(sysfs: Path, listen: Callable[[str], Listener]) -> None:
    heard = {name: listen(name) for name in ("ttyACM0", "ttyACM1", "ttyUSB0", "ttyGS0")}
    before = {name: termios.tcgetattr(one.slave) for name, one in heard.items()}
    ports = by_name(see(sysfs))
    assert {n: p.link for n, p in ports.items()} == {
        "ttyACM0": "silent", "ttyACM1": None, "ttyUSB0": None, "ttyGS0": None,
    }  # fmt: skip
    got = {name: bytes(one.heard) for name, one in heard.items() if one.heard}
    assert list(got) == ["ttyACM0"]
    (frame,) = frames.Reader().feed(got["ttyACM0"])
    assert frame.type == frames.PING and len(got["ttyACM0"]) == 28
    assert {name: termios.tcgetattr(one.slave) for name, one in heard.items()} == before  # cooked again
    ports = by_name(see(sysfs, probe_links=True))
    assert {p.link for p in ports.values()} == {"silent"}
    assert all(one.heard for one in heard.values())


def test_a_module_says_which_model_it_has(
    sysfs: Path, convert: Any, module: Any, ptys: PtyPair  # noqa: F811
) -> None:  # fmt: skip
    """A real expertd behind our gadget's port; the question neither counts as refused nor ends a greeting."""
    model = convert(reference("granitemoe", "q4_k_m").gguf)
    name = json.loads((model / "manifest.json").read_text())["name"]
    (sysfs.parent / "dev/ttyACM0").symlink_to(ptys.names[0])
    there = module(model, "--device", ptys.names[1])
    for _ in range(2):
        port = by_name(sight := see(sysfs))["ttyACM0"]
        assert (port.link, port.link_words) == ("module", f"this is {name}, protocol 1")
    text = report(sight, Ui.table)
    assert f"offload module: this is {name}, protocol 1" in text
    stats = there.stop()
    assert stats["refused"] == 0 and not any("refused" in line for line in there.said)


def test_a_question_leaves_the_greeting_alone(convert: Any, module: Any, ptys: PtyPair) -> None:  # noqa: F811
    """HELLO, question, EXEC: the EXEC is looked at (malformed), not told that it came before HELLO."""
    model = convert(reference("granitemoe", "q4_k_m").gguf)
    manifest = json.loads((model / "manifest.json").read_text())
    module(model, "--device", ptys.names[1])
    right = frames.Hello(**{
        **frames.QUESTION.__dict__, "model_id": bytes.fromhex(manifest["model_id"]),
        "golden": bytes.fromhex(manifest["golden"]["sha256"]), "n_layer": 2, "n_embd": 256,
        "n_expert": manifest["geometry"]["n_expert"], "n_used": manifest["geometry"]["n_expert_used"],
        "n_expert_ff": manifest["geometry"]["n_expert_ff"],
    })  # fmt: skip
    asked = [(frames.HELLO, right.pack()), (frames.HELLO, frames.QUESTION.pack()), (frames.EXEC, b"x" * 16)]
    fd = os.open(ptys.names[0], os.O_RDWR | os.O_NOCTTY)
    reader, got = frames.Reader(), []
    try:
        for seq, (kind, payload) in enumerate(asked, 1):
            os.write(fd, frames.Frame(kind, seq, 0, payload).pack())
        while len(got) < 3:
            assert select.select([fd], [], [], 20)[0]
            got += reader.feed(os.read(fd, 4096))
    finally:
        os.close(fd)
    codes = [int.from_bytes(f.payload[:2], "little") for f in got]
    assert [f.type for f in got] == [frames.HELLO, frames.ERROR, frames.ERROR]
    assert codes[1:] == [2, 5]


def test_an_engine_that_looks_for_a_module(
    sysfs: Path, convert: Any, ptys: PtyPair, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """The other end is a board that runs with --offload: it greets, this end may become its module."""
    from colibri_kit.native import Engine

    (sysfs.parent / "dev/ttyACM0").symlink_to(ptys.names[0])
    with Engine(convert(reference("llama", "q4_k_m").gguf), threads=1, offload=ptys.names[1]):
        for _ in range(20):  # it greets anew with pauses
            port = by_name(see(sysfs))["ttyACM0"]
            if port.link == "board":
                break
    assert port.link == "board" and port.link_words.startswith("colibri ")


def test_a_port_in_use_is_left_alone(sysfs: Path, listen: Callable[[str], Listener]) -> None:
    """An engine (or pyserial) locks what it uses; so does this."""
    port = listen("ttyACM0")
    fd = os.open(sysfs.parent / "dev/ttyACM0", os.O_RDWR | os.O_NOCTTY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert by_name(see(sysfs))["ttyACM0"].link == "busy"
    finally:
        os.close(fd)
    assert not port.heard
    (sysfs.parent / "dev/ttyACM0").unlink()
    gone = by_name(see(sysfs))["ttyACM0"]
    assert (gone.link, gone.link_words) == ("unopened", "No such file or directory")


def test_two_engines_do_not_share_a_device(convert: Any, module: Any, ptys: PtyPair) -> None:  # noqa: F811
    model = convert(reference("llama", "q4_k_m").gguf)
    module(model, "--device", ptys.names[1])
    done = eb.colibri("expertd", "--model", model, "--device", ptys.names[1])
    assert done.returncode != 0
    assert f"{ptys.names[1]} is in use" in done.stderr.decode()


def test_noise_is_not_an_answer(sysfs: Path, listen: Callable[[str], Listener]) -> None:
    port = listen("ttyACM0")
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                port.say(frames.Frame(frames.PONG, 1, 7, b"").pack() + b"login: \xc5BXP" + bytes(40))
            stop.wait(0.01)

    thread = threading.Thread(target=chatter)
    thread.start()
    try:
        assert by_name(see(sysfs))["ttyACM0"].link == "silent"
    finally:
        stop.set()
        thread.join()
