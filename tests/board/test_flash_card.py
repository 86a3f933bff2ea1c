"""The appliance: tools accept the image, two builds are equal, and it boots from its own partitions.

Nothing emulates the Raspberry Pi's own firmware stage (start4.elf reading config.txt): what
is tested is what comes after it, by handing QEMU the slot's files, and through U-Boot.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from card import boot_offset, boot_slot, device_tree, from_card, sd_copy, start

from colibri_kit.appliance import identity, pieces
from colibri_kit.media.partitions import Partition, read_table
from colibri_kit.transport.serial_answer import classify
from colibri_kit.vboard.images import copy_sparse

DATA = Path(__file__).resolve().parents[1] / "data" / "engine"
PROMPT = "the quick brown"


def kit(*args: object, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "colibri_kit", *map(str, args)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})}, errors="replace",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Made:
    image: Path
    model: Path
    identity: Path
    report: dict[str, object]
    command: tuple[object, ...]
    env: dict[str, str]
    pieces: pieces.Pieces

    @property
    def partitions(self) -> tuple[Partition, ...]:
        with self.image.open("rb") as file:
            return read_table(file, self.image.stat().st_size).partitions


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A card for rpi4 with a tiny model, made by the command that users type."""
    folder = tmp_path_factory.mktemp("card")
    model = folder / "tiny.coli"
    kit("convert", DATA / "qwen3moe.t64.f32.gguf", "-o", model, "-q")
    login = folder / "login"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(login)], check=True)
    env = {"XDG_CONFIG_HOME": str(folder / "config")}
    engine = folder / "engine"
    kit("build", "--board", "rpi4", "-o", engine, "-q")
    command = (
        "flash", "--engine", engine, "--board", "rpi4", "--model", model, "--hostname", "colibri-card",
        "--max-new", 12,
        "--authorized-key", f"{login}.pub", "--address", "10.0.2.15/24", "--json",
    )  # fmt: skip
    image = folder / "card.img"
    report = json.loads(kit(*command, "--image", image, env=env))
    return Made(image, model, login, report, command, env, pieces.fetch(print, uboot=True))


