"""Adding to somebody else's image: a Debian arm64 userland from its packages, packed as .img.xz."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from colibri_kit.appliance import extlist
from colibri_kit.appliance.filesystems import Tools
from colibri_kit.media.partitions import Partition, make_mbr, read_table
from colibri_kit.vboard.packages import Store, small

MIB = 1 << 20
DATA = Path(__file__).resolve().parents[1] / "data" / "engine"
OLD_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f old"


def run(*args: object, config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "colibri_kit", *map(str, args)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "XDG_CONFIG_HOME": str(config)},
    )  # fmt: skip


@dataclass(frozen=True)
class Ready:
    """A model, an engine, a root tree of Debian's packages for arm64."""

    folder: Path
    model: Path
    engine: Path
    tree: Path

    def flash(self, base: Path, image: Path, *more: object) -> subprocess.CompletedProcess[str]:
        return run(
            "flash", "--board", "rpi4", "--model", self.model, "--engine", self.engine, "--base", base,
            "--image", image, "--json", *more, config=self.folder / "config",
        )  # fmt: skip


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    folder = tmp_path_factory.mktemp("base")
    model, engine = folder / "tiny.coli", folder / "engine"
    for args in (
        ("convert", DATA / "qwen3moe.t64.f32.gguf", "-o", model, "-q"),
        ("build", "--board", "rpi4", "-o", engine, "-q"),
    ):
        done = run(*args, config=folder)
        assert done.returncode == 0, done.stderr
    tree = folder / "root"
    packages = Store(print).get(small("arm64"))
    shutil.copytree(packages, tree, symlinks=True, ignore=shutil.ignore_patterns("doc", "man", "locale"))
    for path, text in {
        "etc/passwd": "root:x:0:0:root:/root:/bin/sh\npi:x:1000:1000::/home/pi:/bin/sh\n",
        "etc/hostname": "raspberrypi\n",
        "etc/ssh/sshd_config": "UsePAM no\n",
        "home/pi/.ssh/authorized_keys": OLD_KEY,  # without a newline at its end
        "usr/lib/systemd/systemd": "stands for the program\n",
        "usr/lib/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n',
        'usr/share/odd name/ü «quoted» "x"': "names that need quotes\n",
        "etc/systemd/system/multi-user.target.wants/other.service": "[Unit]\n",
    }.items():
        file = tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    shell = tree / "bin" / "sh"
    if not shell.exists():
        shell.parent.mkdir(exist_ok=True)
        shutil.copyfile(tree / "bin/busybox", shell)
    return Ready(folder, model, engine, tree)


