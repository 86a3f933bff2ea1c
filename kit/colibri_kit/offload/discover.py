"""What could be an offload link on this machine: USB-C ports, serial devices, and which of them answer.

Reads only ``/sys`` and, when asked, sends one PING to a device; a module answers it with PONG before
any greeting. ``colibri-kit detect`` shows these.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from colibri_kit.offload import frames

#: What our own gadget says it is (gadget.py); pid.codes' test range, not for sale.
GADGET_VENDOR, GADGET_PRODUCT = 0x1209, 0x0001
_TTYS = re.compile(r"^tty(ACM|USB|GS)\d+$")

#: Links that have names but no implementation, and why.
REFUSED = {
    "pcie": "no driver for an accelerator behind PCIe exists here",
    "usb4": "tunnels PCIe: see pcie",
    "altmode": "an alternate mode needs a driver of its partner",
}


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
class SerialPort:
    """One serial device that may carry the protocol.

    Attributes:
        kind: ``gadget`` (we are the device), ``acm`` or ``usb`` (the other end is).
        usb_id: ``1209:0001``, "" for a gadget's own end.
        ours: the USB id and product are those of our gadget.
        answers: None = not asked; else whether a module answered a PING.
    """

    device: str
    kind: str
    usb_id: str
    product: str
    serial: str
    ours: bool
    answers: bool | None = None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """``host`` of ``[host] device``; a plain word stays."""
    match = re.search(r"\[(\w+)\]", text)
    return match.group(1) if match else text


def typec_ports(sys: Path = Path("/sys")) -> list[TypecPort]:
    """USB-C ports, in order; empty where the kernel has no such class."""
    root = sys / "class" / "typec"
    out = []
    for port in sorted(p for p in root.glob("port*") if re.fullmatch(r"port\d+", p.name)):
        partner = root / f"{port.name}-partner"
        modes = sorted({svid for p in partner.glob(f"{partner.name}.*") if (svid := _text(p / "svid"))})
        out.append(
            TypecPort(
                name=port.name,
                data_role=_chosen(_text(port / "data_role")),
                power_role=_chosen(_text(port / "power_role")),
                partner=_text(partner / "type") if partner.is_dir() else None,
                alt_modes=tuple(modes),
            )
        )
    return out


def _usb_device(tty: Path) -> Path | None:
    """The USB device that a tty's interface belongs to: the first parent with an idVendor."""
    real = Path(os.path.realpath(tty / "device"))
    for parent in (real, *real.parents):
        if (parent / "idVendor").is_file():
            return parent
    return None


def serial_ports(sys: Path = Path("/sys")) -> list[SerialPort]:
    """Serial devices over USB, either end, in order of their names."""
    out = []
    for tty in sorted((sys / "class" / "tty").glob("tty*")):
        match = _TTYS.match(tty.name)
        if match is None:
            continue
        kind = {"ACM": "acm", "USB": "usb", "GS": "gadget"}[match.group(1)]
        usb = _usb_device(tty) if kind != "gadget" else None
        ids = [_text(usb / n) for n in ("idVendor", "idProduct")] if usb else []
        product = _text(usb / "product") if usb else ""
        ours = ids == [f"{GADGET_VENDOR:04x}", f"{GADGET_PRODUCT:04x}"] and product.startswith("colibri")
        serial = _text(usb / "serial") if usb else ""
        out.append(SerialPort(f"/dev/{tty.name}", kind, ":".join(ids), product, serial, ours))
    return out


def answers(device: str, timeout_s: float = 0.5) -> bool:
    """Whether a module listens at the other end: sends one PING, waits for its PONG.

    False too when the device cannot be opened or is in use by somebody who locked it.
    """
    import select
    import termios
    import tty

    try:
        fd = os.open(device, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        with contextlib.suppress(termios.error):
            tty.setraw(fd)
        seq = int.from_bytes(os.urandom(4), "little") | 1
        os.write(fd, frames.Frame(frames.PING, seq, 0, b"").pack())
        reader, end = frames.Reader(65536), time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if not select.select([fd], [], [], left)[0]:
                continue
            for frame in reader.feed(os.read(fd, 4096)):
                if frame.type == frames.PONG and frame.ref == seq:
                    return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def scan(sys: Path = Path("/sys"), *, ask: bool = False) -> dict[str, list[dict[str, object]]]:
    """Everything at once, for ``--json``: ``{"typec": […], "serial": […]}``.

    Args:
        ask: send a PING to every serial device that is ours or a gadget's end.
    """
    ports = serial_ports(sys)
    rows = []
    for port in ports:
        row = asdict(port)
        if ask and (port.ours or port.kind == "gadget"):
            row["answers"] = answers(port.device)
        rows.append(row)
    typec = [{**asdict(p), "alt_modes": list(p.alt_modes)} for p in typec_ports(sys)]
    return {"typec": typec, "serial": rows}
