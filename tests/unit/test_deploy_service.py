"""Services of a release: what a recipe makes of them, what a board's record may say, when one is well."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from colibri_kit.config import load_board, load_recipe
from colibri_kit.deploy import act, back, health, job, keeper, plan, services, serving
from colibri_kit.deploy.model import Parcel, Part
from colibri_kit.deploy.record import check_of
from colibri_kit.deploy.services import install
from colibri_kit.errors import PreflightError
from colibri_kit.transport.base import Completed, sh_join
from colibri_kit.transport.fake import FakeTransport

GIB = 1 << 30
GOLDEN = "ab" * 32
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SETTINGS = plan.Settings(budget=GIB, threads=4)
ANALYZE = shutil.which("systemd-analyze")


def parcel(size: int = 4 * 10**9) -> Parcel:
    return Parcel("m", "00" * 16, GOLDEN, (Part("dense.coli", Path("x"), size, "11" * 32),), 4096, 0)


def spec_of(recipe: str) -> serving.Spec:
    found, _ = load_recipe(str(RECIPES / recipe))
    return job.service_of(load_board(found.board), parcel(), SETTINGS, found)


def rendered(spec: serving.Spec, settings: plan.Settings = SETTINGS) -> services.Rendered:
    made = services.render(spec.kind, services.of_spec("/opt/colibri", "colibri", settings, spec))
    assert made is not None
    return made


# ---- what a board's record may say ---------------------------------------------------


def test_record_comes_back_as_it_went() -> None:
    for name in ("rpi4-gateway.yaml", "a53-plc.yaml"):
        spec = spec_of(name)
        told = json.loads(json.dumps({"service": spec.as_json()}))
        assert serving.of_release(told) == spec
    check = health.Check("say\n'$x'", 9, "y")
    assert check_of(json.loads(json.dumps({"check": dataclasses.asdict(check)}))) == check


def test_tampered_records_put_nothing_into_unit_files() -> None:
    bad = "x\nExecStartPre=/bin/sh -c reboot"
    doc = spec_of("rpi4-gateway.yaml").as_json()
    doc.update(user=bad, restart=bad, memory_max="1", watchdog=-5)
    doc["options"].update(
        listen=bad, unix=bad, token_file=bad, allow_host=[bad, "ok", 3], queue=bad, drain=-1, log=bad, lock=1
    )
    spec = serving.of_release({"service": doc})
    assert spec is not None
    text = rendered(spec).text + spec.options_text(SETTINGS)
    assert "reboot" not in text and "allow-host ok" in text
    assert (spec.user, spec.restart, spec.watchdog, spec.options.drain) == ("", "on-failure", 300, 30)
    for odd in (None, 3, "none", "x", {"kind": "upstart"}, {"kind": bad}, []):
        assert serving.of_release({"service": odd}) is None
    old = serving.of_release({"service": "sysv"})
    assert old is not None and not old.options_file
    assert check_of({"check": {"prompt": 3, "max_new": True, "expect": None}}) == health.Check()


# ---- definitions ----------------------------------------------------------------------


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("offload", ["", "/dev/ttyGS0"])
@pytest.mark.parametrize("name", ["rpi4-gateway.yaml", "a53-plc.yaml"])
def test_systemd_has_nothing_to_say_against_the_unit(name: str, offload: str, tmp_path: Path) -> None:
    assert ANALYZE is not None
    text = rendered(spec_of(name), plan.Settings(budget=GIB, offload=offload)).text
    unit = tmp_path / "colibri.service"
    unit.write_text(text.replace("/opt/colibri/current/colibri ", "/bin/true "))
    done = subprocess.run([ANALYZE, "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(text.replace("Type=notify", "Type=notifi"))
    done = subprocess.run([ANALYZE, "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert done.stderr != ""  # it would have said so


def test_systemd_unit_follows_the_recipe() -> None:
    spec = spec_of("rpi4-gateway.yaml")
    lines = rendered(spec, dataclasses.replace(SETTINGS, offload="/dev/ttyGS0")).text.splitlines()
    for line in (
        "Type=notify", "NotifyAccess=main", "WatchdogSec=600", "TimeoutStopSec=75", "Restart=on-failure",
        "RestartPreventExitStatus=2 3 4 5", "ExecReload=/bin/kill -HUP $MAINPID", "RuntimeDirectory=colibri",
        "ExecStart=/opt/colibri/current/colibri serve --model /opt/colibri/current/model.coli "
        "--listen 0.0.0.0:8080 --unix /run/colibri/api.sock --options /opt/colibri/current/serve.options",
    ):  # fmt: skip
        assert line in lines
    # A serial link: no device rules at all, or one that is plugged in later stays locked out.
    assert not [line for line in lines if line.startswith(("PrivateDevices", "ProtectClock", "Device"))]
    # Nothing loads the model before `serve` does: it takes the time of a start, twice.
    assert not [line for line in lines if line.startswith("ExecStartPre") and "colibri check" in line]
    plain = rendered(spec_of("a53-plc.yaml")).text.splitlines()
    assert {"PrivateDevices=yes", "ProtectClock=yes", "Restart=always"} <= set(plain)
    assert "Restart=no" in rendered(dataclasses.replace(spec, restart="never")).text.splitlines()


@pytest.mark.parametrize("kind", ["openrc", "sysv"])
def test_init_scripts_leave_keeping_up_to_the_engine(kind: str, tmp_path: Path) -> None:
    spec = dataclasses.replace(spec_of("rpi4-gateway.yaml"), kind=kind)
    text = rendered(spec).text
    assert "--supervise --watchdog 600" in text and "supervise-daemon" not in text
    assert "HUP" in text and "75" in text
    assert "--supervise" not in rendered(dataclasses.replace(spec, restart="never")).text
    file = tmp_path / "script"
    file.write_text(text)
    subprocess.run(["sh", "-n", str(file)], check=True)


# ---- a service that is waited for -----------------------------------------------------

SPEC = serving.Spec("systemd", serving.ServeOptions(listen="127.0.0.1:9"), user="me", memory_max=GIB)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """time.monotonic and time.sleep of the keeper, without waiting."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(keeper.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(keeper.time, "sleep", sleep)
    return now


