"""Deployment plans and what they refuse: pure, from facts made by hand."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import struct
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from colibri_kit.config import load_board
from colibri_kit.deploy import act, elf, facts, health, model, plan, release, services, state, store, target
from colibri_kit.errors import FormatError, KitError, PreflightError, UsageError
from colibri_kit.transport.base import Completed
from colibri_kit.transport.fake import FakeTransport
from colibri_kit.transport.local import LocalTransport
from colibri_kit.transport.options import SshOptions

GIB = 1 << 30
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)

RPI4 = facts.Facts(
    uname="aarch64", userland=elf.Kind("aarch64", 64), kernel="6.6", user="pi", uid=1000,
    ram=4 * GIB, mem_available=3 * GIB, cpu_flags=frozenset(["fp", "asimd", "evtstrm", "crc32", "cpuid"]),
    init="systemd", missing_tools=(), prefix="/opt/colibri", near="/opt/colibri", writable=True,
    exists=True, filled=True, ours=True, disk_free=8 * GIB, mount="/", fstype="ext4",
    mount_options=frozenset({"rw"}), clock_skew=0.0,
)  # fmt: skip


def part(name: str, size: int) -> model.Part:
    return model.Part(name, Path("/x") / name, size, hashlib.sha256(name.encode()).hexdigest())


ENGINE = plan.Engine(part("colibri", 400_000), elf.Kind("aarch64", 64))
PARCEL = model.Parcel(
    "m", "0" * 32, "",
    (part("manifest.json", 1000), part("dense.coli", 3_000_000), part("experts-0000.coli", 60_000_000)),
    ctx_train=2048, kv_bytes_per_token=1000,
)  # fmt: skip


def make(fact: facts.Facts = RPI4, **more: Any) -> plan.Plan:
    args: dict[str, Any] = {
        "board": load_board("rpi4"), "facts": fact, "where": "pi@b", "engine": ENGINE, "parcel": PARCEL,
        "settings": plan.Settings(), "stored": plan.Stored({}, {}, (), None), "current_content": None,
        "bad": [], "retry_bad": False, "keep": 3, "now": NOW,
    }  # fmt: skip
    return plan.make(**{**args, **more})


def test_first_plan_sends_all() -> None:
    made = make()
    assert made.send_bytes == 63_401_000 and made.reuse == ()
    assert made.release == f"r20260102-030405-{made.content[:6]}"
    assert store.RELEASE.fullmatch(made.release)
    json.dumps(made.as_json())


def test_plan_sends_what_is_missing_and_counts_what_can_be_resumed() -> None:
    dense, experts = PARCEL.parts[1], PARCEL.parts[2]
    held = plan.Stored(
        {dense.sha256: dense.size, ENGINE.part.sha256: 1}, {experts.sha256: 50_000_000}, (), None
    )
    made = make(stored=held)
    assert {p.name for p in made.reuse} == {"dense.coli"}
    assert {p.name for p in made.send} == {"colibri", "manifest.json", "experts-0000.coli"}
    assert made.resume_bytes == 50_000_000


def test_same_content_keeps_the_release() -> None:
    content = make().content
    held = plan.Stored({}, {}, ("r20250101-000000-abcdef",), "r20250101-000000-abcdef")
    made = make(stored=held, current_content=content)
    assert made.same_as_current and made.release == "r20250101-000000-abcdef"
    assert not make(stored=held, current_content=content, settings=plan.Settings(ctx=64)).same_as_current


def test_content_that_was_bad_is_not_tried_silently() -> None:
    content = make().content
    with pytest.raises(PreflightError) as err:
        make(bad=[content])
    assert err.value.code == "CK-PREFLIGHT-BAD"
    assert make(bad=[content], retry_bad=True).content == content


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"userland": elf.Kind("x86_64", 64), "uname": "x86_64"}, "ARCH"),
        ({"userland": elf.Kind("arm", 32)}, "ARCH"),  # a 64-bit kernel under a 32-bit system
        ({"userland": None, "uname": "armv7l"}, "ARCH"),
        ({"cpu_flags": frozenset({"fp"})}, "CPU"),
        ({"missing_tools": ("sha256sum",)}, "TOOLS"),
        ({"mount_options": frozenset({"ro"})}, "READONLY"),
        ({"mount_options": frozenset({"rw", "noexec"})}, "NOEXEC"),
        ({"writable": False}, "WRITE"),
        ({"ours": False}, "FOREIGN"),
        ({"disk_free": 63_401_000}, "SPACE"),  # fits, but without the tenth to spare
        ({"ram": 4_000_000}, "RAM"),
    ],
)
def test_refusals(change: dict[str, Any], code: str) -> None:
    with pytest.raises(PreflightError) as err:
        make(dataclasses.replace(RPI4, **change))
    assert err.value.code == f"CK-PREFLIGHT-{code}"
    assert err.value.state == "nothing was sent or changed"
    assert err.value.hint


def test_space_with_the_tenth_is_enough() -> None:
    assert make(dataclasses.replace(RPI4, disk_free=63_401_000 + 6_340_100))


def test_budget_refusal_shows_the_sum() -> None:
    with pytest.raises(PreflightError) as err:
        make(settings=plan.Settings(budget=64_000_000, ctx=2000, weights="preload"))
    assert (
        "weights 63000000 + tokenizer 0 + KV cache of 2000 tokens 2000000 = 65000000 bytes"
        in err.value.message
    )
    assert make(settings=plan.Settings(budget=65_000_000, ctx=2000, weights="preload"))


def test_streamed_experts_need_no_memory_of_their_own() -> None:
    assert make(settings=plan.Settings(budget=5_000_000, ctx=2000))
    with pytest.raises(PreflightError, match=r"weights 3000000 \+ .* = 5000000 bytes"):
        make(settings=plan.Settings(budget=4_999_999, ctx=2000))
    assert make(settings=plan.Settings(budget=4_062_500, ctx=2000, kv="q8_0"))


def test_engine_words_travel_and_come_back() -> None:
    said = plan.Settings(weights="lazy", kv="q8_0", cache_experts="0", cache_policy="lru")
    words = ["--weights", "lazy", "--kv", "q8_0", "--cache-experts", "0", "--cache-policy", "lru"]
    assert said.flags() == words
    assert act.settings_of({"settings": dataclasses.asdict(said)}) == said
    odd = {"weights": "a b", "kv": "$(x)", "cache_experts": 3, "cache_policy": "--x"}
    assert act.settings_of({"settings": odd}) == plan.Settings()


def test_engine_for_another_board() -> None:
    with pytest.raises(PreflightError) as err:
        make(engine=plan.Engine(ENGINE.part, elf.Kind("x86_64", 64)))
    assert err.value.code == "CK-PREFLIGHT-ENGINE"


def test_warnings() -> None:
    made = make(dataclasses.replace(RPI4, fstype="overlay", clock_skew=-86400.0))
    assert len(made.warnings) == 2
    assert "overlay" in made.warnings[0] and "-86400 s" in made.warnings[1]


def test_elf_kinds() -> None:
    assert elf.identify(Path("/bin/sh").read_bytes()[:20]) == elf.Kind(_uname(), 64)
    arm = b"\x7fELF\1\1" + bytes(12) + struct.pack("<H", 40)
    assert str(elf.identify(arm)) == "arm, 32-bit"
    assert elf.identify(b"#!/bin/sh\n" * 3) is None
    assert elf.identify(b"\x7fELF") is None


def _uname() -> str:
    return subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True).stdout.strip()


def test_facts_of_this_machine(tmp_path: Path) -> None:
    """Against the kernel's own files, read another way."""
    import os

    found = facts.gather(LocalTransport(), str(tmp_path / "a" / "b c"))
    assert found.uname == os.uname().machine
    assert found.uid == os.getuid()
    assert found.near == str(tmp_path) and not found.exists and found.writable and not found.ours
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert found.ram == total
    vfs = os.statvfs(tmp_path)
    assert abs(found.disk_free - vfs.f_bavail * vfs.f_frsize) < 1 << 30
    assert found.missing_tools == ()
    assert abs(found.clock_skew) < 5
    assert "rw" in found.mount_options
    assert not (tmp_path / "a").exists()


