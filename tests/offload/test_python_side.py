"""The protocol written twice (C and Python) agrees; discovery over fixture trees; the gadget script runs."""

from __future__ import annotations

import ctypes as ct
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from colibri_kit.errors import UsageError
from colibri_kit.offload import discover, frames, gadget

from .conftest import Module, PtyPair, convert, eb, reference  # noqa: F401


class CFrame(ct.Structure):
    _fields_ = (
        ("type", ct.c_uint32), ("seq", ct.c_uint32), ("ref", ct.c_uint32), ("len", ct.c_uint32),
        ("payload", ct.POINTER(ct.c_uint8)),
    )  # fmt: skip


class CFrames(ct.Structure):
    _fields_ = (
        ("buf", ct.c_void_p), ("cap", ct.c_uint32), ("max_payload", ct.c_uint32), ("at", ct.c_uint32),
        ("n", ct.c_uint32), ("expect", ct.c_uint32), ("bad", ct.c_uint32), ("bad_end", ct.c_uint32),
        ("in_garbage", ct.c_int), ("frames", ct.c_uint64),
        ("bad_crc", ct.c_uint64), ("garbage", ct.c_uint64), ("gaps", ct.c_uint64),
    )  # fmt: skip


@pytest.fixture(scope="module")
def lib() -> Any:
    library = eb.library("offload/frame.c", "core/err.c", "kernels/crc32c.c", "kernels/types.c")
    library.cb_frames_room.restype = ct.c_void_p
    return library


class CReader:
    """cb_frames behind the interface of frames.Reader."""

    def __init__(self, lib: Any, max_payload: int) -> None:
        self._lib, self._f = lib, CFrames()
        self._buf = ct.create_string_buffer(max_payload + 28 + 65536)
        lib.cb_frames_init(ct.byref(self._f), self._buf, len(self._buf), max_payload)

    def feed(self, data: bytes) -> list[frames.Frame]:
        room, out = ct.c_uint32(), []
        to = self._lib.cb_frames_room(ct.byref(self._f), ct.byref(room))
        assert room.value >= len(data)
        ct.memmove(to, data, len(data))
        self._lib.cb_frames_took(ct.byref(self._f), len(data))
        got = CFrame()
        while self._lib.cb_frames_next(ct.byref(self._f), ct.byref(got)):
            out.append(frames.Frame(got.type, got.seq, got.ref, ct.string_at(got.payload, got.len)))
        return out

    @property
    def counts(self) -> tuple[int, int]:
        return int(self._f.garbage), int(self._f.bad_crc)


def test_crc32c_known_value() -> None:
    assert frames.crc32c(b"123456789") == 0xE3069283  # RFC 3720, B.4


def test_c_seals_what_python_packs(lib: Any) -> None:
    rng = random.Random(1)
    for size in (0, 1, 13, 1000):
        payload, room = rng.randbytes(size), ct.create_string_buffer(size + 28)
        ct.memmove(ct.addressof(room) + 24, payload, size)
        n = lib.cb_frame_seal(room, 3, 0xDEADBEEF, 77, size)
        assert room.raw[:n] == frames.Frame(3, 0xDEADBEEF, 77, payload).pack()


@pytest.mark.parametrize("seed", range(40))
def test_both_readers_see_the_same(lib: Any, seed: int) -> None:
    """Frames, garbage, lost and flipped bytes, fed in random pieces."""
    rng = random.Random(seed)
    stream, whole = b"", []
    for seq in range(1, 30):
        raw = frames.Frame(rng.randint(1, 7), seq, 0, rng.randbytes(rng.choice([0, 4, 200, 3000]))).pack()
        at = rng.randrange(len(raw) - 4)
        match rng.randrange(6):
            case 0:
                raw = raw[:at] + raw[at + 1 :]
            case 1:
                raw = raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
            case 2:
                raw = rng.randbytes(rng.randrange(50)) + frames.MAGIC[: rng.randrange(4)] + raw
                whole.append(seq)
            case _:
                whole.append(seq)
        stream += raw
    stream += bytes(4096)
    here, there = frames.Reader(4096), CReader(lib, 4096)
    mine, its = [], []
    while stream:
        n = rng.choice([1, 7, 100, 4000])
        mine += here.feed(stream[:n])
        its += there.feed(stream[:n])
        stream = stream[n:]
    assert mine == its
    assert [f.seq for f in mine] == whole
    assert (here.garbage, here.bad_crc) == there.counts


def test_hello_of_a_real_module(convert: Any, module: Any, ptys: PtyPair) -> None:  # noqa: F811
    """What the engine says in HELLO is what the model folder says; a PING is answered before any HELLO."""
    import json

    model = convert(reference("granitemoe", "q4_k_m").gguf)
    module(model, "--device", ptys.names[1])
    assert discover.ask(ptys.names[0], 5.0).role == "module"
    manifest = json.loads((model / "manifest.json").read_text())
    fd = os.open(ptys.names[0], os.O_RDWR | os.O_NOCTTY)
    try:
        probe = frames.Hello(
            1, 0, bytes(16), bytes(32), 0, 0, 0, 0, 0, 0, 65536, 1, 1, 1, b"test"
        )  # fmt: skip
        os.write(fd, frames.Frame(frames.HELLO, 9, 0, probe.pack()).pack())
        (answer,) = frames.Reader().feed(os.read(fd, 4096))
        assert (answer.type, answer.ref) == (frames.ERROR, 9)
        assert int.from_bytes(answer.payload[:2], "little") == 2  # another model
        right = frames.Hello(**{
            **probe.__dict__, "model_id": bytes.fromhex(manifest["model_id"]),
            "golden": bytes.fromhex(manifest["golden"]["sha256"]), "n_layer": 2, "n_embd": 256,
            "n_expert": manifest["geometry"]["n_expert"], "n_used": manifest["geometry"]["n_expert_used"],
            "n_expert_ff": manifest["geometry"]["n_expert_ff"],
        })  # fmt: skip
        os.write(fd, frames.Frame(frames.HELLO, 10, 0, right.pack()).pack())
        (answer,) = frames.Reader().feed(os.read(fd, 4096))
        assert (answer.type, answer.ref) == (frames.HELLO, 10)
        said = frames.Hello.unpack(answer.payload)
        assert (said.protocol, said.role, said.n_embd) == (1, 1, 256)
        assert said.who.startswith(b"colibri ")
    finally:
        os.close(fd)


