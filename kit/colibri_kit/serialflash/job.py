"""``flash --serial``: finds out what is at the other end and flashes accordingly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colibri_kit.config.board import Board
from colibri_kit.deploy import model as model_folder
from colibri_kit.deploy.plan import Engine, check_engine, size_text
from colibri_kit.errors import UnreachableError
from colibri_kit.serialflash import plan
from colibri_kit.serialflash.options import SerialOptions
from colibri_kit.transport.base import ConnectionLost
from colibri_kit.transport.serial_answer import Answer, identify
from colibri_kit.transport.serial_line import Line
from colibri_kit.ui import Ui


def flash_serial(
    ui: Ui, board: Board, device: str, model: Path, options: SerialOptions | None = None
) -> dict[str, Any]:
    """Puts engine and weights on a board whose console is ``device``; reports through ``ui``.

    Args:
        device: ``/dev/ttyUSB0``, or ``socket://HOST:PORT``.
        model: a ``NAME.coli`` folder.

    Returns:
        What it reported: ``way`` is ``uboot`` or ``linux``; see docs/serial.md.

    Raises:
        UsageError, UnreachableError, AuthError: port or login. PreflightError: refused, nothing
        sent. TransferError, VerifyError, HealthError: see the error's state.
    """
    from colibri_kit.deploy.job import load_engine

    options = options or SerialOptions()
    parcel = model_folder.load(model)
    engine = load_engine(ui, board, options.engine)
    check_engine(board, engine)
    total = engine.part.size + parcel.size
    fastest = max(options.baud, options.max_baud or 0)
    if not device.startswith("socket://"):
        plan.check_time(total, fastest / 10 * plan.YMODEM_SHARE, options.max_hours, f"{fastest} baud at best")
    line = options.open(device)
    try:
        answer = identify(line, options.wait)
        ui.note(f"{device}: {answer.kind}" + (f" ({answer.text})" if answer.text else ""))
        if answer.kind == "uboot":
            result = _uboot(ui, line, board, engine, parcel, options)
        elif answer.kind in ("login", "password", "shell"):
            from colibri_kit.serialflash.linux_job import flash_linux

            result = flash_linux(ui, line, board, engine, parcel, options)
        else:
            raise _no_prompt(device, answer, options)
    except ConnectionLost as err:
        err.state = err.state or "what arrived and was compared stays on the board"
        err.hint = "when the console answers again, repeat the command: only the rest is sent"
        raise
    finally:
        line.close()
    ui.result(result, _text(result))
    return result


def _uboot(
    ui: Ui, line: Line, board: Board, engine: Engine, parcel: model_folder.Parcel, options: SerialOptions
) -> dict[str, Any]:
    from dataclasses import asdict

    from colibri_kit.serialflash.uboot_job import UBootFlash

    files = plan.items(engine.part, parcel.parts, f"{parcel.name}.coli", options.extra)
    job = UBootFlash(ui, line, options)
    done = job.run(files)
    listed = [{"name": f.name, "bytes": f.size} for f in files]
    if options.dry_run:
        total = sum(f.size for f in files)
        return {
            "way": "uboot",
            "dry_run": True,
            "board": board.name,
            "place": done.place,
            "files": listed,
            "bytes": total,
            "rate_bytes_s": round(done.rate_bytes_s),
            "seconds": round(total / done.rate_bytes_s, 1),
        }
    return {"way": "uboot", "board": board.name, **asdict(done), "rate_bytes_s": round(done.rate_bytes_s)}


def _no_prompt(device: str, answer: Answer, options: SerialOptions) -> UnreachableError:
    """Why nothing can be done with what answers."""
    if answer.kind == "silent":
        return UnreachableError(
            f"nothing answers on {device} at {options.baud} baud within {options.wait:.0f} s",
            hint="is the board on, RX and TX crossed, the console enabled? a booting board: --wait 60",
            state="nothing was sent but Return",
            code="CK-SERIAL-SILENT",
        )
    if answer.kind == "garbled":
        return UnreachableError(
            f"{device} carries noise at {options.baud} baud: probably another rate",
            hint="try --baud 9600, 57600, 921600 or 1500000 (Rockchip boards)",
            state="nothing was sent but Return",
            code="CK-SERIAL-NOISE",
        )
    words = (
        "the engine's own prompt"
        if answer.kind == "engine"
        else f"neither U-Boot nor a shell: {answer.text!r}"
    )
    return UnreachableError(
        f"{device} shows {words}",
        hint="reset the board; it is caught in U-Boot's countdown (--wait 60), or log in there once by hand",
        state="nothing was sent but Return",
        code="CK-SERIAL-SILENT",
    )


def _text(result: dict[str, Any]) -> str:
    """The same for people."""
    if result["way"] == "linux":
        if "steps" in result:
            size = size_text(result["send_bytes"])
            return f"would send {size} to {result['prefix']}: {len(result['send'])} files"
        return f"{result['release']} is current on {result['target']}, {result['prefix']}; {result['state']}"
    if result.get("dry_run"):
        rows = [f"  {f['name']}  {size_text(f['bytes'])}" for f in result["files"]]
        took = plan.time_text(result["seconds"])
        return "\n".join([f"would write to {result['place']}, at least {took}:", *rows])
    lines = [
        f"written to {result['place']}: {size_text(result['sent_bytes'])} sent, "
        f"{size_text(result['kept_bytes'])} were there; {result['rate_bytes_s'] / 1024:.1f} KiB/s"
    ]
    if result["bootcmd"]:
        lines.append(f"boot command {result['environment']}: {result['bootcmd']}")
    if result["booted"]:
        lines.append("the board booted")
    return "\n".join(lines)
