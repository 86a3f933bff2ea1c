"""Decodes fixed tokens one at a time with the engine; prints one JSON object. Runs in a limit.

``python -m colibri_kit.bench.decode MODEL.coli THREADS CTX WARM TOKENS BUDGET``: the same
tokens as llama_decode.c.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(argv: list[str]) -> int:
    from colibri_kit.native import Engine

    model, (threads, ctx, warm, n, budget) = Path(argv[0]), map(int, argv[1:])
    start = time.monotonic()
    with Engine(model, threads=threads, ctx=ctx, budget=budget) as engine:
        loaded = time.monotonic()
        vocab = engine.info()["n_vocab"]
        tokens = [(i * 2654435761 + 12345) % 2**32 % vocab for i in range(warm + n)]
        for token in tokens[:warm]:
            engine.eval([token], want_all=False, want_experts=False)
        before, begin = engine.counters(), time.monotonic()
        for token in tokens[warm:]:
            engine.eval([token], want_all=False, want_experts=False)
        seconds, after = time.monotonic() - begin, engine.counters()
        ledger = engine.ledger()
    hits, misses = (after[k] - before[k] for k in ("hits", "misses"))
    facts = {
        "load_s": loaded - start,
        "seconds": seconds,
        "tokens": n,
        "hit_rate": hits / max(1, hits + misses),
        "bytes_read": after["bytes_read"] - before["bytes_read"],
        "slots": ledger["slots"],
        "records": ledger["records"],
        "total": ledger["total"],
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
