"""What one token moves and multiplies, from the heads of a .coli folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Traffic:
    """Per token unless said otherwise; bytes and multiply-accumulates.

    Attributes:
        dense_bytes: everything that is read for every token, the output matrix included.
        head_bytes, head_macs: the output matrix alone: prefill needs it once a prompt.
        expert_bytes: one expert's matrices (mean); record_bytes: its record in the file.
        kv_bytes: keys and values of one position in F16, all layers.
        file_bytes: dense.coli: what start has to read besides experts.
    """

    dense_bytes: int
    dense_macs: int
    head_bytes: int
    head_macs: int
    expert_bytes: float
    expert_macs: int
    record_bytes: float
    n_moe_layer: int
    n_expert: int
    n_used: int
    kv_bytes: int
    file_bytes: int

    @property
    def token_bytes(self) -> float:
        """Read for one token when every expert is in memory."""
        return self.dense_bytes + self.n_moe_layer * self.n_used * self.expert_bytes

    @property
    def token_macs(self) -> int:
        return self.dense_macs + self.n_moe_layer * self.n_used * self.expert_macs


def measure(folder: Path) -> Traffic:
    """Reads manifest and directories.

    Raises:
        FormatError: they are damaged.
    """
    from colibri_kit.convert import manifest
    from colibri_kit.convert.check import read_directories

    model = manifest.read(folder)
    g = model.geometry
    _, dense, _ = read_directories(folder / "dense.coli")
    by_name = {t.name: t for t in dense}
    head = by_name.get("output") or by_name["token_embd"]
    per_token = [t for t in dense if t.name != "token_embd"] + ([] if "output" in by_name else [head])
    records = []
    for fact in model.files:
        if fact.name.startswith("experts-"):
            records += read_directories(folder / fact.name)[2]
    n = max(1, len(records))
    return Traffic(
        dense_bytes=sum(t.size for t in per_token),
        dense_macs=sum(t.rows * t.cols for t in per_token),
        head_bytes=head.size,
        head_macs=head.rows * head.cols,
        expert_bytes=sum(p.size for r in records for p in r.parts) / n,
        expert_macs=3 * g.n_embd * g.n_expert_ff,
        record_bytes=sum(r.size for r in records) / n,
        n_moe_layer=model.n_moe_layer,
        n_expert=g.n_expert,
        n_used=g.n_expert_used,
        kv_bytes=2 * 2 * g.n_layer * g.n_head_kv * g.head_dim,
        file_bytes=sum(f.bytes for f in model.files if not f.name.startswith("experts-")),
    )
