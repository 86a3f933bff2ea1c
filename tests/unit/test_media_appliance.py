"""What goes on an appliance's card: keys that dropbear and OpenSSH read, boot files, settings."""

from __future__ import annotations

import base64
import stat
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from colibri_kit.appliance import boot, identity
from colibri_kit.appliance.platforms import PLATFORMS, platform_of
from colibri_kit.appliance.settings import Settings
from colibri_kit.config import load_board
from colibri_kit.errors import ConfigError, UsageError
from colibri_kit.transport import known_hosts

KEY = identity.from_seed(bytes(range(32)))


def test_dropbear_reads_the_host_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY.dropbear())
    done = subprocess.run(["dropbearkey", "-y", "-f", str(file)], capture_output=True, text=True, check=True)
    assert KEY.line in done.stdout
    assert KEY.fingerprint in done.stdout


def test_openssh_reads_the_host_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY.openssh())
    file.chmod(0o600)
    done = subprocess.run(["ssh-keygen", "-y", "-f", str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == KEY.line
    done = subprocess.run(["ssh-keygen", "-lf", str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == KEY.fingerprint


def test_the_host_key_is_kept_private_and_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    key, fresh = identity.load_or_make("plc7")
    assert fresh and identity.load_or_make("plc7") == (key, False)
    assert identity.load_or_make("plc8")[0] != key
    file = tmp_path / "colibri-kit/boards/plc7/ssh_host_ed25519_seed"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    pinned = identity.pin("plc7", "192.168.1.20/24", key)
    entries = known_hosts.load([pinned])
    for name in ("plc7", "plc7.local", "192.168.1.20"):
        mine = known_hosts.recorded(entries, name)
        assert known_hosts.judge(mine, "ssh-ed25519", key.blob) == "known"
    assert known_hosts.judge(mine, "ssh-ed25519", KEY.blob) == "changed"
    assert identity.load_or_make("plc7", renew=True)[0] != key
    for damage in ("", "AAAA", base64.b64encode(bytes(31)).decode()):
        file.write_text(damage)
        with pytest.raises(ConfigError) as caught:
            identity.load_or_make("plc7")
        assert caught.value.code == "CK-FLASH-KEY"


@pytest.mark.parametrize("uboot", [False, True])
@pytest.mark.parametrize("name", sorted(PLATFORMS))
def test_configurations_are_one_sector(name: str, uboot: bool) -> None:
    """So that another slot is chosen by one sector written in place."""
    texts = [boot.config_txt(PLATFORMS[name], slot, uboot=uboot) for slot in boot.SLOTS]
    assert [len(t) for t in texts] == [512, 512] and texts[0] != texts[1]
    for text, slot in zip(texts, boot.SLOTS, strict=True):
        lines = [line for line in text.decode().splitlines() if line and not line.startswith("#")]
        assert "arm_64bit=1" in lines
        assert (f"os_prefix=slot-{slot}/" in lines) is not uboot
        # The firmware reads at most 98 characters a line; only ``initramfs`` is written with spaces.
        assert all(len(line) < 98 for line in lines)
        assert (
            [line for line in lines if " " in line] == [] if uboot else ["initramfs initrd.gz followkernel"]
        )


def test_the_script_image_is_as_mkimage_writes_it() -> None:
    data = boot.uboot_image("echo hello\n")
    magic, crc, when, size, load, entry, body_crc = struct.unpack(">7I", data[:28])
    assert (magic, when, load, entry) == (0x27051956, 0, 0, 0)
    assert tuple(data[28:32]) == (5, 22, 6, 0)  # Linux, arm64, script, none: include/image.h
    assert size == len(data) - 64 and body_crc == zlib.crc32(data[64:])
    assert crc == zlib.crc32(data[:4] + bytes(4) + data[8:64])
    assert data[64:72] == struct.pack(">II", 11, 0) and data[72:] == b"echo hello\n"


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"hostname": "Pi"}, "hostname"),
        ({"hostname": "a\nb"}, "hostname"),
        ({"hostname": "-a"}, "hostname"),
        ({"address": "192.168.1.20"}, "prefix length"),
        ({"address": "192.168.1.0/24"}, "network's own"),
        ({"address": "192.168.1.300/24"}, "192.168.1.300"),
        ({"address": "192.168.1.2/24", "gateway": "10.0.0.1"}, "not in"),
        ({"gateway": "10.0.0.1"}, "static"),
        ({"watchdog": 16}, "15 seconds"),
        ({"authorized_keys": ("-----BEGIN OPENSSH PRIVATE KEY-----",)}, "not a public key"),
        ({"authorized_keys": ("ssh-ed25519 AAAA\nreboot",)}, "not a public key"),
    ],
)
def test_settings_that_are_refused(wrong: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Settings(**{"hostname": "plc", **wrong})  # type: ignore[arg-type]


def test_settings_file_is_plain_lines() -> None:
    text = Settings("plc", address="10.1.2.3/8", gateway="10.0.0.1", budget=1 << 30, threads=2).render()
    rows = dict(line.split("=", 1) for line in text.splitlines() if not line.startswith("#"))
    assert rows["address"] == "10.1.2.3/8" and rows["engine_flags"] == "--budget 1073741824 --threads 2"


@pytest.mark.parametrize(
    ("name", "word"), [("rpi5", "--base"), ("x86-gateway", "deploy"), ("a53-plc", "--serial")]
)
def test_boards_without_an_appliance(name: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        platform_of(load_board(name))
    assert word in (caught.value.hint or "")
