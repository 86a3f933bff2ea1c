"""A multicast DNS query (RFC 6762) as a plain client: one question packet, answers for a while.

Asked from an ephemeral port, responders answer straight back (section 6.7), so nothing has
to be bound to 5353 and a running avahi is not disturbed.
"""

from __future__ import annotations

import ipaddress
import random
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

GROUP = ("224.0.0.251", 5353)
SERVICES = ("_ssh._tcp.local", "_workstation._tcp.local", "_sftp-ssh._tcp.local")
_A, _PTR, _TXT, _AAAA, _SRV = 1, 12, 16, 28, 33
_ROOM = 9000


@dataclass
class Found:
    """A host that answered. ``services``: what it offers, with the port."""

    name: str
    addresses: list[str] = field(default_factory=list)
    services: dict[str, int] = field(default_factory=dict)


def question(names: Iterable[str], number: int) -> bytes:
    """A query packet for PTR records, unicast answers wanted (the top bit of the class)."""
    out = b""
    count = 0
    for name in names:
        for label in name.split("."):
            raw = label.encode()
            if not 0 < len(raw) < 64:
                raise ValueError(f"not a DNS name: {name}")
            out += bytes([len(raw)]) + raw
        out += b"\0" + struct.pack(">HH", _PTR, 0x8001)
        count += 1
    return struct.pack(">6H", number, 0, count, 0, 0, 0) + out


def read_name(packet: bytes, at: int) -> tuple[str, int]:
    """A possibly compressed name and the offset behind it.

    Raises:
        ValueError: it is malformed; pointers may only go backwards, so it always ends.
    """
    labels: list[str] = []
    after = -1
    limit = at
    while True:
        if at >= len(packet):
            raise ValueError("a name runs over the end")
        size = packet[at]
        if size >= 0xC0:
            if at + 1 >= len(packet):
                raise ValueError("a pointer runs over the end")
            target = (size & 0x3F) << 8 | packet[at + 1]
            after = at + 2 if after < 0 else after
            if target >= limit:
                raise ValueError("a pointer does not go back")
            at = limit = target
            continue
        if size >= 0x40:
            raise ValueError("an unknown kind of label")
        if size == 0:
            return ".".join(labels), after if after >= 0 else at + 1
        if at + 1 + size > len(packet) or len(labels) > 127:
            raise ValueError("a label runs over the end")
        labels.append(packet[at + 1 : at + 1 + size].decode("utf-8", "replace"))
        at += 1 + size


def records(packet: bytes) -> list[tuple[str, int, int, int]]:
    """(name, type, offset of the data, its length) of every record in a response.

    Raises:
        ValueError: the packet is malformed or no response.
    """
    if len(packet) < 12:
        raise ValueError("shorter than a header")
    _, flags, questions, answers, authority, extra = struct.unpack_from(">6H", packet)
    if not flags & 0x8000:
        raise ValueError("not a response")
    at = 12
    for _ in range(questions):
        _, at = read_name(packet, at)
        at += 4
    out = []
    for _ in range(answers + authority + extra):
        name, at = read_name(packet, at)
        if at + 10 > len(packet):
            raise ValueError("a record runs over the end")
        kind, _, _, size = struct.unpack_from(">HHIH", packet, at)
        at += 10
        if at + size > len(packet):
            raise ValueError("a record's data runs over the end")
        out.append((name, kind, at, size))
        at += size
    return out


def merge(found: dict[str, Found], packet: bytes, sender: str) -> None:
    """Adds what one response tells. Malformed packets are ignored. Pure but for ``found``."""
    try:
        rows = records(packet)
        services = []
        addresses: dict[str, list[str]] = {}
        pointed = set()
        for name, kind, at, size in rows:
            if kind == _PTR:
                pointed.add((name, read_name(packet, at)[0]))
            elif kind == _SRV and size >= 7:
                port = struct.unpack_from(">H", packet, at + 4)[0]
                services.append((name, read_name(packet, at + 6)[0], port))
            elif kind in (_A, _AAAA) and size == (4 if kind == _A else 16):
                text = str(ipaddress.ip_address(packet[at : at + size]))
                addresses.setdefault(name.lower(), []).append(text)
    except ValueError:
        return
    for instance, host, port in services:
        kind_name = next((s for s in SERVICES if instance.lower().endswith("." + s)), None)
        if kind_name is None:
            continue
        one = found.setdefault(host.lower(), Found(host))
        one.services[kind_name.split(".")[0]] = port
        for address in addresses.get(host.lower(), [sender]):
            if address not in one.addresses:
                one.addresses.append(address)
    if not services:  # only the pointer: an instance's name and who said it
        for service, instance in pointed:
            if service.lower() in SERVICES:
                label = instance[: -len(service) - 1].split(" [")[0] + ".local"
                one = found.setdefault(label.lower(), Found(label))
                one.services.setdefault(service.split(".")[0], 0)
                if sender not in one.addresses:
                    one.addresses.append(sender)


def browse(timeout: float, *, group: tuple[str, int] = GROUP) -> list[Found]:
    """Asks the local network and collects answers for ``timeout`` seconds.

    Returns:
        Hosts by name; empty where there is no network.
    """
    found: dict[str, Found] = {}
    packet = question(SERVICES, random.randrange(1, 1 << 16))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        end = time.monotonic() + timeout
        again = 0.0
        while (now := time.monotonic()) < end:
            if now >= again:
                try:
                    sock.sendto(packet, group)
                except OSError:
                    return []
                again = now + max(timeout / 3, 0.3)
            sock.settimeout(max(0.01, min(again, end) - now))
            try:
                answer, (sender, _) = sock.recvfrom(_ROOM)
            except TimeoutError:
                continue
            except OSError:
                break
            merge(found, answer, sender)
    return sorted(found.values(), key=lambda f: f.name)
