"""Mixture of experts: which experts a token goes to, and what they make of it."""

from __future__ import annotations

from kernels.dispatch import Dispatch
from kernels.moe import permuted, reference, unpermuted
from kernels.moe import route as mosaic_route

route = Dispatch("moe.route", [("mosaic", mosaic_route.route), ("reference", reference.route)])
"""Each token's experts and their weights. See `reference.route` for the contract."""

experts = Dispatch(
    "moe.experts",
    [
        ("unpermuted", unpermuted.experts),
        ("permuted", permuted.experts),
        ("reference", reference.experts),
    ],
)
"""The chosen experts' weighted sum. See `reference.experts` for the contract."""
