"""The logits verb: what it refuses, and that its bits do not depend on how it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_maker import make

from colibri_kit import cli


def run(*argv: object) -> int:
    try:
        cli.main([str(a) for a in argv])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a.coli."""
    folder = tmp_path_factory.mktemp("models")
    make(folder / "a.gguf")
    assert run("convert", "-q", folder / "a.gguf", "-o", folder / "a.coli") == 0
    return folder


def npy(path: Path, array: Any) -> Path:
    np.save(path, array, allow_pickle=True)
    return path


def test_logits_refuses_bad_token_files(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = npy(tmp_path / "good.npy", np.arange(5, dtype=np.int32)).read_bytes()
    (tmp_path / "cut.npy").write_bytes(good[:-3])
    (tmp_path / "long.npy").write_bytes(good + b"x")
    (tmp_path / "text.npy").write_text("1 2 3")
    (tmp_path / "lies.npy").write_bytes(good.replace(b"(5,)", b"(9999999999999,)"))
    cases = {
        npy(tmp_path / "float.npy", np.zeros(3, np.float32)): "one dimension of int32",
        npy(tmp_path / "two.npy", np.zeros((2, 2), np.int32)): "one dimension of int32",
        npy(tmp_path / "none.npy", np.zeros(0, np.int32)): "holds 0 ids",
        npy(tmp_path / "high.npy", np.array([1, 264], np.int64)): "id 264 at 1 is not in the vocabulary",
        npy(tmp_path / "low.npy", np.array([-1], np.int32)): "id -1 at 0",
        npy(tmp_path / "ctx.npy", np.zeros(129, np.int32)): "129 ids are more than the model's context",
        npy(tmp_path / "pickle.npy", np.array([{"a": 1}], dtype=object)): "not a .npy file",
        tmp_path / "cut.npy": "not a .npy file",
        tmp_path / "long.npy": "more bytes follow",
        tmp_path / "text.npy": "not a .npy file",
        tmp_path / "lies.npy": "not a .npy file",
        tmp_path / "absent.npy": "cannot be read",
    }
    for path, said in cases.items():
        assert run("logits", models / "a.coli", "--tokens", path, "-o", tmp_path / "out.npy") == 2, path
        err = capsys.readouterr().err
        assert said in err and path.name in err and "Traceback" not in err
    assert not (tmp_path / "out.npy").exists()
    ids = tmp_path / "good.npy"
    ids.write_bytes(good)
    assert run("logits", models / "a.coli", "--tokens", ids, "-o", tmp_path / "out.npy", "--isa", "mmx") != 0
    assert not (tmp_path / "out.npy").exists()
    assert run("logits", models / "a.coli", "--tokens", ids, "-o", tmp_path / "no" / "out.npy") == 2


def test_logits_do_not_depend_on_isa_threads_or_batch(models: Path, tmp_path: Path) -> None:
    ids = npy(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 264, 40).astype(np.int32))
    seen = set()
    for i, extra in enumerate(
        (["--isa", "scalar", "--threads", 1, "--batch", 1], ["--threads", 2, "--batch", 7])
    ):
        out = tmp_path / f"{i}.npy"
        assert run("logits", "-q", models / "a.coli", "--tokens", ids, "-o", out, *extra) == 0
        seen.add(np.load(out).tobytes())
    assert len(seen) == 1
