"""Residual and norm between a layer's products, on the GPU: first that it is right, then its time.

    PYTHONPATH=. python benchmarks/kernels/norm.py --json OUT.json [--quick]

Sums are compared bit for bit with float32 ones rounded, norms with float64; what must not change a
bit is checked to change none. A failure ends the run with status 1. Then the time of one sum and
norm in a chain of many, beside that of the plain form and of reading and writing its bytes.

`--quick` leaves out the sizes that tell least.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.kernels import harness
from benchmarks.kernels.harness import Checks
from benchmarks.roofline import Ceilings
from kernels.norm import api

EPS = 1e-6
SCALE_AT = 8
TOLERANCE = 2.0**-7
"""Of one value: it is rounded before the scale and after, by at most 2^-9 each."""
CHAIN = 32
SERVED = ((1, 4096), (64, 4096), (2048, 4096), (8, 4096), (32, 4096), (256, 4096), (1, 2048))
OTHERS = ((64, 2048), (8192, 4096), (8192, 2048))
RAGGED = ((3, 4096, 1), (7, 2048, 4), (33, 5120, 2), (100, 8192, 8), (1000, 128, 1), (5, 896, 3))
_SAMPLE_SECONDS = 0.03

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@functools.partial(jax.jit, static_argnames="kernels")
def _call(*arrays: jax.Array, kernels: str = "mosaic") -> tuple[jax.Array, jax.Array]:
    return api.add_norm(*arrays, scale_at=SCALE_AT, eps=EPS, kernels=kernels)


def inputs(num_tokens: int, hidden_size: int, num_parts: int, magnitude: float = 1.0) -> Arrays:
    """Residual, parts and scale on the host; several parts are float32."""
    rng = np.random.default_rng(num_tokens)
    shape = num_tokens, hidden_size
    residual = (magnitude * rng.standard_normal(shape)).astype(jnp.bfloat16)
    parts = (magnitude * rng.standard_normal((num_parts, *shape))).astype(np.float32)
    vectors = (1 + 0.3 * rng.standard_normal(SCALE_AT + hidden_size)).astype(jnp.bfloat16)
    return residual, parts if num_parts > 1 else parts.astype(jnp.bfloat16), vectors


def run(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """One call."""
    hidden, normed = _call(*arrays)
    return np.asarray(hidden), np.asarray(normed)


def exact(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """The sum as it must be bit for bit, and its norm in float64."""
    residual, parts, vectors = arrays
    update = functools.reduce(np.add, list(parts.astype(np.float32))).astype(jnp.bfloat16)
    hidden = (residual.astype(np.float32) + update.astype(np.float32)).astype(jnp.bfloat16)
    wide = hidden.astype(np.float64)
    inverse = 1 / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS)
    return hidden, wide * inverse * vectors[SCALE_AT:].astype(np.float64)


def check_values(sizes: Sequence[tuple[int, ...]]) -> Checks:
    """Sums and norms."""
    for num_tokens, hidden_size, *parts in sizes:
        for magnitude in (1.0, 1e-12, 1e15):
            num_parts = parts[0] if parts else 1
            arrays = inputs(num_tokens, hidden_size, num_parts, magnitude)
            before = api.add_norm.counts["reference"]
            hidden, normed = run(arrays)
            total, truth = exact(arrays)
            error = np.abs(normed.astype(np.float64) - truth) / np.maximum(np.abs(truth), 1e-30)
            differ = int((hidden.view(np.uint16) != total.view(np.uint16)).sum())
            is_covered = api.add_norm.counts["reference"] == before
            holds = is_covered and differ == 0 and float(error.max()) <= TOLERANCE
            name = f"{num_tokens} x {hidden_size}, {num_parts} parts, times {magnitude:g}"
            yield name, bool(holds), f"{differ} sums differ, {error.max():.1e}"


def check_bits() -> Checks:
    """What must change no bit of a token."""
    for num_tokens, hidden_size, num_parts in ((64, 4096, 1), (33, 2048, 4)):
        residual, parts, vectors = inputs(num_tokens, hidden_size, num_parts)
        clean = run((residual, parts, vectors))
        name = f"{num_tokens} x {hidden_size}"
        same = all(_bits_equal(run((residual, parts, vectors)), clean) for _ in range(5))
        yield f"{name}: 5 more runs", same, ""

        kept = np.arange(num_tokens) % 3 == 1
        bad = residual.copy()
        bad[~kept, 7] = np.nan
        found = run((bad, parts, vectors))
        same = _bits_equal([x[kept] for x in found], [x[kept] for x in clean])
        yield f"{name}: neighbours that are not finite", same, ""

        alone = run((residual[3:4], parts[:, 3:4], vectors))
        yield f"{name}: alone", _bits_equal(alone, [x[3:4] for x in clean]), ""


def _bits_equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(a.view(np.uint16), b.view(np.uint16)) for a, b in pairs)


@functools.partial(jax.jit, static_argnames="kernels")
def _chain(residual: jax.Array, vectors: jax.Array, kernels: str) -> jax.Array:
    update = residual
    for _ in range(CHAIN):
        out = api.add_norm(
            residual, update[None], vectors, scale_at=SCALE_AT, eps=EPS, kernels=kernels
        )
        # Between two products, in a layer: XLA must not make one kernel of several.
        residual, update = jax.lax.optimization_barrier(out)
    return update


def measured(sizes: Sequence[tuple[int, int]], ceilings: Ceilings | None) -> Iterable[Any]:
    """Time of one sum and norm, ours and the plain form's."""
    for num_tokens, hidden_size in sizes:
        residual, _, vectors = map(jnp.asarray, inputs(num_tokens, hidden_size, 1))
        figures: dict[str, Any] = {"tokens": num_tokens, "hidden_size": hidden_size}
        for kernels in ("mosaic", "plain"):
            call = functools.partial(_chain, residual, vectors, kernels)
            seconds = harness.seconds(call, _SAMPLE_SECONDS) / CHAIN
            figures[f"{kernels}_us"] = round(1e6 * seconds, 2)
        if ceilings:
            moved = 4 * 2 * num_tokens * hidden_size
            figures["floor_us"] = round(1e6 * moved / ceilings.read_bytes_per_second, 2)
        print("  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        yield figures


def checks(quick: bool) -> Iterator[Callable[[], Checks]]:
    """Those that tell most first."""
    yield lambda: check_values(SERVED[:3])
    yield check_bits
    yield lambda: check_values(RAGGED[:3] if quick else RAGGED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, measures and writes the report; the exit status is 1 when a check failed."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--quick", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    sizes = SERVED if options.quick else SERVED + OTHERS
    return harness.run(
        "norm",
        "Checks and times residual and norm. --quick: the sizes that tell most.",
        tuple(checks(options.quick)),
        lambda ceilings: measured(sizes, ceilings),
        lambda: ("declined", dict(api.add_norm.declined), True),
        rest,
    )


if __name__ == "__main__":
    raise SystemExit(main())
