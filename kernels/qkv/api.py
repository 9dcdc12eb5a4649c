"""Queries, keys and values of a layer: from their projection to what attention reads."""

from __future__ import annotations

from kernels.dispatch import Dispatch
from kernels.qkv import prepare as mosaic_prepare
from kernels.qkv import reference

prepare = Dispatch(
    "qkv.prepare", [("mosaic", mosaic_prepare.prepare), ("reference", reference.prepare)]
)
"""Norm, rotation and KV write of every token. See `reference.prepare` for the contract."""