def board(clock: list[float], *, born: float, golden: str = GOLDEN, show: str = "ActiveState=active",
          text: str = " world", refuses: bool = False) -> FakeTransport:  # fmt: skip
    """A board whose service answers since ``born`` (by the clock; inf = never)."""

    def ask(call: list[str], _stdin: bytes) -> Completed:
        clock[0] += 0.1
        if born > clock[0]:
            return Completed(
                1, b"", b"colibri health: error: nobody answers on 127.0.0.1:9: Connection refused"
            )
        asked = "--prompt" in call
        if asked and refuses:
            return Completed(
                1, b"", b"colibri health: error: 127.0.0.1:9 refused the prompt with status 500: x"
            )
        told = {"uptime_s": clock[0] - born, "golden": golden, "text": text if asked else None}
        return Completed(0, json.dumps(told).encode())

    return FakeTransport(
        {
            "health": ask, "show": Completed(0, show.encode()), "id": Completed(0, b"5"),
            "command -v": Completed(0), "cat >": Completed(0), "mv": Completed(0), "systemctl": Completed(0),
            "journalctl": Completed(0, b'{"event":"x"}\ncolibri serve: error: golden differs\nlast\n'),
        }
    )  # fmt: skip


def up(transport: FakeTransport, check: health.Check | None = None, timeout: float = 60) -> health.Health:
    kept = keeper.Keeper(transport, "/opt/colibri", SPEC, SETTINGS)
    return kept.bring_up("r1", GOLDEN, check or health.Check(), timeout)


def test_service_that_comes_up_late_is_waited_for(clock: list[float]) -> None:
    transport = board(clock, born=1030)
    assert up(transport) == health.Health(True, "", GOLDEN)
    asked = [c for c in transport.calls if "health" in c]
    assert asked[0][:5] == ["/opt/colibri/releases/r1/colibri", "health", "--json", "--listen", "127.0.0.1:9"]
    assert "--prompt" in asked[-1] and len(asked) < 40


def test_an_old_process_or_another_model_is_not_this_release(clock: list[float]) -> None:
    old = up(board(clock, born=900), timeout=20)
    assert not old.ok and "old answers, not the one just started" in old.reason
    other = up(board(clock, born=clock[0] + 1, golden="cd" * 32))
    assert not other.ok and "golden cdcdcdcdcdcd, r1 has abababababab" in other.reason
    mute = up(board(clock, born=clock[0] + 1, refuses=True))
    assert not mute.ok and "gave no token" in mute.reason and "status 500" in mute.reason
    wrong = up(board(clock, born=clock[0] + 1, text=" moon"), health.Check("hello", 2, "world"))
    assert not wrong.ok and "' moon', without 'world'" in wrong.reason


@pytest.mark.parametrize(
    ("show", "told"),
    [
        ("ActiveState=failed\nResult=exit-code\nExecMainStatus=5", "status 5 (its golden does not match)"),
        (
            "ActiveState=activating\nSubState=auto-restart\nResult=exit-code\nExecMainStatus=1",
            "status 1 (an error",
        ),
        (
            "ActiveState=activating\nSubState=start\nNRestarts=2\nResult=oom-kill\nExecMainStatus=9",
            "out of memory",
        ),
        ("ActiveState=failed\nResult=watchdog\nExecMainStatus=9", "the watchdog killed it"),
        ("ActiveState=failed\nResult=signal\nExecMainStatus=11", "signal 11"),
        ("ActiveState=inactive\nResult=success\nExecMainStatus=0", "has ended"),
    ],
)
def test_service_that_fell_is_not_waited_for(show: str, told: str, clock: list[float]) -> None:
    well = up(board(clock, born=float("inf"), show=show), timeout=3600)
    assert not well.ok and told in well.reason
    assert well.reason.endswith("it said: colibri serve: error: golden differs")
    assert clock[0] < 1030


