"""What goes wrong while deploying: cuts, stalls, full disks, wrong boards. Each names the state."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parcel_maker
from kit_cli import Ran, kit
from ssh_servers import Proxy, Server
from test_ssh_deploy import link, on_board, tree

Deploy = Callable[..., Ran]
MIB = 1 << 20


def through(proxy: Proxy, server: Server, tmp_path: Path) -> dict[str, object]:
    """Deploy's arguments for going through a proxy, which is another host to known_hosts."""
    args = [*server.args, "--known-hosts", str(tmp_path / "proxy_hosts"), "--accept-new-host-key"]
    return {"target": f"{server.user}@127.0.0.1:{proxy.listen_port}", "args": args}


def settled(server: Server, part: Path) -> int:
    """A file's size once the cut session has ended, having written what it had received."""
    end = time.monotonic() + 20
    while server.sessions() and time.monotonic() < end:
        time.sleep(0.02)
    assert not server.sessions()
    return part.stat().st_size


def status(server: Server, prefix: Path) -> dict[str, Any]:
    ran = kit("status", server.target, *server.args, "--prefix", prefix, "--json")
    assert ran.rc == 0, ran.err
    return dict(ran.json)


def test_cut_in_the_middle_then_resumed(
    server: Server, deploy: Deploy, prefix: Path, model: Path, tmp_path: Path
) -> None:
    good = deploy(server, "--json").json["release"]
    big = parcel_maker.write(tmp_path / "big.coli", seed=2, shards=1, shard_bytes=24 * MIB)
    before = tree(prefix / "releases")
    with Proxy(server.port, 8 * MIB, "cut") as proxy:
        ran = deploy(server, "--json", folder=big, **through(proxy, server, tmp_path))
    assert ran.rc == 7, ran.err
    error = ran.json["error"]
    assert error["code"] == "CK-SSH-LOST"
    assert error["state"].startswith(f"board unchanged: {good} is current; ")
    assert "the next deploy sends the rest" in error["state"]
    assert link(prefix) == good
    assert tree(prefix / "releases") == before
    [part] = (prefix / "blobs").glob("*.part")
    kept = settled(server, part)
    assert 0 < kept < 9 * MIB  # what the server had not read yet is lost with the connection
    # The lock was left behind by a deployment that is over: it is taken over.
    assert (prefix / "lock").is_dir() and status(server, prefix)["busy"] is None
    ran = deploy(server, "--json", folder=big)
    assert ran.rc == 0, ran.err
    sent = ran.json["sent"]
    assert sent["bytes_resumed"] == kept
    total = sum(p.stat().st_size for p in big.iterdir())
    whole = [p for p in big.iterdir() if p.name in ("manifest.json", "dense.coli")]
    assert sent["bytes_sent"] == total - kept - sum(p.stat().st_size for p in whole)
    assert (prefix / "current/model.coli/experts-0000.coli").read_bytes() == (
        big / "experts-0000.coli"
    ).read_bytes()


def test_session_killed_on_the_board(server: Server, deploy: Deploy, prefix: Path, tmp_path: Path) -> None:
    big = parcel_maker.write(tmp_path / "big.coli", seed=3, shards=1, shard_bytes=24 * MIB)

    def kill() -> None:
        for pid in server.sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    with Proxy(server.port, 8 * MIB, kill) as proxy:
        ran = deploy(server, "--json", folder=big, **through(proxy, server, tmp_path))
    assert ran.rc == 7, ran.err
    assert ran.json["error"]["code"] == "CK-SSH-LOST"
    assert "board unchanged: no release is current" in ran.json["error"]["state"]
    again = deploy(server, "--json", folder=big)
    assert again.rc == 0, again.err
    assert again.json["sent"]["bytes_resumed"] > 0


