"""The engine in this process: the host's shared library through cffi.

    from colibri_kit import native
    with native.Engine("model.coli", ctx=512) as engine:
        logits, experts = engine.eval([1, 2, 3])

The library is built on first use (see ``toolchain.library``).
"""

from colibri_kit.native.engine import Engine, plan
from colibri_kit.native.quant import crc32c, dequantise_rows, quantise_rows, row_bytes

__all__ = ["Engine", "crc32c", "dequantise_rows", "plan", "quantise_rows", "row_bytes"]
