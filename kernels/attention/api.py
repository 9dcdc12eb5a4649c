"""Paged attention: every new token attends to its own request's pages."""

from __future__ import annotations

from kernels.attention import decode as mosaic_decode
from kernels.attention import prefill as mosaic_prefill
from kernels.attention import reference
from kernels.dispatch import Dispatch
from kernels.tuning import Tunable

decode = Dispatch(
    "attention.decode",
    [("mosaic", mosaic_decode.decode), ("reference", reference.decode)],
    Tunable(mosaic_decode.shape_of, mosaic_decode.candidates),
)
"""Rows of a fixed query length. See `reference.decode` for the contract."""

prefill = Dispatch(
    "attention.prefill", [("mosaic", mosaic_prefill.prefill), ("reference", reference.prefill)]
)
"""Chunks of any length. See `reference.prefill` for the contract."""