def test_a_false_beginning_is_not_resumed(sshd: Server, deploy: Deploy, prefix: Path, model: Path) -> None:
    """A .part that is no beginning of the file (another kit's, or rotten) is thrown away."""
    deploy(sshd, "--dry-run")
    import hashlib

    digest = hashlib.sha256((model / "dense.coli").read_bytes()).hexdigest()
    deploy(sshd)
    blob = prefix / "blobs" / digest
    blob.rename(prefix / "blobs" / f"{digest}.part")
    part = prefix / "blobs" / f"{digest}.part"
    part.chmod(0o644)
    part.write_bytes(b"x" * 1000)
    ran = deploy(sshd, "--json")
    assert ran.rc == 0, ran.err
    assert ran.json["sent"]["bytes_resumed"] == 0
    assert blob.read_bytes() == (model / "dense.coli").read_bytes()


def test_link_that_stalls_is_given_up(sshd: Server, deploy: Deploy, prefix: Path, tmp_path: Path) -> None:
    big = parcel_maker.write(tmp_path / "big.coli", seed=4, shards=1, shard_bytes=24 * MIB)
    with Proxy(sshd.port, 6 * MIB, "stall") as proxy:
        began = time.monotonic()
        ran = deploy(sshd, "--json", "--stall-timeout", "1", folder=big, **through(proxy, sshd, tmp_path))
        took = time.monotonic() - began
    assert ran.rc == 7, ran.err
    assert "no byte moved for 1 s" in ran.json["error"]["message"]
    assert took < 15


def test_full_disk_is_seen_before_anything_is_sent(
    server: Server, deploy: Deploy, small_disk: Path, tmp_path: Path
) -> None:
    big = parcel_maker.write(tmp_path / "big.coli", shards=2, shard_bytes=4 * MIB)
    ran = deploy(server, "--json", folder=big, place=small_disk / "b")
    assert ran.rc == 6, ran.err
    assert ran.json["error"]["code"] == "CK-PREFLIGHT-SPACE"
    assert ran.json["error"]["state"] == "nothing was sent or changed"
    assert list(small_disk.iterdir()) == []


def test_disk_that_fills_up_in_the_middle(
    server: Server, deploy: Deploy, small_disk: Path, tmp_path: Path
) -> None:
    big = parcel_maker.write(tmp_path / "big.coli", shards=1, shard_bytes=3 * MIB)

    def fill() -> None:
        with contextlib.suppress(OSError), (small_disk / "other").open("wb") as out:
            while True:
                out.write(bytes(65536))

    with Proxy(server.port, 2 * MIB, fill) as proxy:
        ran = deploy(server, "--json", folder=big, place=small_disk / "b", **through(proxy, server, tmp_path))
    assert ran.rc == 7, ran.err
    error = ran.json["error"]
    assert error["code"] == "CK-DEPLOY-FULL"
    assert "board unchanged: no release is current; the partial file was removed" in error["state"]
    assert not list((small_disk / "b/blobs").glob("*.part"))
    assert not (small_disk / "b/lock").exists()
    (small_disk / "other").unlink()
    assert deploy(server, folder=big, place=small_disk / "b").rc == 0


