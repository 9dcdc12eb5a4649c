"""Sizes and values that sum and norm are tried with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels.norm import api, reference

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; the update is one bfloat16 part or several of float32."""

    num_tokens: int
    hidden_size: int = 256
    num_parts: int = 1
    scale_at: int = 8
    dtype: str = "bfloat16"
    magnitude: float = 1.0

    def __str__(self) -> str:
        name = f"{self.num_tokens}x{self.hidden_size}, {self.num_parts} parts of {self.dtype}"
        return name if self.magnitude == 1 else f"{name}, times {self.magnitude:g}"

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        shape = (self.num_tokens, self.hidden_size)
        return (
            jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((self.num_parts, *shape), jnp.dtype(self.dtype)),
            jax.ShapeDtypeStruct((self.scale_at + self.hidden_size + 8,), jnp.bfloat16),
        )

    def call(self, kernels: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """The op with everything static bound."""
        return functools.partial(api.add_norm, **self.static, kernels=kernels)

    @property
    def static(self) -> dict[str, float]:
        return {"scale_at": self.scale_at, "eps": EPS}


def inputs(case: Case) -> tuple[jax.Array, ...]:
    """Random values; those around the scale are far from 1."""
    rng = np.random.default_rng(case.num_tokens + case.hidden_size)
    residual, parts, vectors = (rng.standard_normal(struct.shape) for struct in case.structs)
    vectors = 100 + vectors
    kept = slice(case.scale_at, case.scale_at + case.hidden_size)
    vectors[kept] = (vectors[kept] - 100) * 0.3 + 1
    arrays = residual * case.magnitude, parts * case.magnitude, vectors
    return tuple(
        jnp.asarray(x, struct.dtype) for x, struct in zip(arrays, case.structs, strict=True)
    )


def poisoned(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same call, with tokens 1 and 3 that are not finite."""
    residual, parts, vectors = arrays
    return residual.at[1, 5].set(jnp.nan), parts.at[0, 3, 0].set(jnp.inf), vectors


def expected(case: Case, arrays: tuple[jax.Array, ...]) -> tuple[np.ndarray, ...]:
    """The reference, one operation after the other: as fused ones, some would round less."""
    with jax.disable_jit():
        out = reference.add_norm(*arrays, **case.static)
    return tuple(np.asarray(x.astype(jnp.float32)) for x in out)


VALUES = (
    Case(1),
    Case(3, hidden_size=128, scale_at=0),
    Case(2, hidden_size=1024, num_parts=4, dtype="float32"),
    Case(5, hidden_size=384, num_parts=1, dtype="float32", scale_at=400),
    Case(4, hidden_size=512, num_parts=8, dtype="float32"),
    Case(2, hidden_size=256, magnitude=1e-12),
    Case(2, hidden_size=256, magnitude=1e15),
    Case(8, num_parts=2, dtype="float32"),
)
GUARDED = Case(4, num_parts=3, dtype="float32")
"""Run clean, and with values that are not finite."""
ASSEMBLED = (
    Case(1, 4096),
    Case(2048, 4096),
    Case(64, 2048, num_parts=4, dtype="float32"),
    Case(64, 5120, num_parts=2, dtype="float32"),
    Case(8, 8192, num_parts=4, dtype="float32"),
    Case(64, 2048, num_parts=16, dtype="float32"),
    Case(8, 128),
)
"""Served sizes and the ends of what the kernel covers."""
