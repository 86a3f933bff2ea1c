"""The probe over real SSH servers: a real engine and a small model, deployed and measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit_cli import Ran, kit
from ssh_servers import Server

GGUF = Path(__file__).resolve().parents[1] / "data/engine/qwen3moe.t64.f32.gguf"


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("probe") / "m.coli"
    ran = kit("convert", GGUF, "-o", out, "-q")
    assert ran.rc == 0, ran.err
    return out


def probe(server: Server, prefix: Path, *more: object) -> Ran:
    return kit("probe", "--latency", server.target, *server.args, "--prefix", prefix, *more)


def test_probe_a_deployed_release(
    server: Server, prefix: Path, board: str, real_model: Path, tmp_path: Path
) -> None:
    ran = probe(server, prefix)
    assert ran.rc == 6  # nothing is deployed yet
    assert "CK-NOT-DEPLOYED" in ran.err

    place = [server.target, *server.args, "--prefix", prefix]
    ran = kit("deploy", "--board", board, place[0], real_model, *place[1:], "--threads", "1", "-q")
    assert ran.rc == 0, ran.err
    small = ["--runs", "2", "--tokens", "6", "--prompt-tokens", "5"]
    ran = probe(server, prefix, *small, "--json")
    assert ran.rc == 0, ran.err
    doc = ran.json
    assert doc["probe"]["threads"] == 1  # as deployed
    assert doc["probe"]["token_ns"]["n"] == 12
    assert doc["probe"]["model"]["n_moe_layer"] * 12 == doc["probe"]["route_ns"]["n"]
    promised = json.loads((real_model / "manifest.json").read_text())["golden"]["sha256"]
    assert doc["probe"]["golden"]["sha256"] == promised
    assert "samples" not in doc["probe"]

    (tmp_path / "base.json").write_text(ran.out)
    html = tmp_path / "r.html"
    ran = probe(
        server, prefix, *small, "--threads", "2", "--compare", tmp_path / "base.json", "--report", html,
        "--max-p99", "0.0001",
    )  # fmt: skip
    assert ran.rc == 11
    assert "CK-LIMIT-P99" in ran.err
    assert "threads 2, was 1" in ran.err
    assert "token p99" in ran.out  # the table comes all the same
    assert html.read_text().count("data:image/png") == 3

    ran = probe(server, prefix, "--model", prefix / "none.coli", "--json")
    assert ran.rc == 13
    assert ran.json["error"]["code"] == "CK-ENGINE-FORMAT"
