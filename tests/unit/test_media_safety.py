"""Which disks may be erased. The lsblk texts have the shape that util-linux 2.38 prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from colibri_kit.errors import PreflightError
from colibri_kit.media import disks, safety

GIB = 1 << 30


def node(name: str, kind: str = "disk", size: int = 32 * GIB, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name, "path": f"/dev/{name}", "type": kind, "size": size, "model": None, "vendor": None,
        "serial": None, "rm": False, "hotplug": False, "ro": False, "tran": None, "fstype": None,
        "label": None, "mountpoints": [None], "maj:min": "8:16",
    }  # fmt: skip
    row.update({k.replace("_", ":") if k == "maj_min" else k: v for k, v in more.items()})
    return row


HOME = node("vg-home", "lvm", mountpoints=["/home"])


def card(**more: Any) -> dict[str, Any]:
    given = {"rm": True, "hotplug": True, "tran": "usb", "model": "Ultra", "serial": "4C530001"}
    return node("sdb", **{**given, **more})


def disk(row: dict[str, Any], swaps: str = "", mountinfo: str = "") -> disks.Disk:
    text = json.dumps({"blockdevices": [row]})
    return disks.disk_of(disks.parse_lsblk(text)[0], swaps, mountinfo)


def test_a_card_with_old_contents_is_fine_and_they_are_named() -> None:
    old = node("sdb1", "part", 256 << 20, fstype="vfat", label="bootfs", **{"maj:min": "8:17"})
    verdict = safety.judge(disk(card(children=[old])), GIB, None)
    assert not verdict.needs_serial and verdict.confirm == "sdb"
    assert verdict.lost == ("/dev/sdb1  256.0 MiB  vfat “bootfs”",)


@pytest.mark.parametrize(
    ("child", "word"),
    [
        (node("sdb1", "part", mountpoints=["/"], fstype="ext4"), "mounted at /"),
        (node("sdb1", "part", mountpoints=["/boot/efi"], fstype="vfat"), "mounted at /boot/efi"),
        (node("sdb1", "part", mountpoints=["/media/u/card"], fstype="vfat"), "mounted at /media/u/card"),
        (node("sdb2", "part", mountpoints=["[SWAP]"], fstype="swap"), "is swap"),
        (node("sdb1", "part", fstype="LVM2_member"), "an LVM volume group"),
        (node("sdb1", "part", fstype="linux_raid_member"), "a RAID array"),
        (node("sdb1", "part", fstype="zfs_member"), "a ZFS pool"),
        (node("sdb1", "part", children=[node("vg-root", "lvm", mountpoints=[None])]), "in use by LVM"),
        (node("sdb1", "part", children=[node("luks-1", "crypt")]), "an open encrypted volume"),
        (node("sdb1", "part", children=[node("md0", "raid1")]), "is a RAID array on it"),
        (node("sdb1", "part", children=[node("luks", "crypt", children=[HOME])]), "mounted at /home"),
    ],
)  # fmt: skip
def test_what_is_in_use_is_refused_whatever_is_said(child: dict[str, Any], word: str) -> None:
    with pytest.raises(PreflightError) as caught:
        safety.judge(disk(card(children=[child])), GIB, "4C530001")
    assert caught.value.code == "CK-FLASH-IN-USE" and caught.value.exit_status == 6
    assert word in caught.value.message
    assert "no flag" in (caught.value.hint or "")


def test_proc_knows_mounts_that_lsblk_does_not() -> None:
    """lsblk shows the mounts of its own namespace; the device's number in mountinfo is enough."""
    line = "99 1 8:16 / /mnt/hidden rw - ext4 /dev/root rw"
    with pytest.raises(PreflightError, match="mounted at /mnt/hidden"):
        safety.judge(disk(card(), mountinfo=line), GIB, None)
    with pytest.raises(PreflightError, match="/dev/sdb is swap"):
        safety.judge(disk(card(), swaps="Filename Type\n/dev/sdb partition 1 0 -2\n"), GIB, None)


def test_fixed_and_huge_disks_want_their_serial_number() -> None:
    fixed = node("sda", model="Samsung SSD", serial="S3Z9")
    verdict = safety.judge(disk(fixed), GIB, None)
    assert verdict.needs_serial and verdict.confirm == "S3Z9"
    huge = safety.judge(disk(card(size=12_000 * GIB)), GIB, None)
    assert huge.needs_serial and huge.confirm == "4C530001"


@pytest.mark.parametrize(
    ("row", "need", "serial", "code"),
    [
        (card(size=GIB), GIB + 1, None, "CK-FLASH-SIZE"),
        (card(size=0), 0, None, "CK-FLASH-NO-MEDIUM"),
        (card(ro=True), GIB, None, "CK-FLASH-READONLY"),
        (card(), GIB, "other", "CK-FLASH-SERIAL"),
        (card(type="lvm"), GIB, None, "CK-FLASH-PARTITION"),
        (card(type="part"), GIB, None, "CK-FLASH-PARTITION"),
        (card(type="rom"), GIB, None, "CK-FLASH-PARTITION"),
    ],
)
def test_refusals(row: dict[str, Any], need: int, serial: str | None, code: str) -> None:
    with pytest.raises(PreflightError) as caught:
        safety.judge(disk(row), need, serial)
    assert caught.value.code == code


def test_a_medium_without_serial_number_is_told_by_model_and_size() -> None:
    reader = disk(card(serial=None, model="SD Card Reader"))
    assert reader.identity == f"SD-Card-Reader-{32 * GIB}"
    other = disk(card(serial=None, model="SD Card Reader", size=16 * GIB))
    assert not safety.same(reader, other) and safety.same(reader, reader)


def test_a_disk_that_was_mounted_meanwhile_is_not_the_same() -> None:
    assert not safety.same(disk(card()), disk(card(mountpoints=["/mnt"])))
    assert not safety.same(disk(card()), disk(card(**{"maj:min": "8:32"})))


@pytest.mark.parametrize(
    ("name", "whole"), [("sdb1", "/dev/sdb"), ("mmcblk0p2", "/dev/mmcblk0"), ("nvme0n1p3", "/dev/nvme0n1")]
)
def test_the_disk_of_a_partition(name: str, whole: str) -> None:
    assert disks.parent(name) == whole


def test_lsblk_gone_mad_is_an_error() -> None:
    for text in ("", "[]", "{}", '{"blockdevices": 3'):
        with pytest.raises(PreflightError, match="lsblk"):
            disks.parse_lsblk(text)
