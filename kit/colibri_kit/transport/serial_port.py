"""Opening serial ports, and what to say when that fails.

A port is a device (``/dev/ttyUSB0``, ``COM3``) or ``socket://HOST:PORT``, a console that
something else serves raw over TCP (ser2net, an emulator). Opening takes the port for us
alone and leaves the modem lines as the kernel sets them: many boards reset on a change.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

from colibri_kit.errors import AuthError, UnreachableError, UsageError
from colibri_kit.transport.serial_line import Line

DEFAULT_BAUD = 115200


def _missing(device: str) -> UnreachableError:
    return UnreachableError(
        f"there is no serial port {device}",
        hint="list the ports: colibri-kit detect",
        state="nothing was sent",
        code="CK-SERIAL-PORT",
    )


def holders(device: str, proc: Path = Path("/proc")) -> list[str]:
    """Programs that have the port open, as ``name (pid N)``; ours is left out. Only Linux knows."""
    try:
        wanted = os.stat(device).st_rdev  # noqa: PTH116
    except OSError:
        return []
    out = []
    for entry in proc.glob("[0-9]*"):
        if entry.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):
            if any(_is_device(fd, wanted, device) for fd in (entry / "fd").iterdir()):
                name = (entry / "comm").read_text().strip()
                out.append(f"{name} (pid {entry.name})")
    return sorted(out)


def _is_device(fd: Path, rdev: int, device: str) -> bool:
    """Is this descriptor the device? Character devices agree in their device number."""
    try:
        info = fd.stat()
    except OSError:
        return False
    if rdev:
        return info.st_rdev == rdev
    return os.path.realpath(fd) == os.path.realpath(device)


def permission_remedy(device: str) -> str:
    """The command that lets the user open the port from now on."""
    group = "dialout"
    with contextlib.suppress(ImportError, OSError, KeyError):
        import grp

        group = grp.getgrgid(os.stat(device).st_gid).gr_name  # noqa: PTH116
    rule = "the udev rule that `colibri-kit doctor --udev-rule` prints"
    if group == "root":
        return f"install {rule}, then plug the adapter again"
    return f"sudo usermod -aG {group} $USER  (then log in again), or install {rule}"


def _open(device: str, baud: int) -> Any:
    import serial

    if "://" in device:
        return serial.serial_for_url(device, baudrate=baud, timeout=0.2)
    port = serial.Serial()
    port.port = device
    port.baudrate = baud
    port.timeout = 0.2
    port.exclusive = True
    port.open()
    return port


def _keep_lines_at_close(port: Any) -> None:
    """No hang-up at close: a board must not be reset because we are done."""
    try:
        import termios
    except ImportError:
        return
    with contextlib.suppress(OSError, AttributeError, termios.error, ValueError):
        fd = port.fileno()
        mode = termios.tcgetattr(fd)
        mode[2] &= ~termios.HUPCL
        termios.tcsetattr(fd, termios.TCSANOW, mode)


def open_line(device: str, baud: int = DEFAULT_BAUD, *, txdelay: float = 0.0) -> Line:
    """Opens the port for us alone.

    Args:
        device: a device's path or ``socket://HOST:PORT``.
        baud: bits a second on the wire.
        txdelay: seconds to wait after each byte written, for a board that loses bytes.

    Raises:
        UnreachableError: no such port, or another program has it. AuthError: no permission.
        UsageError: it is no serial port, or takes no such rate.
    """
    import serial

    if "://" not in device and not device.upper().startswith("COM") and not Path(device).exists():
        raise _missing(device)
    try:
        port = _open(device, baud)
    except serial.SerialException as err:
        raise _explain(device, baud, err) from err
    except (ValueError, OSError) as err:
        if "://" in device:
            raise UnreachableError(f"cannot open {device}: {err}", code="CK-SERIAL-PORT") from err
        raise UsageError(f"{device} does not take {baud} baud: {err}", code="CK-SERIAL-BAUD") from err
    _keep_lines_at_close(port)
    return Line(port, device, baud=baud, txdelay=txdelay)


def _explain(device: str, baud: int, err: Exception) -> Exception:
    """The error for the user: which cause, which remedy."""
    text = str(err)
    number = getattr(err, "errno", None)
    others = holders(device)
    if number in (errno.EACCES, errno.EPERM):
        return AuthError(
            f"{device}: permission denied",
            hint=permission_remedy(device),
            state="nothing was sent",
            code="CK-SERIAL-PERMISSION",
        )
    if "exclusive" in text.lower() or number in (errno.EBUSY, errno.EAGAIN):
        who = ", ".join(others) or "another program"
        modem = any(o.startswith("ModemManager") for o in others)
        return UnreachableError(
            f"{device} is in use by {who}",
            hint="sudo systemctl stop ModemManager" if modem else "close that program, then repeat",
            state="nothing was sent",
            code="CK-SERIAL-BUSY",
        )
    if number in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
        return _missing(device)
    if "configure port" in text.lower() or number == errno.ENOTTY:
        return UsageError(f"{device} is no serial port", hint="list the ports: colibri-kit detect")
    return UnreachableError(f"cannot open {device} at {baud} baud: {text}", code="CK-SERIAL-PORT")