def test_gadget_script(tmp_path: Path) -> None:
    """Runs against a folder in place of configfs; twice, then takes it all down."""
    (tmp_path / "config/usb_gadget").mkdir(parents=True)
    (tmp_path / "udc/fe980000.usb").mkdir(parents=True)
    path = tmp_path / "script"
    path.write_text(gadget.script("rack-7"))
    env = {
        "PATH": os.environ["PATH"],
        "CONFIGFS": str(tmp_path / "config"),
        "UDC_CLASS": str(tmp_path / "udc"),
    }
    run = lambda verb: subprocess.run(["sh", path, verb], env=env, capture_output=True, text=True)  # noqa: E731
    for _ in range(2):
        done = run("start")
        assert done.returncode == 0, done.stderr
    root = tmp_path / "config/usb_gadget/colibri"
    assert (root / "UDC").read_text().strip() == "fe980000.usb"
    assert int((root / "idVendor").read_text(), 16) == discover.GADGET_VENDOR
    assert int((root / "idProduct").read_text(), 16) == discover.GADGET_PRODUCT
    assert (root / "strings/0x409/serialnumber").read_text().strip() == "rack-7"
    assert (root / "configs/c.1/acm.usb0").is_symlink()
    assert run("stop").returncode == 0
    assert not (root / "configs/c.1/acm.usb0").exists()
    shutil.rmtree(tmp_path / "udc")
    (tmp_path / "udc").mkdir()
    shutil.rmtree(root)
    done = run("start")
    assert done.returncode == 1 and "no USB device controller" in done.stderr


def test_gadget_serial_is_checked() -> None:
    for bad in ("", "a b", "$(reboot)", "x" * 33, "a'b"):
        with pytest.raises(UsageError):
            gadget.script(bad)


def test_document_and_code_agree() -> None:
    """docs/offload.md lists the types, codes and sizes that the header has."""
    root = Path(__file__).resolve().parents[2]
    text, header = (root / "docs/offload.md").read_text(), (root / "native/offload/frame.h").read_text()
    for name, value in re.findall(r"CB_FRAME_([A-Z]+) = (\d)", header):
        assert f"| {value} | `{name}`" in text, name
    for name, value in re.findall(r"CB_OFF_([A-Z_]+) = ([1-8])", header):
        assert re.search(rf"\| {value} \| {name.lower().replace('_', ' ')}", text), name
    assert re.search(r"CB_HELLO_BYTES (\d+)u", header).group(1) == str(frames._HELLO.size) == "144"  # type: ignore[union-attr]
    assert "144 bytes" in text


def test_recipe_and_release_carry_the_link() -> None:
    from pydantic import ValidationError

    from colibri_kit.config.recipe import Recipe
    from colibri_kit.deploy.act import settings_of

    base = {"name": "x", "model": "m.coli", "board": "rpi4"}
    for link in ("/dev/ttyGS0", "tty:/dev/ttyS1@921600", "unix:/run/expertd.sock", "tcp:127.0.0.1:7790"):
        assert Recipe(**base, offload=link).offload == link
        assert settings_of({"settings": {"offload": link}}).flags() == ["--offload", link]
    for bad in ("ttyGS0", "tcp:host:1", "/dev/x; reboot", "unix:relative", "pcie:0"):
        with pytest.raises(ValidationError):
            Recipe(**base, offload=bad)
    assert settings_of({"settings": {"offload": "/dev/x; reboot"}}).flags() == []


def test_gadget_needs_root_and_systemd() -> None:
    """Refused before anything is written; with both, script and unit arrive and are started."""
    from colibri_kit.errors import PreflightError
    from colibri_kit.transport.base import Completed

    class Board:
        def __init__(self, uid: bytes, systemd: int) -> None:
            self.uid, self.systemd, self.files, self.ran = uid, systemd, {}, []  # type: ignore[var-annotated]

        def describe(self) -> str:
            return "board"

        def run(self, argv: Any, **_more: Any) -> Completed:
            self.ran.append(list(argv))
            if argv[0] == "id":
                return Completed(0, self.uid, b"")
            return Completed(self.systemd if argv[0] == "test" else 0, b"", b"")

        def put_stream(self, source: Any, size: int, path: str, *, mode: int) -> None:
            self.files[path] = (source.read(), mode)
            assert len(self.files[path][0]) == size

    for uid, systemd in ((b"1000\n", 0), (b"0\n", 1)):
        board = Board(uid, systemd)
        with pytest.raises(PreflightError):
            gadget.check(board)  # type: ignore[arg-type]
        assert not board.files
    board = Board(b"0\n", 0)
    gadget.check(board)  # type: ignore[arg-type]
    assert "/dev/ttyGS0" in gadget.install(board)  # type: ignore[arg-type]
    assert board.files[f"{gadget.SCRIPT_PATH}.new"] == (gadget.script().encode(), 0o755)
    assert board.ran[-1] == ["systemctl", "enable", "--now", "colibri-offload-gadget.service"]
