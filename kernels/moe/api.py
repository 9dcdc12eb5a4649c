"""Mixture of experts: which experts a token goes to, and what they make of it."""

from __future__ import annotations

import jax

from kernels.dispatch import Dispatch
from kernels.moe import permuted, reference, unpermuted
from kernels.moe import route as mosaic_route
from kernels.tuning import Choice, Shape, Tunable, rung

route = Dispatch("moe.route", [("mosaic", mosaic_route.route), ("reference", reference.route)])
"""Each token's experts and their weights. See `reference.route` for the contract."""


def _shape_of(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    **_: object,
) -> Shape:
    del weights, gate_up
    num_experts, hidden_size, intermediate_size = down.shape
    return {
        "tokens": rung(x.shape[0], least=8),
        "num_experts": num_experts,
        "top_k": expert_ids.shape[1],
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
    }


def _candidates(shape: Shape) -> tuple[Choice, ...]:
    """Both forms', the first one's first where it covers the tokens."""
    return (*unpermuted.candidates(shape), *permuted.candidates(shape))


experts = Dispatch(
    "moe.experts",
    [
        ("unpermuted", unpermuted.experts),
        ("permuted", permuted.experts),
        ("reference", reference.experts),
    ],
    Tunable(_shape_of, _candidates),
)
"""The chosen experts' weighted sum. See `reference.experts` for the contract."""
