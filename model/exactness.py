"""How many rows llama.cpp's CPU code computes with the same sums as one row, by the types of a model's weights. Pure.

Measured with llama.cpp as llama-cpp-python 0.3.36 builds it, comparing logits: one row and n rows give the same bits up
to these n. Beyond, other kernels add in another order. The exact mode of the engines has rules of its own.
"""

from __future__ import annotations

from gguf.constants import GGMLQuantizationType as Type

from potluck.model.facts import ModelFacts

SIMPLE = frozenset({Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0})
"""Weights in these types differ only in flash attention, from 64 rows of one sequence on."""
SIMPLE_ROWS = 32
OTHER_ROWS = 7
"""K-quants and IQ quants are computed in tiles from 8 rows on."""


def rows_of_one_kernel(facts: ModelFacts) -> int:
    """Tokens that may be computed again in one chunk and give the bits that they gave one by one."""
    matrices = {tensor.type for tensor in facts.tensors.values() if len(tensor.shape) > 1}
    return SIMPLE_ROWS if matrices <= SIMPLE else OTHER_ROWS