def test_service_that_never_answers_has_its_time(clock: list[float]) -> None:
    well = up(board(clock, born=float("inf"), show="ActiveState=activating\nSubState=start"), timeout=300)
    assert not well.ok and "not well within 300 s: nobody answers" in well.reason
    assert 1300 <= clock[0] < 1310


# ---- users, tokens, devices -----------------------------------------------------------


def in_shell(tools: dict[str, str], tmp_path: Path) -> Callable[[list[str], bytes], Completed]:
    """Runs a command here, with these programs first in PATH."""
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(call: list[str], _stdin: bytes) -> Completed:
        done = subprocess.run(
            ["sh", "-c", sh_join(call)], capture_output=True, check=False,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        )  # fmt: skip
        return Completed(done.returncode, done.stdout, done.stderr)

    return run


def test_user_is_made_where_it_is_missing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    tools = {"id": f"[ -f {made} ] && echo 7 || exit 1", "useradd": f'echo "$@" > {made}'}
    run = in_shell(tools, tmp_path)
    assert install.user(FakeTransport({"": run})) == "colibri"
    assert made.read_text().split()[-1] == "colibri" and "--system" in made.read_text()
    made.unlink()
    in_shell({"useradd": "exit 1"}, tmp_path)
    assert install.user(FakeTransport({"": run})) == "nobody"
    with pytest.raises(PreflightError, match="no user gateway"):
        install.user(FakeTransport({"": run}), "gateway")


def test_board_with_another_service_manager_is_refused() -> None:
    with pytest.raises(PreflightError, match=r"kept by openrc, .* but fake board has no rc-service"):
        install.check_manager(FakeTransport({"rc-service": Completed(127)}), "openrc")
    install.check_manager(FakeTransport({"systemctl": Completed(0)}), "systemd")


def test_device_group(tmp_path: Path) -> None:
    device = tmp_path / "ttyX"
    device.touch()
    run = in_shell({"ls": "echo 'crw-rw---- 1 root plugdev 166, 0 Jan 1 x'"}, tmp_path)
    # Only paths under /dev are devices: the script is run by itself for one that is here.
    text = install._DEVICE_GROUP
    done = subprocess.run(["sh", "-c", text, "sh", str(device)], capture_output=True, text=True, check=True,
                          env={"PATH": f"{tmp_path}:/usr/bin:/bin"})  # fmt: skip
    assert done.stdout == "plugdev\n"
    assert install.groups(FakeTransport({"": run}), "tty:/dev/no-such-tty@921600") == ("dialout",)
    assert install.groups(FakeTransport(), "tcp:10.0.0.1:7") == ()
    assert install.groups(FakeTransport(), "") == ()


@pytest.mark.parametrize(("total", "budget", "freed", "fits"), [
    (100, 200, False, False), (100, 200, True, True), (201, 200, True, False), (100, 0, True, False),
])  # fmt: skip
def test_memory_of_the_service_that_will_have_ended_counts_as_free(
    total: int, budget: int, freed: bool, fits: bool
) -> None:
    """The machine has too little left now; what counts once the old service is gone is the budget."""

    def engine(call: list[str], _stdin: bytes) -> Completed:
        out = json.dumps({"ledger": {"total": total}}).encode() if "--json" in call else b"the sum"
        return Completed(4, out, b"error: the machine has 1 MiB left")

    told = health.memory(FakeTransport({"plan": engine}), "/r", plan.Settings(budget=budget), freed=freed)
    assert (told == "") is fits
    assert fits or told.startswith("the sum")


def test_leaving_a_service_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    monkeypatch.setattr(keeper, "remove", lambda _t, _p, kind: gone.append(kind))
    board = FakeTransport()
    back.leave(board, "/p", None, None)
    back.leave(board, "/p", "systemd", SPEC)
    assert gone == []
    back.leave(board, "/p", "systemd", None)
    back.leave(board, "/p", "sysv", SPEC)
    assert gone == ["systemd", "sysv"]


def test_content_tells_services_apart() -> None:
    engine = Part("colibri", Path("e"), 1, "22" * 32)
    one = spec_of("rpi4-gateway.yaml")
    two = dataclasses.replace(one, options=dataclasses.replace(one.options, queue=9))
    ids = {plan.content_id(engine, parcel(), SETTINGS, s) for s in (None, one.as_json(), two.as_json())}
    assert len(ids) == 3
    assert act.settings_of({}) == plan.Settings()
