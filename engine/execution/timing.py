"""Times an op's candidates side by side on the first device.

As in the kernels' benchmarks a program runs over weights of several layers, more than the
second-level cache holds, and many calls are under way between two waits. Samples of one candidate
and the next take turns, so that a clock that drifts favours none.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.config import EngineConfig
from engine.execution.candidates import TUNED, Job, Measured, lens_of
from engine.execution.runner import device_profile
from kernels.tuning import Choice

_TOKENS = (8, 64)
"""Tokens at which a choice is measured that holds for any number of them."""
_COLD_BYTES = 2**29
_MAX_LAYERS = 36
_TOLERANCE = 2.0**-6
_SAMPLES, _SAMPLE_SECONDS = 7, 0.01
_WARM_UP_CALLS = 3


# --- programs ---


@dataclasses.dataclass(frozen=True)
class _Program:
    """A chain of calls, one a layer."""

    call: Callable[..., jax.Array]
    """call(x, layer, *shared, choice=)."""
    x: jax.ShapeDtypeStruct
    layer: tuple[jax.ShapeDtypeStruct, ...]
    shared: tuple[np.ndarray, ...]
    num_layers: int

    def traced(self, choice: Choice) -> jax.stages.Traced:
        """The chain with one candidate."""

        def chain(x: jax.Array, layers: Any, shared: Any) -> list[jax.Array]:
            outs = []
            for layer in layers:
                out = self.call(x, layer, *shared, choice=choice)
                # One call must not start before the one ahead of it has ended.
                x, out = jax.lax.optimization_barrier((x, out))
                outs.append(out)
            return outs  # a call whose result nobody reads would not be made

        return jax.jit(chain).trace(self.x, [self.layer] * self.num_layers, self.shared)

    def arrays(self) -> tuple[Any, ...]:
        """Random values on the device."""

        def make(key: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
            # Of a weight, that sums stay about as large as the tokens.
            scale = struct.shape[-1] ** -0.5 if struct in self.layer else 1.0
            return jax.random.normal(key, struct.shape, struct.dtype) * scale

        normal = jax.jit(make, static_argnums=1)
        keys = iter(jax.random.split(jax.random.key(0), 1 + self.num_layers * len(self.layer)))
        x = normal(next(keys), self.x)
        layers = [
            tuple(normal(next(keys), one) for one in self.layer) for _ in range(self.num_layers)
        ]
        return x, layers, jax.device_put(self.shared)


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def programs_of(job: Job) -> list[_Program]:
    """What is timed for a job, all of it together."""
    s = job.shape
    num_layers = max(2, min(_MAX_LAYERS, math.ceil(_COLD_BYTES / job.layer_bytes)))
    if job.op in ("attention.decode", "attention.decode_times", "mla.decode"):
        return [_attending(job, num_layers)]
    if job.op == "linear.normed":
        return [_norming(job, num_layers)]
    if job.op == "moe.experts":
        return [_choosing(job, num_layers)]
    op, outputs = TUNED[job.op], (s["outputs"],)
    if job.op == "linear.gated":
        outputs = (2, s["outputs"] // 2)

    def call(x: jax.Array, layer: Any, *, choice: Choice) -> jax.Array:
        out = op(x, layer[0], kernels="mosaic", choice=choice)
        return out.sum(axis=0) if job.op == "linear.parts" else out

    weight = _bf16(s["inputs"], *outputs)
    tokens = (s["tokens"],) if "tokens" in s else _TOKENS
    return [_Program(call, _bf16(n, s["inputs"]), (weight,), (), num_layers) for n in tokens]


def _attending(job: Job, num_layers: int) -> _Program:
    s, op, lens = job.shape, TUNED[job.op], lens_of(job.shape)
    counts = -(-lens // s["page_size"])
    pages = 1 + np.random.default_rng(0).permutation(int(counts.sum())).astype(np.int32)
    table = np.zeros((s["rows"], s["pages"]), np.int32)
    table[np.arange(s["pages"]) < counts[:, None]] = pages
    positions = lens[:, None] - s["queries"] + np.arange(s["queries"], dtype=np.int32)
    shared = (table, np.maximum(positions, 0), lens)
    options = dict(block_pages=128, block_bytes=2**29, kernels="mosaic")
    rows, num_pages = (s["rows"], s["queries"]), len(pages) + 1
    if job.op == "mla.decode":
        dims = s["latent"] + 64
        pool = _bf16(num_pages, s["page_size"], dims)

        def latent(x: jax.Array, layer: Any, *rest: jax.Array, choice: Choice) -> jax.Array:
            queries = (x[..., : s["latent"]], x[..., s["latent"] :])
            return op(*queries, layer[0], *rest, scale=dims**-0.5, choice=choice, **options)

        return _Program(latent, _bf16(*rows, s["num_heads"], dims), (pool,), shared, num_layers)
    dims = s["head_dim"]
    options |= dict(scale=dims**-0.5, window=s["window"] or None)

    def paged(x: jax.Array, layer: Any, *rest: jax.Array, choice: Choice) -> jax.Array:
        pool, *weight = layer
        out = op(x, pool, *rest, *weight, choice=choice, **options)
        return out.sum(axis=0) if weight else out

    heads, num_heads = s["num_kv_heads"], s["num_kv_heads"] * s["group"]
    layer = [_bf16(num_pages, heads, 2, s["page_size"], dims)]
    if "outputs" in s:
        layer.append(_bf16(num_heads * dims, s["outputs"]))
    return _Program(paged, _bf16(*rows, num_heads, dims), tuple(layer), shared, num_layers)


def _norming(job: Job, num_layers: int) -> _Program:
    s, op = job.shape, TUNED[job.op]
    rng, inputs, halves = np.random.default_rng(0), s["inputs"], s["halves"]
    update = rng.standard_normal((2, 1, inputs), np.float32)
    scale = np.ones(inputs, jnp.bfloat16)
    options = dict(form="gated" if halves == 2 else "product", scale_at=0, eps=1e-6)

    def call(x: jax.Array, layer: Any, *rest: jax.Array, choice: Choice) -> jax.Array:
        *_, out = op(x, *rest, layer[0], kernels="mosaic", choice=choice, **options)
        return out

    outputs = (s["outputs"],) if halves == 1 else (2, s["outputs"] // 2)
    weight = _bf16(inputs, *outputs)
    return _Program(call, _bf16(1, inputs), (weight,), (update, scale), num_layers)


def _choosing(job: Job, num_layers: int) -> _Program:
    s, op, rng = job.shape, TUNED[job.op], np.random.default_rng(0)
    scores = rng.random((s["tokens"], s["num_experts"]))
    ids = np.argsort(scores, axis=1)[:, : s["top_k"]].astype(np.int32)
    weights = rng.dirichlet(np.ones(s["top_k"]), s["tokens"]).astype(np.float32)

    def call(
        x: jax.Array, layer: Any, ids: jax.Array, weights: jax.Array, *, choice: Choice
    ) -> jax.Array:
        parts = op(x, ids, weights, *layer, kernels="mosaic", choice=choice)
        return parts.astype(jnp.float32).sum(axis=0)

    experts, hidden, width = s["num_experts"], s["hidden_size"], s["intermediate_size"]
    layer = _bf16(experts, 2 * width, hidden), _bf16(experts, hidden, width)
    return _Program(call, _bf16(s["tokens"], hidden), layer, (ids, weights), num_layers)


# --- the device ---


class DeviceBench:
    """Times candidates on this machine's first device."""

    def __init__(self, report: Callable[[str], None] = lambda text: None) -> None:
        """`report` is told what goes on.

        Raises:
          RuntimeError: the device has no kernels to tune, with the way out.
        """
        device = jax.devices()[0]
        # Of no model in particular.
        self.profile = device_profile(device, EngineConfig(model="any"))
        if self.profile.tiling.kernels != "mosaic":
            raise RuntimeError(
                f"the first device here is {device.device_kind}, which runs none of the kernels "
                "that are tuned; run `treadle tune` on a machine with a Hopper GPU"
            )
        self._report = report

    def measure(self, jobs: Sequence[Job]) -> Iterator[Measured]:
        """Compiles all programs on all cores, then times one job after the other."""
        traced = {}
        for number, job in enumerate(jobs):
            self._report(f"tracing {number + 1} of {len(jobs)}")
            programs = programs_of(job)
            found = [_traced(job, programs, choice) for choice in job.candidates]
            if found[0] is not None:
                traced[number] = programs, found
        read = self._read_bytes_per_second()
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = {
                number: [[pool.submit(_compiled, one) for one in many or ()] for many in found]
                for number, (_, found) in traced.items()
            }
            for done, futures in enumerate(compiled.values()):
                self._report(f"compiling {done + 1} of {len(compiled)}")
                concurrent.futures.wait([one for many in futures for one in many])
        for number, (programs, _) in traced.items():
            job = jobs[number]
            self._report(f"timing {job.op}")
            ready = [[future.result() for future in many] for many in compiled.pop(number)]
            seconds = _timed(programs, ready)
            yield Measured(job, tuple(seconds), len(programs) * job.layer_bytes / read)

    def _read_bytes_per_second(self) -> float:
        """Of a plain reduction over 1 GiB, which is what the floor is made of."""
        x = jnp.ones((8, 2**26), jnp.bfloat16)
        run = jax.jit(lambda x: x.max(axis=1))
        return x.nbytes / min(elapsed(lambda: run(x), 10) / 10 for _ in range(_SAMPLES))