def test_boards_without_an_appliance_are_refused_before_an_engine_is_built(tmp_path: Path) -> None:
    kit("convert", DATA / "qwen3moe.t64.f32.gguf", "-o", tmp_path / "m.coli", "-q")
    argv = ["flash", "--board", "rpi5", "--model", tmp_path / "m.coli", "--image", tmp_path / "x.img"]
    done = subprocess.run(
        [sys.executable, "-m", "colibri_kit", *map(str, argv)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "no appliance image for board rpi5; there is for rpi4" in done.stderr
    assert "--base IMAGE" in done.stderr and "compile" not in done.stderr
    assert not (tmp_path / "x.img").exists()


def test_tools_accept_the_image(made: Made, tmp_path: Path) -> None:
    done = subprocess.run(["sfdisk", "-V", str(made.image)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    fat, weights, state = made.partitions
    part = tmp_path / "fat"
    with made.image.open("rb") as source, part.open("wb") as out:
        source.seek(fat.start)
        out.write(source.read(fat.size))
    for argv in (
        ["fsck.vfat", "-n", str(part)],
        ["e2fsck", "-fn", f"{made.image}?offset={weights.start}"],
        ["e2fsck", "-fn", f"{made.image}?offset={state.start}"],
        ["mdir", "-/", "-i", f"{made.image}@@{fat.start}"],
    ):
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, env={**os.environ, "MTOOLSRC": "/dev/null"}
        )
        assert done.returncode == 0, (argv, done.stdout, done.stderr)
    assert stat.S_IMODE(made.image.stat().st_mode) == 0o600, "it holds a private key"


def test_two_builds_are_equal(made: Made, tmp_path: Path) -> None:
    again = tmp_path / "again.img"
    kit(*made.command, "--image", again, env=made.env)
    first, second = (hashlib.sha256(p.read_bytes()).hexdigest() for p in (made.image, again))
    assert first == second


def test_what_is_on_the_card(made: Made) -> None:
    """Firmware with its notice, both slots alike, the model's bytes as they were converted."""
    firmware = made.pieces.firmware / "usr/lib/raspi-firmware"
    assert from_card(made.image, "start4.elf") == (firmware / "start4.elf").read_bytes()
    notice = from_card(made.image, "notices/raspi-firmware")
    assert b"Raspberry Pi" in notice and b"redistribut" in notice.lower()
    assert from_card(made.image, "slot-a/initrd.gz") == from_card(made.image, "slot-b/initrd.gz")
    assert from_card(made.image, "config.txt") == from_card(made.image, "config-a.txt")
    assert from_card(made.image, "tryboot.txt") == from_card(made.image, "config-b.txt")
    manifest = json.loads((made.model / "manifest.json").read_text())
    weights = made.partitions[1]
    for item in manifest["files"]:
        got = subprocess.run(
            ["debugfs", "-R", f"cat model.coli/{item['name']}", f"{made.image}?offset={weights.start}"],
            capture_output=True, check=True,
        ).stdout  # fmt: skip
        assert hashlib.sha256(got).hexdigest() == item["sha256"]


def answer_here(made: Made) -> str:
    """What this machine's engine answers: the board must say the same, bit for bit."""
    done = kit("run", made.model, "-p", PROMPT, "-n", 12, "-q")
    return re.sub(r"[^\x21-\x7e]", "", done)


def ask(console: object, made: Made) -> None:
    console.until(r"colibri> ", 30)  # type: ignore[attr-defined]
    console.send(PROMPT)  # type: ignore[attr-defined]
    told = console.until(rf"(?s){PROMPT}\n(.*)\ncolibri> ", 60)  # type: ignore[attr-defined]
    assert re.sub(r"[^\x21-\x7e]", "", told.group(1)) == answer_here(made) != ""
    assert classify(told.group(0).encode()).kind == "engine", "flash --serial would not know it"


def golden(made: Made) -> str:
    text: str = json.loads((made.model / "manifest.json").read_text())["golden"]["sha256"]
    return text


def test_boots_in_raspi3b_and_answers_on_serial_and_ssh(made: Made, tmp_path: Path) -> None:
    import paramiko

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    net = f"user,id=n0,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22"
    console = boot_slot(
        "raspi3b", tmp_path, made.image, made.pieces, "a", "-netdev", net, "-device", "usb-net,netdev=n0"
    )
    client = paramiko.SSHClient()
    try:
        console.until(rf"golden ok, slot a, {golden(made)}", 90)
        ask(console, made)
        console.send(".status")
        console.until(r"slot a, loader firmware", 20)
        console.send(".shell")
        console.until("not allowed", 20)
        key, _ = identity_of(made)
        client.get_host_keys().add(f"[127.0.0.1]:{port}", "ssh-ed25519", key)
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        client.connect(
            "127.0.0.1", port, "root", key_filename=str(made.identity), allow_agent=False,
            look_for_keys=False, banner_timeout=60, auth_timeout=60, timeout=60,
        )  # fmt: skip
        _, out, _ = client.exec_command("hostname; slot; cat /state/tries-a; colibri version; pidof colibri")
        told = out.read().decode()
        assert re.search(r"\n\d+\n$", told), "the engine stays, with the model loaded"
        assert told.startswith("colibri-card\nslot a runs; tries a 0, b 0\n"), told
        assert re.search(r"(?m)^colibri \d", told), told
    finally:
        client.close()
        console.close()


def identity_of(made: Made) -> tuple[object, str]:
    """The pinned key, from the known_hosts file that flash wrote."""
    import paramiko

    line = Path(str(made.report["known_hosts"])).read_text().split()
    assert line[0] == "colibri-card,colibri-card.local,10.0.2.15"
    key = paramiko.Ed25519Key(data=identity.base64.b64decode(line[2]))
    return key, line[1]


def test_boots_in_raspi4b_and_answers(made: Made, tmp_path: Path) -> None:
    """Slot b; the address from a DHCP server, as a user would set it on the card."""
    card = tmp_path / "dhcp.img"
    copy_sparse(made.image, card)
    conf = tmp_path / "board.conf"
    text = from_card(card, "colibri/board.conf")
    conf.write_bytes(text.replace(b"address=10.0.2.15/24", b"address=dhcp\r"))  # edited on Windows
    drive = ["-i", f"{card}@@{boot_offset(card)}"]
    env = {**os.environ, "MTOOLSRC": "/dev/null"}
    subprocess.run(["mcopy", "-o", *drive, str(conf), "::colibri/board.conf"], check=True, env=env)
    net = ("-netdev", "user,id=n0,restrict=on", "-device", "usb-net,netdev=n0")
    console = boot_slot("raspi4b", tmp_path, card, made.pieces, "b", *net)
    try:
        console.until(rf"golden ok, slot b, {golden(made)}", 120)
        ask(console, made)
        for _ in range(20):
            console.send(".status")
            seen = console.until(r"(?s)slot b, loader firmware.*?colibri> ", 30).group(0)
            if "inet 10.0.2.15/24" in seen:
                break
            time.sleep(1)
        assert "inet 10.0.2.15/24" in seen, seen
    finally:
        console.close()


def edit(card: Path, part: Partition, commands: str) -> None:
    done = subprocess.run(
        ["debugfs", "-w", "-f", "-", f"{card}?offset={part.start}"],
        input=commands, text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert "rror" not in done.stderr, done.stderr


def with_tries(made: Made, folder: Path, **tries: int) -> Path:
    """A copy of the card whose slots were tried so often before."""
    card = folder / "edited.img"
    sd_copy(made.image, card)
    commands = ""
    for slot, count in tries.items():
        (folder / slot).write_text(f"{count}\n")
        commands += f"write {folder / slot} tries-{slot}\n"
    edit(card, made.partitions[2], commands)
    return card


def test_a_slot_that_never_was_good_is_left(made: Made, tmp_path: Path) -> None:
    """The fourth start of slot a chooses slot b: one sector of the boot partition."""
    card = with_tries(made, tmp_path, a=3)
    console = boot_slot("raspi3b", tmp_path, card, made.pieces, "a")
    try:
        console.until(r"slot a was not good 3 times: slot b from now on", 60)
        console.process.wait(60)  # it starts again, and QEMU was told to end then
        running = tmp_path / "sd.img"
        assert from_card(running, "config.txt") == from_card(made.image, "config-b.txt")
        assert from_card(running, "tryboot.txt") == from_card(made.image, "config-a.txt")
    finally:
        console.close()


def test_damaged_weights_never_answer(made: Made, tmp_path: Path) -> None:
    """One byte of the weights partition is another: no prompt, and no other slot would be better."""
    card = with_tries(made, tmp_path, a=3, b=3)
    dense = (made.model / "dense.coli").read_bytes()
    weights = made.partitions[1]
    with card.open("r+b") as file:
        file.seek(weights.start)
        at = file.read(weights.size).index(dense[4096:8192]) + 2000
        file.seek(weights.start + at)
        byte = file.read(1)[0]
        file.seek(weights.start + at)
        file.write(bytes([byte ^ 0x40]))
    console = boot_slot("raspi3b", tmp_path, card, made.pieces, "a")
    try:
        console.until(r"golden check failed", 60)
        seen = console.until(r"(?s).*golden check failed", 60).group(0)
        assert "colibri> " not in seen
    finally:
        console.close()


def test_uboot_boots_the_card_and_falls_back(made: Made, tmp_path: Path) -> None:
    """The slowest: U-Boot polls the card. Slot a cannot be loaded; after three tries b is taken."""
    card = sd_copy(made.image, tmp_path / "sd.img")
    drive = ["-i", f"{card}@@{boot_offset(card)}"]
    env = {**os.environ, "MTOOLSRC": "/dev/null"}
    subprocess.run(["mdel", *drive, "::slot-a/initrd.gz"], check=True, env=env)
    # QEMU has no timer behind the Pi's watchdog and resets at once; users edit the file like this.
    conf = tmp_path / "board.conf"
    conf.write_bytes(from_card(made.image, "colibri/board.conf").replace(b"watchdog=15", b"watchdog=0"))
    subprocess.run(["mcopy", "-o", *drive, str(conf), "::colibri/board.conf"], check=True, env=env)
    assert made.pieces.uboot is not None
    kernel = made.pieces.uboot / "usr/lib/u-boot/rpi_3/u-boot.bin"
    console = start("raspi3b", tmp_path, card, kernel, device_tree("raspi3b", made.pieces, tmp_path))
    try:
        for number in (1, 2, 3):
            console.until(rf"colibri: slot a, try {number}\s", 60)
        console.until(r"slot a did not come up 3 times", 60)
        console.until(r"colibri: slot b, try 1\s", 60)
        console.until(rf"golden ok, slot b, {golden(made)}", 150)
        ask(console, made)
        console.send(".status")
        console.until(r"slot b, loader uboot", 20)
    finally:
        console.close()
    assert from_card(card, "slot.env") == b"slot=b\ntries=0\n"
