"""The flash verb against real block devices: loop devices over files. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_media_image import filesystems

MIB = 1 << 20

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="loop devices need root")


def flash(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "colibri_kit", "flash", *map(str, args)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def error(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(done.stdout)["error"]
    return found


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Callable[..., tuple[str, Path]]]:
    """``loop(size)`` -> device, file behind it, beginning with 2 MiB of 0xA5."""
    made: list[str] = []

    def make(size: int, folder: Path = tmp_path) -> tuple[str, Path]:
        file = folder / f"medium{len(made)}"
        with file.open("wb") as out:
            out.write(b"\xa5" * min(size, 2 * MIB))
            out.truncate(size)
        done = subprocess.run(
            ["losetup", "-f", "--show", str(file)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"no loop device: {done.stderr.strip()}")
        made.append(done.stdout.strip())
        return made[-1], file

    yield make
    for device in made:
        subprocess.run(["losetup", "-d", device], check=False)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filesystems(tmp_path_factory.mktemp("image"))[0]


def test_write_and_verify(loop: Callable[..., tuple[str, Path]], image: Path) -> None:
    size = image.stat().st_size
    device, file = loop(size + 3 * MIB)
    done = flash("--from", image, "--to", device, "--yes", "--serial-number", file, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["device"] == device and told["written_bytes"] + told["skipped_bytes"] == size
    assert told["verified_bytes"] == told["written_bytes"]
    assert told["verified_past_cache"] is True
    with file.open("rb") as got, image.open("rb") as want:
        assert got.read(MIB) == want.read(MIB)
    for number, check in ((1, ["fsck.vfat", "-n"]), (2, ["e2fsck", "-fn"])):
        start, length = ((MIB, 64 * MIB), (65 * MIB, 160 * MIB))[number - 1]
        part = file.with_name("part")
        with file.open("rb") as source, part.open("wb") as out:
            source.seek(start)
            out.write(source.read(length))
        found = subprocess.run([*check, str(part)], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


def test_dry_run_changes_nothing(loop: Callable[..., tuple[str, Path]], image: Path) -> None:
    device, file = loop(250 * MIB)
    done = flash("--from", image, "--to", device, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["disk"]["serial_number"] == str(file)
    assert untouched(file)


def untouched(file: Path) -> bool:
    with file.open("rb") as f:
        return set(f.read(2 * MIB)) == {0xA5}


def test_refusals_leave_it_untouched(loop: Callable[..., tuple[str, Path]], image: Path) -> None:
    device, file = loop(image.stat().st_size - 4096)
    cases = {
        "CK-FLASH-SIZE": ["--to", device, "--yes", "--serial-number", file],
        "CK-FLASH-SERIAL": ["--to", device, "--yes", "--serial-number", "another"],
        "CK-FLASH-NOT-BLOCK": ["--to", file],
        "CK-FLASH-NO-DEVICE": ["--to", "/dev/no-such-disk"],
    }
    for code, args in cases.items():
        done = flash("--from", image, *args, "--json")
        assert (done.returncode, error(done)["code"]) == (6, code), done.stderr
        assert error(done)["state"] == "nothing was changed"
    done = flash("--from", image, "--to", device, "--yes", "--json")
    assert done.returncode == 2 and str(file) in str(error(done)["hint"])
    assert untouched(file)


def test_nobody_there_to_confirm(loop: Callable[..., tuple[str, Path]], image: Path) -> None:
    device, file = loop(250 * MIB)
    done = flash("--from", image, "--to", device)
    assert done.returncode == 6 and "CK-FLASH-CONFIRM" in done.stderr
    assert untouched(file)


@pytest.mark.parametrize("right", [True, False])
def test_typing_the_serial_number(loop: Callable[..., tuple[str, Path]], image: Path, right: bool) -> None:
    """A loop device is not removable: its serial number (here the file's path) must be typed."""
    device, file = loop(250 * MIB)
    ours, theirs = os.openpty()
    typed = str(file) if right else device.removeprefix("/dev/")
    child = subprocess.Popen(
        [sys.executable, "-m", "colibri_kit", "flash", "--from", str(image), "--to", device],
        stdin=theirs, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    os.write(ours, typed.encode() + b"\n")
    _, told = child.communicate(timeout=120)
    os.close(ours)
    os.close(theirs)
    assert "Everything on" in told and str(file) in told
    assert child.returncode == (0 if right else 6), told
    assert untouched(file) is not right


def test_mounted_is_refused(loop: Callable[..., tuple[str, Path]], image: Path, tmp_path: Path) -> None:
    device, file = loop(250 * MIB)
    subprocess.run(["mke2fs", "-q", "-F", device], check=True, capture_output=True)
    where = tmp_path / "mnt"
    where.mkdir()
    subprocess.run(["mount", device, str(where)], check=True)
    try:
        before = file.read_bytes()
        done = flash("--from", image, "--to", device, "--yes", "--serial-number", file, "--json")
        assert (done.returncode, error(done)["code"]) == (6, "CK-FLASH-IN-USE"), done.stderr
        assert str(where) in str(error(done)["message"])
        assert file.read_bytes() == before
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_held_by_somebody_else(loop: Callable[..., tuple[str, Path]], image: Path) -> None:
    """A mount in a foreign namespace shows as a failing O_EXCL; another O_EXCL open does the same."""
    device, file = loop(250 * MIB)
    fd = os.open(device, os.O_RDWR | os.O_EXCL)
    try:
        done = flash("--from", image, "--to", device, "--yes", "--serial-number", file, "--json")
        assert (done.returncode, error(done)["code"]) == (6, "CK-FLASH-OPEN"), done.stderr
    finally:
        os.close(fd)
    assert untouched(file)


def test_a_medium_that_lies_about_its_size(
    loop: Callable[..., tuple[str, Path]], image: Path, tmp_path: Path
) -> None:
    """Behind the loop device there is room for 24 MiB: the kernel finds out when it writes its cache back."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(small)], check=True)
    try:
        device, file = loop(250 * MIB, small)
        done = flash("--from", image, "--to", device, "--yes", "--serial-number", file, "--json")
        assert (done.returncode, error(done)["code"]) == (7, "CK-FLASH-WRITE"), done.stderr
        assert "no partition table" in str(error(done)["state"])
        with file.open("rb") as f:
            assert f.read(MIB) == bytes(MIB)
        subprocess.run(["losetup", "-d", device], check=True)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_ctrl_c(loop: Callable[..., tuple[str, Path]], image: Path) -> None:
    """SIGINT while it writes: the medium has no table, and that is said."""
    import signal
    import time

    device, file = loop(250 * MIB)
    child = subprocess.Popen(
        [sys.executable, "-m", "colibri_kit", "flash", "--from", str(image), "--to", device, "--yes",
         "--serial-number", str(file)],
        stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    end = time.monotonic() + 60
    while untouched(file) and time.monotonic() < end:
        time.sleep(0.005)
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=60)
    if child.returncode == 0:
        pytest.skip("it was faster than the signal")
    assert child.returncode == 130
    assert "no partition table" in told
    with file.open("rb") as f:
        assert f.read(MIB) == bytes(MIB)


def test_this_machines_own_disk_is_refused(image: Path) -> None:
    """The disk that / is on, whatever it is called here."""
    done = subprocess.run(["findmnt", "-no", "SOURCE", "/"], capture_output=True, text=True, check=False)
    source = done.stdout.strip()
    if not source.startswith("/dev/") or not Path(source).is_block_device():
        pytest.skip("/ is not on a disk here")
    name = Path(source).resolve().name
    whole = source
    link = Path(f"/sys/class/block/{name}")
    if (link / "partition").exists():
        whole = f"/dev/{link.resolve().parent.name}"
    done = flash("--from", image, "--to", whole, "--yes", "--serial-number", "any", "--json")
    assert (done.returncode, error(done)["code"]) == (6, "CK-FLASH-IN-USE"), done.stderr
