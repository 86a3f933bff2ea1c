"""What could be an offload link on this machine: USB-C ports, our serial devices, and who speaks there.

Reads only ``/sys``. :func:`ask` opens a device and sends one PING; a module answers it with PONG before
any greeting. ``colibri-kit detect`` shows all of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.detect.sysfs import Port, text
from colibri_kit.offload import frames

#: What our own gadget says it is (gadget.py); pid.codes' test range, not for sale.
GADGET_VENDOR, GADGET_PRODUCT = 0x1209, 0x0001

#: Links that have names but no implementation, and why.
REFUSED = {
    "pcie": "no driver for an accelerator behind PCIe exists here",
    "usb4": "tunnels PCIe: see pcie",
    "altmode": "an alternate mode needs a driver of its partner",
}

#: SVIDs of alternate modes, from linux/include/linux/usb/typec_{dp,tbt}.h.
ALT_MODES = {"ff01": "DisplayPort", "8087": "Thunderbolt"}


@dataclass(frozen=True)
class TypecPort:
    """One USB-C port of ``/sys/class/typec``. Roles are as the kernel gives them, without brackets.

    Attributes:
        data_role: ``host`` or ``device``; power_role: ``source`` or ``sink``.
        partner: None = nothing is plugged in; else its type ("" when the kernel does not know).
        alt_modes: SVIDs of the partner's alternate modes, hexadecimal.
    """

    name: str
    data_role: str
    power_role: str
    partner: str | None
    alt_modes: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a serial device.

    Attributes:
        role: ``module`` (answers a PING), ``board`` (an engine that greets, looking for a module),
            ``silent``, ``busy`` (a program on this side holds the device) or ``unopened``.
        words: the module's model, the board's engine, or why it could not be opened.
    """

    role: str
    words: str = ""


def _chosen(words: str) -> str:
    """``host`` of ``[host] device``; a plain word stays."""
    match = re.search(r"\[(\w+)\]", words)
    return match.group(1) if match else words


def typec_ports(sys: Path = Path("/sys")) -> list[TypecPort]:
    """USB-C ports, in order; empty where the kernel has no such class."""
    root = sys / "class" / "typec"
    out = []
    for port in sorted(p for p in root.glob("port*") if re.fullmatch(r"port\d+", p.name)):
        partner = root / f"{port.name}-partner"
        modes = sorted({svid for p in partner.glob(f"{partner.name}.*") if (svid := text(p / "svid"))})
        out.append(
            TypecPort(
                name=port.name,
                data_role=_chosen(text(port / "data_role")),
                power_role=_chosen(text(port / "power_role")),
                partner=text(partner / "type") if partner.is_dir() else None,
                alt_modes=tuple(modes),
            )
        )
    return out


def is_ours(port: Port, sys: Path = Path("/sys")) -> bool:
    """Whether a port belongs to our gadget, seen from either end.

    At the other end: USB id and product are the gadget's. On the board itself: the configfs entry that
    made this /dev/ttyGS carries our id. Another gadget's ttyGS may be a login console.
    """
    number = re.search(r"ttyGS(\d+)$", port.device)
    if number is None:
        both = f"{GADGET_VENDOR:04x}:{GADGET_PRODUCT:04x}"
        return port.usb is not None and port.usb.id == both and "colibri" in port.usb.name
    for gadget in (sys / "kernel/config/usb_gadget").glob("*"):
        ids = [text(gadget / name) for name in ("idVendor", "idProduct")]
        if ids != [f"0x{GADGET_VENDOR:04x}", f"0x{GADGET_PRODUCT:04x}"]:
            continue
        if number.group(1) in {text(at) for at in gadget.glob("functions/acm.*/port_num")}:
            return True
    return False


@contextlib.contextmanager
def _raw(device: str) -> Iterator[int]:
    """The device in raw mode, locked; its mode is put back.

    Raises:
        BlockingIOError: somebody holds it. OSError: it cannot be opened.
    """
    import fcntl
    import termios
    import tty

    fd = os.open(device, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            before = termios.tcgetattr(fd)
            tty.setraw(fd, termios.TCSANOW)
        except termios.error as err:
            raise OSError(*err.args) from err
        try:
            yield fd
        finally:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(fd, termios.TCSANOW, before)
    finally:
        os.close(fd)


def _converse(fd: int, timeout_s: float) -> Peer:
    """One PING; to a module that answers it, the question which model it has."""
    import select

    seq = int.from_bytes(os.urandom(3), "little") + 1
    try:
        os.write(fd, frames.Frame(frames.PING, seq, 0, b"").pack())
    except BlockingIOError:  # full: nobody reads what went there before
        return Peer("silent")
    reader, found, end = frames.Reader(65536), Peer("silent"), time.monotonic() + timeout_s
    while (left := end - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            continue
        for frame in reader.feed(os.read(fd, 4096)):
            if frame.type == frames.HELLO and frame.ref == 0:
                with contextlib.suppress(ValueError):
                    hello = frames.Hello.unpack(frame.payload)
                    return Peer("board", hello.who.decode("ascii", "replace"))
            if frame.type == frames.PONG and frame.ref == seq:
                found = Peer("module")
                os.write(fd, frames.Frame(frames.HELLO, seq + 1, 0, frames.QUESTION.pack()).pack())
            if frame.type == frames.ERROR and frame.ref == seq + 1:
                return Peer("module", frame.payload[4:].decode("ascii", "replace"))
    return found


def ask(device: str, timeout_s: float = 1.0) -> Peer:
    """Who speaks the protocol there. Sends 28 bytes, and 172 more to a module that answered them."""
    try:
        with _raw(device) as fd:
            return _converse(fd, timeout_s)
    except BlockingIOError:
        return Peer("busy", "a program here holds it")
    except OSError as err:
        return Peer("unopened", err.strerror or str(err))
