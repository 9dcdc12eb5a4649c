"""Products of a layer's tokens with its dense weights."""

from __future__ import annotations

import functools

import jax

from kernels.dispatch import Dispatch
from kernels.linear import few_tokens, one_token, reference, split
from kernels.norm import api as norm_api
from kernels.tuning import Tunable

product = Dispatch(
    "linear.product",
    [("mosaic", few_tokens.product), ("reference", reference.product)],
    Tunable(few_tokens.shape_of, few_tokens.product_candidates),
)
"""[T, K] times [K, N]. See `reference.product` for the contract."""
parts = Dispatch(
    "linear.parts",
    [("mosaic", few_tokens.parts), ("split", split.parts), ("reference", reference.parts)],
    Tunable(few_tokens.weight_shape_of, few_tokens.parts_candidates),
)
"""The same, to be added up by whoever takes it. See `reference.parts` for the contract."""
gated = Dispatch(
    "linear.gated",
    [("mosaic", few_tokens.gated), ("reference", reference.gated)],
    Tunable(few_tokens.weight_shape_of, few_tokens.gated_candidates),
)
"""silu(gate) * up of both halves of a weight. See `reference.gated` for the contract."""
FORMS = {"product": product, "parts": parts, "gated": gated}


def apart(
    residual: jax.Array,
    update: jax.Array,
    vectors: jax.Array,
    weight: jax.Array,
    *,
    form: str,
    scale_at: int,
    eps: float,
    kernels: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the update [S, T, D] to the residual stream [T, D], norms the sum and multiplies it.

    Args:
      residual: as in `kernels.norm.api.add_norm`, and so are the others.
      update: its parts.
      vectors: holds the norm's scale among others.
      weight: as in the op of that form.
      form: `product`, `parts` or `gated`.
      scale_at: where in `vectors` the scale begins.
      eps: of the norm.
      kernels: what the device can run.

    Returns:
      The sum and its norm, [T, D] each, and what the form makes of the norm.
    """
    hidden, x = norm_api.add_norm(
        residual, update, vectors, scale_at=scale_at, eps=eps, kernels=kernels
    )
    return hidden, x, FORMS[form](x, weight, kernels=kernels)


normed = Dispatch(
    "linear.normed",
    [
        ("mosaic", one_token.normed),
        ("registers", functools.partial(one_token.normed, from_registers=True)),
        ("apart", apart),
    ],
    Tunable(one_token.shape_of, one_token.candidates),
)
"""A norm and the product of what it gives. See `apart` for the contract."""
