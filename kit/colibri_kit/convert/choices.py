"""Names that command lines offer, without the imports that work on them."""

from __future__ import annotations

QUANT_NAMES = ("q4_k_m", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "f16", "bf16", "f32")
