"""Deployments over real SSH servers (OpenSSH's, and dropbear without sftp), as an ordinary user."""

from __future__ import annotations

import hashlib
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import parcel_maker
from kit_cli import Ran, kit
from ssh_servers import Server, start_sshd

Deploy = Callable[..., Ran]


def on_board(server: Server, prefix: Path) -> list[object]:
    return [server.target, *server.args, "--prefix", prefix]


def link(prefix: Path) -> str:
    """The release that ``current`` points at."""
    target = str((prefix / "current").readlink())
    assert target.startswith("releases/")
    return target.removeprefix("releases/")


def tree(folder: Path) -> dict[str, str]:
    """Every file and link below a folder with its content: to show that nothing changed."""
    out = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            out[str(path.relative_to(folder))] = f"-> {path.readlink()}"
        elif path.is_file():
            out[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return out


def test_first_deploy_lays_out_the_release(
    server: Server, deploy: Deploy, prefix: Path, model: Path, engines: dict[str, Path], user: str
) -> None:
    ran = deploy(server, "--json")
    assert ran.rc == 0, ran.err
    release = ran.json["release"]
    expected = sum(p.stat().st_size for p in model.iterdir()) + engines["a"].stat().st_size
    assert ran.json["sent"]["bytes_sent"] == expected
    assert link(prefix) == release
    for file in model.iterdir():
        there = prefix / "current" / "model.coli" / file.name
        assert there.read_bytes() == file.read_bytes()
        assert there.resolve().name == hashlib.sha256(file.read_bytes()).hexdigest()
        assert there.stat().st_mode & 0o777 == 0o444
    engine = prefix / "current" / "colibri"
    assert engine.read_bytes() == engines["a"].read_bytes()
    assert engine.stat().st_mode & 0o777 == 0o555
    assert (prefix / "blobs").stat().st_uid == pwd.getpwnam(user).pw_uid
    assert not (prefix / "lock").exists()
    assert not list((prefix / "blobs").glob("*.part"))


def test_second_deploy_sends_nothing(server: Server, deploy: Deploy, prefix: Path) -> None:
    first = deploy(server, "--json")
    blobs = tree(prefix / "blobs")
    second = deploy(server, "--json")
    assert second.rc == 0, second.err
    assert second.json["sent"] == {"bytes_sent": 0, "files_sent": 0, "bytes_resumed": 0, "repaired": 0}
    assert second.json["changed"] is False
    assert second.json["release"] == first.json["release"]
    assert tree(prefix / "blobs") == blobs


def test_changed_shard_sends_that_shard_and_the_manifest(
    server: Server, deploy: Deploy, prefix: Path, model: Path
) -> None:
    first = deploy(server, "--json").json
    size = parcel_maker.change_shard(model)
    ran = deploy(server, "--json")
    assert ran.rc == 0, ran.err
    assert ran.json["sent"]["files_sent"] == 2
    assert ran.json["sent"]["bytes_sent"] == size + (model / "manifest.json").stat().st_size
    assert ran.json["previous"] == first["release"]
    shard = "model.coli/experts-0001.coli"
    assert (prefix / "current" / shard).read_bytes() == (model / "experts-0001.coli").read_bytes()
    assert (prefix / "releases" / first["release"] / shard).resolve() != (
        prefix / "current" / shard
    ).resolve()


def test_dry_run_says_what_it_would_send_and_changes_nothing(
    server: Server, deploy: Deploy, prefix: Path, model: Path
) -> None:
    ran = deploy(server, "--dry-run", "--json")
    assert ran.rc == 0, ran.err
    assert not prefix.exists()
    names = {item["name"] for item in ran.json["send"]}
    assert names == {p.name for p in model.iterdir()} | {"colibri"}
    deploy(server)
    before = tree(prefix)
    again = deploy(server, "--dry-run", "--json", engine="b")
    assert [item["name"] for item in again.json["send"]] == ["colibri"]
    assert tree(prefix) == before


def test_failing_health_check_rolls_back(server: Server, deploy: Deploy, prefix: Path) -> None:
    good = deploy(server, "--json").json["release"]
    ran = deploy(server, "--json", engine="failing")
    assert ran.rc == 9, ran.err
    error = ran.json["error"]
    assert "golden mismatch" in error["message"]
    assert error["state"] == f"rolled back to {good}, which is well"
    assert link(prefix) == good
    # Remembered: the same release is not tried again unless asked for by name.
    again = deploy(server, "--json", engine="failing")
    assert again.rc == 6
    assert again.json["error"]["code"] == "CK-PREFLIGHT-BAD"
    assert deploy(server, "--retry-bad", engine="failing").rc == 9
    status = kit("status", *on_board(server, prefix), "--json").json
    assert status["current"] == good and status["health"] == "ok"
    assert len(status["bad"]) == 1
    events = [e["event"] for e in kit("logs", *on_board(server, prefix), "--json").json["deployments"]]
    assert events == ["deploy", "rolled-back", "rolled-back"]


def test_failing_first_release_leaves_none_current(sshd: Server, deploy: Deploy, prefix: Path) -> None:
    ran = deploy(sshd, "--json", engine="failing")
    assert ran.rc == 9
    assert "no release is current" in ran.json["error"]["state"]
    assert not (prefix / "current").is_symlink()
    assert deploy(sshd).rc == 0


def test_rollback_that_fails_too_says_so(sshd: Server, deploy: Deploy, prefix: Path, model: Path) -> None:
    good = deploy(sshd, "--json").json["release"]
    # The earlier release loses a file that the new one does not use.
    old = prefix / "releases" / good / "model.coli" / "experts-0001.coli"
    parcel_maker.change_shard(model)
    assert deploy(sshd, "--dry-run").rc == 0
    old.unlink()
    old.symlink_to("../../../blobs/gone")
    ran = deploy(sshd, "--json", engine="failing")
    assert ran.rc == 10, ran.err
    assert f"{good} is current, and is unwell" in ran.json["error"]["state"]


def test_tampered_blob_is_found_and_sent_again(
    server: Server, deploy: Deploy, prefix: Path, model: Path
) -> None:
    deploy(server)
    blob = (prefix / "current" / "model.coli" / "experts-0002.coli").resolve()
    data = bytearray(blob.read_bytes())
    data[5000] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    ran = deploy(server, "--json", engine="b")
    assert ran.rc == 0, ran.err
    assert ran.json["sent"]["repaired"] == 1
    assert ran.json["sent"]["files_sent"] == 2  # the shard and the other engine
    assert "experts-0002.coli on the board is damaged" in ran.err
    assert blob.read_bytes() == (model / "experts-0002.coli").read_bytes()


def test_status_logs_rollback_undeploy(server: Server, deploy: Deploy, prefix: Path) -> None:
    place = on_board(server, prefix)
    assert kit("status", *place).rc == 6
    first = deploy(server, "--json").json["release"]
    second = deploy(server, "--json", engine="b").json["release"]
    status = kit("status", *place, "--check", "--json").json
    assert (status["current"], status["previous"]) == (second, first)
    assert (status["health"], status["engine"], status["model"]) == ("ok", "0-b", "tiny")
    before = tree(prefix)
    assert kit("rollback", *place, "--dry-run", "--json").json["to"] == first
    assert tree(prefix) == before
    assert kit("rollback", *place).rc == 0
    assert link(prefix) == first
    assert kit("rollback", *place, "--to", second).rc == 0
    assert link(prefix) == second
    ran = kit("rollback", *place, "--to", "r20000101-000000-abcdef", "--json")
    assert ran.rc == 6 and ran.json["error"]["state"] == f"board unchanged: {second} is current"
    assert kit("undeploy", *place).rc == 2
    assert kit("undeploy", *place, "--dry-run").rc == 0
    (prefix / "mine.txt").write_text("x")
    ran = kit("undeploy", *place, "--yes", "--json")
    assert ran.rc == 0, ran.err
    assert ran.json["left"] == ["mine.txt"]
    assert [p.name for p in prefix.iterdir()] == ["mine.txt"]


def test_run_sends_the_prompt_on_stdin(server: Server, deploy: Deploy, prefix: Path) -> None:
    deploy(server)
    prompt = 'it\'s $(id) `x` "q" \\ grün 雪'
    ran = kit("run", *on_board(server, prefix), "--prompt", prompt)
    assert ran.rc == 0, ran.err
    text, _, digest = ran.out.strip().rpartition("|")
    assert text == prompt
    assert len(digest) == 16
    argv = kit("run", *on_board(server, prefix), "--prompt", prompt, "--dry-run", "--json").json["argv"]
    assert prompt not in argv and argv[-1] != "" and "--budget" in argv
    empty = kit("run", *on_board(server, prefix), "--prompt", "", "--json")
    assert empty.rc == 13 and empty.json["error"]["code"] == "CK-ENGINE-USAGE"


def test_interrupt_ends_the_engine_on_the_board(
    server: Server, deploy: Deploy, prefix: Path, user: str
) -> None:
    from colibri_kit.transport.options import SshOptions
    from colibri_kit.transport.sshconnect import connect

    # Its `run` never ends, so it is unwell, and it is ended on the board.
    ran = deploy(server, "--health-timeout", "1", "--json", engine="slow")
    assert ran.rc == 9
    assert "did not end within 1 s" in ran.json["error"]["message"]
    slow = next(p for p in (prefix / "blobs").iterdir() if p.stat().st_mode & 0o111)
    options = SshOptions(
        identity=server.identity,
        known_hosts=server.known_hosts,
        no_agent=True,
        ssh_config=server.folder / "empty_config",
    )
    transport = connect(options.spec(server.target, lambda text: None))

    def running() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (entry / "exe").readlink() == slow:
                        found.append(entry.name)
                except OSError:
                    continue
        return found

    seen: list[bytes] = []

    def sink(piece: bytes) -> None:
        seen.append(piece)
        if b"word" in piece:
            assert running()
            raise KeyboardInterrupt

    model = next((prefix / "releases").glob("*/model.coli"), None)
    folder = str(model) if model else str(prefix)
    try:
        transport.stream([str(slow), "run", "--model", folder], stdin=b"hi", on_out=sink)
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        pass
    transport.close()
    end = time.monotonic() + 5
    while running() and time.monotonic() < end:
        time.sleep(0.02)
    assert not running()


def test_old_releases_and_their_blobs_are_pruned(
    sshd: Server, deploy: Deploy, prefix: Path, model: Path
) -> None:
    deploy(sshd)
    old = {p.name for p in (prefix / "blobs").iterdir()}
    for name in ("experts-0000.coli", "experts-0001.coli", "experts-0002.coli"):
        parcel_maker.change_shard(model, name)
        ran = deploy(sshd, "--keep", "1", "--json")
        assert ran.rc == 0, ran.err
    # The newest and the one before it, which rollback needs.
    assert len(list((prefix / "releases").iterdir())) == 2
    blobs = {p.name for p in (prefix / "blobs").iterdir()}
    assert len(blobs) == 1 + 6 + 2  # engine, six files, the other shard and manifest
    assert not old <= blobs
    assert kit("rollback", *on_board(sshd, prefix)).rc == 0


def test_board_with_nothing_but_busybox(
    open_dir: Path, user: str, identity: Path, deploy: Deploy, prefix: Path, model: Path
) -> None:
    """Every program that a deployment runs on the board is busybox's, its shell included."""
    busybox = shutil.which("busybox")
    assert busybox, "this test needs busybox (Debian: busybox-static)"
    tools = open_dir / "busybox-bin"
    tools.mkdir()
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout
    for name in applets.split():
        (tools / name).symlink_to(busybox)
    server = start_sshd(open_dir / "busybox-sshd", user, identity, extra=f"SetEnv PATH={tools}\n")
    try:
        first = deploy(server, "--json")
        assert first.rc == 0, first.err
        assert deploy(server, "--json").json["sent"]["bytes_sent"] == 0
        size = parcel_maker.change_shard(model)
        second = deploy(server, "--keep", "1", "--json")
        assert second.json["sent"]["bytes_sent"] == size + (model / "manifest.json").stat().st_size
        assert link(prefix) == second.json["release"]
        assert not list(prefix.glob(".current*"))  # mv -T renamed it; it did not move into `current`
        assert deploy(server, engine="failing").rc == 9
        assert link(prefix) == second.json["release"]
        place = on_board(server, prefix)
        assert kit("rollback", *place, "--to", first.json["release"]).rc == 0
        assert kit("run", *place, "--prompt", "x").out.startswith("x|")
        assert len(kit("logs", *place, "--json").json["deployments"]) == 5
        assert kit("undeploy", *place, "--yes").rc == 0
        assert not prefix.exists()
    finally:
        server.stop()
