"""verify: every header, directory, CRC32C and sha256 of a .coli folder, then its golden."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import VERBS, ui_options

if TYPE_CHECKING:
    from colibri_kit.ui import Ui


@click.command("verify", help=VERBS["verify"])
@ui_options
@click.argument("model", metavar="MODEL.coli", type=click.Path(path_type=Path))
@click.option("--no-golden", is_flag=True, help="Do not run the engine; check the bytes alone.")
@click.option("--isa", help="Instruction set for the golden: scalar, sse41, avx2, neon.")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="0 = all cores.")
def command(ui: Ui, model: Path, no_golden: bool, isa: str | None, threads: int) -> None:
    from colibri_kit.convert import manifest as mf
    from colibri_kit.convert.check import check_file, check_head, check_listing, check_model, read_header

    manifest = mf.read(model)
    check_listing(model, manifest)
    for fact in manifest.files:
        check_head(fact.name, read_header(model / fact.name), manifest)
    with ui.progress("verify", sum(f.bytes for f in manifest.files)) as bar:
        reports = [check_file(model / f.name, bar.advance) for f in manifest.files]
    check_model(manifest, reports)
    golden = "skipped" if no_golden else check_golden(model, manifest.golden, isa, threads)
    data: dict[str, Any] = {
        "model": str(model),
        "model_id": manifest.model_id.hex(),
        "files": len(reports) + 1,
        "bytes": sum(f.bytes for f in manifest.files),
        "tensors": sum(len(r.dense) for r in reports),
        "experts": sum(len(r.records) for r in reports),
        "golden": golden,
        "golden_sha256": manifest.golden,
    }
    said = {"skipped": "golden NOT checked (--no-golden)", "ok": f"golden matches {manifest.golden}"}[golden]
    ui.result(
        data,
        f"{model}: good. {data['files']} files, {data['bytes'] / 1e6:.1f} MB, {data['tensors']} tensors, "
        f"{data['experts']} expert records: every CRC32C and sha256 matches; {said}",
    )


def check_golden(model: Path, promised: str | None, isa: str | None, threads: int) -> str:
    """Runs the engine on the fixed tokens.

    Raises:
        VerifyError: the logits' hash is not the manifest's, or the manifest has none.
    """
    from colibri_kit.errors import VerifyError
    from colibri_kit.native import Engine

    if promised is None:
        raise VerifyError(f"{model}: the manifest has no golden", code="CK-VERIFY-GOLDEN")
    with Engine(model, ctx=32, threads=threads, isa=isa) as engine:
        got, used = engine.golden(), engine.info()["isa"]
    if got != promised:
        raise VerifyError(
            f"{model}: the golden is {got} here ({used}), the manifest promises {promised}: "
            "the bytes are intact but this engine computes something else",
            hint="check the memory of this machine; convert again if the kit is newer than the model",
            code="CK-VERIFY-GOLDEN",
        )
    return "ok"
