"""``colibri-kit flash``: a board from nothing. A card or image, or over a serial line."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.commands.sizes import Size
from colibri_kit.errors import UsageError
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.appliance.job import Wish
    from colibri_kit.config.board import Board
    from colibri_kit.media.safety import Verdict


_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(short_help="Write a card, an image, or a board over its serial line.")
@click.option("--board", metavar="NAME", help="A name of `colibri-kit boards`, or a profile's path.")
@click.option("--boards-dir", type=click.Path(path_type=Path), help="Look here for profiles first.")
@click.option("--model", type=click.Path(path_type=Path), help="MODEL.coli; default: the only one here.")
@click.option("--engine", type=_FILE, help="This engine binary; default: build one.")
@click.option("--to", "device", metavar="DEVICE", help="Write this disk, for example /dev/sdb.")
@click.option("--image", type=_FILE, help="Write this file instead of a disk.")
@click.option("--force", is_flag=True, help="Replace IMAGE once the new one is complete.")
@click.option("--serial", metavar="PORT", help="Through this serial port, for example /dev/ttyUSB0.")
@click.option("--base", type=_FILE, help="Add to this system image (.img, .xz, .zst, .gz).")
@click.option("--from", "given", type=_FILE, help="Write this finished image as it is.")
@click.option("--serial-number", metavar="SN", help="The medium's serial number, to be sure of it.")
@click.option("--yes", is_flag=True, help="Do not ask; needs --serial-number.")
@click.option("--hostname", help="Default: the board's name.")
@click.option(
    "--address", default="dhcp", show_default=True, help="dhcp, off, or a static one: 192.168.1.20/24."
)
@click.option("--gateway", help="With a static address.")
@click.option("--authorized-key", "keys", type=_FILE, multiple=True, help="Public key file that may log in.")
@click.option("--new-host-key", is_flag=True, help="Another SSH host key than last time.")
@click.option(
    "--user", default="root", show_default=True, help="Whose keys they are, in --base and at a console."
)
@click.option(
    "--boot-loader", type=click.Choice(["firmware", "uboot"]), default="firmware", show_default=True
)
@click.option(
    "--watchdog", type=click.IntRange(0, 15), default=15, show_default=True, help="Seconds; 0 = off."
)
@click.option("--console-shell", is_flag=True, help="Offer a root shell on the serial console.")
@click.option("--budget", type=Size(), help="Memory the engine may take; default: the board's.")
@click.option("--ctx", type=click.IntRange(1, 1 << 24), help="Context length in tokens.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads; default: physical cores.")
@click.option(
    "--max-new", type=click.IntRange(1, 1 << 20), default=128, show_default=True, help="Tokens an answer."
)
@click.option("--refresh", is_flag=True, help="Look for newer Debian packages.")
@click.option("--baud", type=click.IntRange(300, 4000000), help="Serial: the console's rate.")
@click.option(
    "--max-baud", type=click.IntRange(300, 4000000), help="Serial: switch to this for the transfer."
)
@click.option("--txdelay", type=click.FloatRange(0, 1), help="Serial: seconds after each byte.")
@click.option("--place", metavar="PLACE", help="Serial, U-Boot: `mmc 0:1` or `mmc 0@0x8000`.")
@click.option("--extra", metavar="FILE=NAME", multiple=True, help="Serial: also send this file under NAME.")
@click.option("--bootcmd", help="Serial, U-Boot: the boot command to set.")
@click.option("--bootargs", help="Serial, U-Boot: the kernel's command line.")
@click.option("--boot", is_flag=True, help="Serial: boot at the end.")
@click.option("--password-file", type=_FILE, help="Serial: the console login's password.")
@click.option("--prefix", help="Serial, Linux: the folder for releases.")
@click.option("--service", is_flag=True, help="Serial, Linux: install the service.")
@click.option("--method", type=click.Choice(["auto", "rx", "base64"]), help="Serial, Linux: how to send.")
@click.option("--max-hours", type=click.FloatRange(0, min_open=True), help="Serial: longest transfer begun.")
@click.option("--wait", type=click.FloatRange(1), help="Serial: seconds to wait for a prompt.")
@click.option("--dry-run", is_flag=True, help="Show what would be made and erased; change nothing.")
@ui_options
def command(ui: Ui, **flags: Any) -> None:
    """Write a card, an image, or a board over its serial line.

    One of --to, --image, --serial says where. Without --base the result is an
    appliance that boots straight into the engine. A disk that is in use is
    never written; any other is shown first and must be confirmed.
    """
    where = [name for name in ("device", "image", "serial") if flags[name]]
    if len(where) != 1:
        raise UsageError("say where to write: one of --to DEVICE, --image FILE, --serial PORT")
    if flags["serial"]:
        _serial(ui, flags)
    else:
        _medium(ui, flags)


def _board(flags: dict[str, Any]) -> Board:
    from colibri_kit.config import load_board

    if not flags["board"]:
        raise UsageError("name the board: --board NAME", hint="see them with: colibri-kit boards")
    return load_board(flags["board"], flags["boards_dir"])


def _serial(ui: Ui, flags: dict[str, Any]) -> None:
    from colibri_kit.appliance.job import find_model
    from colibri_kit.serialflash.job import flash_serial
    from colibri_kit.serialflash.options import SerialOptions

    for name in ("base", "given"):
        if flags[name]:
            raise UsageError("--base and --from make cards; a serial line takes engine and weights")
    names = (
        "baud", "max_baud", "txdelay", "engine", "bootcmd", "bootargs", "boot", "user", "password_file",
        "prefix", "budget", "ctx", "threads", "service", "method", "max_hours", "wait", "dry_run",
    )  # fmt: skip
    given = {name: flags[name] for name in names if flags[name] is not None}
    extra = []
    for item in flags["extra"]:
        path, sign, name = item.rpartition("=")
        if not sign or not path or not name:
            raise UsageError(f"--extra {item}: give FILE=NAME")
        extra.append((Path(path), name))
    options = SerialOptions(**given, to=flags["place"], extra=tuple(extra))
    flash_serial(ui, _board(flags), flags["serial"], find_model(flags["model"]), options)


def _medium(ui: Ui, flags: dict[str, Any]) -> None:
    from colibri_kit import resources
    from colibri_kit.appliance import job
    from colibri_kit.media import job as media
    from colibri_kit.media.job import Target

    start = time.monotonic()
    target = Target(
        Path(flags["device"]) if flags["device"] else None,
        flags["image"],
        flags["serial_number"],
        flags["yes"],
    )
    if flags["given"] and flags["base"]:
        raise UsageError("--from writes an image as it is; --base adds to one: give one of them")
    for name in ("given", "base"):
        file, image = flags[name], flags["image"]
        if file and image and image.exists() and file.exists() and image.samefile(file):
            raise UsageError(f"{image} is the image that is read; write to another file")
    if flags["image"] and flags["image"].is_file() and not flags["force"]:
        raise UsageError(
            f"{flags['image']} exists", hint="choose another --image, or replace it with --force"
        )
    wish = None if flags["given"] else _wish(ui, flags)
    if wish:
        job.check(wish)
    verdict = media.look(target, wish.least_bytes if wish else 0)
    rows = [*(job.plan_rows(wish) if wish else [("image", str(flags["given"]))])]
    rows += media.plan_rows(verdict, target)
    text = "\n".join(f"{name:<9} {value}" for name, value in rows)
    if flags["dry_run"]:
        disk = verdict.disk.as_json() if verdict else None
        ui.result({"dry_run": True, "plan": [list(r) for r in rows], "disk": disk}, text)
        return
    ui.note(text)
    if verdict:
        media.confirm(ui, verdict, target)
    # A file is made beside its final place, so that it appears there by one rename.
    folder = target.image.absolute().parent if target.image else resources.cache_dir()
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".colibri-flash-") as temp:
        image = Path(temp) / "image"
        facts = job.make(ui, wish, image) if wish else job.copy_as_is(ui, flags["given"], image)
        if verdict:
            verdict = media.look(target, image.stat().st_size)
        facts |= media.put(ui, image, target, verdict)
    facts["seconds"] = round(time.monotonic() - start, 1)
    ui.result(facts, _text(facts, verdict, wish))


def _wish(ui: Ui, flags: dict[str, Any]) -> Wish:
    from colibri_kit.appliance.job import Wish, find_model
    from colibri_kit.appliance.platforms import platform_of
    from colibri_kit.appliance.settings import Settings
    from colibri_kit.deploy import model
    from colibri_kit.deploy.job import load_engine
    from colibri_kit.deploy.plan import check_engine

    board = _board(flags)
    if not flags["base"]:
        platform_of(board)  # before an engine is built in vain
    settings = Settings(
        hostname=flags["hostname"] or board.name,
        address=flags["address"],
        gateway=flags["gateway"],
        authorized_keys=tuple(line for path in flags["keys"] for line in _public_keys(path)),
        watchdog=flags["watchdog"],
        budget=flags["budget"] or board.budget,
        ctx=flags["ctx"] or 0,
        threads=flags["threads"] or 0,
        max_new=flags["max_new"],
        console_shell=flags["console_shell"],
    )
    parcel = model.load(find_model(flags["model"]))
    engine = load_engine(ui, board, flags["engine"])
    check_engine(board, engine)
    return Wish(
        board=board,
        engine=engine.part,
        parcel=parcel,
        settings=settings,
        uboot=flags["boot_loader"] == "uboot",
        refresh=flags["refresh"],
        new_host_key=flags["new_host_key"],
        base=flags["base"],
        user=flags["user"],
        rename=flags["hostname"] is not None,
    )


def _public_keys(path: Path) -> list[str]:
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"cannot read {path}: {err}") from err
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{path} holds no key")
    return keys


def _text(facts: dict[str, Any], verdict: Verdict | None, wish: Wish | None) -> str:
    from colibri_kit.deploy.plan import size_text

    if verdict:
        rows = [
            (
                "written",
                f"{size_text(facts['written_bytes'])}, {size_text(facts['skipped_bytes'])} not needed",
            ),
            ("verified", f"{size_text(facts['verified_bytes'])} read back"),
        ]
    else:
        rows = [("written", f"{facts['image']}  {size_text(facts['size_bytes'])}")]
    if "host_key" in facts:
        rows.append(("host key", f"{facts['host_key']}, pinned in {facts['known_hosts']}"))
    rows.append(("done in", f"{facts['seconds']} s"))
    if wish and wish.base is None:
        rows.append(("next", "insert the card, connect the serial console (115200) and switch on"))
    return "\n".join(f"{name:<9} {value}" for name, value in rows)
