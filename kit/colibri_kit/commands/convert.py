"""convert: GGUF -> .coli, checked and with its golden."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import VERBS, ui_options
from colibri_kit.convert.choices import QUANT_NAMES

if TYPE_CHECKING:
    from colibri_kit.convert.plan import Plan
    from colibri_kit.ui import Ui


@click.command("convert", help=VERBS["convert"])
@ui_options
@click.argument("source", metavar="IN.gguf", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="OUT.coli", type=click.Path(path_type=Path), help="Default: IN.coli.")
@click.option(
    "--quant",
    type=click.Choice(QUANT_NAMES, case_sensitive=False),
    help="Quantise float tensors; quantised ones stay (f32 widens all).",
)
@click.option("--name", help="Name in the manifest; default: the GGUF's general.name.")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="0 = all cores.")
@click.option("--ignore-key", multiple=True, metavar="KEY", help="A GGUF key that you know is harmless.")
@click.option("--over-budget", is_flag=True, help="Compute the golden although memory seems short.")
@click.option("--force", is_flag=True, help="Replace OUT.coli once the new one is complete.")
@click.option("--dry-run", is_flag=True, help="Show what would be written; write nothing.")
def command(
    ui: Ui,
    source: Path,
    output: Path | None,
    quant: str | None,
    name: str | None,
    threads: int,
    ignore_key: tuple[str, ...],
    over_budget: bool,
    force: bool,
    dry_run: bool,
) -> None:
    from colibri_kit.convert import job
    from colibri_kit.convert.adapters import map_model
    from colibri_kit.convert.plan import make_plan
    from colibri_kit.convert.tokenizer import export_tokenizer
    from colibri_kit.convert.tokenizer_keys import check_tokenizer_keys
    from colibri_kit.errors import FormatError, UsageError
    from colibri_kit.gguf.reader import GgufFile

    out = Path(output) if output else Path(source.stem + ".coli")
    if out.suffix != ".coli":
        raise UsageError(f"{out}: the output's name must end in .coli", hint=f"-o {out.name}.coli")
    with GgufFile(source) as gguf:
        model = map_model(gguf, name=name, ignore_keys=ignore_key)
        check_tokenizer_keys(gguf.kv, gguf.name)
        tokenizer = export_tokenizer(gguf.kv)
        if tokenizer.n_vocab != model.geometry.n_vocab:
            raise FormatError(
                f"{gguf.name}: {tokenizer.n_vocab} tokens in the vocabulary, "
                f"but token_embd.weight has {model.geometry.n_vocab} rows",
                code="CK-FORMAT-GGUF",
            )
        plan = make_plan(model, quant.lower() if quant else None)
        needed = plan.weight_bytes + len(tokenizer.payload)
        if dry_run:
            ui.result(plan_data(plan, out, needed), plan_text(plan, out, needed, ui))
            return
        job.check_target(out, needed, force=force)
        if not over_budget:
            job.check_memory(plan.weight_bytes)
        for key in model.ignored_keys:
            ui.warn(f"{key} ignored, as you asked")
        facts = job.run(gguf, plan, tokenizer, out, threads, ui, over_budget=over_budget)
    ui.result(facts, report_text(facts))


def plan_data(plan: Plan, out: Path, needed: int) -> dict[str, Any]:
    """--dry-run --json."""
    from dataclasses import asdict

    from colibri_kit.convert.plan import plan_rows

    return {
        "dry_run": True,
        "model": str(out),
        "name": plan.model.name,
        "arch": plan.model.arch,
        "geometry": asdict(plan.model.geometry),
        "features": asdict(plan.model.features),
        "tensors": plan_rows(plan),
        "types": plan.type_counts(),
        "shards": len(plan.shards),
        "disk_bytes": needed,
        "ram_bytes": ram_bytes(plan),
    }


def ram_bytes(plan: Plan, ctx: int = 4096) -> int:
    """Weights plus an F16 KV cache of ``ctx`` tokens; the engine's own plan counts exactly."""
    g = plan.model.geometry
    ctx = min(ctx, g.ctx_train)
    return plan.weight_bytes + 2 * 2 * g.n_layer * g.n_head_kv * g.head_dim * ctx


def plan_text(plan: Plan, out: Path, needed: int, ui: Ui) -> str:
    """--dry-run for people."""
    from colibri_kit.convert.plan import plan_rows

    rows = plan_rows(plan)
    cells = [
        [r["name"], f"{r['rows']} × {r['cols']}", r["from"], r["to"], r["bytes"], r["why"]] for r in rows
    ]
    g = plan.model.geometry
    lines = [
        ui.table(["tensor", "shape", "from", "to", "bytes", "why"], cells),
        "",
        f"{plan.model.name}: {plan.model.arch}, {g.n_layer} layers, "
        + (f"{g.n_expert} experts, {g.n_expert_used} used" if g.n_expert else "dense"),
        f"would write {out}: {needed / 1e6:.1f} MB in {len(plan.shards) + 2} files and a manifest",
        f"needs about {ram_bytes(plan) / 1e6:.0f} MB of memory to run (context "
        f"{min(4096, g.ctx_train)}), and once here for the golden",
    ]
    return "\n".join(lines)


def report_text(facts: dict[str, Any]) -> str:
    types = ", ".join(f"{n} {t}" for t, n in facts["quant"].items())
    chat = "as parts" if facts["chat"] == "parts" else f"none ({facts['chat_reason']})"
    return "\n".join(
        [
            f"wrote {facts['model']}: {facts['bytes'] / 1e6:.1f} MB in {facts['files']} files, verified",
            f"  name      {facts['name']} ({facts['arch']})",
            f"  tensors   {types}",
            f"  chat      {chat}",
            f"  model id  {facts['model_id']}",
            f"  golden    {facts['golden']}",
        ]
    )
