"""Makes the image that ``flash`` writes: an appliance, an image with additions, or one as it is."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from colibri_kit.appliance import base, boot, build, identity, pieces, platforms
from colibri_kit.appliance.filesystems import Tools
from colibri_kit.appliance.settings import Settings
from colibri_kit.config.board import Board
from colibri_kit.deploy import plan as deploying
from colibri_kit.deploy.model import Parcel, Part
from colibri_kit.errors import PreflightError, UsageError
from colibri_kit.media import source
from colibri_kit.ui import Ui
from colibri_kit.vboard.packages import Store


@dataclass(frozen=True)
class Wish:
    """What the command line asked for, read and checked."""

    board: Board
    engine: Part
    parcel: Parcel
    settings: Settings
    uboot: bool = False
    refresh: bool = False
    new_host_key: bool = False
    base: Path | None = None
    user: str = "root"
    rename: bool = False

    @property
    def least_bytes(self) -> int:
        """What the image takes at least, known before it is made."""
        return self.parcel.size + self.engine.size + (0 if self.base else 320 << 20)


def plan_rows(wish: Wish) -> list[tuple[str, str]]:
    """What will be made, for people."""
    s = wish.settings
    rows = [
        ("board", f"{wish.board.name}  {wish.board.title}"),
        ("model", f"{wish.parcel.name}, {deploying.size_text(wish.parcel.size)}"),
        ("image", f"{wish.base} with additions" if wish.base else f"appliance, {_loader(wish)}"),
    ]
    if not wish.base or wish.rename:
        rows.append(("hostname", s.hostname))
    if not wish.base:
        rows.append(("network", s.address + (f", gateway {s.gateway}" if s.gateway else "")))
        rows.append(("watchdog", f"{s.watchdog} s" if s.watchdog else "off"))
    rows.append(("ssh", f"{len(s.authorized_keys)} key(s)" if s.authorized_keys else "off: no key was given"))
    return rows


def _loader(wish: Wish) -> str:
    return "started by U-Boot" if wish.uboot else "started by the Raspberry Pi firmware"


def check(wish: Wish) -> None:
    """Refuses what cannot work, before anything is fetched or made.

    Raises:
        PreflightError: wrong engine, model too large. UsageError: no image for this board.
    """
    if not wish.base:
        platforms.platform_of(wish.board)
    cache = wish.parcel.kv_bytes_per_token * (wish.settings.ctx or min(wish.parcel.ctx_train or 4096, 4096))
    fixed = [p.size for p in wish.parcel.parts if not p.name.startswith("experts-")]
    budget = wish.settings.budget or wish.board.budget
    if sum(fixed) + cache > budget:
        raise PreflightError(
            f"{wish.parcel.name} needs at least {deploying.size_text(sum(fixed) + cache)} of memory, "
            f"the budget is {deploying.size_text(budget)}",
            hint="raise --budget if the board has the memory, lower --ctx, or convert with a smaller --quant",
            state="nothing was made",
            code="CK-PREFLIGHT-BUDGET",
        )


def room(folder: Path, need: int) -> None:
    """Raises PreflightError when ``folder`` has not ``need`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise PreflightError(
            f"{folder} has {deploying.size_text(free)} free, "
            f"making the image takes {deploying.size_text(need)}",
            hint="free some space, or let it be made elsewhere: XDG_CACHE_HOME=/other/disk",
            state="nothing was made",
            code="CK-FLASH-ROOM",
        )


def make(ui: Ui, wish: Wish, image: Path) -> dict[str, object]:
    """Makes the image at ``image``. Returns what the report says of it."""
    tools = Tools(Store(ui.note))
    key, fresh = identity.load_or_make(wish.settings.hostname, renew=wish.new_host_key)
    facts: dict[str, object] = {"board": wish.board.name, "model": wish.parcel.name}
    if wish.base is not None:
        room(image.parent, base.need(_addition(wish, key)) + wish.base.stat().st_size)
        facts |= _with_additions(ui, tools, wish, key, wish.base, image)
        pinned = bool(facts["host_key_pinned"])
    else:
        room(image.parent, 2 * wish.parcel.size + (200 << 20))
        facts |= _appliance(ui, tools, wish, key, image)
        pinned = bool(wish.settings.authorized_keys)
    if pinned:
        file = identity.pin(wish.settings.hostname, wish.settings.address, key)
        facts |= {"host_key": key.fingerprint, "host_key_new": fresh, "known_hosts": str(file)}
    return facts


def _appliance(ui: Ui, tools: Tools, wish: Wish, key: identity.HostKey, image: Path) -> dict[str, object]:
    found = pieces.fetch(ui.note, uboot=wish.uboot, refresh=wish.refresh)
    recipe = build.Recipe(
        board=wish.board.name,
        platform=platforms.platform_of(wish.board),
        pieces=found,
        engine=wish.engine.path.read_bytes(),
        parcel=wish.parcel,
        settings=wish.settings,
        host_key=key,
        uboot=wish.uboot,
    )
    made = build.build(recipe, tools, image, ui.detail)
    return {
        "kind": "appliance",
        "loader": "uboot" if wish.uboot else "firmware",
        "slots": list(boot.SLOTS),
        "disk_signature": f"{made.signature:08x}",
        "partitions": [asdict(p) for p in made.partitions],
        "packages": found.versions,
    }


def _addition(wish: Wish, key: identity.HostKey) -> base.Addition:
    s = wish.settings
    return base.Addition(
        board=wish.board,
        engine=wish.engine,
        parcel=wish.parcel,
        settings=deploying.Settings(s.budget or wish.board.budget, s.ctx, s.threads),
        authorized_keys=s.authorized_keys,
        user=wish.user,
        hostname=s.hostname if wish.rename else None,
        host_key=key.openssh() if wish.rename else None,
        host_key_public=key.line if wish.rename else None,
    )


def _with_additions(
    ui: Ui, tools: Tools, wish: Wish, key: identity.HostKey, given: Path, image: Path
) -> dict[str, object]:
    ui.detail(f"unpacking {given}")
    source.unpack(given, image)
    found = base.inspect(tools, image)
    addition = _addition(wish, key)
    base.check(tools, image, found, addition)
    need = base.need(addition)
    grown = 0
    if need > found.free:
        grown = found.root.size
        found = base.grow(tools, image, found, need - found.free + (16 << 20))
        grown = found.root.size - grown
    added = base.add(tools, image, found, addition, datetime.now(timezone.utc))
    return {
        "kind": "base",
        "system": found.system,
        "added": added,
        "root_grown_bytes": grown,
        "host_key_pinned": addition.host_key is not None
        and found.has("/etc/ssh")
        and not base.renews_keys(found),
    }


def copy_as_is(ui: Ui, given: Path, image: Path) -> dict[str, object]:
    """``--from``: an image made before, unpacked."""
    ui.detail(f"unpacking {given}")
    source.unpack(given, image)
    return {"kind": "as it is", "source": str(given)}


def find_model(given: Path | None, folders: tuple[Path, ...] = (Path(), Path("build/demo"))) -> Path:
    """The model named, else the only one in sight.

    Raises:
        UsageError: none or several are in sight.
    """
    if given is not None:
        return given
    seen = [
        p for f in folders if f.is_dir() for p in sorted(f.glob("*.coli")) if (p / "manifest.json").is_file()
    ]
    if len(seen) == 1:
        return seen[0]
    raise UsageError(
        "name the model: --model MODEL.coli" + (f"; there are {', '.join(map(str, seen))}" if seen else ""),
        hint="make one with: colibri-kit convert IN.gguf -o OUT.coli, or: colibri-kit demo",
    )
