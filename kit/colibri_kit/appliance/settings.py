"""What the user chose for one appliance, checked, and the file on the card that says it."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from colibri_kit.errors import UsageError

_HOSTNAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_KEY = re.compile(
    r"(ssh-ed25519|ecdsa-sha2-nistp(256|384|521)|ssh-rsa|sk-[a-z0-9@.-]+) [A-Za-z0-9+/]+={0,3}( .*)?"
)


@dataclass(frozen=True)
class Settings:
    """One appliance.

    Attributes:
        address: ``dhcp``, ``off`` or a network such as ``192.168.1.20/24``; gateway only with the latter.
        authorized_keys: lines of public keys; without any there is no SSH.
        watchdog: seconds until the hardware resets a board that hangs; 0 = off, at most 15.
        budget: bytes; ctx, threads: 0 = the engine's choice. max_new: tokens an answer.
        console_shell: whether the serial console offers a root shell.
    """

    hostname: str
    address: str = "dhcp"
    gateway: str | None = None
    authorized_keys: tuple[str, ...] = ()
    watchdog: int = 15
    budget: int = 0
    ctx: int = 0
    threads: int = 0
    max_new: int = 128
    console_shell: bool = False

    def __post_init__(self) -> None:
        if not _HOSTNAME.fullmatch(self.hostname):
            raise UsageError(
                f"hostname {self.hostname!r}: lower-case letters, digits and inner dashes, at most 63"
            )
        if not 0 <= self.watchdog <= 15:
            raise UsageError("the watchdog of this chip counts to 15 seconds; 0 turns it off")
        self._check_network()
        for key in self.authorized_keys:
            if not _KEY.fullmatch(key):
                raise UsageError(
                    f"not a public key as in id_ed25519.pub: {key[:40]}…",
                    hint="give the .pub file, never the private key",
                )

    def _check_network(self) -> None:
        if self.address in ("dhcp", "off"):
            if self.gateway:
                raise UsageError("--gateway goes with a static --address")
            return
        try:
            own = ipaddress.ip_interface(self.address)
            if "/" not in self.address:
                raise ValueError("a prefix length such as /24 is needed")
            if own.version == 4 and own.network.prefixlen < 31 and own.ip in (
                own.network.network_address, own.network.broadcast_address,
            ):  # fmt: skip
                raise ValueError("that is the network's own or its broadcast address")
            if self.gateway and ipaddress.ip_address(self.gateway) not in own.network:
                raise ValueError(f"the gateway {self.gateway} is not in {own.network}")
        except ValueError as err:
            raise UsageError(f"--address {self.address}: {err}") from err

    def engine_flags(self) -> list[str]:
        pairs = (("--budget", self.budget), ("--ctx", self.ctx), ("--threads", self.threads))
        return [w for name, value in pairs if value for w in (name, str(value))]

    def render(self) -> str:
        """colibri/board.conf: ``key=value`` lines that the board's init reads, never runs."""
        rows = {
            "hostname": self.hostname,
            "address": self.address,
            "gateway": self.gateway or "",
            "watchdog": self.watchdog,
            "engine_flags": " ".join(self.engine_flags()),
            "max_new": self.max_new,
            "console_shell": "yes" if self.console_shell else "no",
        }
        head = "# Read at boot. Edit on any computer; one key=value a line, no quotes.\n"
        return head + "".join(f"{k}={v}\n" for k, v in rows.items())
