"""Transports without a network: quoting, this machine, doubles, targets, known_hosts, sudo."""

from __future__ import annotations

import io
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_kit.errors import AuthError, UsageError
from colibri_kit.transport import known_hosts
from colibri_kit.transport.base import CommandTimeout, Completed, ConnectionLost, PutFailed, script, sh_join
from colibri_kit.transport.fake import FakeTransport, FaultyTransport
from colibri_kit.transport.local import LocalTransport
from colibri_kit.transport.sshconfig import parse_target, resolve
from colibri_kit.transport.sudo import with_sudo

NASTY = ["it's", "$(id)", "`id`", "a b", '"', "\\", "", "*", "~", "-n", "line\nline", "雪", "!x", "$HOME"]


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=0))
def test_sh_join_is_read_back_by_a_real_shell(words: list[str]) -> None:
    line = sh_join(["printf", "%s\\0", *words])
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == (words or [""])


def test_sh_join_refuses_what_a_shell_cannot_carry() -> None:
    with pytest.raises(ValueError):
        sh_join(["a\0b"])
    with pytest.raises(ValueError):
        sh_join([])


def test_script_arguments_never_become_code(tmp_path: Path) -> None:
    done = LocalTransport().run(script('for a in "$@"; do printf "%s\\0" "$a"; done', *NASTY))
    assert done.out.decode().split("\0")[:-1] == NASTY


def test_local_run_stream_and_put(tmp_path: Path) -> None:
    local = LocalTransport()
    done = local.run(script("cat; echo oops >&2; exit 3"), stdin=b"in")
    assert done == Completed(3, b"in", b"oops\n")
    assert done.why == "oops"
    assert local.run(["/nonexistent/program"]).rc == 127
    assert local.run([str(tmp_path)]).rc == 126
    assert local.run(script("kill -9 $$")).rc == 137
    seen: list[bytes] = []
    assert local.stream(script("echo a; echo b"), on_out=seen.append).rc == 0
    assert b"".join(seen) == b"a\nb\n"
    path = tmp_path / "f"
    counted: list[int] = []
    local.put_stream(io.BytesIO(b"abc"), 3, str(path), mode=0o600, progress=counted.append)
    local.put_stream(io.BytesIO(b"def"), 3, str(path), mode=0o640, offset=3)
    assert path.read_bytes() == b"abcdef" and path.stat().st_mode & 0o777 == 0o640 and counted == [3]
    assert local.read(str(path), limit=4) == b"abcd"
    assert local.read(str(tmp_path / "none")) is None


def test_local_timeout_ends_the_whole_group(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    began = time.monotonic()
    with pytest.raises(CommandTimeout, match="did not end within"):
        LocalTransport().run(script(f"(sleep 1; touch {mark}) & wait"), timeout=0.2)
    assert time.monotonic() - began < 1
    time.sleep(1.1)
    assert not mark.exists()


def test_full_disk_is_told_from_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(PutFailed) as full:
        LocalTransport().put_stream(io.BytesIO(bytes(100)), 100, "/dev/full")
    assert full.value.no_space
    with pytest.raises(PutFailed) as other:
        LocalTransport().put_stream(io.BytesIO(b"x"), 1, str(tmp_path / "no" / "folder"))
    assert not other.value.no_space


def test_short_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost):
        LocalTransport().put_stream(io.BytesIO(b"ab"), 3, str(tmp_path / "f"))


def test_faulty_transport_cuts_once_and_for_good(tmp_path: Path) -> None:
    faulty = FaultyTransport(LocalTransport(), cut_after=5)
    faulty.put_stream(io.BytesIO(b"abc"), 3, str(tmp_path / "a"))
    with pytest.raises(ConnectionLost):
        faulty.put_stream(io.BytesIO(b"defg"), 4, str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == b"de"
    with pytest.raises(ConnectionLost):
        faulty.run(["true"])


@pytest.mark.parametrize(
    ("text", "user", "host", "port"),
    [
        ("board", None, "board", None),
        ("me@board:2222", "me", "board", 2222),
        ("me@corp@board", "me@corp", "board", None),
        ("fe80::1", None, "fe80::1", None),
        ("me@[fe80::1%eth0]:22", "me", "fe80::1%eth0", 22),
    ],
)
def test_targets(text: str, user: str | None, host: str, port: int | None) -> None:
    target = parse_target(text)
    assert (target.user, target.host, target.port) == (user, host, port)


@pytest.mark.parametrize(
    "text", ["", "@h", "u@", "h:", "h:x", "h:0", "h:65536", "-h", "a b", "h;x", "h\n", "[::1"]
)
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_target(text)


@pytest.mark.parametrize("openssh", [True, False])
def test_ssh_config_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openssh: bool) -> None:
    """The same hops from OpenSSH's own reader and from the fallback."""
    if not openssh:
        monkeypatch.setattr("shutil.which", lambda name: None)
    config = tmp_path / "config"
    config.write_text(
        "Host gate\n HostName gate.example\n User g\n Port 2200\n"
        "Host plc*\n HostName 10.0.0.9\n User p\n ProxyJump gate\n HostKeyAlias plc-key\n"
        f" IdentityFile {tmp_path}/key\n IdentitiesOnly yes\n UserKnownHostsFile {tmp_path}/kh\n"
        "Host direct\n ProxyJump none\n"
    )
    gate, board = resolve(parse_target("plc7"), config=config)
    assert (gate.host, gate.port, gate.user) == ("gate.example", 2200, "g")
    assert (board.host, board.port, board.user) == ("10.0.0.9", 22, "p")
    assert board.identities[0] == tmp_path / "key" and board.identities_only
    assert board.known_hosts[0] == tmp_path / "kh" and board.key_alias == "plc-key"
    assert [h.port for h in resolve(parse_target("x@plc7:99"), config=config)] == [2200, 99]
    assert resolve(parse_target("x@plc7:99"), config=config, port=7)[1].port == 7
    assert len(resolve(parse_target("direct"), config=config)) == 1


