"""What makes one token and its product in one kernel, on the GPU: that it is right, then its time.

    PYTHONPATH=. python benchmarks/kernels/one_token.py --json OUT.json

Sums and norms must be those of the norm's own kernel but for a root's last bits, products those of
full precision; attention and its product those of two kernels. Every way to do it in one kernel
must give the same bits. Then times in a chain over distinct weights, in one kernel and apart,
beside that of reading the weights. A failure ends the run with status 1.
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

from benchmarks.kernels import harness, linear
from benchmarks.kernels.harness import Checks
from benchmarks.roofline import Ceilings
from kernels.attention import api as attention
from kernels.dispatch import Dispatch
from kernels.linear import api, one_token
from kernels.tuning import Choice

EPS = 1e-6
SCALE_AT = 8
SIZES = {
    "8B qkv": ("product", 4096, 6144, 2),
    "8B gate_up": ("gated", 4096, 12288, 2),
    "30B qkv": ("product", 2048, 5120, 4),
    "30B router": ("parts", 2048, 128, 4),
}
"""Form, inputs, outputs, and parts of the update."""
ATTENTION = {"8B": (8, 4, 4096), "30B": (4, 8, 2048)}
"""Kv heads, queries of each, and outputs."""
KEYS = (300, 1000, 8000)
PAGE_SIZE = 64
LOOK = {"scale": 128**-0.5, "window": None, "block_pages": 128, "block_bytes": 2**29}
CHOICES = one_token.choices((64, 128))
"""Every way to do it in one kernel."""
CHAIN = 24
_SAMPLE_SECONDS = 0.03
_ROUNDED_TWICE = 2.0**-7


def inputs(form: str, size: int, outputs: int, parts: int, magnitude: float = 1.0) -> Any:
    """Residual, parts, vectors and weight."""
    rng = np.random.default_rng(size + parts)
    residual = magnitude * rng.standard_normal((1, size), np.float32)
    update = magnitude * rng.standard_normal((parts, 1, size), np.float32)
    vectors = 1 + 0.3 * rng.standard_normal(SCALE_AT + size)
    _, weight = linear.inputs(form, 1, size, outputs)
    return (
        jnp.asarray(residual, jnp.bfloat16),
        jnp.asarray(update),
        jnp.asarray(vectors, jnp.bfloat16),
        weight,
    )


def _op_of(op: Dispatch, apart: Callable[..., Any], way: Choice | None) -> Callable[..., Any]:
    """None: apart."""
    return apart if way is None else functools.partial(op, choice=way)


def _named(way: Choice | None) -> str:
    if way is None:
        return "apart"
    return "_".join([way.form or "", *(str(n) for _, n in way.settings)])


@functools.partial(jax.jit, static_argnames=("form", "way"))
def call(*arrays: jax.Array, form: str, way: Choice | None) -> Any:
    """Sum, norm and product."""
    op = _op_of(api.normed, api.apart, way)
    return op(*arrays, form=form, scale_at=SCALE_AT, eps=EPS, kernels="mosaic")


def check_values() -> Checks:
    """Every size and way, beside the norm's own kernel and a product of full precision."""
    for name, (form, size, outputs, parts) in SIZES.items():
        for magnitude in (1.0, 1e-12, 1e6):
            arrays = inputs(form, size, outputs, parts, magnitude)
            apart = call(*arrays, form=form, way=None)
            for way in CHOICES:
                before = api.normed.counts["apart"]
                holds, figure = _compared(form, call(*arrays, form=form, way=way), apart, arrays[3])
                holds = holds and api.normed.counts["apart"] == before
                yield f"{name}, times {magnitude:g}, {way}", holds, figure


def _compared(form: str, found: Any, apart: Any, weight: jax.Array) -> tuple[bool, str]:
    """Whether one kernel's sum, norm and product are right, and how far they are off."""
    hidden, normed, out = found
    same = np.asarray(hidden).tobytes() == np.asarray(apart[0]).tobytes()
    wide = [np.asarray(x).astype(np.float64) for x in (normed, apart[1])]
    off = (np.abs(wide[0] - wide[1]) / np.maximum(np.abs(wide[1]), 1e-30)).max()
    out = np.asarray(functools.reduce(jnp.add, list(out)) if form == "parts" else out)
    error = harness.worst_error(
        out.reshape(1, -1), linear.exact(form, normed, weight).reshape(1, -1)
    )
    holds = same and float(off) <= _ROUNDED_TWICE and error <= linear.TOLERANCE[form]
    return bool(holds), f"norm {off:.1e}, product {error:.1e}"


