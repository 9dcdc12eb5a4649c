"""Shared parts of every family: weights that know their product, norms, rotary embedding, MLP."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kernels.linear import api as linear_api
from kernels.linear.reference import precision_of
from kernels.qkv import reference

Tap = Callable[[str, jax.Array], jax.Array]
"""Static observer `tap(name, x) -> x`: identity when serving, records or patches in a study."""


def identity(name: str, x: jax.Array) -> jax.Array:
    """The tap of a serving engine."""
    del name
    return x


class Weight(Protocol):
    """A pytree node that knows its product and its storage order."""

    def product(self, x: jax.Array, out_dtype: jnp.dtype, kernels: str) -> jax.Array: ...


@flax.struct.dataclass
class Dense:
    """A plain weight [in, out...]."""

    kernel: jax.Array

    def product(self, x: jax.Array, out_dtype: jnp.dtype, kernels: str) -> jax.Array:
        """x [T, in] -> [T, out...]; nothing asks for another dtype than x's."""
        assert x.dtype == out_dtype
        return linear_api.product(x, self.kernel, kernels=kernels)

    def parts(self, x: jax.Array, kernels: str) -> jax.Array:
        """x [T, in] -> [S, T, out], which add up to the product: the next norm adds them up."""
        return linear_api.parts(x, self.kernel, kernels=kernels)


@flax.struct.dataclass
class Rows:
    """A weight stored output-major [out, in], as vocabulary matrices are."""

    kernel: jax.Array

    def product(self, x: jax.Array, out_dtype: jnp.dtype, kernels: str) -> jax.Array:
        """x [T, in] -> [T, out]; XLA's on every device."""
        del kernels
        return jax.lax.dot_general(
            x,
            self.kernel,
            (((x.ndim - 1,), (1,)), ((), ())),
            precision=precision_of(x.dtype),
            preferred_element_type=out_dtype,
        )


@flax.struct.dataclass
class PerHead:
    """One matrix per head: [N, in, out], or [N, out, in] where it is `output_major`."""

    kernel: jax.Array
    output_major: bool = flax.struct.field(pytree_node=False, default=False)

    def product(self, x: jax.Array, out_dtype: jnp.dtype, kernels: str) -> jax.Array:
        """x [T, N, in] -> [T, N, out]; XLA's on every device."""
        del kernels
        return jnp.einsum(
            "TNI,NOI->TNO" if self.output_major else "TNI,NIO->TNO",
            x,
            self.kernel,
            precision=precision_of(x.dtype),
            preferred_element_type=out_dtype,
        )


def linear(
    x: jax.Array,
    weight: Weight,
    *,
    out_dtype: jnp.dtype | None = None,
    kernels: str = "plain",
) -> jax.Array:
    """Every projection of every family: x [..., in] -> [..., out...].

    Args:
      x: of one dtype with the weight.
      weight: knows its product.
      out_dtype: None: x's.
      kernels: as in `Tiling.kernels`.
    """
    return weight.product(x, jnp.dtype(out_dtype or x.dtype), kernels)


def summed(parts: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[S, T, D] -> [T, D]: first to last in the parts' own dtype, rounded once."""
    return functools.reduce(jnp.add, [parts[i] for i in range(parts.shape[0])]).astype(dtype)


rms_norm = reference.rms_norm
"""The norm of every family, that of queries and keys included."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of half-split pairs."""

    theta: float
    head_dim: int
    """Dimensions that are rotated."""
    kind: str = "default"
    """`default`, `linear`, `llama3` or `yarn`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    beta_fast: float = 32.0
    """Turns within original_length from which on yarn leaves a frequency as it is."""
    beta_slow: float = 1.0
    """Turns within original_length up to which yarn divides a frequency by the factor."""
    amplitude: float = 1.0
    """Multiplies cosines and sines."""

    def inverse_frequencies(self) -> np.ndarray:
        """f32[head_dim / 2]. llama3: Llama 3.1 model card and Hugging Face's rope utilities."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        base = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        if self.kind == "linear":
            return base / np.float32(self.factor)
        if self.kind == "yarn":
            kept = self._kept_by_yarn()
            return base / np.float32(self.factor) * (1 - kept) + base * kept
        if self.kind != "llama3":
            return base
        wavelengths = 2 * math.pi / base
        smooth = (self.original_length / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * base / self.factor + smooth * base
        scaled = np.where(
            wavelengths > self.original_length / self.low_freq_factor, base / self.factor, blended
        )
        is_short = wavelengths < self.original_length / self.high_freq_factor
        return np.where(is_short, base, scaled).astype(np.float32)

    def _kept_by_yarn(self) -> np.ndarray:
        """f32[head_dim / 2]: 1 where a frequency stays, 0 where it is divided, a ramp between."""

        def index(turns: float) -> float:
            """Of the frequency that turns so often within the original length."""
            wavelength = self.original_length / (turns * 2 * math.pi)
            return self.head_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low = max(math.floor(index(self.beta_fast)), 0)
        high = min(math.ceil(index(self.beta_slow)), self.head_dim - 1)
        ramp = np.arange(self.head_dim // 2, dtype=np.float32) - np.float32(low)
        return 1 - np.clip(ramp / np.float32(max(high - low, 1e-3)), 0, 1)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's growth of attention with the context: 0.1 mscale ln(factor) + 1, at least 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@flax.struct.dataclass
class Rotation:
    """Cosines and sines of one step, f32[T, H / 2]."""

    cos: jax.Array
    sin: jax.Array


def rotation(rope: RopeConfig, positions: jax.Array) -> Rotation:
    """Angles in float32 for i32[T] positions."""
    frequencies = jnp.asarray(rope.inverse_frequencies())
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.amplitude == 1:
        return Rotation(cos, sin)
    amplitude = jnp.float32(rope.amplitude)
    return Rotation(cos * amplitude, sin * amplitude)


def rotate(x: jax.Array, turn: Rotation) -> jax.Array:
    """Rotates [T, ..., H]: dimension h pairs with h + H / 2."""
    return reference.rotate(x, turn.cos, turn.sin)


def embed(table: Rows, token_ids: jax.Array) -> jax.Array:
    """The one gather of the embedding table: i32[T], all inside the vocabulary -> [T, D]."""
    return table.kernel.at[token_ids].get(mode="promise_in_bounds")
