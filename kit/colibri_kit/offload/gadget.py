"""Makes a board's USB-C port a serial device (CDC-ACM) for whoever is at the other end of the cable.

A Raspberry Pi 4 does this on its USB-C (power) port with the dwc2 controller; any board whose kernel has
a USB device controller and configfs does it the same way. The board gets /dev/ttyGS0, the other end
/dev/ttyACM0.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from colibri_kit.deploy import root
from colibri_kit.errors import PreflightError, TransferError, UsageError
from colibri_kit.offload.discover import GADGET_PRODUCT, GADGET_VENDOR
from colibri_kit.transport.base import ConnectionLost
from colibri_kit.transport.base import script as sh

if TYPE_CHECKING:
    from colibri_kit.transport.base import Transport

#: Lines that the Pi's firmware needs, in config.txt, before dwc2 can be a device.
PI4_CONFIG = ("dtoverlay=dwc2,dr_mode=peripheral",)
MODULES = ("dwc2", "libcomposite", "usb_f_acm")
SCRIPT_PATH = "/usr/local/sbin/colibri-offload-gadget"
UNIT = "colibri-offload-gadget.service"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"
#: What the board's end of the link is called.
DEVICE = "/dev/ttyGS0"

#: The line by which a script is known to be ours, whatever kit made it.
_MARK = "# Makes this board's USB device port a serial line for the offload link."

_SCRIPT = """\
#!/bin/sh
@MARK@
# Usage: colibri-offload-gadget start|stop
set -eu
root=${CONFIGFS:-/sys/kernel/config}
gadget=$root/usb_gadget/colibri

start() {
    for module in @MODULES@; do modprobe "$module" 2>/dev/null || true; done
    mountpoint -q "$root" 2>/dev/null || mount -t configfs none "$root" 2>/dev/null || true
    [ -d "$root/usb_gadget" ] || { echo "no USB gadget support in this kernel" >&2; exit 1; }
    udc=$(ls "${UDC_CLASS:-/sys/class/udc}" 2>/dev/null | head -n 1)
    [ -n "$udc" ] || { echo "no USB device controller (dtoverlay=dwc2,dr_mode=peripheral?)" >&2; exit 1; }
    if [ -d "$gadget" ] && [ -n "$(cat "$gadget/UDC" 2>/dev/null)" ]; then exit 0; fi
    mkdir -p "$gadget/strings/0x409" "$gadget/configs/c.1/strings/0x409" "$gadget/functions/acm.usb0"
    echo @VENDOR@ > "$gadget/idVendor"
    echo @PRODUCT@ > "$gadget/idProduct"
    echo 0x0200 > "$gadget/bcdUSB"
    echo "colibri" > "$gadget/strings/0x409/manufacturer"
    echo "colibri offload" > "$gadget/strings/0x409/product"
    echo @SERIAL@ > "$gadget/strings/0x409/serialnumber"
    echo "offload" > "$gadget/configs/c.1/strings/0x409/configuration"
    echo 250 > "$gadget/configs/c.1/MaxPower"
    [ -e "$gadget/configs/c.1/acm.usb0" ] || ln -s "$gadget/functions/acm.usb0" "$gadget/configs/c.1/"
    echo "$udc" > "$gadget/UDC"
}

stop() {
    [ -d "$gadget" ] || exit 0
    echo "" > "$gadget/UDC" 2>/dev/null || true
    rm -f "$gadget/configs/c.1/acm.usb0"
    rmdir "$gadget/configs/c.1/strings/0x409" "$gadget/configs/c.1" "$gadget/functions/acm.usb0" \\
        "$gadget/strings/0x409" "$gadget" 2>/dev/null || true
}

case "${1:-}" in
    start) start ;;
    stop) stop ;;
    *) echo "usage: $0 start|stop" >&2; exit 2 ;;
esac
"""

_UNIT = """\
[Unit]
Description=USB serial gadget for the colibri offload link
After=sys-kernel-config.mount
ConditionPathIsDirectory=/sys/class/udc

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=@SCRIPT@ start
ExecStop=@SCRIPT@ stop

