"""`colibri health`: a client in the engine itself, against the real service and against impostors."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import engine_build as eb
import pytest

from tests.service.rig import Service

TOKEN = "0123456789abcdef0123"


def health(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [eb.tool(), "health", *map(str, words)], capture_output=True, text=True, timeout=60, check=False
    )


def test_it_hears_what_the_service_says(service: Service, model: Path) -> None:
    at = ("--listen", f"127.0.0.1:{service.port}")
    golden = json.loads((model / "manifest.json").read_text())["golden"]["sha256"]
    done = health(*at, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    page = service.json("/health")
    assert (told["status"], told["golden"], told["model"]) == ("ok", golden, page["model"])
    assert 0 <= page["uptime_s"] - told["uptime_s"] < 30
    assert (told["text"], told["tokens"]) == (None, 0)
    # The same text as any other client gets, with everything that JSON must escape.
    prompt = 'a "quoted" \\ line\n\ttab, grün 雪'
    done = health(*at, "--json", "--prompt", prompt, "-n", 7)
    told = json.loads(done.stdout)
    want = service.complete(prompt, max_tokens=7, temperature=0)
    assert told["text"] == want["choices"][0]["text"]
    assert told["finish"] == want["choices"][0]["finish_reason"]
    assert told["tokens"] == want["usage"]["completion_tokens"] == 7
    text = health(*at).stdout
    assert text.startswith("ok: ") and golden in text


def test_every_address_means_loopback(model: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# ours\n\n{TOKEN}\n")
    tokens.chmod(0o600)
    path = tmp_path / "api.sock"
    with Service(model, "--listen", "0.0.0.0:0", "--token-file", str(tokens), "--unix", str(path)) as service:
        at = ("--listen", f"0.0.0.0:{service.port}")
        assert health(*at).returncode == 0  # /health needs no token
        refused = health(*at, "--prompt", "x")
        assert refused.returncode == 1 and "401" in refused.stderr
        assert health(*at, "--prompt", "x", "--token-file", tokens).returncode == 0
        assert health("--unix", path, "--prompt", "x").returncode == 0


def test_nobody_and_impostors(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = health("--listen", f"127.0.0.1:{port}", "--json")
    assert done.returncode == 1
    assert "nobody answers" in json.loads(done.stdout)["error"]["message"]
    assert health("--unix", tmp_path / "none").returncode == 1
    good = b'HTTP/1.0 200 OK\r\n\r\n{"status":"ok","model":"m","golden":"%s","uptime_s":1}'
    for answer, words in [
        (b"", "does not speak HTTP"),
        (b"SSH-2.0-x\r\n", "does not speak HTTP"),
        (b"HTTP/1.0 200 OK\r\n", "does not speak HTTP"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "without JSON"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "is no colibri service"),
        (b"HTTP/1.0 404 X\r\n\r\n{}", "is no colibri service"),
        (
            b"HTTP/1.0 503 X\r\n\r\n" + good.split(b"\r\n\r\n")[1].replace(b'"ok"', b'"stuck"'),
            "not well: stuck",
        ),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 200_000, "more than 65536 bytes"),
    ]:
        with impostor(answer.replace(b"%s", b"ab" * 32)) as at:
            done = health("--listen", f"127.0.0.1:{at}")
        assert done.returncode == 1, answer
        assert words in done.stderr, (answer, done.stderr)
    with impostor(good.replace(b"%s", b"ab" * 32)) as at:
        done = health("--listen", f"127.0.0.1:{at}", "--prompt", "x")
    assert done.returncode == 1 and "gave no answer to the prompt" in done.stderr
    with impostor(None) as at:
        done = health("--listen", f"127.0.0.1:{at}", "--timeout", "1")
    assert done.returncode == 1 and "within 1 s" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--listen", "board.local:80"), "an address in digits"),
        (("--unix", "/" + "x" * 200), "at most"),
        (("--token-file", "/no/such/file"), "No such file"),
        (("--prompt", "x" * 20000), "longer than"),
        (("--timeout", "0"), "from 1 to"),
    ],
)
def test_usage(words: tuple[str, ...], told: str, service: Service) -> None:
    at = () if words[0] == "--listen" else ("--listen", f"127.0.0.1:{service.port}")
    done = health(*at, *words)
    assert done.returncode == 2 and told in done.stderr


@contextmanager
def impostor(answer: bytes | None) -> Iterator[int]:
    """Answers every connection with the same bytes; None: never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            held = []
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                held.append(peer)
                if answer is not None:
                    peer.recv(65536)
                    try:
                        peer.sendall(answer)
                    except OSError:
                        continue
                    finally:
                        peer.close()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
