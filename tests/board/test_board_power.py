"""Twenty power cuts at random moments of a deployment with a real service under a real systemd.

After each the board boots, systemd brings the service up, it answers with the golden of a
release that is well, and the deployment, repeated, finishes.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import ask, complete, golden, journal, wait_active
from virtual import board, command, good, inside, tiny_models

pytestmark = pytest.mark.timeout(900)  # an emulated board on a busy machine is slow

CUTS = int(os.environ.get("COLIBRI_POWER_CUTS", "20"))
BOARD = ("virt-a53", "--as", "power", "--init", "systemd", "--ram", "384MiB")
#: What a deployment says with -v when a phase begins.
PHASES = (
    ("upload", r"to send: "),
    ("make", r"send +100 %"),
    ("switch", r"switched to "),
    ("start", r"starting the .* service|checking r\d"),
)


class Deploy:
    """A deployment in a process of its own; which phase it is in, and since when."""

    def __init__(self, model: Path, engine: Path) -> None:
        words = ("deploy", "-v", "--board", "virt-a53", "root@@power", model, "--engine", engine, "--service",
                 "--budget", "64MiB", "--keep", "1")  # fmt: skip
        self.began = time.monotonic()
        self.phases = [("plan", 0.0)]
        self.said = ""
        self.child = subprocess.Popen(
            command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stderr
        for line in self.child.stderr:
            self.said += line
            for name, pattern in PHASES:
                if re.match(pattern, line) and all(name != n for n, _ in self.phases):
                    self.phases.append((name, time.monotonic() - self.began))

    @property
    def phase(self) -> str:
        """The one it is in; ``after`` when it has ended."""
        return self.phases[-1][0] if self.child.poll() is None else "after"

    def wait_for(self, phase: str, seconds: float = 400) -> None:
        """Until it is in this phase."""
        end = time.monotonic() + seconds
        while self.phase != phase:
            assert time.monotonic() < end and self.child.poll() is None, self.said
            time.sleep(0.05)

    def wait(self, seconds: float = 400) -> int:
        try:
            rc = self.child.wait(seconds)
        finally:
            self.child.kill()
            self._reader.join(10)
        return rc


class Cuts:
    """The board, its models in turn, and what the cuts so far met."""

    def __init__(self, models: list[Path], engine: Path) -> None:
        self.models, self.engine = models, engine
        self.rng = random.Random(20)
        # One moment in each twentieth of a deployment, in random order.
        self.moments = [(k + self.rng.random()) / CUTS for k in range(CUTS)]
        self.rng.shuffle(self.moments)
        self.seconds = 0.0
        self.met: Counter[str] = Counter()
        self.record: list[str] = []
        self.on = 0

    def finish(self, number: int) -> None:
        """Deploys a model to the end."""
        run = Deploy(self.models[number], self.engine)
        rc = run.wait()
        assert rc == 0, run.said
        self.on = number
        self.seconds = max(self.seconds, time.monotonic() - run.began)

    def wait_for_moment(self, run: Deploy, turn: int) -> float:
        """Until the moment of this turn, or the end. A busy machine changes how long a deployment takes."""
        moment = self.moments[turn] * self.seconds
        try:
            run.child.wait(max(0.0, run.began + moment - time.monotonic()))
            self.seconds = time.monotonic() - run.began
        except subprocess.TimeoutExpired:
            pass
        return time.monotonic() - run.began


@pytest.fixture(scope="module")
def cuts(board_dir: Path, a53_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cuts]:
    # Four that differ in every shard: two are kept on the board, so that each is sent anew.
    made = Cuts(tiny_models(tmp_path_factory.mktemp("models"), 4), a53_engine)
    with board(BOARD[0], BOARD[2], *BOARD[3:]):
        made.finish(0)  # the first one installs the unit
        good("board", "down", "power", "--power-cut")
        good("board", "up", *BOARD)
        wait_active("power")  # what a deployment calls done is on the disk
        run = Deploy(made.models[1], made.engine)
        assert run.wait() == 0, run.said
        made.on, made.seconds = 1, time.monotonic() - run.began  # the first one was longer
        assert [name for name, _ in run.phases] == ["plan", *(name for name, _ in PHASES)], run.said
        yield made


@pytest.mark.parametrize("turn", range(CUTS))
def test_a_power_cut_never_leaves_an_unwell_release(cuts: Cuts, turn: int) -> None:
    before, after = cuts.on, (cuts.on + 1) % len(cuts.models)
    run = Deploy(cuts.models[after], cuts.engine)
    moment = cuts.wait_for_moment(run, turn)
    phase = run.phase
    good("board", "down", "power", "--power-cut")
    rc = run.wait()
    assert rc in ((0,) if phase == "after" else (0, 4, 7)), run.said
    cuts.met[phase] += 1

    booted = good("board", "up", *BOARD)["boot_seconds"]
    wait_active("power")
    assert ask("power", "GET", "/health").json["status"] == "ok"
    _, fingerprint = complete("power", "h e")
    well = {golden(cuts.models[n])[: len(fingerprint)]: n for n in (before, after)}
    assert fingerprint in well, (phase, fingerprint)
    if phase in ("plan", "upload"):
        assert well[fingerprint] == before
    if phase == "after":
        assert well[fingerprint] == after, "what a deployment calls done is on the disk"
    cuts.finish(after)
    assert complete("power", "h e")[1] == golden(cuts.models[after])[: len(fingerprint)]
    kept = "the new one" if well[fingerprint] == after else "the old one"
    took = time.monotonic() - run.began
    cuts.record.append(f"{turn}: {phase} at {moment:.1f} s; up in {booted} s with {kept}; {took:.0f} s")


def test_cut_while_an_unwell_release_is_on_trial(cuts: Cuts, tmp_path: Path) -> None:
    """It is current when the power goes, and its golden cannot pass: the board boots into the one before."""
    bad = tmp_path / "bad.coli"
    shutil.copytree(cuts.models[cuts.on], bad)
    manifest = json.loads((bad / "manifest.json").read_text())
    manifest["golden"]["sha256"] = "ab" * 32
    (bad / "manifest.json").chmod(0o644)
    (bad / "manifest.json").write_text(json.dumps(manifest))
    run = Deploy(bad, cuts.engine)
    run.wait_for("start")
    good("board", "down", "power", "--power-cut")
    assert run.wait() in (4, 7), run.said

    good("board", "up", *BOARD)
    wait_active("power")
    (trial,) = re.findall(r"switched to (\S+)", run.said)
    assert inside("power", "readlink /opt/colibri/current", user="root").strip() != f"releases/{trial}"
    _, fingerprint = complete("power", "h e")
    assert fingerprint == golden(cuts.models[cuts.on])[: len(fingerprint)]
    assert "was cut off" in journal("power", 60)
    cuts.finish((cuts.on + 1) % len(cuts.models))


def test_the_cuts_met_most_phases(cuts: Cuts) -> None:
    """Else the moments were not random, and the test above showed less than it says."""
    print(f"a deployment takes {cuts.seconds:.1f} s", *cuts.record, sep="\n")
    if CUTS >= 20:
        met = {name for name in cuts.met if name != "after"}
        assert sum(cuts.met.values()) == CUTS and len(met) >= 4, cuts.met
