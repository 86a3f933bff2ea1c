"""The init scripts that deploy installs, run by real tools over SSH as root: sysv by Debian's and by nothing
but busybox', OpenRC by its own package, unpacked over a copy of this machine's root. The engine supervises
itself there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ssh_servers
from kit_cli import kit
from ssh_servers import Server

from colibri_kit import resources
from colibri_kit.vboard.packages import Store, tool_set

#: A board of its own: scripts in a scratch folder, nothing under /run but sshd's folder.
_SYSV = """
mkdir -p /etc/init.d && mount --bind "$0" /etc/init.d && mount -t tmpfs tmpfs /run && mkdir /run/sshd
exec "$@"
"""
#: The same with OpenRC's files over this machine's; what it writes is gone with the namespace.
_OPENRC = """
set -e
scripts=$0 openrc=$1 own=$2 levels=$3
shift 3
mount -t tmpfs tmpfs "$own"
mkdir "$own/upper" "$own/work" "$own/root"
cp -a "$openrc" "$own/lower" # layers may not lie in each other
mount -t overlay -o "lowerdir=$own/lower:/,upperdir=$own/upper,workdir=$own/work" overlay "$own/root"
for folder in proc sys dev tmp; do mount --rbind "/$folder" "$own/root/$folder"; done
mount -t tmpfs tmpfs "$own/root/run"
mkdir "$own/root/run/sshd" "$own/root/run/openrc"
cd "$own/root/run/openrc" # as a boot by OpenRC leaves it
echo default >softlevel
mkdir starting started stopping inactive wasinactive failed hotplugged daemons options exclusive scheduled tmp
mkdir -p "$own/root/etc/init.d" "$own/root/etc/runlevels"
mount --bind "$scripts" "$own/root/etc/init.d"
mount --bind "$levels" "$own/root/etc/runlevels"
exec chroot "$own/root" "$@"
"""


@dataclass(frozen=True)
class Machine:
    """A board: ``kind`` of its service, ``scripts`` its /etc/init.d, ``starts_it()`` at boot."""

    kind: str
    server: Server
    scripts: Path
    starts_it: Callable[[], bool]

    def init(self, word: str) -> subprocess.CompletedProcess[str]:
        """What the service manager answers to ``word``."""
        script = f"rc-service colibri {word}" if self.kind == "openrc" else f"/etc/init.d/colibri {word}"
        login = ["ssh", "-F", "none", "-i", str(self.server.identity), "-o", "BatchMode=yes"]
        login += ["-o", f"UserKnownHostsFile={self.server.known_hosts}", "-p", str(self.server.port)]
        return subprocess.run(
            [*login, "root@127.0.0.1", script], capture_output=True, text=True, timeout=60, check=False
        )


def _openrc(folder: Path) -> Path:
    """Debian's OpenRC, its folders where a merged /usr has them."""
    source = Store(lambda words: None).get(tool_set("openrc"))
    out = folder / "openrc"
    shutil.copytree(source, out / "all", symlinks=True)
    for name in ("bin", "sbin", "lib"):
        if (out / "all" / name).is_dir() and not (out / "all" / name).is_symlink():
            shutil.copytree(out / "all" / name, out / "all/usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(out / "all" / name)
    return out / "all"


@pytest.fixture(scope="module", params=["debian", "busybox", "openrc"])
def machine(request: pytest.FixtureRequest, open_dir: Path, identity: Path) -> Iterator[Machine]:
    if os.geteuid() != 0:
        pytest.skip("installing a service needs root")
    folder = open_dir / f"init-{request.param}"
    scripts, tools = folder / "init.d", folder / "tools"
    scripts.mkdir(parents=True)
    tools.mkdir()
    path = f"{tools}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    words = [_SYSV, str(scripts)]

    def starts_it() -> bool:
        calls = folder / "rc"
        return calls.is_file() and calls.read_text() == "colibri defaults\n"

    if request.param == "busybox":
        busybox = shutil.which("busybox")
        assert busybox, "this test needs busybox (Debian: busybox-static)"
        for name in subprocess.run(
            [busybox, "--list"], capture_output=True, text=True, check=True
        ).stdout.split():
            (tools / name).symlink_to(busybox)
        (scripts / "rcS").touch()
        path = str(tools)

        def starts_it() -> bool:
            link = scripts / "S99colibri"
            return link.is_symlink() and link.readlink() == Path("colibri")

    elif request.param == "openrc":
        levels, own = folder / "runlevels", folder / "own"
        (levels / "default").mkdir(parents=True)
        own.mkdir()
        words = [_OPENRC, str(scripts), str(_openrc(folder)), str(own), str(levels)]

        def starts_it() -> bool:
            return (levels / "default" / "colibri").is_symlink()

    else:
        (tools / "update-rc.d").write_text(f'#!/bin/sh\necho "$@" >> {folder}/rc\n')
        (tools / "update-rc.d").chmod(0o755)
    server = ssh_servers.start_sshd(
        folder / "sshd", "root", identity, extra=f"SetEnv PATH={path}\n",
        wrap=["unshare", "-m", "--propagation", "slave", "sh", "-c", *words],
    )  # fmt: skip
    yield Machine("openrc" if request.param == "openrc" else "sysv", server, scripts, starts_it)
    server.stop()


def health(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        doc: dict[str, Any] = json.load(answer)
        return doc


def pid_of(log: Path) -> int:
    """Of the process that answers: its supervisor is its parent."""
    ready = [json.loads(line) for line in log.read_text().splitlines() if '"event":"ready"' in line]
    return int(ready[-1]["pid"])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_service_stays_up_goes_back_and_goes_away(
    machine: Machine,
    prefix: Path,
    user: str,
    board: str,
    real_engine: Path,
    olmoe: Path,
    tmp_path: Path,
) -> None:
    server = machine.server
    port = ssh_servers.free_port()
    profile = tmp_path / "plc.yaml"
    name = "x86-atom" if os.uname().machine == "x86_64" else "a53-plc"
    text = (resources.boards_dir() / f"{name}.yaml").read_text()
    profile.write_text(
        text.replace(f"name: {name}", "name: plc").replace("service: systemd", f"service: {machine.kind}")
    )
    recipe = tmp_path / "recipe.yaml"
    tokens = prefix.parent / "tokens"
    tokens.write_text("0123456789abcdef0123\n")
    tokens.chmod(0o600)  # root's: the service's user cannot read it yet

    def deploy(model: Path) -> Any:
        recipe.write_text(
            f"name: r\nmodel: {model}\nboard: {profile}\nhost: {server.target}\nbudget: 64MiB\nctx: 128\n"
            f"threads: 1\nservice: {{listen: '127.0.0.1:{port}', user: {user}, log: json, drain: 5, "
            f"token_file: {tokens}}}\n"
        )
        return kit("deploy", recipe, *server.args, "--prefix", prefix, "--engine", real_engine, "--json")

    good = deploy(olmoe)
    assert good.rc == 0, good.err
    golden = json.loads((olmoe / "manifest.json").read_text())["golden"]["sha256"]
    assert health(port)["golden"] == golden
    log = prefix / "log" / "engine.log"
    assert tokens.stat().st_mode & 0o777 == 0o640
    first = pid_of(log)
    assert Path(f"/proc/{first}").stat().st_uid != 0
    assert machine.starts_it()
    assert machine.init("status").returncode == 0
    # Its end is seen and mended by the engine's own supervisor.
    os.kill(first, signal.SIGKILL)
    until(lambda: pid_of(log) != first)
    assert health(port)["golden"] == golden
    # Reloaded on the word of the service manager; stopped and started; fallen, and started over that.
    assert machine.init("reload").returncode == 0
    until(lambda: '"event":"tokens_read"' in log.read_text())
    assert machine.init("stop").returncode == 0 and machine.init("status").returncode == 3
    second = pid_of(log)
    assert machine.init("start").returncode == 0
    until(lambda: pid_of(log) != second)
    assert health(port)["golden"] == golden
    engine = pid_of(log)
    for pid in (parent_of(engine), engine):
        os.kill(pid, signal.SIGKILL)
    assert machine.init("status").returncode == (32 if machine.kind == "openrc" else 1)
    # A release that cannot pass its golden: the supervisor gives up at once, the one before runs again.
    other = tmp_path / "other.coli"
    shutil.copytree(olmoe, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["golden"]["sha256"] = "ab" * 32
    (other / "manifest.json").write_text(json.dumps(manifest))
    began = time.monotonic()
    ran = deploy(other)
    assert ran.rc == 9, ran.err
    assert "the service has ended; it said:" in ran.json["error"]["message"]
    assert ran.json["error"]["state"] == f"rolled back to {good.json['release']}, which is well"
    assert health(port)["golden"] == golden and health(port)["uptime_s"] < time.monotonic() - began
    last = pid_of(log)
    place = [server.target, *server.args, "--prefix", prefix]
    assert kit("status", *place, "--check", "--json").json["health"] == "ok"
    assert kit("undeploy", *place, "--yes").rc == 0
    assert not prefix.exists() and not (machine.scripts / "colibri").exists()
    assert not machine.starts_it()
    assert not Path(f"/proc/{last}").exists()
    with pytest.raises(OSError, match="refused"):
        health(port)
