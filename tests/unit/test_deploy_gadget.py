"""The offload gadget as part of a deployment: planned, made last, taken back, removed by undeploy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from colibri_kit.cli import root
from colibri_kit.deploy import act, elf, facts, job, model, state
from colibri_kit.deploy import plan as planning
from colibri_kit.errors import KitError, PreflightError
from colibri_kit.offload import gadget
from colibri_kit.transport.base import Completed
from colibri_kit.transport.fake import FakeTransport
from colibri_kit.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the board is a folder of this machine")
RELEASE = "r20260102-030405-abcdef"


class Rig:
    """This machine as the board: the gadget's files under ``tmp``, systemctl and id are ours."""

    def __init__(self, tmp: Path, patch: pytest.MonkeyPatch) -> None:
        self.prefix, self.script, self.unit = tmp / "p", tmp / "gadget", tmp / "gadget.service"
        self.log, self._bin = tmp / "ran", tmp / "bin"
        self._bin.mkdir()
        self.tool("systemctl", f'echo "$@" >>{self.log}')
        self.tool("id", "echo 0")
        self.tool("test", "exit 0")  # of /run/systemd/system; shells have their own
        patch.setenv("PATH", f"{self._bin}:{os.environ['PATH']}")
        patch.setenv("CONFIGFS", str(tmp / "configfs"))
        patch.setattr(gadget, "SCRIPT_PATH", str(self.script))
        patch.setattr(gadget, "UNIT_PATH", str(self.unit))

    def tool(self, name: str, text: str) -> None:
        (self._bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (self._bin / name).chmod(0o755)

    def there(self) -> list[str]:
        return [p.name for p in (self.script, self.unit) if p.exists()]

    def ran(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def deployed(self, offload: str = "/dev/ttyGS0") -> None:
        """What a deployment leaves under the prefix, without a service."""
        folder = self.prefix / "releases" / RELEASE
        folder.mkdir(parents=True)
        (self.prefix / ".colibri-kit").touch()
        (folder / "release.json").write_text(json.dumps({"settings": {"offload": offload}}))

    def kit(self, *args: str) -> Result:
        return CliRunner().invoke(root, [args[0], "--root", str(self.prefix), *args[1:]])


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


@pytest.fixture
def deploy(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``colibri-kit deploy --offload-gadget`` of two small files."""
    host = facts.gather(LocalTransport(), str(rig.prefix)).userland
    parts = []
    for name in ("colibri", "dense.coli"):
        (tmp_path / name).write_bytes(name.encode())
        parts.append(model.Part(name, tmp_path / name, len(name), name[0] * 64))
    engine = planning.Engine(parts[0], host or elf.Kind("x86_64", 64))
    parcel = model.Parcel("m", "00" * 16, "", (parts[1],), 4096, 0)
    monkeypatch.setattr(job, "load_engine", lambda *_: engine)
    monkeypatch.setattr(model, "load", lambda *_: parcel)
    monkeypatch.setattr("colibri_kit.deploy.plan.check_board", lambda *_: None)
    monkeypatch.setattr("colibri_kit.deploy.plan.check_engine", lambda *_: None)
    return lambda *more: rig.kit("deploy", "--board", "host", "--offload-gadget", *more, "m.coli")


def failed(done: Result) -> KitError:
    assert isinstance(done.exception, KitError), (done.output, done.exception)
    return done.exception


def test_the_plan_names_the_gadget(rig: Rig, deploy: Callable[..., Result]) -> None:
    told = json.loads(deploy("--dry-run", "--json").stdout)
    steps: list[str] = told["steps"]
    (at,) = (i for i, step in enumerate(steps) if str(rig.script) in step and str(rig.unit) in step)
    assert steps[at - 1] == "run its engine once" and steps[at + 1].startswith("switch current")
    assert steps[at] in deploy("--dry-run").stdout
    assert rig.there() == [] and rig.ran() == []


def test_a_board_that_cannot_have_it_is_refused_at_once(rig: Rig, deploy: Callable[..., Result]) -> None:
    rig.tool("test", "exit 1")
    assert "another init" in failed(deploy("--dry-run")).message
    rig.tool("id", "echo 1000")
    error = failed(deploy())
    assert (error.code, error.state) == ("CK-PREFLIGHT-ROOT", "nothing was sent or changed")
    assert not rig.prefix.exists() and rig.there() == []


def test_a_locked_board_keeps_its_port(rig: Rig, deploy: Callable[..., Result]) -> None:
    rig.deployed()
    with state.Lock(LocalTransport(), str(rig.prefix)):
        error = failed(deploy())
    assert error.code == "CK-DEPLOY-LOCKED" and error.state == "nothing was sent or changed"
    assert rig.there() == [] and rig.ran() == []


def test_what_refuses_late_comes_before_it(
    rig: Rig, deploy: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: act.Deployment) -> str:
        raise PreflightError("too large", state="as it was")

    monkeypatch.setattr(act.Deployment, "_send", lambda *_: None)
    monkeypatch.setattr(act.Deployment, "_make", refuse)
    assert failed(deploy()).state == "as it was"
    assert rig.there() == [] and rig.ran() == []


def test_it_is_there_when_the_engine_is_asked(
    rig: Rig, deploy: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_self: act.Deployment) -> Any:
        raise PreflightError(f"seen: {rig.there()}")

    monkeypatch.setattr(act.Deployment, "_send", lambda *_: None)
    monkeypatch.setattr(act.Deployment, "_make", lambda *_: "0")
    monkeypatch.setattr(act.Deployment, "_start", start)
    assert failed(deploy()).message == "seen: ['gadget', 'gadget.service']"
    assert rig.ran()[-1] == f"enable --now {gadget.UNIT}"


def test_one_that_does_not_start_is_taken_back(
    rig: Rig, deploy: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.tool("systemctl", f'echo "$@" >>{rig.log}; [ "$1" != enable ]')
    monkeypatch.setattr(act.Deployment, "_send", lambda *_: None)
    monkeypatch.setattr(act.Deployment, "_make", lambda *_: "0")
    error = failed(deploy())
    assert "config.txt" in str(error.hint)
    assert error.state == "board unchanged: no release is current; the new release was removed"
    assert rig.there() == []
    before = gadget.script("older")
    rig.script.write_text(before)  # an earlier one stays
    failed(deploy())
    assert rig.there() == ["gadget", "gadget.service"]


def test_the_way_round_it_is_one() -> None:
    """The hint's options are options of deploy, and it sends nobody to a page for what is not there."""
    board = FakeTransport({"id": Completed(0, b"0"), "/run/systemd": Completed(1)})
    with pytest.raises(PreflightError) as caught:
        gadget.check(board)
    hint = str(caught.value.hint)
    verb = root.get_command(None, "deploy")  # type: ignore[arg-type]
    assert verb is not None
    options = {name for p in verb.params for name in p.opts}
    assert set(re.findall(r"--[a-z-]+", hint)) <= options and f"--offload {gadget.DEVICE}" in hint
    assert "script" not in hint and "docs/" not in hint


# ---- undeploy -------------------------------------------------------------------------


def installed(rig: Rig) -> None:
    gadget.install(LocalTransport())
    assert rig.there() == ["gadget", "gadget.service"]
    rig.log.unlink()


def test_undeploy_removes_it_and_says_so_first(rig: Rig) -> None:
    rig.deployed()
    installed(rig)
    paths = [str(rig.script), str(rig.unit)]
    assert json.loads(rig.kit("undeploy", "--dry-run", "--json").stdout)["gadget"] == paths
    assert ", ".join(paths) in rig.kit("undeploy", "--dry-run").stdout
    assert ", ".join(paths) in failed(rig.kit("undeploy", "--json")).message  # what a person would be asked
    assert rig.there() == ["gadget", "gadget.service"] and rig.ran() == []
    done = rig.kit("undeploy", "--yes", "--json")
    assert json.loads(done.stdout)["gadget"] == paths and json.loads(done.stdout)["left"] == []
    assert rig.there() == [] and not rig.prefix.exists()
    assert rig.ran() == [f"disable --now {gadget.UNIT}", "daemon-reload"]


def test_undeploy_leaves_what_is_not_ours(rig: Rig) -> None:
    rig.deployed()
    rig.script.write_text("#!/bin/sh\necho colibri-offload-gadget\n")
    rig.unit.write_text("[Service]\nExecStart=/usr/bin/other\n")
    assert json.loads(rig.kit("undeploy", "--yes", "--json").stdout)["gadget"] == []
    assert rig.there() == ["gadget", "gadget.service"] and rig.ran() == []


def test_undeploy_without_root(rig: Rig) -> None:
    rig.deployed()
    installed(rig)
    rig.tool("id", "echo 1000")
    error = failed(rig.kit("undeploy", "--yes"))
    assert (error.code, error.state) == ("CK-PREFLIGHT-ROOT", "nothing was removed")
    assert rig.there() == ["gadget", "gadget.service"] and (rig.prefix / "releases" / RELEASE).is_dir()
    (rig.prefix / "releases" / RELEASE / "release.json").write_text("{}")  # another deployment's gadget
    told = json.loads(rig.kit("undeploy", "--yes", "--json").stdout)
    assert told["gadget"] == [] and told["left"] == [str(rig.script), str(rig.unit)]
    assert rig.there() == ["gadget", "gadget.service"] and not rig.prefix.exists()