def test_proxy_jump_that_leads_to_itself(tmp_path: Path) -> None:
    from colibri_kit.errors import ConfigError

    config = tmp_path / "config"
    config.write_text("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with pytest.raises(ConfigError, match="leads to itself"):
        resolve(parse_target("a"), config=config)


def entry(text: str, tmp_path: Path) -> list[known_hosts.Entry]:
    file = tmp_path / "kh"
    file.write_text(text)
    return known_hosts.load([file])


def test_known_hosts_names(tmp_path: Path) -> None:
    """Against OpenSSH's own lookup, for every kind of name field."""
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGlW3Ilz6OyQ6C5pKFRHPWcOqlYHnSLtUFt8YDd8rz4F"
    names = ["board", "[board]:2222", "*.lab,!bad.lab", "10.0.0.?", "A,B"]
    lookups = [
        "board",
        "[board]:2222",
        "[board]:22",
        "x.lab",
        "bad.lab",
        "10.0.0.5",
        "10.0.0.55",
        "a",
        "b",
        "c",
    ]
    for name in names:
        entries = entry(f"# comment\n{name} {key}\n\nbroken\n", tmp_path)
        assert len(entries) == 1
        for lookup in lookups:
            real = subprocess.run(
                ["ssh-keygen", "-F", lookup, "-f", str(tmp_path / "kh")], capture_output=True, check=False
            )
            assert bool(known_hosts.recorded(entries, lookup)) == (real.returncode == 0), (name, lookup)


def test_judgements(tmp_path: Path) -> None:
    def judge(line: str, kind: str, blob: bytes) -> str:
        mine = known_hosts.recorded(entry(line, tmp_path), "h")
        return known_hosts.judge(mine, kind, blob)

    assert judge("h ssh-ed25519 AAAA\n", "ssh-ed25519", b"\0\0\0") == "known"
    assert judge("h ssh-ed25519 AAAA\n", "ssh-ed25519", b"\0\0\1") == "changed"
    assert judge("h ssh-rsa AAAA\n", "ssh-ed25519", b"\0\0\1") == "new-type"
    assert judge("g ssh-rsa AAAA\n", "ssh-ed25519", b"\0\0\1") == "new-host"
    assert judge("@revoked h ssh-rsa AAAA\n", "ssh-rsa", b"\0\0\0") == "revoked"
    assert judge("@cert-authority h ssh-rsa AAAA\n", "ssh-rsa", b"\0\0\0") == "new-host"


def test_record_appends_after_a_missing_newline(tmp_path: Path) -> None:
    file = tmp_path / "new" / "kh"
    known_hosts.record(file, "h", "ssh-rsa", b"\0\0\0")
    assert file.read_text() == "h ssh-rsa AAAA\n"
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.write_text("x ssh-rsa BBBB")
    known_hosts.record(file, "h", "ssh-rsa", b"\0\0\0")
    assert file.read_text() == "x ssh-rsa BBBB\nh ssh-rsa AAAA\n"


def test_sudo_that_would_not_eat_the_password_is_refused() -> None:
    """A sudo that lets `cat` see the password line must never be given file uploads."""
    board = FakeTransport(
        {
            "-n": Completed(1, b"", b"sudo: a password is required"),
            "cat": lambda call, stdin: Completed(0, stdin),
        }
    )
    with pytest.raises(AuthError, match="refused the password"):
        with_sudo(board, lambda: "secret")
    board = FakeTransport({"-n": Completed(127, b"", b"sh: sudo: not found")})
    with pytest.raises(AuthError, match="has no sudo"):
        with_sudo(board, lambda: "secret")
    assert all("secret" not in word for call in board.calls for word in call)


def test_sudo_puts_the_password_before_the_file_and_counts_only_the_file() -> None:
    got: list[bytes] = []

    def accept(call: list[str], stdin: bytes) -> Completed:
        got.append(stdin)
        return Completed(0, stdin.partition(b"\n")[2])

    board = FakeTransport({"-n": Completed(1), "-S": accept})
    root = with_sudo(board, lambda: "pw")
    counted: list[int] = []
    root.put_stream(io.BytesIO(b"data"), 4, "/x", progress=counted.append)
    assert got[-1] == b"pw\ndata"
    assert sum(counted) == 4
