"""The sysv script that deploy installs, run by real tools (Debian's, and nothing but busybox'), over SSH
as root: the engine supervises itself there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ssh_servers
from kit_cli import kit
from ssh_servers import Server

from colibri_kit import resources

#: A board of its own: scripts in a scratch folder, nothing under /run but sshd's folder.
_BEGIN = """
mkdir -p /etc/init.d && mount --bind "$0" /etc/init.d && mount -t tmpfs tmpfs /run && mkdir /run/sshd
exec "$@"
"""


@pytest.fixture(scope="module", params=["debian", "busybox"])
def machine(
    request: pytest.FixtureRequest, open_dir: Path, identity: Path
) -> Iterator[tuple[Server, Path, Path]]:
    """Server, the folder that is its /etc/init.d, and the calls of update-rc.d."""
    if os.geteuid() != 0:
        pytest.skip("installing a service needs root")
    folder = open_dir / f"sysv-{request.param}"
    scripts, tools = folder / "init.d", folder / "tools"
    scripts.mkdir(parents=True)
    tools.mkdir()
    path = f"{tools}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if request.param == "busybox":
        busybox = shutil.which("busybox")
        assert busybox, "this test needs busybox (Debian: busybox-static)"
        for name in subprocess.run(
            [busybox, "--list"], capture_output=True, text=True, check=True
        ).stdout.split():
            (tools / name).symlink_to(busybox)
        (scripts / "rcS").touch()
        path = str(tools)
    else:
        (tools / "update-rc.d").write_text(f'#!/bin/sh\necho "$@" >> {folder}/rc\n')
        (tools / "update-rc.d").chmod(0o755)
    server = ssh_servers.start_sshd(
        folder / "sshd", "root", identity, extra=f"SetEnv PATH={path}\n",
        wrap=["unshare", "-m", "--propagation", "slave", "sh", "-c", _BEGIN, str(scripts)],
    )  # fmt: skip
    yield server, scripts, folder / "rc"
    server.stop()


def health(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        doc: dict[str, Any] = json.load(answer)
        return doc


def pid_of(log: Path) -> int:
    """Of the process that answers: its supervisor is its parent."""
    ready = [json.loads(line) for line in log.read_text().splitlines() if '"event":"ready"' in line]
    return int(ready[-1]["pid"])


def test_sysv_service_stays_up_goes_back_and_goes_away(
    machine: tuple[Server, Path, Path],
    prefix: Path,
    user: str,
    board: str,
    real_engine: Path,
    olmoe: Path,
    tmp_path: Path,
) -> None:
    server, scripts, rc = machine
    port = ssh_servers.free_port()
    profile = tmp_path / "plc.yaml"
    name = "x86-atom" if os.uname().machine == "x86_64" else "a53-plc"
    text = (resources.boards_dir() / f"{name}.yaml").read_text()
    profile.write_text(
        text.replace(f"name: {name}", "name: plc").replace("service: systemd", "service: sysv")
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
    if rc.parent.name.endswith("debian"):
        assert rc.read_text() == "colibri defaults\n"
    else:
        assert (scripts / "S99colibri").readlink() == Path("colibri")
    # Its end is seen and mended by the engine's own supervisor.
    os.kill(first, signal.SIGKILL)
    end = time.monotonic() + 60
    while pid_of(log) == first and time.monotonic() < end:
        time.sleep(0.1)
    assert pid_of(log) != first and health(port)["golden"] == golden
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
    assert not prefix.exists() and not (scripts / "colibri").exists()
    assert not (scripts / "S99colibri").is_symlink()
    assert not Path(f"/proc/{last}").exists()
    with pytest.raises(OSError, match="refused"):
        health(port)
