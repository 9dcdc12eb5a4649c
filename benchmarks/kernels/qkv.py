"""Norm, rotation and KV write on the GPU: first that they are right, then what one launch costs.

    PYTHONPATH=. python benchmarks/kernels/qkv.py --json OUT.json

Every class of calls that the kernel covers is compared with float64 on the host and with the
reference on the same device; what must not change a bit is checked to change none. A failure ends
the run with status 1. Then one layer's time at the shapes of `TOKENS`, beside the reference's and
that of moving the bytes at the memory's speed: a program runs over pools and projections of several
layers, and many calls of it are under way between two waits.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.kernels import harness
from benchmarks.kernels.harness import Checks
from benchmarks.roofline import Ceilings
from kernels.qkv import api

TOKENS = (1, 64, 256, 2048)
"""Timed with 32 query and 8 kv heads of 128, normed, and pages of 64."""
TOLERANCE = 3 * 2.0**-8
"""Of the length of a pair that turns: it is rounded to bfloat16 three times, by 2^-8 at most."""
EPS = 1e-6
_SCALES_AT = 64
_LAYER_BYTES = 2 * 10**8
_MAX_LAYERS = 36
_SAMPLE_SECONDS = 0.05

Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the op; an eighth of the tokens are padding."""

    num_tokens: int
    num_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_size: int = 64
    has_norm: bool = True

    def __str__(self) -> str:
        norm = "normed" if self.has_norm else "not normed"
        return (
            f"{self.num_tokens} tokens, {self.num_kv_heads * self.group}/{self.num_kv_heads} heads "
            f"of {self.head_dim}, {norm}, pages of {self.page_size}"
        )

    @property
    def num_real(self) -> int:
        return self.num_tokens - self.num_tokens // 8

    @property
    def num_pages(self) -> int:
        return 2 + -(-self.num_tokens // self.page_size)

    @property
    def moved_bytes(self) -> int:
        """Read and written at least: projection, queries, keys and values, cosines and sines."""
        heads = 2 * self.num_kv_heads * (self.group + 2)
        return self.num_tokens * self.head_dim * (2 * heads + 4)

    def prepare(self, kernels: str) -> Callable[..., tuple[jax.Array, ...]]:
        """The op with everything static bound."""
        return functools.partial(api.prepare, scales_at=_SCALES_AT, eps=EPS, kernels=kernels)


@functools.cache
def _program(case: Case, kernels: str) -> Callable[..., tuple[jax.Array, ...]]:
    return jax.jit(case.prepare(kernels), donate_argnums=4)


def cases() -> Iterator[Case]:
    """Every class that the kernel covers."""
    for group in range(1, 17):
        yield Case((16, 21)[group % 2], group=group, has_norm=group % 3 > 0)
    for head_dim in (64, 256):
        for page_size in (8, 16, 32, 64):
            yield Case(24, group=5, head_dim=head_dim, page_size=page_size)
    for i, num_tokens in enumerate((1, 2, 3, 4, 6, 8, 64, 100, 256, 1000)):
        yield Case(num_tokens, head_dim=(128, 64, 256)[i % 3], has_norm=i % 4 > 0)
    yield Case(2048)
    yield Case(2048, num_kv_heads=2, head_dim=64)
    yield Case(2048, num_kv_heads=1, group=16, head_dim=256)
    yield Case(8192, num_kv_heads=1)
    yield Case(256, num_kv_heads=32, group=1)


def inputs(case: Case, seed: int = 0) -> Arrays:
    """Everything a call takes, on the host; tokens at scattered places, padding at page 0."""
    rng = np.random.default_rng(seed)
    heads, half = case.group + 2, case.head_dim // 2
    shape = (case.num_tokens, case.num_kv_heads, heads, case.head_dim)
    angles = rng.uniform(0, 6.3, (case.num_tokens, half)).astype(np.float32)
    size = _SCALES_AT + (heads - 1) * case.head_dim
    vectors = rng.uniform(0.5, 1.5, size).astype(jnp.bfloat16) if case.has_norm else None
    pool = (case.num_pages, case.num_kv_heads, 2, case.page_size, case.head_dim)
    places = case.page_size + rng.permutation((case.num_pages - 1) * case.page_size)
    places = places[: case.num_tokens].astype(np.int32)
    places[case.num_real :] %= case.page_size
    return (
        (2 * rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16),
        np.cos(angles),
        np.sin(angles),
        vectors,
        rng.standard_normal(pool, np.float32).astype(jnp.bfloat16),
        places // case.page_size,
        places % case.page_size,
    )


def exact(case: Case, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Heads [T, K, G + 2, H] in float64, queries and keys turned, and what they are measured by."""
    qkv, cos, sin, vectors, *_ = arrays
    x = qkv.astype(np.float64)
    qk = x[:, :, :-1]
    if vectors is not None:
        scales = vectors[_SCALES_AT:].astype(np.float64).reshape(case.group + 1, case.head_dim)
        qk = qk / np.sqrt((qk**2).mean(-1, keepdims=True) + EPS) * scales
    first, second = np.split(qk, 2, axis=-1)
    cos, sin = (turn.astype(np.float64)[:, None, None] for turn in (cos, sin))
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    size = np.tile(np.hypot(first, second), 2)
    values = x[:, :, -1:]
    return np.concatenate([turned, values], 2), np.concatenate([size, np.abs(values)], 2)


def gathered(case: Case, out: Arrays, arrays: Arrays) -> np.ndarray:
    """[real tokens, K, G + 2, H] of what a call left: queries, and what it stored."""
    q, pool, _ = (np.asarray(x) for x in out)
    *_, pages, offsets = arrays
    q = q.reshape(case.num_tokens, case.num_kv_heads, case.group, case.head_dim)
    stored = pool[pages, :, :, offsets]
    return np.concatenate([q, stored], 2)[: case.num_real].astype(np.float64)


def call(case: Case, arrays: Arrays, kernels: str = "mosaic") -> Arrays:
    """One call with a pool of its own."""
    return jax.device_get(_program(case, kernels)(*jax.device_put(arrays)))


def check_values() -> Checks:
    """(what was checked, whether it holds, its figure) of every covered class."""
    for case in cases():
        arrays = inputs(case)
        before = api.prepare.counts["mosaic"]
        out = call(case, arrays)
        did_run = api.prepare.counts["mosaic"] == before + 1
        expected, size = exact(case, arrays)
        found = gathered(case, out, arrays)
        error = np.abs(found - expected[: case.num_real]) / np.maximum(size[: case.num_real], 1e-9)
        plain = gathered(case, call(case, arrays, "plain"), arrays)
        differ = float(np.mean(found != plain))
        worst = float(error.max()) if np.isfinite(error).all() else float("inf")
        holds = did_run and worst <= TOLERANCE and not out[2].any() and _keeps_others(out, arrays)
        figure = f"{worst:.1e}, {differ:.1e} of all numbers unlike the reference's"
        yield str(case), holds, figure if did_run else "declined"


def _keeps_others(out: Arrays, arrays: Arrays) -> bool:
    """Whether every place but the tokens' own holds what it held."""
    *_, pool, pages, offsets = arrays
    is_other = np.ones((pool.shape[0], pool.shape[3]), bool)
    is_other[pages, offsets] = False
    return bool((out[1] == pool).all(axis=(1, 2, 4))[is_other].all())


def check_bits() -> Checks:
    """What must change no bit of the other tokens."""
    for case in (Case(64, group=3), Case(2048), Case(1000, head_dim=64), Case(256, head_dim=256)):
        arrays = inputs(case)
        clean = call(case, arrays)
        again = all(_same(case, call(case, arrays), clean, arrays) for _ in range(5))
        yield f"{case}: 5 more runs", again, ""
        qkv = arrays[0].copy()
        token, key = case.num_tokens // 3, case.group
        qkv[token, 1, key, 7], qkv[token + 1, 0, key + 1, -1] = np.nan, -np.inf
        qkv[token + 2, 2, 0, 5] = np.nan  # a query
        arrays = (qkv, *arrays[1:])
        found = call(case, arrays)
        at = np.flatnonzero(found[2]).tolist()
        yield f"{case}: a NaN and an infinity", at == [token, token + 1], f"flagged {at}"
        is_rest = np.ones(case.num_tokens, bool)
        is_rest[token : token + 3] = False
        same = _same(case, found, clean, arrays, is_rest[: case.num_real])
        yield f"{case}: their neighbours", same, ""
        *_, pages, offsets = arrays
        stored = found[1][pages, :, :, offsets].astype(np.float32)
        value = np.where(np.arange(case.head_dim) == case.head_dim - 1, 0, qkv[token + 1, 0, -1])
        zeroed = np.array_equal(stored[token + 1, 0, 1], value.astype(np.float32))
        holds = zeroed and stored[token, 1, 0, 7] == 0 and np.isfinite(stored).all()
        yield f"{case}: zeros in their place", bool(holds), ""


def _same(
    case: Case, found: Arrays, clean: Arrays, arrays: Arrays, rows: np.ndarray | None = None
) -> bool:
    pair = [gathered(case, out, arrays) for out in (found, clean)]
    pair = pair if rows is None else [x[rows] for x in pair]
    return np.array_equal(*pair)


def measure(num_tokens: int, kernels: str, ceilings: Ceilings | None) -> dict[str, Any]:
    """Time of one layer, and what moving its bytes would take."""
    case = Case(num_tokens)
    num_layers = min(max(-(-_LAYER_BYTES // case.moved_bytes), 4), _MAX_LAYERS)
    qkv, cos, sin, vectors, pool, pages, offsets = jax.device_put(inputs(case))
    qkvs = [qkv + i for i in range(num_layers)]
    pools = [pool + i for i in range(num_layers)]
    prepare = case.prepare(kernels)

    def model(pools: list[jax.Array], qkvs: list[jax.Array], *turn: jax.Array) -> Any:
        outs = [
            prepare(qkv, *turn, vectors, pool, pages, offsets)
            for qkv, pool in zip(qkvs, pools, strict=True)
        ]
        queries, pools, is_bad = (list(x) for x in zip(*outs, strict=True))
        return pools, queries, functools.reduce(jnp.logical_or, is_bad)

    program = jax.jit(model, donate_argnums=0)

    def call() -> list[jax.Array]:
        nonlocal pools
        pools, *_ = program(pools, qkvs, cos, sin)
        return pools

    seconds = harness.seconds(call, _SAMPLE_SECONDS) / num_layers
    floor = case.moved_bytes / ceilings.read_bytes_per_second if ceilings else None
    figures = {
        "tokens": num_tokens,
        "kernels": kernels,
        "layers": num_layers,
        "bytes": case.moved_bytes,
        "us": round(1e6 * seconds, 2),
        "floor_us": floor and round(1e6 * floor, 2),
    }
    print(
        f"{num_tokens:>6} tokens {kernels:>7}  {figures['us']:7.2f} us  "
        f"bytes alone {figures['floor_us']} us",
        flush=True,
    )
    return figures


def declined() -> dict[str, str]:
    """Reasons of calls that the kernel should have taken."""
    reasons = api.prepare.declined.items()
    return {name: reason for name, reason in reasons if "'plain'" not in reason}


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, measures and writes the report; the exit status is 1 when a check failed."""
    return harness.run(
        "qkv",
        "Checks and times norm, rotation and KV write.",
        (check_values, check_bits),
        lambda ceilings: (
            measure(num_tokens, kernels, ceilings)
            for num_tokens in TOKENS
            for kernels in ("mosaic", "plain")
        ),
        lambda: ("declined", declined(), not declined()),
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
