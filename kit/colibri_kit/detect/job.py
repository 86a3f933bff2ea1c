"""Looks around: plan (what to look at), act (look), report (as a table). Changes nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from colibri_kit.detect import mdns
from colibri_kit.detect.sysfs import Port, UsbDevice, serial_ports, usb_devices
from colibri_kit.errors import KitError
from colibri_kit.media.disks import Disk
from colibri_kit.offload import discover

#: What a person may press Return on: an answer's kind in words.
_WORDS = {
    "uboot": "U-Boot prompt",
    "login": "Linux login",
    "password": "Linux login (half done)",
    "shell": "Linux shell",
    "engine": "our engine",
    "text": "something that prints",
    "garbled": "noise: another rate?",
    "silent": "nothing",
}
#: What is at the other end of an offload link (discover.Peer.role).
_PEERS = {
    "module": "offload module",
    "board": "an engine that looks for a module",
    "silent": "nobody speaks the offload protocol",
}


@dataclass(frozen=True)
class Wish:
    """What to look at. ``sysfs``, ``dev`` and ``group`` are other places in tests.

    Attributes:
        probe_links: send a PING of the offload protocol to every port, not only to our gadget's.
    """

    probe_ports: bool = False
    baud: int = 115200
    network: bool = True
    seconds: float = 2.0
    hosts: tuple[str, ...] = ()
    sysfs: Path = Path("/sys")
    dev: Path = Path("/dev")
    group: tuple[str, int] = mdns.GROUP
    probe_links: bool = False


@dataclass(frozen=True)
class Host:
    """A board on the network; ``banner`` is what its SSH server says, None = not asked."""

    name: str
    addresses: tuple[str, ...]
    services: dict[str, int]
    banner: str | None = None
    error: str | None = None


@dataclass
class Sight:
    """Everything that was seen, and what could not be looked at."""

    media: list[dict[str, object]] = field(default_factory=list)
    ports: list[Port] = field(default_factory=list)
    usb: list[UsbDevice] = field(default_factory=list)
    typec: list[discover.TypecPort] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def look(wish: Wish, disks: Callable[[], Sequence[Disk]], note: Callable[[str], None]) -> Sight:
    """Looks at everything in the wish.

    Args:
        disks: lists this machine's disks.
        note: told what is being waited for.
    """
    sight = Sight()
    try:
        sight.media = [d.as_json() for d in disks() if d.removable and d.size]
    except KitError as err:
        sight.notes.append(err.message)
    sight.usb = usb_devices(wish.sysfs)
    sight.typec = discover.typec_ports(wish.sysfs)
    ports = [replace(p, ours=discover.is_ours(p, wish.sysfs)) for p in serial_ports(wish.sysfs, wish.dev)]
    sight.ports = [_port(p, wish, note) for p in ports]
    if wish.network:
        note(f"asking the network for {wish.seconds:g} s")
        found = mdns.browse(wish.seconds, group=wish.group)
        sight.hosts = [Host(f.name, tuple(f.addresses), f.services) for f in found]
    sight.hosts += [_knock(h) for h in wish.hosts]
    return sight


def _port(port: Port, wish: Wish, note: Callable[[str], None]) -> Port:
    """Asks our own gadget's ports whether a module is there, others only when that is wished."""
    if port.ours or wish.probe_links:
        note(f"sending a PING to {port.device}")
        peer = discover.ask(port.device)
        port = replace(port, link=peer.role, link_words=peer.words)
    speaks = port.link in ("module", "board", "busy")
    return _probe(port, wish.baud, note) if wish.probe_ports and not speaks else port


def _probe(port: Port, baud: int, note: Callable[[str], None]) -> Port:
    """Presses Return on a port and says what answers. A countdown of U-Boot is left alone."""
    from colibri_kit.transport.serial_answer import identify
    from colibri_kit.transport.serial_port import open_line

    note(f"pressing Return on {port.device}")
    try:
        line = open_line(port.device, baud)
    except KitError as err:
        return replace(port, answers="unopened", words=err.message)
    try:
        answer = identify(line, 3.0, gentle=True)
    except KitError as err:
        return replace(port, answers="lost", words=err.message)
    finally:
        line.close()
    return replace(port, answers=answer.kind, words=answer.text)


def _knock(target: str) -> Host:
    """The first line that an SSH server says; no login."""
    from colibri_kit.transport.sshconfig import parse_target

    where = parse_target(target)
    port = where.port or 22
    try:
        with socket.create_connection((where.host, port), 3.0) as sock:
            sock.settimeout(3.0)
            address = sock.getpeername()[0]
            banner = sock.recv(255).split(b"\n")[0].decode("ascii", "replace").strip()
    except OSError as err:
        return Host(target, (), {}, None, str(err))
    if not banner.startswith("SSH-"):
        return Host(target, (address,), {}, None, f"port {port} answers, but not as SSH")
    return Host(target, (address,), {"_ssh": port}, banner)


def report(sight: Sight, table: Callable[[Sequence[str], Sequence[Sequence[object]]], str]) -> str:
    """The sight for people."""
    from colibri_kit.deploy.plan import size_text

    parts = []
    rows: list[Sequence[object]] = [
        (m["path"], m["model"] or m["kind"], size_text(int(str(m["size_bytes"]))), m["serial_number"])
        for m in sight.media
    ]
    parts.append(_part("removable media", ("device", "model", "size", "serial"), rows, table))
    rows = [
        (
            p.device,
            (p.usb.known or p.usb.name or p.usb.id) if p.usb else p.driver,
            "yes" if p.permitted else "no",
            _answer(p),
        )
        for p in sight.ports
    ]
    parts.append(_part("serial ports", ("port", "adapter", "may open", "answers"), rows, table))
    rows = [(u.id, u.known or u.name or "?", u.serial) for u in sight.usb]
    parts.append(_part("USB devices", ("id", "what", "serial"), rows, table))
    rows = [
        (
            t.name,
            f"{t.data_role or '?'}, {t.power_role or '?'}",
            "nothing plugged in" if t.partner is None else t.partner or "unknown",
            ", ".join(discover.ALT_MODES.get(m, m) for m in t.alt_modes) or "-",
        )
        for t in sight.typec
    ]
    parts.append(_part("USB-C ports", ("port", "role", "partner", "alternate modes"), rows, table))
    rows = [
        (
            h.name,
            ", ".join(h.addresses) or "-",
            h.banner
            or h.error
            or ", ".join(f"{k.lstrip('_')} {v or ''}".strip() for k, v in h.services.items()),
        )
        for h in sight.hosts
    ]
    parts.append(_part("on the network", ("host", "address", "says"), rows, table))
    parts += [f"note: {n}" for n in sight.notes]
    return "\n\n".join(parts)


def _answer(port: Port) -> str:
    if port.link is not None and port.answers is None:
        words = _PEERS.get(port.link, port.link)
        return f"{words}: {port.link_words}" if port.link_words else words
    if port.answers is None:
        return "not asked (--probe-ports)"
    words = _WORDS.get(port.answers, port.answers)
    return f"{words}: {port.words}" if port.words else words


def _part(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    table: Callable[[Sequence[str], Sequence[Sequence[object]]], str],
) -> str:
    return f"{title}\n" + (table(head, rows) if rows else "none")