def _traced(job: Job, programs: list[_Program], choice: Choice) -> list[Any] | None:
    """The programs of one candidate; None when its implementation declined a call."""
    counts, found = TUNED[job.op].counts, []
    for program in programs:
        before = counts[choice.form or ""]
        found.append(program.traced(choice))
        if counts[choice.form or ""] != before + program.num_layers:
            return None
    return found


def _compiled(traced: jax.stages.Traced) -> jax.stages.Compiled | None:
    try:
        return traced.lower().compile()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None  # for one: its memory is past what a block may have


def _timed(programs: list[_Program], ready: list[list[Any]]) -> list[float]:
    """Seconds of a layer for each candidate, over all programs together."""
    totals = [0.0 if found and all(found) else math.inf for found in ready]
    for number, program in enumerate(programs):
        arrays = program.arrays()
        calls = [
            functools.partial(found[number], *arrays) if math.isfinite(total) else None
            for found, total in zip(ready, totals, strict=True)
        ]
        if calls[0] is None:
            raise RuntimeError(
                f"the formula's choice was not compiled for {program.x}; its kernel fails when "
                "served, too: run the kernel's own benchmark for the reason"
            )
        truth = np.asarray(calls[0](), np.float32)
        for i, call in enumerate(calls):
            if call is not None and not _agrees(np.asarray(call(), np.float32), truth):
                calls[i], totals[i] = None, math.inf
        samples = _samples(calls)
        for i, each in enumerate(samples):
            if each:
                totals[i] += statistics.median(each) / program.num_layers
    return totals


def _samples(calls: Sequence[Callable[[], Any] | None]) -> list[list[float]]:
    """Seconds of a call, the candidates in turns."""
    repeats = []
    for call in calls:
        if call is not None:
            elapsed(call, _WARM_UP_CALLS)  # records its graph
        repeats.append(call and max(3, int(_SAMPLE_SECONDS / (elapsed(call, 3) / 3))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(_SAMPLES):
        for call, count, mine in zip(calls, repeats, samples, strict=True):
            if call is not None and count:
                mine.append(elapsed(call, count) / count)
    return samples


def elapsed(call: Callable[[], Any], calls: int) -> float:
    """Seconds of so many calls, all under way at once; each returns arrays to wait for."""
    began = time.perf_counter()
    out = None
    for _ in range(calls):
        out = call()
    jax.block_until_ready(out)
    return time.perf_counter() - began


def _agrees(found: np.ndarray, truth: np.ndarray) -> bool:
    most = float(np.abs(truth).max())
    return bool(np.isfinite(found).all() and np.abs(found - truth).max() <= _TOLERANCE * most)
