"""Who may ask: tokens, addresses, sockets."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.service.rig import Service, parse, read_all, request


def test_tokens(model: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# who may ask\nfirst-token-0123456789\nsecond-token-0123456789\n")
    tokens.chmod(0o600)
    with Service(
        model, "--token-file", str(tokens), "--allow-host", "board.lan", "--listen", "0.0.0.0:0"
    ) as s:
        for good in ("first-token-0123456789", "second-token-0123456789"):
            assert s.get("/v1/models", Authorization=f"Bearer {good}", Host="board.lan:8080")[0] == 200
            assert (
                s.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, Authorization=f"bearer {good}")[0]
                == 200
            )
        for bad in ("", "Bearer", "Bearer ", "Bearer first-token-012345678", "Basic first-token-0123456789",
                    "Bearer first-token-01234567890", "Bearer " + "x" * 4000):  # fmt: skip
            for path in ("/v1/models", "/metrics", "/status"):
                assert s.get(path, **({"Authorization": bad} if bad else {}))[0] == 401
            assert (
                s.post("/v1/completions", {"prompt": "x"}, **({"Authorization": bad} if bad else {}))[0]
                == 401
            )
        assert s.get("/health")[0] == s.get("/")[0] == 200
        assert s.metrics_with("first-token-0123456789")["unauthorised_total"] == 28
        journal = s.journal.read_text()
    assert "token-0123" not in journal


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "0.0.0.0:0"], "--token-file"),
        (["--listen", "[::]:0"], "--token-file"),
        (["--listen", "nowhere"], "expected ADDRESS:PORT"),
        (["--listen", "board:80"], "an address in digits"),
        (["--listen", "127.0.0.1:99999"], "expected ADDRESS:PORT"),
        (["--listen", "none"], "nobody could ask"),
        (["--token-file", "/nonexistent"], "No such file"),
        (["--allow-host", "a:80"], "without port"),
        (["--sequences", "40"], "--batch"),
    ],
)
def test_what_is_refused_before_loading(model: Path, options: list[str], words: str) -> None:
    import engine_build as eb

    done = eb.colibri("serve", "--model", model, *options)
    assert done.returncode == 2
    assert words in done.stderr.decode()
    assert b"golden" not in done.stderr


def test_a_token_file_that_all_may_read_is_refused(model: Path, tmp_path: Path) -> None:
    import engine_build as eb

    tokens = tmp_path / "tokens"
    tokens.write_text("first-token-0123456789\n")
    tokens.chmod(0o644)
    done = eb.colibri("serve", "--model", model, "--token-file", tokens)
    assert done.returncode == 2
    assert b"chmod 600" in done.stderr
    tokens.write_text("short\n")
    tokens.chmod(0o600)
    assert b"characters" in eb.colibri("serve", "--model", model, "--token-file", tokens).stderr


def test_a_port_that_is_taken(service: Service, model: Path) -> None:
    import engine_build as eb

    done = eb.colibri("serve", "--model", model, "--listen", f"127.0.0.1:{service.port}")
    assert done.returncode == 1
    assert b"Address already in use" in done.stderr


def test_a_unix_socket(model: Path, tmp_path: Path) -> None:
    import engine_build as eb

    path = tmp_path / "socket"
    with Service(model, "--unix", str(path)) as s:
        assert path.stat().st_mode & 0o777 == 0o660
        with socket.socket(socket.AF_UNIX) as c:
            c.connect(str(path))
            c.sendall(request("GET", "/health"))
            assert parse(read_all(c))[0] == 200
        done = eb.colibri("serve", "--model", model, "--listen", "none", "--unix", path)
        assert b"somebody answers there already" in done.stderr
        s.process.kill()
        s.process.wait()
        assert path.exists()
    with Service(model, "--unix", str(path), "--listen", "127.0.0.1:0"):
        pass  # a leftover is no obstacle
    assert not path.exists()
