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
from kernels.tuning import FORMULA, Choice
from tests.kernels import norm_cases

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
    x, weight = x * case.magnitude, weight * case.inputs**-0.5
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)


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


@dataclasses.dataclass(frozen=True)
class Normed:
    """One call of a norm and the product of what it gives."""

    form: Form
    inputs: int = 256
    outputs: int = 4096
    num_parts: int = 2
    num_tokens: int = 1
    scale_at: int = 8
    choice: Choice = FORMULA

    def __str__(self) -> str:
        name = f"{self.num_parts} parts, {self.product}"
        return name if self.choice == FORMULA else f"{name}, {self.choice}"

    @property
    def product(self) -> Case:
        """What is made of the norm."""
        return Case(self.form, self.num_tokens, self.inputs, self.outputs)

    @property
    def norm(self) -> norm_cases.Case:
        """What is normed."""
        return norm_cases.Case(
            self.num_tokens, self.inputs, self.num_parts, self.scale_at, dtype="float32"
        )

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (*self.norm.structs, self.product.structs[1])

    def call(self, kernels: str) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
        """The op with everything static bound."""
        static = dict(form=self.form, **self.norm.static, kernels=kernels)
        chosen = {} if self.choice == FORMULA else {"choice": self.choice}
        return functools.partial(api.normed, **static, **chosen)

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Random values."""
        return (*norm_cases.inputs(self.norm), inputs(self.product)[1])


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
REGISTERS = tuple(Choice.of("registers", depth=depth) for depth in (64, 128))
"""One token's rows stay in registers."""
NORMED_NAMES = ("hidden", "normed", "product")
NORMED = (
    Normed("parts", 512, 128),
    Normed("gated", 384, 192, num_parts=1),
    Normed("product", 256, 4096, num_parts=4),
)
_SERVED = (
    Normed("product", 4096, 6144),
    Normed("product", 2048, 5120, num_parts=4),
    Normed("gated", 4096, 12288),
    Normed("parts", 2048, 128, num_parts=4),
    Normed("product", 8192, 10240, num_parts=4),
)
NORMED_ASSEMBLED = (
    *_SERVED,
    *(dataclasses.replace(case, choice=choice) for case in _SERVED for choice in REGISTERS),
)
"""Served sizes, and those that take the most memory, by formula and from registers."""