def test_facts_of_a_terse_board() -> None:
    """A board that answers little gives zeros, not exceptions."""
    found = facts.parse("uname=mips\ndf=nonsense\noptions=\nmissing=dd\nmissing=wc\n", b"", "/x", 0.0)
    assert found.userland is None and found.disk_free == 0 and found.missing_tools == ("dd", "wc")
    line = "uname=x\ndf=/dev/mmcblk0p2 30000000 10000000 20000000 34% /mnt/a b\n"
    found = facts.parse(line, b"", "/x", 0.0)
    assert (found.disk_free, found.mount) == (20_000_000 * 1024, "/mnt/a b")


def test_which_releases_go() -> None:
    names = [f"r2026010{i}-000000-abcdef" for i in range(1, 7)]
    assert release.doomed(names, 2, names[0], names[2]) == [names[1], names[3]]
    assert release.doomed(names, 1, names[5], None) == names[:5]
    assert release.doomed(names, 9, None, None) == []


def test_state_survives_damage() -> None:
    good = state.State().with_bad("r1", "c", "why", "t").with_good("r2", "r0", "t")
    raw = json.dumps(dataclasses.asdict(good)).encode()
    assert state.load(FakeTransport(files={"/p/state.json": raw}), "/p") == good
    for damaged in (b"", b"{", b"[]", b'{"bad": 3}', raw[:-5]):
        assert state.load(FakeTransport(files={"/p/state.json": damaged}), "/p") == state.State()