def attention_inputs(kv_heads: int, group: int, outputs: int, keys: int) -> Any:
    """What `attention.decode_times` takes of one query."""
    rng = np.random.default_rng(keys)
    width = -(-keys // PAGE_SIZE)
    pool = rng.standard_normal((width + 1, kv_heads, 2, PAGE_SIZE, 128), np.float32)
    _, weight = linear.inputs("parts", 1, kv_heads * group * 128, outputs)
    return (
        jnp.asarray(rng.standard_normal((1, 1, kv_heads * group, 128)), jnp.bfloat16),
        jnp.asarray(pool, jnp.bfloat16),
        jnp.arange(1, width + 1, dtype=jnp.int32)[None],
        jnp.full((1, 1), keys - 1, jnp.int32),
        jnp.full((1,), keys, jnp.int32),
        weight,
    )


def _attention_ways(*arrays: Any) -> tuple[Choice, ...]:
    """Every way to merge in the product, with its weights prefetched and without."""
    tunable = attention.decode_times.tunable
    assert tunable is not None
    return tunable.candidates(tunable.shape(*arrays, window=None))


@functools.partial(jax.jit, static_argnames="way")
def attend(*arrays: jax.Array, way: Choice | None) -> jax.Array:
    """The product, its parts added up."""
    op = _op_of(attention.decode_times, attention.apart, way)
    return functools.reduce(jnp.add, list(op(*arrays, kernels="mosaic", **LOOK)))


def check_attention() -> Checks:
    """Merged in the product, beside merged before it."""
    for name, sizes in ATTENTION.items():
        for keys in KEYS:
            arrays = attention_inputs(*sizes, keys)
            apart = np.asarray(attend(*arrays, way=None))
            before = attention.decode_times.counts["apart"]
            ways = _attention_ways(*arrays)
            found = [np.asarray(attend(*arrays, way=way)) for way in ways for _ in range(10)]
            error = harness.worst_error(found[0], apart)
            same = all(np.array_equal(one, found[0]) for one in found)
            is_covered = attention.decode_times.counts["apart"] == before
            holds = same and is_covered and error <= 1e-5
            yield f"{name} attention of {keys} keys, 10 runs of each way", holds, f"{error:.1e}"


def check_bits() -> Checks:
    """Runs after runs of every way give the same bits."""
    for name, (form, *sizes) in SIZES.items():
        arrays = inputs(form, *sizes)
        clean: list[bytes] = []
        for way in CHOICES:
            runs = (call(*arrays, form=form, way=way) for _ in range(20))
            found = [[np.asarray(x).tobytes() for x in run] for run in runs]
            clean = clean or found[0]
            yield f"{name}: 20 runs of {way}", all(one == clean for one in found), ""


@functools.partial(jax.jit, static_argnames=("form", "way"))
def _chain(
    residual: jax.Array,
    update: jax.Array,
    vectors: jax.Array,
    weights: list[jax.Array],
    form: str,
    way: Choice | None,
) -> list[jax.Array]:
    """Every product: one that nobody reads would not be made."""
    op, products = _op_of(api.normed, api.apart, way), []
    for weight in weights:
        residual, _, out = op(
            residual,
            update,
            vectors,
            weight,
            form=form,
            scale_at=SCALE_AT,
            eps=EPS,
            kernels="mosaic",
        )
        residual, update, out = jax.lax.optimization_barrier((residual, update, out))
        products.append(out)
    return products


@functools.partial(jax.jit, static_argnames="way")
def _attention_chain(*arrays: Any, way: Choice | None) -> list[jax.Array]:
    q, pool, table, positions, kv_lens, weights = arrays
    op, products = _op_of(attention.decode_times, attention.apart, way), []
    for weight in weights:
        out = op(q, pool, table, positions, kv_lens, weight, kernels="mosaic", **LOOK)
        q, out = jax.lax.optimization_barrier((q, out))
        products.append(out)
    return products


def measured_attention(ceilings: Ceilings | None) -> Iterable[dict[str, Any]]:
    """Time of one query's attention and the product of it."""
    for name, sizes in ATTENTION.items():
        for keys in KEYS:
            *arrays, weight = attention_inputs(*sizes, keys)
            weights = [weight + i for i in range(CHAIN)]
            figures: dict[str, Any] = {"attention": name, "keys": keys}
            for way in (*_attention_ways(*arrays, weight), None):
                run = functools.partial(_attention_chain, *arrays, weights, way=way)
                seconds = harness.seconds(run, _SAMPLE_SECONDS) / CHAIN
                figures[f"{_named(way)}_us"] = round(1e6 * seconds, 2)
            if ceilings:
                read = weight.nbytes + 2 * keys * sizes[0] * 128 * 2
                figures["floor_us"] = round(1e6 * read / ceilings.read_bytes_per_second, 2)
            print("  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
            yield figures


def measured(ceilings: Ceilings | None) -> Iterable[dict[str, Any]]:
    """Time of one norm and product, in one kernel each way and in two."""
    for name, (form, *sizes) in SIZES.items():
        *arrays, weight = inputs(form, *sizes)
        weights = [weight + i for i in range(CHAIN)]
        figures: dict[str, Any] = {"product": name}
        for way in (*CHOICES, None):
            run: Callable[[], Any] = functools.partial(_chain, *arrays, weights, form, way)
            seconds = harness.seconds(run, _SAMPLE_SECONDS) / CHAIN
            figures[f"{_named(way)}_us"] = round(1e6 * seconds, 2)
        if ceilings:
            floor = weight.nbytes / ceilings.read_bytes_per_second
            figures["floor_us"] = round(1e6 * floor, 2)
        print("  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
        yield figures
    yield from measured_attention(ceilings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, measures and writes the report; the exit status is 1 when a check failed."""
    return harness.run(
        "one_token",
        "Checks and times what makes one token, with the product of it.",
        (check_values, check_attention, check_bits),
        measured,
        lambda: ("declined", dict(api.normed.declined), not api.normed.declined),
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
