"""Sizes and values that products of few tokens are tried with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from kernels.linear import api

Form = Literal["product", "parts", "gated"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; a gated weight is [K, 2, N]."""

    form: Form
    num_tokens: int
    inputs: int = 256
    outputs: int = 4096
    magnitude: float = 1.0

    def __str__(self) -> str:
        name = f"{self.form} of {self.num_tokens}x{self.inputs} to {self.outputs}"
        return name if self.magnitude == 1 else f"{name}, times {self.magnitude:g}"

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        outputs = (2, self.outputs) if self.form == "gated" else (self.outputs,)
        return (
            jax.ShapeDtypeStruct((self.num_tokens, self.inputs), jnp.bfloat16),
            jax.ShapeDtypeStruct((self.inputs, *outputs), jnp.bfloat16),
        )

    def call(self, kernels: str) -> Callable[..., jax.Array]:
        """The op with everything static bound."""
        return functools.partial(getattr(api, self.form), kernels=kernels)


def inputs(case: Case) -> tuple[jax.Array, jax.Array]:
    """Random values; outputs are about as large as the tokens."""
    rng = np.random.default_rng(case.num_tokens + case.inputs)
    x, weight = (rng.standard_normal(struct.shape) for struct in case.structs)
    arrays = x * case.magnitude, weight * case.inputs**-0.5
    return tuple(jnp.asarray(array, jnp.bfloat16) for array in arrays)


def poisoned(arrays: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The same call, with tokens 1 and 3 that are not finite."""
    x, weight = arrays
    return x.at[1, 5].set(jnp.nan).at[3, 0].set(jnp.inf), weight


def exact(case: Case, arrays: tuple[jax.Array, jax.Array]) -> np.ndarray:
    """[T, N] in float64."""
    x, weight = (np.asarray(array).astype(np.float64) for array in arrays)
    if case.form != "gated":
        return x @ weight
    gate, up = x @ weight[:, 0], x @ weight[:, 1]
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


VALUES = (
    Case("product", 1),
    Case("product", 16, inputs=384),
    Case("product", 64, inputs=128),
    Case("product", 8, magnitude=1e-12),
    Case("parts", 4, inputs=1024, outputs=192),
    Case("parts", 24, inputs=2048, outputs=128),
    Case("parts", 64, inputs=512, outputs=64, magnitude=1e6),
    Case("gated", 1, outputs=192),
    Case("gated", 32, inputs=1152, outputs=64),
)
GUARDED = (
    Case("product", 8, inputs=640),
    Case("parts", 8, inputs=1024, outputs=64),
    Case("gated", 8, inputs=1280, outputs=64),
)
"""Run clean, and with values that are not finite."""
ASSEMBLED = (
    Case("product", 1, 4096, 6144),
    Case("product", 64, 4096, 6144),
    Case("product", 8, 2048, 5120),
    Case("parts", 1, 4096, 4096),
    Case("parts", 64, 12288, 4096),
    Case("parts", 32, 4096, 2048),
    Case("parts", 4, 2048, 128),
    Case("gated", 1, 4096, 12288),
    Case("gated", 64, 4096, 12288),
)
"""Served sizes and the ends of what the kernel covers."""