[Install]
WantedBy=multi-user.target
"""


def script(serial: str = "colibri-0") -> str:
    """The configfs script, for ``SCRIPT_PATH``, mode 755.

    Args:
        serial: the USB serial number that the other end sees; letters, digits, ``._-``.

    Raises:
        UsageError: another character, or longer than 32.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,32}", serial):
        raise UsageError(f"'{serial}' cannot be a USB serial number: letters, digits and ._- only")
    return (
        _SCRIPT.replace("@MARK@", _MARK)
        .replace("@MODULES@", " ".join(MODULES))
        .replace("@VENDOR@", f"0x{GADGET_VENDOR:04x}")
        .replace("@PRODUCT@", f"0x{GADGET_PRODUCT:04x}")
        .replace("@SERIAL@", serial)
    )


def unit() -> str:
    """The systemd unit that runs it at boot, for ``UNIT_PATH``."""
    return _UNIT.replace("@SCRIPT@", SCRIPT_PATH)


def step() -> str:
    """What :func:`install` does, as a step of a plan."""
    return f"install {SCRIPT_PATH} and {UNIT_PATH}: the USB port is {DEVICE}, from boot on"


def check(transport: Transport) -> None:
    """Refuses a board where :func:`install` cannot work. Changes nothing.

    Raises:
        PreflightError: not root there, or no systemd.
    """
    state = "nothing was sent or changed"
    root.need(transport, f"--offload-gadget on {transport.describe()}", state=state)
    if transport.run(["test", "-d", "/run/systemd/system"]).rc != 0:
        raise PreflightError(
            "--offload-gadget installs a systemd unit, and the board runs another init",
            hint=f"have its init make {DEVICE} (`modprobe g_serial` does where the kernel has it), "
            f"then deploy with --offload {DEVICE} and without --offload-gadget",
            state=state,
        )


def install(transport: Transport, serial: str = "colibri-0") -> str:
    """Puts script and unit on a board that :func:`check` accepts, and starts them.

    What was not there before is taken away again when they cannot be started.

    Returns:
        What was done, for people.

    Raises:
        TransferError: a file cannot be written, or the board has no USB device controller.
    """
    before = found(transport)
    try:
        _write(transport, serial)
        _start(transport)
    except ConnectionLost:
        raise
    except TransferError:
        if not before:
            remove(transport, found(transport))
        raise
    return f"USB serial gadget installed: {DEVICE} here, /dev/ttyACM0 at the other end of the cable"


def _write(transport: Transport, serial: str) -> None:
    for path, text, mode in ((SCRIPT_PATH, script(serial), 0o755), (UNIT_PATH, unit(), 0o644)):
        data = text.encode()
        transport.put_stream(io.BytesIO(data), len(data), f"{path}.new", mode=mode)
        done = transport.run(["mv", "-f", f"{path}.new", path])
        if done.rc != 0:
            raise TransferError(f"cannot write {path}: {done.why}")


def _start(transport: Transport) -> None:
    for command in (["daemon-reload"], ["enable", "--now", UNIT]):
        done = transport.run(["systemctl", *command], timeout=60)
        if done.rc != 0:
            raise TransferError(
                f"`systemctl {' '.join(command)}` failed: {done.why}",
                hint=f"on a Raspberry Pi 4 add to config.txt and reboot: {PI4_CONFIG[0]}",
            )


# $1 script, $2 its mark, $3 unit, $4 its mark.
_FOUND = """
[ -f "$1" ] && grep -qxF "$2" "$1" && echo "$1"
[ -f "$3" ] && grep -qxF "$4" "$3" && echo "$3"
exit 0
"""


def found(transport: Transport) -> tuple[str, ...]:
    """Which of script and unit are on a board, and ours."""
    done = transport.run(sh(_FOUND, SCRIPT_PATH, _MARK, UNIT_PATH, f"ExecStart={SCRIPT_PATH} start"))
    return tuple(done.text.splitlines())


def remove(transport: Transport, paths: tuple[str, ...]) -> None:
    """Takes away what :func:`found` named: the unit is disabled and the port given back first.

    Raises:
        TransferError: a file cannot be removed.
    """
    if UNIT_PATH in paths:
        transport.run(["systemctl", "disable", "--now", UNIT], timeout=90)
    if SCRIPT_PATH in paths:
        transport.run([SCRIPT_PATH, "stop"])
    if not paths:
        return
    done = transport.run(["rm", "-f", *paths])
    if done.rc != 0:
        raise TransferError(f"cannot remove {' and '.join(paths)}: {done.why}")
    if UNIT_PATH in paths:
        transport.run(["systemctl", "daemon-reload"], timeout=60)
