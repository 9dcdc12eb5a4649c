"""Shapes, inputs and truth of the preparation of q, k and v, for tests and what they start."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels.qkv import api, reference

EPS = 1e-6
POISONED = ((1, "key"), (3, "value"), (4, "both"))
"""Tokens of a poisoned call, and what of each is not finite."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens of one call, the last ones padding."""

    num_tokens: int
    num_kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    page_size: int = 64
    has_norm: bool = True
    padding: int = 0
    scales_at: int = 24

    def __str__(self) -> str:
        fields = dataclasses.fields(self)
        changed = [f for f in fields[1:] if getattr(self, f.name) != f.default]
        parts = [f"{field.name}{getattr(self, field.name)}" for field in changed]
        return "-".join([f"tokens{self.num_tokens}", *parts])

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // self.page_size) + 3

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """qkv, cos, sin, vectors, pool, pages, offsets."""
        tokens, kv, h = self.num_tokens, self.num_kv_heads, self.head_dim
        turn = jax.ShapeDtypeStruct((tokens, h // 2), "float32")
        size = self.scales_at + (self.group + 1) * h + 8
        place = jax.ShapeDtypeStruct((tokens,), "int32")
        return (
            jax.ShapeDtypeStruct((tokens, kv, self.group + 2, h), "bfloat16"),
            turn,
            turn,
            jax.ShapeDtypeStruct((size,), "bfloat16") if self.has_norm else None,
            jax.ShapeDtypeStruct((self.num_pages, kv, 2, self.page_size, h), "bfloat16"),
            place,
            place,
        )

    def prepare(self, kernels: str):
        """The op with everything static bound."""
        return functools.partial(api.prepare, **self.static, kernels=kernels)

    @property
    def static(self) -> dict[str, float]:
        return {"scales_at": self.scales_at, "eps": EPS}


def inputs(case: Case) -> tuple[jax.Array | None, ...]:
    """Random values; tokens at scattered places, padding at the trash page."""
    rng = np.random.default_rng(len(str(case)))
    qkv, cos, _, vectors, pool, *_ = case.structs
    angles = rng.uniform(0, 6.3, cos.shape).astype(np.float32)
    # Token after token from the last page down, so that no place is that of its index.
    at = np.arange(case.num_tokens) + case.page_size // 2
    is_real = np.arange(case.num_tokens) < case.num_tokens - case.padding
    pages = np.where(is_real, case.num_pages - 1 - at // case.page_size, 0)
    return (
        jnp.asarray(2 * rng.standard_normal(qkv.shape), jnp.bfloat16),
        jnp.asarray(np.cos(angles)),
        jnp.asarray(np.sin(angles)),
        vectors and jnp.asarray(1 + 0.3 * rng.standard_normal(vectors.shape), jnp.bfloat16),
        jnp.asarray(rng.standard_normal(pool.shape), jnp.bfloat16),
        jnp.asarray(pages.astype(np.int32)),
        jnp.asarray((at % case.page_size).astype(np.int32)),
    )


def poisoned(arrays: tuple[jax.Array | None, ...]) -> tuple[jax.Array | None, ...]:
    """The same call, with values of three tokens that are not finite, of one kv head each."""
    qkv, *rest = arrays
    key, value = qkv.shape[2] - 2, qkv.shape[2] - 1
    qkv = qkv.at[1, 0, key, 5].set(jnp.nan).at[3, 1, value, -1].set(-jnp.inf)
    qkv = qkv.at[4, 1, key, 0].set(jnp.inf).at[4, 0, value, 70 % qkv.shape[3]].set(jnp.nan)
    return qkv, *rest


def expected(case: Case, arrays: tuple[jax.Array | None, ...]) -> tuple[np.ndarray, ...]:
    """The reference, one operation after the other: as fused ones, some would round less."""
    with jax.disable_jit():
        q, pool, is_bad = reference.prepare(*arrays, **case.static)
    return tuple(np.asarray(x.astype(jnp.float32)) for x in (q, pool, is_bad))


VALUES = (
    Case(1),
    Case(2, group=1, head_dim=64, page_size=8),
    Case(5, group=3, num_kv_heads=1, page_size=16, padding=1),
    Case(8, group=16, head_dim=256, num_kv_heads=1, page_size=32),
    Case(24, group=2, head_dim=256, page_size=8, has_norm=False),
    Case(16, group=7, head_dim=64, page_size=16, padding=3),
    Case(48, group=5, num_kv_heads=3, page_size=32, has_norm=False, padding=2),
    Case(32, page_size=8),
    Case(16, group=2, head_dim=128, num_kv_heads=1, page_size=8),
    Case(16, group=3, head_dim=64, num_kv_heads=2, page_size=32),
    Case(8, group=2, head_dim=256, num_kv_heads=1, page_size=16),
    Case(8, group=1, head_dim=128, num_kv_heads=1, page_size=16),
)
GUARDED = Case(6, head_dim=64, page_size=8)
"""Run clean, and with values that are not finite."""