def test_noexec_and_read_only_prefixes(sshd: Server, deploy: Deploy, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,noexec", str(small_disk)], check=True)
    ran = deploy(sshd, "--json", place=small_disk / "b")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-NOEXEC")
    subprocess.run(["mount", "-o", "remount,exec,ro", str(small_disk)], check=True)
    ran = deploy(sshd, "--json", place=small_disk / "b")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-READONLY")
    assert list(small_disk.iterdir()) == []


def test_prefix_that_the_user_may_not_write(sshd: Server, deploy: Deploy, prefix: Path) -> None:
    prefix.mkdir()  # as root, or without permission bits: either way not writable below
    prefix.chmod(0o555)
    ran = deploy(sshd, "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-WRITE")
    assert "--sudo" in ran.json["error"]["hint"]


def test_folder_with_other_things_is_left_alone(
    sshd: Server, deploy: Deploy, prefix: Path, user: str
) -> None:
    prefix.mkdir()
    if os.geteuid() == 0:
        shutil.chown(prefix, user)
    (prefix / "thesis.txt").write_text("x")
    ran = deploy(sshd, "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-FOREIGN")
    assert [p.name for p in prefix.iterdir()] == ["thesis.txt"]


def test_wrong_architecture_engine_is_refused_here(server: Server, deploy: Deploy, prefix: Path) -> None:
    ran = deploy(server, "--json", engine="arm")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-ENGINE")
    assert not prefix.exists()


def test_engine_that_the_board_cannot_start(server: Server, deploy: Deploy, prefix: Path) -> None:
    good = deploy(server, "--json").json["release"]
    ran = deploy(server, "--json", engine="broken")
    assert (ran.rc, ran.json["error"]["code"]) == (8, "CK-DEPLOY-START")
    assert ran.json["error"]["state"] == f"board unchanged: {good} is current; the new release was removed"
    assert link(prefix) == good
    assert [p.name for p in (prefix / "releases").iterdir()] == [good]


def test_board_of_another_architecture(
    sshd: Server, model: Path, prefix: Path, engines: dict[str, Path]
) -> None:
    other, engine = ("rpi4", "arm") if os.uname().machine == "x86_64" else ("x86-atom", "arm")
    ran = kit(
        "deploy", "--board", other, *on_board(sshd, prefix)[:1], model, *sshd.args,
        "--prefix", prefix, "--engine", engines[engine], "--json",
    )  # fmt: skip
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-ARCH")
    assert ran.json["error"]["state"] == "nothing was sent or changed"
    assert not prefix.exists()


def test_model_larger_than_the_budget(sshd: Server, deploy: Deploy, prefix: Path) -> None:
    ran = deploy(sshd, "--budget", "1MiB", "--weights", "preload", "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-BUDGET")
    # weights: dense and three shards with their 64-byte headers; 2 layers · 1 head · 8 · K, V · F16 · 128
    weights = 200_064 + 3 * (MIB + 64)
    assert f"weights {weights} + tokenizer 5064 + KV cache of 128 tokens 8192" in ran.json["error"]["message"]
    assert not prefix.exists()


def test_local_file_that_is_not_what_the_manifest_says(
    sshd: Server, deploy: Deploy, prefix: Path, model: Path
) -> None:
    shard = model / "experts-0001.coli"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    ran = deploy(sshd, "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (8, "CK-DEPLOY-SOURCE")
    assert ran.json["error"]["state"].startswith("board unchanged: no release is current")
    assert not list((prefix / "blobs").glob("*.part"))


def test_two_deployments_at_once(sshd: Server, deploy: Deploy, prefix: Path) -> None:
    deploy(sshd)
    (prefix / "lock").mkdir()
    owner = '{"user": "ann", "host": "elsewhere", "pid": 1, "token": "x", "time": "2026-01-02T03:04:05Z"}'
    (prefix / "lock/owner").write_text(owner)
    (prefix / "lock/since").write_text(str(int(time.time()) - 90))
    ran = deploy(sshd, "--json", engine="b")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-DEPLOY-LOCKED")
    assert "ann@elsewhere since 2026-01-02T03:04:05Z" in ran.json["error"]["message"]
    assert status(sshd, prefix)["busy"] == "ann@elsewhere since 2026-01-02T03:04:05Z"
    told = kit("status", sshd.target, *sshd.args, "--prefix", prefix).out
    assert "lock     ann@elsewhere since 2026-01-02T03:04:05Z is at work there\n" in told
    shutil.chown(prefix / "lock", sshd.user)
    for file in (prefix / "lock").iterdir():
        shutil.chown(file, sshd.user)
    assert deploy(sshd, "--break-lock", engine="b").rc == 0
    assert not (prefix / "lock").exists()


def test_service_needs_root_and_a_service_manager(
    sshd: Server, deploy: Deploy, prefix: Path, tmp_path: Path, model: Path, engines: dict[str, Path]
) -> None:
    ran = deploy(sshd, "--service", "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-ROOT")
    assert not prefix.exists()
    root = tmp_path / "root"
    ran = kit("deploy", "--board", "host", "--root", root, model, "--engine", engines["a"], "--service")
    assert ran.rc == 2 and "no service manager" in ran.err
    if os.geteuid() == 0:
        # As root on this machine: an engine without `serve` is taken off again.
        ran = kit(
            "deploy", "--board", "x86-atom" if os.uname().machine == "x86_64" else "a53-plc",
            "--root", root, model, "--engine", engines["a"], "--service", "--json",
        )  # fmt: skip
        assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-DEPLOY-SERVICE")
        assert list((root / "releases").iterdir()) == []