def base_image(ready: Ready, path: Path, spare: int, label: str = "dos") -> tuple[Partition, Partition]:
    """MBR or GPT, FAT32, and a root as the last partition. With ``spare`` = 0 it is full to the brim."""
    used = sum(f.lstat().st_size + 4096 for f in ready.tree.rglob("*"))
    size = -(-(used + used // 20 + spare + 6 * MIB) // MIB) * MIB
    plain = path.with_name("root.ext4")
    subprocess.run(
        ["mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-O", "^has_journal", "-d",
         str(ready.tree), "-E", "root_owner=0:0", str(plain), f"{size // 1024}k"],
        check=True, capture_output=True,
    )  # fmt: skip
    if not spare:
        subprocess.run(["resize2fs", "-M", str(plain)], check=True, capture_output=True)
        size = -(-plain.stat().st_size // MIB) * MIB
    fat, root = Partition(1, 4 * MIB, 40 * MIB, 0x0C), Partition(2, 44 * MIB, size, 0x83)
    with path.open("wb") as out:
        out.seek(root.start)
        out.write(plain.read_bytes())
        out.truncate(root.end + (MIB if label == "gpt" else 0))
    if label == "gpt":
        script = f"label: gpt\nstart={4 * 2048}, size={40 * 2048}\nstart={44 * 2048}, size={size // 512}\n"
        subprocess.run(["sfdisk", "-q", str(path)], input=script, text=True, check=True, capture_output=True)
    else:
        with path.open("r+b") as out:
            out.write(b"boot code of the maker".ljust(440, b"\x90") + make_mbr(0xCAFE, (fat, root))[440:])
    subprocess.run(
        ["mkfs.vfat", "-F", "32", "-s", "1", "--offset", str(fat.start // 512), str(path), str(40 * 1024)],
        check=True, capture_output=True,
    )  # fmt: skip
    return fat, root


def dump(image: Path, start: int, folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every path with its mode and bytes (or link target), by debugfs rdump: not the way the kit looks."""
    folder.mkdir()
    subprocess.run(
        ["debugfs", "-R", f"rdump / {folder}", f"{image}?offset={start}"], capture_output=True, check=True
    )
    found = {}
    for path in folder.rglob("*"):
        data = b""
        if path.is_symlink():
            data = str(path.readlink()).encode()
        elif path.is_file():
            data = hashlib.sha256(path.read_bytes()).digest()
        found["/" + str(path.relative_to(folder))] = (path.lstat().st_mode, data)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="rdump keeps owners as root only")
def test_only_what_is_ours_is_added(ready: Ready, tmp_path: Path) -> None:
    """Too small a root, so it is grown too; then compared byte for byte."""
    raw = tmp_path / "os.img"
    fat, root = base_image(ready, raw, spare=0)
    packed = tmp_path / "os.img.xz"
    packed.write_bytes(lzma.compress(raw.read_bytes(), preset=0))
    key = tmp_path / "id.pub"
    key.write_text(OLD_KEY.replace("Hh8f", "Hh8g").replace(" old", " new") + "\n")
    out = tmp_path / "out.img"
    done = ready.flash(packed, out, "--authorized-key", key, "--user", "pi", "--hostname", "plc7")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["system"] == "Debian GNU/Linux 12 (bookworm)"
    assert told["root_grown_bytes"] > 0
    with out.open("rb") as file:
        table = read_table(file, out.stat().st_size)
        file.seek(0)
        assert file.read(440) == b"boot code of the maker".ljust(440, b"\x90")
    assert table.signature == 0xCAFE and table.partitions[0] == fat
    assert table.partitions[1].size == root.size + told["root_grown_bytes"]
    check = subprocess.run(["e2fsck", "-fn", f"{out}?offset={root.start}"], capture_output=True, check=False)
    assert check.returncode == 0
    before = dump(raw, root.start, tmp_path / "before")
    after = dump(out, root.start, tmp_path / "after")
    replaced = {"/etc/hostname", "/home/pi/.ssh/authorized_keys"}
    assert {p for p in before if after.get(p) != before[p]} == replaced
    files = {p for p in after if p not in before and not (tmp_path / "after" / p[1:]).is_dir()} | {
        p for p in after if p not in before and (tmp_path / "after" / p[1:]).is_symlink()
    }
    assert files | replaced == set(told["added"])
    made = tmp_path / "after"
    assert (made / "etc/hostname").read_text() == "plc7\n"
    keys = (made / "home/pi/.ssh/authorized_keys").read_text().splitlines()
    assert keys == [OLD_KEY, key.read_text().strip()]
    public = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(made / "etc/ssh/ssh_host_ed25519_key")],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert public[1] == Path(told["known_hosts"]).read_text().split()[2]
    # The engine that was put in, with the model that was put in, gives the golden.
    prefix = made / "opt/colibri/current"
    ran = subprocess.run(
        ["qemu-aarch64-static", "-cpu", "cortex-a72", str(prefix / "colibri"), "check", "--model",
         str(prefix / "model.coli")], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0 and "golden ok" in ran.stdout + ran.stderr, ran.stderr
    (unit,) = [p for p in told["added"] if p.startswith("/etc/systemd/system/colibri")]
    wants = made / "etc/systemd/system/multi-user.target.wants" / Path(unit).name
    assert wants.is_symlink() and str(wants.readlink()) == unit


def test_the_listing_sees_every_name(ready: Ready, tmp_path: Path) -> None:
    raw = tmp_path / "os.img"
    _, root = base_image(ready, raw, spare=0)
    found = extlist.listing(Tools(Store(print)), raw, root.start)
    want = {"/", "/lost+found"} | {"/" + str(p.relative_to(ready.tree)) for p in ready.tree.rglob("*")}
    assert set(found) == want
    passwd = ready.tree / "etc/passwd"
    assert found["/etc/passwd"].size == passwd.stat().st_size


def broken(change: Callable[[Path], None]) -> Callable[[Ready, Path], Path]:
    def make(ready: Ready, folder: Path) -> Path:
        path = folder / "odd.img"
        base_image(ready, path, spare=8 * MIB)
        change(path)
        return path

    return make


def _debugfs(path: Path, *commands: str) -> None:
    script = "\n".join(commands) + "\n"
    subprocess.run(
        ["debugfs", "-w", "-f", "-", f"{path}?offset={44 * MIB}"],
        input=script, text=True, check=True, capture_output=True,
    )  # fmt: skip


def _cut(path: Path) -> None:
    os.truncate(path, 60 * MIB)


def _no_table(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(512))


def _thirty_two_bit(path: Path) -> None:
    head = bytearray(64)
    head[:6] = b"\x7fELF\x01\x01"
    struct.pack_into("<H", head, 18, 40)
    elf = path.with_name("armhf")
    elf.write_bytes(bytes(head))
    _debugfs(path, "rm /bin/sh", "cd /bin", f"write {elf} sh")


@pytest.mark.parametrize(
    ("change", "status", "code", "word"),
    [
        (_cut, 8, "CK-IMAGE-TABLE", "cut off"),
        (_no_table, 8, "CK-IMAGE-LAYOUT", "no partition table"),
        (_thirty_two_bit, 6, "CK-PREFLIGHT-ARCH", "32-bit ARM"),
        (lambda p: _debugfs(p, "rm /usr/lib/systemd/systemd"), 8, "CK-IMAGE-LAYOUT", "systemd"),
        (lambda p: _debugfs(p, "rm /usr/lib/os-release"), 8, "CK-IMAGE-LAYOUT", "no ext4 partition"),
        (lambda p: _debugfs(p, "mkdir /opt", "mkdir /opt/colibri"), 6, "CK-PREFLIGHT-FOREIGN", "/opt"),
    ],
)  # fmt: skip
def test_images_that_are_refused(
    ready: Ready, tmp_path: Path, change: Callable[[Path], None], status: int, code: str, word: str
) -> None:
    path = broken(change)(ready, tmp_path)
    before = hashlib.sha256(path.read_bytes()).digest()
    out = tmp_path / "out.img"
    done = ready.flash(path, out)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (status, code), done.stderr
    assert word in error["message"]
    assert not out.exists() and hashlib.sha256(path.read_bytes()).digest() == before


def test_a_gpt_that_is_too_small_is_not_grown(ready: Ready, tmp_path: Path) -> None:
    path = tmp_path / "gpt.img"
    base_image(ready, path, spare=0, label="gpt")
    done = ready.flash(path, tmp_path / "out.img")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (6, "CK-IMAGE-GROW"), done.stderr


def test_no_such_user(ready: Ready, tmp_path: Path) -> None:
    path = tmp_path / "os.img"
    base_image(ready, path, spare=8 * MIB)
    key = tmp_path / "id.pub"
    key.write_text(OLD_KEY + "\n")
    done = ready.flash(path, tmp_path / "out.img", "--authorized-key", key, "--user", "admin")
    assert done.returncode == 2 and "root, pi" in json.loads(done.stdout)["error"]["hint"]
