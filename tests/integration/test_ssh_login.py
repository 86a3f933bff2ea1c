"""Getting in: host keys, keys, passwords, jump hosts, sudo, and boards that are not there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit_cli import Ran, kit
from ssh_servers import Server, free_port, keygen, known_line, start_dropbear, start_sshd

Deploy = Callable[..., Ran]


def status(server: Server, *more: object, args: list[str] | None = None) -> Ran:
    """The cheapest verb that logs in; nothing is deployed, so it ends with CK-NOT-DEPLOYED."""
    login = server.args if args is None else args
    return kit("status", server.target, *login, "--prefix", "/nonexistent/x", "--json", *more)


def code(ran: Ran) -> str:
    return str(ran.json["error"]["code"])


def fingerprint(server: Server) -> str:
    done = subprocess.run(
        ["ssh-keygen", "-lf", str(server.folder / "hostkey.pub")], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[1]


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


@pytest.fixture
def stranger(server: Server, known: Path) -> Server:
    """The server, seen from a user who has never been there."""
    return Server(server.kind, server.user, server.port, server.folder, server.child, server.identity, known)


def test_unknown_host_is_refused_with_its_fingerprint(stranger: Server, known: Path) -> None:
    ran = status(stranger)
    assert (ran.rc, code(ran)) == (5, "CK-SSH-UNKNOWN-HOST")
    assert fingerprint(stranger) in ran.json["error"]["message"]
    assert f"--host-key-fingerprint {fingerprint(stranger)}" in ran.json["error"]["hint"]
    assert not known.exists()


def test_accepting_records_the_key_for_ssh_too(stranger: Server, known: Path) -> None:
    assert code(status(stranger, "--accept-new-host-key")) == "CK-NOT-DEPLOYED"
    assert known.stat().st_mode & 0o777 == 0o600
    assert code(status(stranger)) == "CK-NOT-DEPLOYED"
    real = subprocess.run(
        ["ssh", "-F", "none", "-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=yes",
         "-o", "BatchMode=yes", "-i", str(stranger.identity), "-p", str(stranger.port),
         f"{stranger.user}@127.0.0.1", "echo in"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert real.stdout == "in\n", real.stderr


def test_fingerprint_accepts_only_that_key(stranger: Server, known: Path) -> None:
    right = fingerprint(stranger)
    wrong = "SHA256:" + "A" * 43
    ran = status(stranger, "--host-key-fingerprint", wrong)
    assert (ran.rc, code(ran)) == (5, "CK-SSH-FINGERPRINT")
    assert not known.exists()
    assert code(status(stranger, "--host-key-fingerprint", right)) == "CK-NOT-DEPLOYED"
    # Also when the host is known: the pin holds.
    assert code(status(stranger, "--host-key-fingerprint", wrong)) == "CK-SSH-FINGERPRINT"
    assert kit("status", stranger.target, *stranger.args, "--host-key-fingerprint", "MD5:1").rc == 2


def test_changed_key_is_refused_whatever_is_said(stranger: Server, known: Path, tmp_path: Path) -> None:
    keygen(tmp_path / "old")
    known.write_text(known_line(stranger.port, tmp_path / "old.pub"))
    before = known.read_bytes()
    for more in ([], ["--accept-new-host-key"], ["--host-key-fingerprint", fingerprint(stranger)]):
        ran = status(stranger, *more)
        assert (ran.rc, code(ran)) == (5, "CK-SSH-CHANGED-KEY")
        assert "CHANGED" in ran.json["error"]["message"]
        assert f"ssh-keygen -R '[127.0.0.1]:{stranger.port}' -f '{known}'" in ran.json["error"]["hint"]
    assert known.read_bytes() == before
    subprocess.run(
        ["ssh-keygen", "-R", f"[127.0.0.1]:{stranger.port}", "-f", str(known)],
        check=True, capture_output=True,
    )  # fmt: skip
    assert code(status(stranger, "--host-key-fingerprint", fingerprint(stranger))) == "CK-NOT-DEPLOYED"


def test_new_key_type_is_not_called_an_attack_but_wants_a_fingerprint(
    stranger: Server, known: Path, tmp_path: Path
) -> None:
    keygen(tmp_path / "old", "ecdsa")
    known.write_text(known_line(stranger.port, tmp_path / "old.pub"))
    ran = status(stranger, "--accept-new-host-key")
    assert (ran.rc, code(ran)) == (5, "CK-SSH-NEW-KEY-TYPE")
    assert "key of a new type: ssh-ed25519" in ran.json["error"]["message"]
    assert code(status(stranger, "--host-key-fingerprint", fingerprint(stranger))) == "CK-NOT-DEPLOYED"


def test_second_recorded_type_is_asked_for(open_dir: Path, user: str, identity: Path, tmp_path: Path) -> None:
    """A server with two keys, the record holds only its RSA key: no alarm, that one is proposed."""
    rsa = keygen(open_dir / "rsa_host", "rsa")
    if os.geteuid() == 0:
        shutil.chown(rsa, user)
    server = start_sshd(open_dir / "twokeys", user, identity, extra=f"HostKey {rsa}\n")
    try:
        server.known_hosts.write_text(known_line(server.port, rsa.with_name("rsa_host.pub")))
        assert code(status(server)) == "CK-NOT-DEPLOYED"
    finally:
        server.stop()


def test_hashed_and_revoked_entries(stranger: Server, known: Path) -> None:
    known.write_text(known_line(stranger.port, stranger.folder / "hostkey.pub"))
    subprocess.run(["ssh-keygen", "-H", "-f", str(known)], check=True, capture_output=True)
    assert known.read_text().startswith("|1|")
    assert code(status(stranger)) == "CK-NOT-DEPLOYED"
    known.write_text("@revoked " + known_line(stranger.port, stranger.folder / "hostkey.pub"))
    assert code(status(stranger, "--accept-new-host-key")) == "CK-SSH-REVOKED"


def test_wrong_key_names_what_was_offered(server: Server, tmp_path: Path) -> None:
    other = keygen(tmp_path / "other")
    ran = status(server, "--identity", other)
    assert (ran.rc, code(ran)) == (5, "CK-SSH-AUTH")
    assert str(other) in ran.json["error"]["message"]
    assert "publickey" in ran.json["error"]["message"]


def test_at_most_four_keys_are_offered(sshd: Server, tmp_path: Path) -> None:
    """The fifth key would be right; a server that counts would have hung up by then."""
    lines = ["Host board", " HostName 127.0.0.1", f" Port {sshd.port}", f" User {sshd.user}"]
    lines += [f" IdentityFile {keygen(tmp_path / f'k{i}')}" for i in range(4)]
    config = tmp_path / "config"
    config.write_text("\n".join([*lines, f" IdentityFile {sshd.identity}"]))
    args = ["--known-hosts", str(sshd.known_hosts), "--no-agent", "--ssh-config", str(config)]
    ran = kit("status", "board", *args, "--prefix", "/nonexistent/x", "--json")
    assert code(ran) == "CK-SSH-AUTH"
    assert ran.json["error"]["message"].count(str(tmp_path)) == 4
    config.write_text("\n".join([*lines[:6], f" IdentityFile {sshd.identity}"]))
    assert code(kit("status", "board", *args, "--prefix", "/nonexistent/x", "--json")) == "CK-NOT-DEPLOYED"


def test_key_with_a_passphrase(
    sshd: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: Path
) -> None:
    locked = tmp_path / "locked"
    shutil.copy(identity, locked)
    locked.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "sesame", "-f", str(locked)], check=True)
    ran = status(sshd, "--identity", locked)
    assert (ran.rc, code(ran)) == (5, "CK-SSH-KEY")
    monkeypatch.setenv("COLIBRI_SSH_PASSPHRASE", "sesame")
    assert code(status(sshd, "--identity", locked)) == "CK-NOT-DEPLOYED"


@pytest.mark.skipif(os.geteuid() != 0, reason="checking a password needs a server that may read /etc/shadow")
def test_password_right_and_wrong(
    open_dir: Path, user: str, identity: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "correct horse"
    subprocess.run(["chpasswd"], input=f"{user}:{secret}", text=True, check=True)
    server = start_dropbear(open_dir / "dropbear-root", user, identity, as_root=True)
    try:
        other = keygen(tmp_path / "other")
        args = ["--identity", str(other), *server.args[2:]]
        file = tmp_path / "password"
        file.write_text("battery staple\n")
        ran = status(server, "--password-file", file, args=args)
        assert (ran.rc, code(ran)) == (5, "CK-SSH-PASSWORD")
        assert "battery" not in ran.out + ran.err
        file.write_text(secret + "\n")
        assert code(status(server, "--password-file", file, args=args)) == "CK-NOT-DEPLOYED"
        monkeypatch.setenv("COLIBRI_SSH_PASSWORD", secret)
        assert code(status(server, args=args)) == "CK-NOT-DEPLOYED"
    finally:
        server.stop()
        subprocess.run(["passwd", "-l", user], check=True, capture_output=True)


def test_wrong_password_for_an_ordinary_sshd(sshd: Server, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("nonsense\n")
    ran = status(sshd, "--identity", keygen(tmp_path / "other"), "--password-file", file)
    assert (ran.rc, code(ran)) == (5, "CK-SSH-PASSWORD")
    assert ran.json["error"]["state"] == "the board was not touched"


def test_proxy_jump(sshd: Server, dropbear: Server, deploy: Deploy, prefix: Path, tmp_path: Path) -> None:
    """Through OpenSSH's server to dropbear, by aliases that only the config knows."""
    config = tmp_path / "config"
    config.write_text(
        f"Host gate\n HostName 127.0.0.1\n Port {sshd.port}\n User {sshd.user}\n"
        f" IdentityFile {sshd.identity}\n"
        f"Host board\n HostName 127.0.0.1\n Port {dropbear.port}\n User {dropbear.user}\n ProxyJump gate\n"
        f" IdentityFile {dropbear.identity}\n"
        f"Host lost\n HostName 127.0.0.1\n Port {free_port()}\n User x\n ProxyJump gate\n"
    )
    known = tmp_path / "known"
    known.write_text(sshd.known_hosts.read_text())
    args = ["--known-hosts", str(known), "--no-agent", "--ssh-config", str(config)]
    ran = deploy(dropbear, "--json", target="board", args=args)
    assert (ran.rc, code(ran)) == (5, "CK-SSH-UNKNOWN-HOST")  # the board behind the gate is checked too
    known.write_text(known.read_text() + dropbear.known_hosts.read_text())
    ran = deploy(dropbear, "--json", target="board", args=args)
    assert ran.rc == 0, ran.err
    assert (prefix / "current").is_symlink()
    ran = kit("status", "lost", *args, "--json")
    assert (ran.rc, code(ran)) == (4, "CK-SSH-JUMP")


