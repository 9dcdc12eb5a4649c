"""Products of a layer's tokens with its dense weights."""

from __future__ import annotations

from kernels.dispatch import Dispatch
from kernels.linear import few_tokens, reference
from kernels.tuning import Tunable

product = Dispatch(
    "linear.product",
    [("mosaic", few_tokens.product), ("reference", reference.product)],
    Tunable(few_tokens.shape_of, few_tokens.product_candidates),
)
"""[T, K] times [K, N]. See `reference.product` for the contract."""
parts = Dispatch(
    "linear.parts",
    [("mosaic", few_tokens.parts), ("reference", reference.parts)],
    Tunable(few_tokens.weight_shape_of, few_tokens.parts_candidates),
)
"""The same, to be added up by whoever takes it. See `reference.parts` for the contract."""
gated = Dispatch(
    "linear.gated",
    [("mosaic", few_tokens.gated), ("reference", reference.gated)],
    Tunable(few_tokens.weight_shape_of, few_tokens.gated_candidates),
)
"""silu(gate) * up of both halves of a weight. See `reference.gated` for the contract."""
