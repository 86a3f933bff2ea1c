"""Who gets in the way at the start and at the end: a stopped neighbour, a terminal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.service.rig import SANITIZE, Service, read_all, request, tool


def test_a_stopped_neighbour_on_the_unix_socket(model: Path, tmp_path: Path) -> None:
    """Its queue is full: whoever connects waits for it. Starting beside it ends at once, by name."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        theirs.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(str(path))
        done = subprocess.run(
            [tool(SANITIZE), "serve", "--model", model, "--listen", "none", "--unix", path],
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        for one in waiting:
            one.close()
    assert done.returncode == 1, done
    assert f"--unix {path}: somebody answers there already" in done.stderr
    assert path.is_socket()


@pytest.mark.parametrize("options", [(), ("--supervise",)], ids=["alone", "supervised"])
def test_ctrl_c_on_a_terminal_lets_the_answer_finish(model: Path, options: tuple[str, ...]) -> None:
    """A terminal signals the whole group: that is still one word to stop, not two."""
    ask = json.dumps({"prompt": "a", "max_tokens": 450, "seed": 1, "temperature": 0, "stream": True})
    for _ in range(4):
        with Service(model, *options, group=True) as s, s.connect() as client:
            client.sendall(request("POST", "/v1/completions", ask.encode()))
            seen = b""
            while seen.count(b"data: ") < 2:
                seen += client.recv(65536)
            os.killpg(s.process.pid, signal.SIGINT)
            seen += read_all(client)
            assert b"data: [DONE]" in seen
            assert s.process.wait(60) == 0
