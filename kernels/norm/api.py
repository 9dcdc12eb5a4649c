"""The residual stream of a layer: what was computed last is added to it, and the sum is normed."""

from __future__ import annotations

from kernels.dispatch import Dispatch
from kernels.norm import reference, rows

add_norm = Dispatch("norm.add_norm", [("mosaic", rows.add_norm), ("reference", reference.add_norm)])
"""Sum and norm of every token. See `reference.add_norm` for the contract."""
