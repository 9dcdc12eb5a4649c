"""The residual stream on its way to a norm: what was added up, and the update still to be added."""

from __future__ import annotations

import dataclasses

import jax

from kernels.linear import api as linear_api
from kernels.norm import api as norm_api
from models import layers
from models.layers import Dense


@dataclasses.dataclass(frozen=True)
class Stream:
    """Everything of one addition and norm, which are made together with what follows them."""

    hidden: jax.Array
    """[T, D]."""
    update: jax.Array | None
    """[S, T, D], parts of what is added; None: there is nothing to add."""
    vectors: jax.Array
    """1-D, holds the norm's scale: a kernel reads it where it lies."""
    scale_at: int
    eps: float
    kernels: str
    """As in `Tiling.kernels`."""

    def normed(self) -> tuple[jax.Array, jax.Array]:
        """The sum and its norm, [T, D] each."""
        if self.update is None:
            end = self.scale_at + self.hidden.shape[1]
            scale = jax.lax.slice(self.vectors, (self.scale_at,), (end,))
            return self.hidden, layers.rms_norm(self.hidden, scale, self.eps)
        return norm_api.add_norm(
            self.hidden,
            self.update,
            self.vectors,
            scale_at=self.scale_at,
            eps=self.eps,
            kernels=self.kernels,
        )

    def times(self, weight: Dense, form: str) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The sum, its norm, and what an op of `kernels.linear` makes of that: its form's name."""
        if self.update is None:
            hidden, x = self.normed()
            return hidden, x, linear_api.FORMS[form](x, weight.kernel, kernels=self.kernels)
        return linear_api.normed(
            self.hidden,
            self.update,
            self.vectors,
            weight.kernel,
            form=form,
            scale_at=self.scale_at,
            eps=self.eps,
            kernels=self.kernels,
        )
