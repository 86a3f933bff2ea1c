"""logits: token ids through a model, every token's logits out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import VERBS, ui_options

if TYPE_CHECKING:
    import numpy as np

    from colibri_kit.ui import Ui

_MAX_TOKENS = 1 << 20
_MAX_FILE = 64 << 20


@click.command("logits", help=VERBS["logits"])
@ui_options
@click.argument("model", metavar="MODEL.coli", type=click.Path(path_type=Path))
@click.option("--tokens", required=True, metavar="IN.npy", type=click.Path(path_type=Path), help="int32 [T].")
@click.option(
    "-o", "--output", required=True, metavar="OUT.npy", type=click.Path(path_type=Path),
    help="float32 [T, vocab].",
)  # fmt: skip
@click.option(
    "--experts", metavar="OUT.npy", type=click.Path(path_type=Path), help="int32 [MoE layers, T, used]."
)
@click.option("--isa", help="scalar, sse41, avx2, neon; default: the best of this CPU.")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="0 = physical cores.")
@click.option("--batch", type=click.IntRange(0, 1 << 16), default=0, help="Prefill chunk; 0 = the engine's.")
@click.option("--kv", type=click.Choice(["f16", "f32"]), default="f16", help="KV cache type.")
def command(
    ui: Ui,
    model: Path,
    tokens: Path,
    output: Path,
    experts: Path | None,
    isa: str | None,
    threads: int,
    batch: int,
    kv: str,
) -> None:
    from colibri_kit.convert import manifest as mf
    from colibri_kit.native import Engine

    geometry = mf.read(model).geometry
    ids = read_tokens(tokens, geometry.n_vocab, geometry.ctx_train)
    with Engine(model, ctx=max(16, len(ids)), threads=threads, isa=isa, kv=kv, batch=batch) as engine:
        logits, chosen = engine.eval(ids, want_all=True, want_experts=experts is not None)
        used = engine.info()["isa"]
    assert logits is not None
    save(output, logits)
    if experts is not None and chosen is not None:
        save(experts, chosen)
    data: dict[str, Any] = {
        "model": str(model),
        "tokens": len(ids),
        "isa": used,
        "logits": str(output),
        "logits_shape": list(logits.shape),
        "experts": str(experts) if experts else None,
        "sha256": digest(logits),
    }
    ui.result(
        data, f"{output}: {logits.shape[0]} × {logits.shape[1]} logits ({used}), sha256 {data['sha256']}"
    )


def read_tokens(path: Path, n_vocab: int, ctx: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The ids of a .npy file: one dimension, integers, all in the vocabulary.

    Raises:
        UsageError: no such file, not .npy, pickled, another type or shape, an id that the
            vocabulary lacks, none at all, or more than the context holds.
    """
    import numpy as np

    from colibri_kit.errors import UsageError

    def bad(what: str) -> UsageError:
        return UsageError(f"{path}: {what}", code="CK-USAGE-NPY", state="unchanged")

    try:
        if path.stat().st_size > _MAX_FILE:
            raise bad(f"larger than {_MAX_FILE} bytes")
        with path.open("rb") as stream:
            ids = np.lib.format.read_array(stream, allow_pickle=False)
            if stream.read(1):
                raise bad("more bytes follow the array")
    except OSError as err:
        raise bad(f"cannot be read: {err.strerror or err}") from err
    except (ValueError, EOFError, SyntaxError, MemoryError) as err:
        raise bad(f"not a .npy file of numbers: {err}") from err
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise bad(f"holds {ids.dtype} {list(ids.shape)}; one dimension of int32 is expected")
    if not 0 < len(ids) <= _MAX_TOKENS:
        raise bad(f"holds {len(ids)} ids")
    wrong = (ids < 0) | (ids >= n_vocab)
    if wrong.any():
        at = int(wrong.argmax())
        raise bad(f"id {int(ids[at])} at {at} is not in the vocabulary of {n_vocab}")
    if len(ids) > ctx:
        raise bad(f"{len(ids)} ids are more than the model's context of {ctx}")
    return ids.astype(np.int32)


def save(path: Path, array: np.ndarray[Any, Any]) -> None:
    """Writes little-endian .npy beside, then renames: a file is whole or absent."""
    import os

    import numpy as np

    from colibri_kit.errors import UsageError

    part = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with part.open("wb") as stream:
            np.lib.format.write_array(stream, np.ascontiguousarray(array), allow_pickle=False)
        part.replace(path)
    except OSError as err:
        part.unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot be written: {err.strerror}", code="CK-USAGE-OUTPUT") from err


def digest(array: np.ndarray[Any, Any]) -> str:
    """Hex sha256 of the array's little-endian bytes."""
    import hashlib

    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(array).astype("<f4", copy=False).tobytes()).hexdigest()
