"""One self-contained HTML file: the table, the warnings, three plots. Needs matplotlib."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from colibri_kit.errors import PreflightError, UsageError
from colibri_kit.probe import table
from colibri_kit.probe.result import Result
from colibri_kit.probe.verdict import Change

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f4f4f2; padding: 1rem; overflow-x: auto; }
img { max-width: 100%; } li { color: #9a3412; }
"""


def require_matplotlib() -> None:
    """Raises PreflightError when reports cannot be drawn; call it before measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PreflightError(
            "--report draws with matplotlib, which is not installed",
            hint="pip install 'colibri-kit[report]'",
            state="nothing was measured",
            code="CK-REPORT-EXTRA",
        )


def write(path: Path, result: Result, where: str, warnings: Sequence[str], changes: Sequence[Change]) -> None:
    """Writes the report beside its place and renames it. ``result`` must hold the samples.

    Raises:
        UsageError: the file cannot be written.
    """
    text = render(result, where, warnings, changes)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as err:
        raise UsageError(f"cannot write {path}: {err.strerror or err}") from err


def render(result: Result, where: str, warnings: Sequence[str], changes: Sequence[Change]) -> str:
    """The HTML text."""
    title = html.escape(f"{result.model} on {where}")
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    body = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>',
        f"<body><h1>{title}</h1><p>{when}; model id {html.escape(result.model_id)}</p>",
        f"<pre>{html.escape(table.render(result, where))}</pre>",
    ]
    if warnings:
        body.append("<ul>" + "".join(f"<li>{html.escape(w)}</li>" for w in warnings) + "</ul>")
    if changes:
        body.append(f"<h2>Compared</h2><pre>{html.escape(table.render_changes(changes))}</pre>")
    body.append("<h2>Plots</h2>")
    for name, figure in _figures(result):
        body.append(f'<p><img alt="{html.escape(name)}" src="data:image/png;base64,{_png(figure)}"></p>')
    body.append("<p>Percentiles are nearest-rank: each is a value that was measured.</p></body></html>")
    return "\n".join(body)


def _png(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return base64.b64encode(out.getvalue()).decode()


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _figures(result: Result) -> list[tuple[str, Any]]:
    tokens = [ns / 1e6 for ns in result.samples["token_ns"]]
    out = []

    figure, axes = _axes("Latency of each token, run by run", "token of the run", "ms")
    for run in range(result.runs):
        part = tokens[run * result.tokens : (run + 1) * result.tokens]
        axes.plot(range(1, len(part) + 1), part, linewidth=1, label=f"run {run + 1}")
    axes.set_ylim(bottom=0)
    if result.runs <= 8:
        axes.legend(fontsize="small")
    out.append(("latency of each token", figure))

    figure, axes = _axes("Distribution of token latency", "ms", "tokens")
    low, high, n_bins = min(tokens), max(tokens), min(60, max(10, len(tokens) // 8))
    if 0 < 10 * low < high:  # rare long stalls would squeeze the rest into one bar
        bins: Any = [low * (high / low) ** (i / n_bins) for i in range(n_bins + 1)]
        axes.set_xscale("log")
    else:
        bins = n_bins
    axes.hist(tokens, bins=bins, color="#8fb9a3")
    s = result.token
    marks = (("p50", s.p50, "-"), ("p90", s.p90, "--"), ("p99", s.p99, ":"), ("max", s.max, "-."))
    for name, value, dash in marks:
        axes.axvline(
            value / 1e6, color="#9a3412", linewidth=1.2, linestyle=dash, label=f"{name} {value / 1e6:.3g} ms"
        )
    axes.legend(fontsize="small")
    out.append(("distribution of token latency", figure))

    routes = sorted(ns / 1e3 for ns in result.samples["route_ns"])
    if routes:
        figure, axes = _axes("Routing latency of a layer", "us", "share of samples not above")
        share = [(i + 1) / len(routes) for i in range(len(routes))]
        axes.step(routes, share, where="post", color="#3b7a57")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        out.append(("routing latency", figure))
    return out
