"""Paged multi-head latent attention: every new token attends to its own request's latents."""

from __future__ import annotations

from kernels.dispatch import Dispatch
from kernels.mla import decode as mosaic_decode
from kernels.mla import prefill as mosaic_prefill
from kernels.mla import reference
from kernels.tuning import Tunable

decode = Dispatch(
    "mla.decode",
    [("mosaic", mosaic_decode.decode), ("reference", reference.decode)],
    Tunable(mosaic_decode.shape_of, mosaic_decode.candidates),
)
"""Absorbed: rows of a fixed query length, in latents. See `reference.decode` for the contract."""

prefill = Dispatch(
    "mla.prefill", [("mosaic", mosaic_prefill.prefill), ("reference", reference.prefill)]
)
"""Un-absorbed: chunks, latents expanded to heads. See `reference.prefill` for the contract."""
