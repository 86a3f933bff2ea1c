"""The offload gadget on a real kernel: dummy_hcd joins /dev/ttyGS0 (the Pi's end) and /dev/ttyACM0.

One guest holds both ends, so that everything but the cable is real: configfs, libcomposite, the ACM
function, cdc-acm, hang-ups, what a serial device does when nobody reads.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import virtual
from virtual import inside

from colibri_kit.config.find import board_path
from colibri_kit.offload import discover, gadget
from colibri_kit.vboard import guest
from colibri_kit.vboard.packages import Store, kernel

pytestmark = pytest.mark.timeout(600)
NAME = "gadget"
SCRIPT = gadget.SCRIPT_PATH
#: What the Pi has in place of dummy_hcd is dwc2; the rest is what the script asks for, and the PC's driver.
MODULES = ("libcomposite", "usb_f_acm", "cdc_acm", "dummy_hcd")


def root(words: str) -> str:
    return inside(NAME, words, user="root")


def put(files: dict[str, tuple[bytes, int]]) -> None:
    """Files into the guest, through tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, (data, mode) in files.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
    ran = virtual.kit("board", "ssh", f"root@{NAME}", "tar -x -C /", stdin=out.getvalue())
    assert ran.rc == 0, ran.err


@pytest.fixture(scope="module")
def told(board_dir: Path, a53_engine: Path, olmoe: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The guest with Debian's full kernel (the cloud one has no USB), engine, model and script."""
    profile = tmp_path_factory.mktemp("profile") / "virt-gadget.yaml"
    text = board_path("virt-a53").read_text()
    profile.write_text(text.replace("virt-a53", "virt-gadget").replace("kernel: cloud", "kernel: full"))
    with virtual.board(str(profile), NAME, "--ram", "512MiB", "--timeout", "400") as up:
        files: dict[str, tuple[bytes, int]] = {
            SCRIPT: (gadget.script("guest-1").encode(), 0o755),
            "/data/colibri-engine": (a53_engine.read_bytes(), 0o755),
            "/data/tokens.npy": ((virtual.REFS / "olmoe.t64.f32.tokens.npy").read_bytes(), 0o644),
        }
        for path in olmoe.iterdir():
            files[f"/data/m.coli/{path.name}"] = (path.read_bytes(), 0o644)
        source = Store(lambda words: None).get(kernel("arm64", "full"))
        names = []
        for module, data in guest.modules(source, MODULES):
            names.append(module)
            files[f"/run/m/{module}.ko"] = (data, 0o644)
        put(files)
        up["modules"] = names
        yield up


@pytest.fixture(scope="module")
def wired(told: Any) -> Iterator[None]:
    """The gadget is up: both devices are there."""
    *before, udc = told["modules"]
    root(
        f'for m in {" ".join(before)}; do grep -q "^$m " /proc/modules || insmod /run/m/$m.ko || exit 1; done'
    )
    no_udc = virtual.kit("board", "ssh", f"root@{NAME}", f"{SCRIPT} start")
    assert no_udc.rc == 1 and "no USB device controller (dtoverlay=dwc2" in no_udc.err
    root(
        f"insmod /run/m/{udc}.ko && {SCRIPT} start && {SCRIPT} start || exit 1; "
        "n=0; until [ -c /dev/ttyACM0 ]; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || exit 1; done"
    )
    yield
    left = "ls /sys/kernel/config/usb_gadget /dev | grep -E '^colibri|^ttyGS|^ttyACM'"
    assert root(f"{SCRIPT} stop && {SCRIPT} stop && {left}; true") == ""


ENGINE = "/data/colibri-engine logits --model /data/m.coli --json -o /tmp/l.npy"


def logits(tokens: str, *more: str) -> tuple[str, Any]:
    """sha256 of the logits, and what the link did."""
    out = root(
        f"{ENGINE} --tokens /data/{tokens}.npy {' '.join(more)} >/tmp/out 2>/tmp/said || "
        "{ cat /tmp/said >&2; exit 1; }; sha256sum </tmp/l.npy; cat /tmp/out"
    )
    sha, said = out.split("\n", 1)
    return sha.split()[0], json.loads(said)["offload"]


class Module:
    """``colibri expertd`` in the guest; none is left behind."""

    def __init__(self, device: str) -> None:
        self.stats: dict[str, Any] = {}
        root(
            f"setsid /data/colibri-engine expertd --model /data/m.coli --json --device {device} "
            "</dev/null >/tmp/module.json 2>/tmp/module.log & echo $! >/tmp/module.pid; "
            "until grep -q listening /tmp/module.log; do "
            "sleep 0.1; kill -0 $(cat /tmp/module.pid) || exit 1; done"
        )

    def __enter__(self) -> Module:
        return self

    def __exit__(self, *_: object) -> None:
        self.stats = dict(json.loads(root(
            "kill -CONT $(cat /tmp/module.pid); kill $(cat /tmp/module.pid); n=0; "
            "while kill -0 $(cat /tmp/module.pid) 2>/dev/null; "
            "do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || exit 1; done; cat /tmp/module.json"
        )))  # fmt: skip


TOKENS = 200
PROMPT = "a long link and a short answer"
#: The words of ``asked``: a prompt handed over; so many prompts answered; one handed over and answered;
#: so many greetings seen; prompts until one finds the link up.
WORDS = f"""\
say() {{ echo '{PROMPT}' >&9; }}
within() {{
    n=0
    until "$@"; do sleep 0.1; n=$((n+1)); [ $n -lt 600 ] || {{ cat /tmp/said >&2; exit 1; }}; done
}}
lines() {{ [ "$(grep -c "$1" "$2")" -ge "$3" ]; }}
answered() {{ within lines '"text"' /tmp/out "$1"; }}
ask() {{ all=$(($(wc -l </tmp/out) + 1)); say; answered $all; }}
greeted() {{ within lines greeted /tmp/module.log "$1"; }}
until_up() {{
    until tail -n 1 /tmp/out | grep -q '"state": *"up"'; do
        sleep 0.5; ask
    done
}}
"""


def asked(link: str, events: str) -> list[Any]:
    """What an engine told of each prompt that ``events``, a script of ``WORDS``, gave it."""
    options = f"--offload {link} --offload-share 100" if link else ""
    out = root(
        f"{WORDS}rm -f /tmp/p; mkfifo /tmp/p; exec 9<>/tmp/p; : >/tmp/out; "
        f"/data/colibri-engine run --model /data/m.coli --json -n {TOKENS} {options} --prompts /tmp/p "
        f">/tmp/out 2>/tmp/said 9>&- & {events}; exec 9>&-; "
        "wait $! || { cat /tmp/said >&2; exit 1; }; cat /tmp/out"
    )
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def want(told: Any) -> str:
    return logits("tokens")[0]


@pytest.fixture(scope="module")
def text(told: Any) -> str:
    """The answer, computed here."""
    (answer,) = asked("", "ask")
    assert answer["tokens"]["generated"] == TOKENS
    return str(answer["text"])


def test_what_the_kernel_shows_is_what_detect_looks_for(wired: None) -> None:
    """The PC's end by USB id and name; the board's end has no device, only configfs knows it."""
    at = "/sys/class/tty/ttyACM0/device/.."
    seen = root(f"cat {at}/idVendor {at}/idProduct {at}/manufacturer {at}/product {at}/serial").splitlines()
    ids = f"{discover.GADGET_VENDOR:04x}", f"{discover.GADGET_PRODUCT:04x}"
    assert seen == [*ids, "colibri", "colibri offload", "guest-1"]
    mine = "/sys/kernel/config/usb_gadget/colibri"
    said = root(f"cat {mine}/idVendor {mine}/idProduct {mine}/functions/acm.usb0/port_num {mine}/UDC")
    assert said.split() == [f"0x{ids[0]}", f"0x{ids[1]}", "0", "dummy_udc.0"]
    assert root("ls -d /sys/class/tty/ttyGS0/device 2>/dev/null; true") == ""


@pytest.mark.parametrize(("board", "there"), [("ttyGS0", "ttyACM0"), ("ttyACM0", "ttyGS0")])
def test_the_same_bits_over_the_cable(wired: None, want: str, board: str, there: str) -> None:
    """The Pi asks the PC, and the other way round."""
    with Module(f"/dev/{there}") as module:
        got, link = logits("tokens", f"--offload /dev/{board} --offload-share 100 --offload-deadline 20000")
    assert got == want
    assert link["state"] == "up" and link["connects"] == 1 and link["experts"] > 0
    assert {link[k] for k in ("local", "late", "cut", "crc", "gaps", "errors", "wrong")} == {0}
    assert module.stats["rows"] > 0 and module.stats["failed"] == 0 and module.stats["crc"] == 0


def test_unplugged_and_plugged_in_again(wired: None, text: str) -> None:
    """UDC unbound while the engine computes: /dev/ttyACM0 goes, comes back; the answers stay."""
    mine = "/sys/kernel/config/usb_gadget/colibri/UDC"
    unplug = f"say; sleep 0.3; echo '' >{mine}; within [ ! -e /dev/ttyACM0 ]"
    with Module("/dev/ttyGS0") as module:
        linked, cut, alone, again = asked(
            "/dev/ttyACM0",
            f"greeted 1; ask; {unplug}; answered 2; ask; {SCRIPT} start; greeted 2; ask",
        )
    assert {answer["text"] for answer in (linked, cut, alone, again)} == {text}
    told = [answer["offload"] for answer in (linked, cut, alone, again)]
    assert [link["state"] for link in told] == ["up", "down", "down", "up"], told
    assert [link["experts"] > 0 for link in told] == [True, True, False, True], told
    assert told[1]["cut"] == 1 and told[0]["cut"] == told[3]["cut"] == 0, told
    assert module.stats["connections"] >= 2


def test_a_module_that_stops(wired: None, text: str) -> None:
    """Stopped while it computes: late, then not asked any more; continued: asked again."""
    with Module("/dev/ttyGS0"):
        linked, late, *more, again = asked(
            "/dev/ttyACM0",
            "greeted 1; ask; say; sleep 0.3; kill -STOP $(cat /tmp/module.pid); answered 2; "
            "kill -CONT $(cat /tmp/module.pid); until_up; ask",
        )
    assert {answer["text"] for answer in (linked, late, *more, again)} == {text}
    told = [answer["offload"] for answer in (linked, late, again)]
    assert told[0]["experts"] > 0, told
    assert told[1]["late"] >= 1 and told[1]["state"] != "up", told
    assert late["timings"]["total_ns"] < 60e9
    assert told[2]["experts"] > 0, told


def test_nobody_reads(wired: None, want: str) -> None:
    """A serial device that nobody empties: neither a layer nor the program's end waits for it."""
    start = time.monotonic()
    got, link = logits("tokens", "--offload /dev/ttyGS0")
    assert got == want and link["experts"] == 0 and link["state"] == "down"
    assert time.monotonic() - start < 25
