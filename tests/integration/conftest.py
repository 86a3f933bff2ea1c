"""Fixtures: an ordinary user, real SSH servers for it, stand-in engines, the kit's command line."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import parcel_maker
import pytest
import ssh_servers
from kit_cli import Ran, kit

USER = "ckboard"
HERE = Path(__file__).parent
GGUF = HERE.parent / "data" / "moe-refs" / "f32" / "olmoe.t64.f32.gguf"


@pytest.fixture(scope="session")
def user() -> str:
    """Who logs in: ourselves, or, when we are root, an ordinary user made for it."""
    if os.geteuid() != 0:
        return getpass.getuser()
    try:
        pwd.getpwnam(USER)
    except KeyError:
        subprocess.run(["useradd", "--create-home", "--shell", "/bin/sh", USER], check=True)
    return USER


@pytest.fixture(scope="session")
def open_dir() -> Iterator[Path]:
    """A folder that the ordinary user can reach (pytest's own are private)."""
    path = Path(tempfile.mkdtemp(prefix="ck-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def small_mount(open_dir: Path, user: str) -> Iterator[Path | None]:
    """A 6 MiB disk; None when we may not mount one. There before the servers start, since
    dropbear's mount namespace is copied then."""
    if os.geteuid() != 0:
        yield None
        return
    path = open_dir / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(path)], check=True)
    shutil.chown(path, user)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def small_disk(small_mount: Path | None) -> Iterator[Path]:
    """The small disk, empty."""
    if small_mount is None:
        pytest.skip("mounting a small file system needs root")
    yield small_mount
    subprocess.run(["mount", "-o", "remount,rw,exec", str(small_mount)], check=True)
    for path in small_mount.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="session")
def identity(open_dir: Path) -> Path:
    return ssh_servers.keygen(open_dir / "client_key")


@pytest.fixture(scope="session")
def sshd(open_dir: Path, user: str, identity: Path, small_mount: Path | None) -> Iterator[ssh_servers.Server]:
    server = ssh_servers.start_sshd(open_dir / "sshd", user, identity)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def dropbear(
    open_dir: Path, user: str, identity: Path, small_mount: Path | None
) -> Iterator[ssh_servers.Server]:
    """dropbear reads keys only from the home: ours is added there and taken away again."""
    entry = pwd.getpwnam(user)
    file = Path(entry.pw_dir) / ".ssh" / "authorized_keys"
    line = identity.with_name("client_key.pub").read_text()
    file.parent.mkdir(mode=0o700, exist_ok=True)
    before = file.read_text() if file.is_file() else ""
    file.write_text(before + ("\n" if before and not before.endswith("\n") else "") + line)
    file.chmod(0o600)
    for path in (file.parent, file):
        os.chown(path, entry.pw_uid, entry.pw_gid)
    server = ssh_servers.start_dropbear(open_dir / "dropbear", user, identity)
    yield server
    server.stop()
    file.write_text(file.read_text().replace(line, ""))


@pytest.fixture(params=["sshd", "dropbear"])
def server(request: pytest.FixtureRequest) -> ssh_servers.Server:
    found: ssh_servers.Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def prefix(user: str) -> Iterator[Path]:
    """An empty folder of the ordinary user's, to deploy into ``prefix/b``."""
    path = Path(tempfile.mkdtemp(prefix="ck-board-"))
    path.chmod(0o755)
    if os.geteuid() == 0:
        shutil.chown(path, user)
    yield path / "b"
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def engines(open_dir: Path) -> dict[str, Path]:
    """Stand-in engines: ``a``, ``b`` (other bytes), ``failing``, ``slow``, ``arm``, ``broken``."""
    variants = {"a": [], "b": ['-DNAME="b"'], "failing": ["-DFAIL_CHECK"], "slow": ["-DSLOW"]}
    made: dict[str, Path] = {}
    compiler = [shutil.which("gcc")] if shutil.which("gcc") else [sys.executable, "-m", "ziglang", "cc"]
    if compiler[0] == sys.executable:
        compiler += ["-target", f"{os.uname().machine}-linux-musl"]
    for name, flags in variants.items():
        made[name] = open_dir / f"engine-{name}"
        subprocess.run(
            [*compiler, "-Os", "-static", "-s", *flags, str(HERE / "standin.c"), "-o", str(made[name])],
            check=True,
        )
    whole = made["a"].read_bytes()
    other = 183 if os.uname().machine == "x86_64" else 62
    made["arm"] = open_dir / "engine-arm"
    made["arm"].write_bytes(whole[:18] + other.to_bytes(2, "little") + whole[20:])
    # The right architecture by its header, and nothing behind it.
    made["broken"] = open_dir / "engine-broken"
    made["broken"].write_bytes(whole[:20] + bytes(1000))
    return made


@pytest.fixture(scope="session")
def board() -> str:
    """A profile that this machine fulfils."""
    return "x86-atom" if os.uname().machine == "x86_64" else "a53-plc"


@pytest.fixture(scope="session")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny olmoe, converted by the kit: 2 MoE layers of 8 experts."""
    out = tmp_path_factory.mktemp("model") / "olmoe.coli"
    ran = kit("convert", GGUF, "-o", out)
    assert ran.rc == 0, ran.err
    return out


@pytest.fixture(scope="session")
def real_engine(tmp_path_factory: pytest.TempPathFactory, board: str) -> Path:
    out = tmp_path_factory.mktemp("engine") / "colibri"
    ran = kit("build", "--board", board, "-o", out)
    assert ran.rc == 0, ran.err
    return out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return parcel_maker.write(tmp_path / "tiny.coli")


@pytest.fixture
def deploy(engines: dict[str, Path], board: str, prefix: Path, model: Path) -> Callable[..., Ran]:
    """``deploy(server, *more, engine="a", target=None, args=None, folder=None, place=None)``."""

    def call(
        server: ssh_servers.Server,
        *more: object,
        engine: str = "a",
        target: str | None = None,
        args: list[str] | None = None,
        folder: Path | None = None,
        place: Path | None = None,
    ) -> Ran:
        login = server.args if args is None else args
        return kit(
            "deploy", "--board", board, target or server.target, folder or model, *login,
            "--prefix", place or prefix, "--engine", engines[engine], *more,
        )  # fmt: skip

    return call
