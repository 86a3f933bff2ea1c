"""Whether a disk may be erased. Pure: facts in, refusals out. What is in use is refused, with no override."""

from __future__ import annotations

from dataclasses import dataclass

from colibri_kit.errors import PreflightError
from colibri_kit.media.disks import Disk, Node

_NOTHING = "nothing was changed"

#: What a disk (or a partition of it) may be a member of; losing a member loses the whole.
_MEMBERS = {
    "LVM2_member": "an LVM volume group",
    "linux_raid_member": "a RAID array",
    "isw_raid_member": "a RAID array",
    "ddf_raid_member": "a RAID array",
    "zfs_member": "a ZFS pool",
    "bcache": "a bcache set",
    "drbd": "a DRBD device",
    "ceph_bluestore": "a Ceph store",
}
#: Above this a "removable" disk is more likely somebody's backup than a card.
LARGE = 256 << 30
_STACKED = {"lvm": "LVM", "crypt": "an open encrypted volume", "mpath": "multipath", "dm": "device mapper"}


@dataclass(frozen=True)
class Verdict:
    """What was decided. ``confirm``: the text a person must type; ``needs_serial``: as no removable medium
    it is erased only when that text is the medium's serial number."""

    disk: Disk
    needs_serial: bool
    confirm: str
    lost: tuple[str, ...]


def refusals(disk: Disk) -> list[str]:
    """Why this disk must not be erased, whatever anybody says."""
    out: list[str] = []
    for node in disk.node.walk():
        for mount in node.mounts:
            what = "swap" if mount == "[SWAP]" else f"mounted at {mount}"
            out.append(f"{node.path} is {what}")
        if node.fstype in _MEMBERS:
            out.append(f"{node.path} belongs to {_MEMBERS[node.fstype]}")
        if node is not disk.node:
            if node.kind.startswith("raid") or node.kind == "md":
                out.append(f"{node.path} is a RAID array on it")
            elif node.kind in _STACKED:
                out.append(f"{node.path} is in use by {_STACKED[node.kind]}")
    out += [f"{path} is swap" for path in disk.swaps]
    known = {m for n in disk.node.walk() for m in n.mounts}
    out += [f"{source} is mounted at {where}" for source, where in disk.mounts if where not in known]
    return list(dict.fromkeys(out))


def contents(node: Node) -> list[str]:
    """What would be lost, one line a partition."""
    from colibri_kit.deploy.plan import size_text

    found = []
    for part in node.walk():
        if part.fstype or part is not node:
            label = f" “{part.label}”" if part.label else ""
            found.append(f"{part.path}  {size_text(part.size)}  {part.fstype or 'unknown contents'}{label}")
    return found or ["no partitions that lsblk knows"]


def judge(disk: Disk, need_bytes: int, given_serial: str | None) -> Verdict:
    """May ``disk`` take an image of ``need_bytes``?

    Args:
        given_serial: from --serial-number; None = not given.

    Raises:
        PreflightError: refused; exit status 6.
    """
    if disk.node.kind not in ("disk", "loop"):
        raise PreflightError(
            f"{disk.path} is no whole disk but {disk.node.kind or 'of an unknown kind'}",
            hint="name the disk itself: lsblk shows them",
            state=_NOTHING,
            code="CK-FLASH-PARTITION",
        )
    reasons = refusals(disk)
    if reasons:
        raise PreflightError(
            f"{disk.path} is in use: " + "; ".join(reasons),
            hint="is it the right disk? If so, unmount or dismantle that first; there is no flag for this",
            state=_NOTHING,
            code="CK-FLASH-IN-USE",
        )
    if disk.read_only:
        raise PreflightError(
            f"{disk.path} is write-protected",
            hint="slide the card's lock, or take another reader; a worn-out card also turns read-only",
            state=_NOTHING,
            code="CK-FLASH-READONLY",
        )
    if disk.size == 0:
        raise PreflightError(
            f"{disk.path} holds no medium", hint="insert the card", state=_NOTHING, code="CK-FLASH-NO-MEDIUM"
        )
    if need_bytes > disk.size:
        raise PreflightError(
            f"the image needs {need_bytes} bytes, {disk.path} has {disk.size}: "
            f"{need_bytes - disk.size} too few",
            hint="take a larger card, or a smaller model",
            state=_NOTHING,
            code="CK-FLASH-SIZE",
        )
    if given_serial is not None and given_serial != disk.identity:
        raise PreflightError(
            f"{disk.path} is not the medium that was named: its serial number is {disk.identity}, "
            f"not {given_serial}",
            hint="device letters move; look again with: lsblk -o PATH,SIZE,MODEL,SERIAL",
            state=_NOTHING,
            code="CK-FLASH-SERIAL",
        )
    named = not disk.removable or disk.size > LARGE
    short = disk.path.removeprefix("/dev/")
    return Verdict(
        disk=disk,
        needs_serial=named,
        confirm=disk.identity if named else short,
        lost=tuple(contents(disk.node)),
    )


def same(before: Disk, after: Disk) -> bool:
    """Is it still the same medium in the same state? Asked after opening it exclusively."""
    return (before.identity, before.size, before.node.number) == (
        after.identity,
        after.size,
        after.node.number,
    ) and not refusals(after)
