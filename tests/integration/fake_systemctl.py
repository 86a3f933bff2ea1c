#!/usr/bin/env python3
"""A stand-in for systemctl and journalctl that really keeps the unit it finds running.

Installed under both names in a folder that comes first in PATH; its state lies beside it. It
does of systemd what deploy relies on: Type=notify, User=, Restart= with
RestartPreventExitStatus=, stopping with SIGTERM, and the properties of `show`. A start is a
process of its own (`run`), so that `start --no-block` returns at once as the real one does.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).absolute().parent
UNIT = Path("/etc/systemd/system/colibri.service")
RESTART_AFTER = 0.5  # seconds, in place of RestartSec=


def load() -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((HERE / "state.json").read_text())
        return found
    except OSError:
        return {"ActiveState": "inactive", "SubState": "dead", "Result": "success", "ExecMainStatus": 0,
                "NRestarts": 0, "MainPID": 0, "runner": 0}  # fmt: skip


def save(**changes: Any) -> None:
    state = {**load(), **changes}
    new = HERE / f"state.{os.getpid()}"
    new.write_text(json.dumps(state))
    new.replace(HERE / "state.json")


def unit() -> configparser.SectionProxy:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[method-assign,assignment]
    parsed.read_string(UNIT.read_text())
    return parsed["Service"]


def once(service: configparser.SectionProxy) -> int:
    """Starts the program, follows it to its end; its wait status."""
    notify = HERE / "notify"
    notify.unlink(missing_ok=True)
    who = pwd.getpwnam(service["User"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(notify))
        os.chown(notify, who.pw_uid, who.pw_gid)
        sock.settimeout(0.05)
        env = {"PATH": "/usr/bin:/bin", "NOTIFY_SOCKET": str(notify),
               "WATCHDOG_USEC": str(int(service["WatchdogSec"]) * 1_000_000)}  # fmt: skip
        drop = ["setpriv", f"--reuid={who.pw_uid}", f"--regid={who.pw_gid}", "--clear-groups"]
        with (HERE / "journal").open("ab") as out:
            child = subprocess.Popen([*drop, *service["ExecStart"].split()], env=env, stderr=out, stdout=out)
        save(MainPID=child.pid, ActiveState="activating", SubState="start")

        def stop(_number: int, _frame: object) -> None:
            save(ActiveState="deactivating", SubState="stop-sigterm")
            child.terminate()

        signal.signal(signal.SIGTERM, stop)
        while child.poll() is None:
            with contextlib.suppress(TimeoutError):
                if b"READY=1" in sock.recv(4096):
                    save(ActiveState="active", SubState="running")
    return child.returncode


def run() -> None:
    """What one start leads to: the program, its restarts."""
    save(runner=os.getpid(), NRestarts=0, Result="success", ExecMainStatus=0)
    while True:
        service = unit()
        status = once(service)
        stopped = load()["ActiveState"] == "deactivating"
        bad = status != 0 and not stopped
        final = str(status) in service["RestartPreventExitStatus"].split()
        result = "success" if not bad else "signal" if status < 0 else "exit-code"
        if not bad or final or service["Restart"] == "no":
            save(ActiveState="failed" if bad else "inactive", SubState="failed" if bad else "dead",
                 Result=result, ExecMainStatus=abs(status), MainPID=0, runner=0)  # fmt: skip
            return
        save(ActiveState="activating", SubState="auto-restart", Result=result, ExecMainStatus=abs(status))
        time.sleep(RESTART_AFTER)
        if load()["ActiveState"] == "deactivating":
            return
        save(NRestarts=load()["NRestarts"] + 1)


def main(words: list[str]) -> int:
    if Path(sys.argv[0]).name == "journalctl":
        with contextlib.suppress(OSError):
            print((HERE / "journal").read_text(), end="")
        return 0
    verb = words[0]
    with (HERE / "calls").open("a") as calls:
        print(*words, file=calls)
    if verb == "run":
        os.setsid()
        run()
    elif verb == "start":
        unit()
        subprocess.Popen(
            [sys.executable, __file__, "run"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    elif verb in ("stop", "disable"):
        runner = load()["runner"]
        with contextlib.suppress(ProcessLookupError):
            if runner:
                os.kill(runner, signal.SIGTERM)
            while runner:
                os.kill(runner, 0)
                time.sleep(0.02)
        save(ActiveState="inactive", SubState="dead", MainPID=0, runner=0)
        if verb == "disable":
            (HERE / "enabled").unlink(missing_ok=True)
    elif verb == "reset-failed":
        save(ActiveState="inactive", SubState="dead", NRestarts=0, Result="success", ExecMainStatus=0)
    elif verb == "enable":
        (HERE / "enabled").touch()
    elif verb == "show":
        state = load()
        for key in words[words.index("-p") + 1].split(","):
            print(f"{key}={state[key]}")
    elif verb != "daemon-reload":
        print(f"unknown verb {verb}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
