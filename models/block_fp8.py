"""FP8 checkpoints with one scale per 128 x 128 block: what is read of them, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

SCALE_SUFFIX = "_scale_inv"
"""`NAME.weight_scale_inv` holds what the blocks of `NAME.weight` are multiplied with."""
BLOCK = 128
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""Every e4m3 number by its byte."""


_WAY_OUT = (
    "fp8 weights are read in e4m3 with weight_block_size [128, 128] and dynamic activations; use "
    "such a checkpoint, or one that is not quantised"
)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuses a config.json whose weights are quantised in another way.

    Raises:
      ValueError: naming what it asks for.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method")
    if method != "fp8":
        raise ValueError(f"quantization_config has quant_method {method!r}; {_WAY_OUT}")
    wanted = {"fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    for name, value in wanted.items():
        # Absent but for the block size, a field has this value.
        found = quantization.get(name, None if name == "weight_block_size" else value)
        if found != value:
            raise ValueError(f"quantization_config has {name} {found!r}; {_WAY_OUT}")


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks along each side of a weight."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantised(stored: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values of a weight, made 128 rows at a time.

    Args:
      stored: uint8[out, in], bytes of e4m3 numbers.
      scales: [blocks of out, blocks of in]; the last ones may be partly filled.
      dtype: of the result; products are rounded to it once.

    Returns:
      [out, in].
    """
    values = np.empty(stored.shape, dtype)
    wide = np.empty((min(BLOCK, len(stored)), stored.shape[1]), np.float32)
    for block, of_block in enumerate(scales.astype(np.float32)):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        some = wide[: len(stored[rows])]
        # A look-up in a small buffer: 0.30 numbers a ns, a cast of ml_dtypes 0.16 (2-core CPU
        # machine under load, 2026-11-30).
        _VALUES.take(stored[rows], out=some, mode="clip")
        some *= np.repeat(of_block, BLOCK)[None, : stored.shape[1]]
        values[rows] = some
    return values