@pytest.mark.parametrize(
    ("rc", "words"),
    [(132, "illegal instruction"), (126, "cannot execute"), (137, "out of memory"), (5, "golden")],
)
def test_health_names_the_cause(rc: int, words: str) -> None:
    board = FakeTransport({"check": Completed(rc, b"", b"error: golden mismatch")})
    well = health.check(board, "/p", plan.Settings(), 5)
    assert not well.ok and words in well.reason


def test_health_wants_the_words_and_a_token() -> None:
    silent = FakeTransport({"check": Completed(0, b"all fine\n"), "run": Completed(0)})
    assert not health.check(silent, "/p", plan.Settings(), 5).ok
    tokenless = FakeTransport({"check": Completed(0, b"golden ok abc (x)\n"), "run": Completed(139)})
    assert "crashed" in health.check(tokenless, "/p", plan.Settings(), 5).reason
    well = FakeTransport({"check": Completed(0, b"x\ngolden ok abc (x)\n"), "run": Completed(0)})
    settings = plan.Settings(budget=7, ctx=8, threads=9)
    assert health.check(well, "/p", settings, 5) == health.Health(True, "", "abc")
    for call in well.calls:
        assert call[call.index("--budget") + 1] == "7" and call[call.index("--threads") + 1] == "9"


# ---- the parcel ---------------------------------------------------------------


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def head(
    kind: int, payload: int, magic: bytes = b"COLI", version: int = 1, owner: bytes = bytes(16)
) -> bytes:
    raw = magic + struct.pack("<HHIIQQQ16sI", version, kind, 0, 0, 64, 64, payload, owner, 0)
    return raw + struct.pack("<I", crc32c(raw))


@pytest.fixture
def parcel(tmp_path: Path) -> Path:
    folder = tmp_path / "m.coli"
    folder.mkdir()
    files = []
    for name, kind in (("dense.coli", 2), ("tokenizer.coli", 1), ("experts-0000.coli", 3)):
        data = head(kind, 1000) + random.Random(kind).randbytes(1000)
        (folder / name).write_bytes(data)
        files.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    doc = {"format": 1, "name": "m", "model_id": "00" * 16, "files": files, "geometry": {}}
    (folder / "manifest.json").write_text(json.dumps(doc))
    return folder


def test_crc32c_of_the_check_string() -> None:
    """The value that RFC 3720 and every CRC catalogue give for 123456789."""
    assert model._crc32c(b"123456789") == 0xE3069283


def test_parcel_is_read(parcel: Path) -> None:
    read = model.load(parcel)
    assert [p.name for p in read.parts] == [
        "manifest.json",
        "dense.coli",
        "tokenizer.coli",
        "experts-0000.coli",
    ]
    assert read.size == sum(p.stat().st_size for p in parcel.iterdir())


def edit(parcel: Path, **more: Any) -> None:
    doc = json.loads((parcel / "manifest.json").read_text())
    doc.update(more)
    (parcel / "manifest.json").write_text(json.dumps(doc))


def replace_head(parcel: Path, new: bytes) -> None:
    file = parcel / "experts-0000.coli"
    file.write_bytes(new + file.read_bytes()[64:])


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (head(3, 1000, b"ILOC"), "byte-swapped"),
        (head(3, 1000, b"GGUF"), "not a .coli file"),
        (head(3, 1000, version=2), "format version 2"),
        (head(2, 1000), "another kind"),
        (head(3, 999), "should have"),
        (head(3, 2**64 - 1), "should have"),
        (head(3, 1000, owner=b"x" * 16), "another model"),
        (head(3, 1000)[:60] + bytes(4), "CRC32C"),
    ],
)
def test_bad_headers(parcel: Path, new: bytes, words: str) -> None:
    replace_head(parcel, new)
    with pytest.raises(FormatError, match=words) as err:
        model.load(parcel)
    assert err.value.state == "nothing was sent"


@pytest.mark.parametrize(
    "name", ["../x.coli", "/etc/passwd", "dense.coli/..", "a\nb", "", "experts-1.coli", 7]
)
def test_names_that_would_leave_the_folder(parcel: Path, name: object) -> None:
    doc = json.loads((parcel / "manifest.json").read_text())
    doc["files"][2]["name"] = name
    edit(parcel, files=doc["files"])
    with pytest.raises(FormatError):
        model.load(parcel)


