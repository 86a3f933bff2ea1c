"""ggml's tensor types: id, name, block size. The ids are also the .coli type ids.

The table holds every id that ggml has given out, so that a type which the engine
lacks is refused by its name and a tensor of it still has a size that can be checked.
Sizes: ggml-common.h (block structs) and ggml.c (type_traits).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorType:
    """One ggml type.

    Attributes:
        id: ggml's number.
        name: as ggml spells it, upper case.
        block: weights in a block.
        block_bytes: bytes of a block.
    """

    id: int
    name: str
    block: int
    block_bytes: int

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of ``cols`` weights; ``cols`` is a multiple of ``block``."""
        return cols // self.block * self.block_bytes


_TABLE = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
]

#: id -> type
TYPES: dict[int, TensorType] = {row[0]: TensorType(*row) for row in _TABLE}
#: name -> type
BY_NAME: dict[str, TensorType] = {t.name: t for t in TYPES.values()}

F32, F16, BF16 = BY_NAME["F32"], BY_NAME["F16"], BY_NAME["BF16"]
#: float types: row-major in a .coli file
FLOATS = frozenset({F32.id, F16.id, BF16.id})
#: what the engine multiplies with (native/kernels/kernels.h, enum cb_type)
ENGINE_TYPES = frozenset({0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30})


def type_name(type_id: int) -> str:
    """The type's name, or ``type 77`` for a number that ggml has not given out."""
    known = TYPES.get(type_id)
    return known.name if known else f"type {type_id}"
