"""Products of few tokens on the GPU: first that they are right, then their times beside XLA's.

    PYTHONPATH=. python benchmarks/kernels/linear.py --json OUT.json

Values are compared with float32 products of full precision; what must not change a bit is checked
to change none. Then a chain of products over distinct weights is timed, in all three forms, beside
the plain form and the time of reading the weights. A failure ends the run with status 1.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.kernels import harness
from benchmarks.kernels.harness import Checks
from benchmarks.roofline import Ceilings
from kernels.linear import api

TOLERANCE = {"product": 2.0**-8, "parts": 1e-5, "gated": 2.0**-6}
"""Of a token's outputs together: parts are not rounded, a gated product is four times."""
QWEN3_8B = {
    "qkv": ("product", 4096, 6144),
    "o": ("parts", 4096, 4096),
    "gate_up": ("gated", 4096, 12288),
    "down": ("parts", 12288, 4096),
}
QWEN3_30B = {"qkv": ("product", 2048, 5120), "o": ("parts", 4096, 2048)}
TOKENS = {"product": (1, 8, 32, 64), "parts": (1, 8, 32, 64, 256), "gated": (1, 8, 32, 64)}
"""Of each form as many as it has an implementation beside the plain one for."""
_FEW = ((1, 1.0), (4, 1e-12), (24, 1.0), (64, 1e6))
_VALUES = {"product": _FEW, "parts": (*_FEW, (200, 1.0)), "gated": _FEW}
"""Tokens, and what they are multiplied by."""
CHAIN = 6
"""Weights of one chain: together they are larger than the second-level cache."""
_SAMPLE_SECONDS = 0.03


def inputs(form: str, tokens: int, size: int, outputs: int, magnitude: float = 1.0) -> Any:
    """Tokens and a weight; a gated one is [K, 2, N]."""
    rng = np.random.default_rng(tokens)
    shape = (size, 2, outputs) if form == "gated" else (size, outputs)
    x = magnitude * rng.standard_normal((tokens, size), np.float32)
    weight = rng.standard_normal(shape, np.float32) * size**-0.5
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("form", "kernels"))
def call(x: jax.Array, weight: jax.Array, form: str, kernels: str = "mosaic") -> jax.Array:
    """[T, N], parts added up in float32."""
    out = getattr(api, form)(x, weight, kernels=kernels)
    return functools.reduce(jnp.add, list(out)) if form == "parts" else out


def exact(form: str, x: jax.Array, weight: jax.Array) -> np.ndarray:
    """[T, N] of float32 products summed on the device in full precision."""
    axes = (((1,), (0,)), ((), ()))
    wide = [array.astype(jnp.float32) for array in (x, weight)]
    out = np.asarray(jax.lax.dot_general(*wide, axes, precision="highest"), np.float64)
    if form != "gated":
        return out
    with np.errstate(over="ignore"):
        return out[:, 0] / (1 + np.exp(-out[:, 0])) * out[:, 1]


def check_values() -> Checks:
    """Every form, at served sizes and at the ends of what is covered."""
    cases = [
        (f"{model} {name}", *size)
        for model, sizes in (("8B", QWEN3_8B), ("30B", QWEN3_30B))
        for name, size in sizes.items()
    ]
    for name, form, size, outputs in (*cases, ("router", "parts", 2048, 128)):
        for tokens, magnitude in _VALUES[form]:
            arrays = inputs(form, tokens, size, outputs, magnitude)
            before = getattr(api, form).counts["reference"]
            found = np.asarray(call(*arrays, form)).astype(np.float64)
            error = harness.worst_error(found, exact(form, *arrays))
            is_covered = getattr(api, form).counts["reference"] == before
            holds = is_covered and error <= TOLERANCE[form]
            yield f"{name}, {tokens} tokens, times {magnitude:g}", holds, f"{error:.1e}"


def check_bits() -> Checks:
    """What must change no bit of a token."""
    for name, (form, size, outputs) in QWEN3_8B.items():
        x, weight = inputs(form, 16, size, outputs)
        clean = np.asarray(call(x, weight, form))
        same = all(np.array_equal(np.asarray(call(x, weight, form)), clean) for _ in range(20))
        yield f"{name}: 20 more runs", same, ""
        bad = np.asarray(call(x.at[::2].set(jnp.nan), weight, form))
        yield f"{name}: neighbours that are not finite", np.array_equal(bad[1::2], clean[1::2]), ""


@functools.partial(jax.jit, static_argnames=("form", "kernels"))
def _chain(x: jax.Array, weights: list[jax.Array], form: str, kernels: str) -> list[jax.Array]:
    """Every product: one that nobody reads would not be made."""
    products: list[jax.Array] = []
    for weight in weights:
        out = getattr(api, form)(x, weight, kernels=kernels)
        x, out = jax.lax.optimization_barrier((x, out))
        products.append(out)
    return products


def measured(ceilings: Ceilings | None) -> Iterable[dict[str, Any]]:
    """Time of one product, ours and the plain form's."""
    for name, (form, size, outputs) in QWEN3_8B.items():
        weights = [inputs(form, 1, size, outputs)[1] + i for i in range(CHAIN)]
        for tokens in TOKENS[form]:
            x, _ = inputs(form, tokens, size, outputs)
            figures: dict[str, Any] = {"product": name, "tokens": tokens}
            for kernels in ("mosaic", "plain"):
                run: Callable[[], Any] = functools.partial(_chain, x, weights, form, kernels)
                seconds = harness.seconds(run, _SAMPLE_SECONDS) / CHAIN
                figures[f"{kernels}_us"] = round(1e6 * seconds, 2)
            if ceilings:
                floor = weights[0].nbytes / ceilings.read_bytes_per_second
                figures["floor_us"] = round(1e6 * floor, 2)
            print("  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
            yield figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, measures and writes the report; the exit status is 1 when a check failed."""
    return harness.run(
        "linear",
        "Checks and times products of few tokens.",
        (check_values, check_bits),
        measured,
        lambda: ("declined", dict(api.product.declined), True),
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
