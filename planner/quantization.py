"""The usual quantizations of GGUF files, and how many bits of the file a weight takes in each. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

BITS_PER_WEIGHT: Final = MappingProxyType(
    {
        "F16": 16.0,
        "Q8_0": 8.50,
        "Q6_K": 6.56,
        "Q5_K_M": 5.70,
        "Q5_K_S": 5.57,
        "Q4_K_M": 4.89,
        "Q4_K_S": 4.67,
        "IQ4_XS": 4.46,
        "Q3_K_L": 4.30,
        "Q3_K_M": 4.00,
        "IQ3_M": 3.76,
        "Q3_K_S": 3.64,
        "IQ3_XS": 3.50,
        "IQ3_XXS": 3.25,
        "Q2_K": 3.16,
        "IQ2_M": 2.93,
        "IQ2_XS": 2.59,
        "IQ2_XXS": 2.38,
    }
)
"""File bits over weights, most first, as files of Llama 3.1 8B have them.

Source: the table in llama.cpp's tools/quantize/README.md; Q3_K_M, which is missing there, from the size of published
files of that model (4.02 GB for 8.03e9 weights). Other models differ by a few percent, because the recipes give some
tensors more bits: a model whose rows are no multiple of 256 (Qwen2.5 72B) takes 7 % more.
"""

HEAD_BITS: Final = 6.5625
"""Bits of a weight of the head in files of fewer bits: llama.cpp's recipes store it as Q6_K (210 bytes for 256)."""