def test_other_bad_parcels(parcel: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        model.load(tmp_path / "none.coli")
    with pytest.raises(UsageError, match="is not a folder"):
        model.load(parcel / "dense.coli")
    for bad in ({"format": 2}, {"model_id": "x"}, {"files": []}, {"files": 3}, {"files": [None]}):
        good = (parcel / "manifest.json").read_bytes()
        edit(parcel, **bad)
        with pytest.raises(FormatError):
            model.load(parcel)
        (parcel / "manifest.json").write_bytes(good)
    (parcel / "dense.coli").write_bytes(b"")
    with pytest.raises(FormatError, match="has 0 bytes"):
        model.load(parcel)
    (parcel / "dense.coli").unlink()
    with pytest.raises(FormatError, match="cannot be read"):
        model.load(parcel)
    for raw in (b"", b"[" * 100_000, b"\xff", b" " * (1 << 20) + b"{}"):
        (parcel / "manifest.json").write_bytes(raw)
        with pytest.raises(FormatError):
            model.load(parcel)


# ---- service definitions --------------------------------------------------------

SERVICE = services.Service(
    "/opt/colibri", "colibri", plan.Settings(budget=GIB, threads=4), services.memory_max(GIB)
)


def test_systemd_unit_says_what_it_promises() -> None:
    made = services.render("systemd", SERVICE)
    assert made is not None
    import configparser

    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read_string(made.text)
    run = unit["Service"]
    assert int(run["MemoryMax"]) == GIB + GIB // 16
    assert run["ExecStart"].split()[:2] == ["/opt/colibri/current/colibri", "serve"]
    assert f"--budget {GIB}" in run["ExecStart"] and "--threads 4" in run["ExecStart"]
    assert run["User"] == "colibri"
    for key, value in {
        "NoNewPrivileges": "yes", "ProtectSystem": "strict", "PrivateTmp": "yes", "Restart": "on-failure",
        "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6",
    }.items():  # fmt: skip
        assert run[key] == value
    assert int(unit["Unit"]["StartLimitBurst"]) > 0


@pytest.mark.parametrize("kind", ["openrc", "sysv"])
def test_init_scripts_are_shell(kind: str, tmp_path: Path) -> None:
    made = services.render(kind, SERVICE)
    assert made is not None and made.mode == 0o755
    file = tmp_path / "script"
    file.write_text(made.text)
    subprocess.run(["sh", "-n", str(file)], check=True)
    assert "/opt/colibri/current/colibri" in made.text and "--threads 4" in made.text


def test_services_refuse_what_would_need_quoting() -> None:
    assert services.render("none", SERVICE) is None
    with pytest.raises(PreflightError):
        services.render("upstart", SERVICE)
    for bad in ("/opt/a b", "/opt/$(id)", "/opt/x\nExecStart=/bin/sh", "/opt/%h"):
        with pytest.raises(KitError):
            services.Service(bad, "u", plan.Settings(), 1)


def test_service_is_written_by_rename_then_started() -> None:
    from colibri_kit.deploy.services import install

    written: list[bytes] = []

    def take(call: list[str], stdin: bytes) -> Completed:
        written.append(stdin)
        return Completed(0)

    made = services.render("systemd", SERVICE)
    assert made is not None
    board = FakeTransport(
        {"cat >": take, "mv": Completed(0), "reset-failed": Completed(1), "systemctl": Completed(0)}
    )
    install.install(board, made)
    assert written == [made.text.encode()]
    assert board.calls[1] == ["mv", "-f", f"{made.path}.new", made.path]
    assert [c[1] for c in board.calls[2:]] == ["daemon-reload", "stop", "reset-failed", "enable", "start"]
    failing = FakeTransport({"cat >": take, "mv": Completed(0), "systemctl": Completed(1, b"", b"no unit")})
    with pytest.raises(KitError, match="daemon-reload` failed: no unit"):
        install.install(failing, made)
    assert install.user(FakeTransport({"colibri": Completed(1)})) == "nobody"
    gone = FakeTransport({"[ -f": Completed(1)})
    assert install.remove(gone, made) is False and len(gone.calls) == 1


@pytest.mark.parametrize(
    ("host", "prefix", "words"),
    [
        ("pi@board:2222", None, "pi@board:2222"),
        ("pi", "/srv/c", "pi --prefix /srv/c"),
        (None, "/x", "--root /x"),
    ],
)
def test_hints_name_the_place(host: str | None, prefix: str | None, words: str) -> None:
    where = target.Place(host, None, prefix, SshOptions())
    hint = "see: colibri-kit status, colibri-kit logs; deploy it all the same with --retry-bad"
    told = target.naming(hint, where)
    assert told == (
        f"see: colibri-kit status {words}, colibri-kit logs {words}; deploy it all the same with --retry-bad"
    )
    assert target.naming(told, where) == told