def test_boards_that_are_not_there(sshd: Server) -> None:
    port = free_port()
    ran = kit("status", f"127.0.0.1:{port}", *sshd.args, "--json")
    assert (ran.rc, code(ran)) == (4, "CK-SSH-UNREACHABLE")
    assert "refuses connections" in ran.json["error"]["message"]
    ran = kit("status", "no-such-board.invalid", *sshd.args, "--json")
    assert (ran.rc, code(ran)) == (4, "CK-SSH-NAME")
    assert ran.json["error"]["state"] == "the board was not touched"


def test_silent_and_foreign_servers(sshd: Server) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        ran = kit("status", f"127.0.0.1:{port}", *sshd.args, "--connect-timeout", "0.5", "--json")
        assert (ran.rc, code(ran)) == (4, "CK-SSH-PROTOCOL")


def test_nothing_of_paramiko_reaches_the_terminal(sshd: Server) -> None:
    """A process of its own: its logger's last resort would write tracebacks to stderr."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "colibri_kit", "status", target, *sshd.args, "--connect-timeout", "0.3"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "error CK-SSH-PROTOCOL",
        "  state",
        "  next",
    ]


@pytest.mark.parametrize("target", ["a b", "-oProxyCommand=x", "x@", "h:0", "h:99999", "h;id", "u@-h"])
def test_targets_that_are_none(target: str) -> None:
    assert kit("status", "--", target).rc == 2


SUDO = """#!/bin/sh
# A sudo with one user and one password, which it logs.
echo "$*" >> "{log}"
[ "$1" = -n ] && {{ echo 'sudo: a password is required' >&2; exit 1; }}
[ "$1 $2 $3" = '-k -S -p' ] || exit 9
shift 5
read -r word
[ "$word" = sesame ] || {{ echo 'sudo: 1 incorrect password attempt' >&2; exit 1; }}
exec "$@"
"""


@pytest.fixture
def sudo_sshd(open_dir: Path, user: str, identity: Path) -> Iterator[Server]:
    """An sshd whose PATH begins with a sudo of ours."""
    tools = open_dir / "sudo-bin"
    tools.mkdir(exist_ok=True)
    log = open_dir / "sudo-log"
    log.write_text("")
    log.chmod(0o666)
    (tools / "sudo").write_text(SUDO.format(log=log))
    (tools / "sudo").chmod(0o755)
    server = start_sshd(
        open_dir / "sudo-sshd", user, identity, extra=f"SetEnv PATH={tools}:/usr/bin:/bin:/usr/sbin:/sbin\n"
    )
    yield server
    server.stop()


def test_sudo_password_goes_to_sudo_and_nowhere_else(
    sudo_sshd: Server, deploy: Deploy, prefix: Path, tmp_path: Path, open_dir: Path, model: Path
) -> None:
    file = tmp_path / "sudo-password"
    file.write_text("wrong\n")
    ran = deploy(sudo_sshd, "--sudo", "--sudo-password-file", file, "--json")
    assert (ran.rc, code(ran)) == (5, "CK-SUDO-PASSWORD")
    ran = deploy(sudo_sshd, "--sudo", "--json")
    assert (ran.rc, code(ran)) == (5, "CK-SUDO-PASSWORD")
    assert not prefix.exists()
    file.write_text("sesame\n")
    ran = deploy(sudo_sshd, "--sudo", "--sudo-password-file", file, "--json")
    assert ran.rc == 0, ran.err
    assert (open_dir / "sudo-log").read_text().count("-k -S -p") > 10
    for path in prefix.rglob("*"):
        if path.is_file():
            assert b"sesame" not in path.read_bytes()
    assert "sesame" not in (open_dir / "sudo-log").read_text()
    shard = "experts-0000.coli"
    assert (prefix / "current/model.coli" / shard).read_bytes() == (model / shard).read_bytes()
