"""What of a model's kernels is worth measuring, and what is kept of it in `kernels.tuning`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from engine.execution.settings import DeviceProfile, Settings
from kernels.attention import api as attention
from kernels.dispatch import Dispatch
from kernels.linear import api as linear
from kernels.mla import api as mla
from kernels.moe import api as moe
from kernels.tuning import TUNING, Choice, Entry, Shape, Table
from models import checkpoint, sharding
from models.batch import Batch
from models.cache import open_cache
from models.registry import Model

TUNED: dict[str, Dispatch] = {
    op.op: op
    for op in (
        attention.decode,
        attention.decode_times,
        mla.decode,
        linear.product,
        linear.parts,
        linear.gated,
        linear.normed,
        moe.experts,
    )
}
WORTH = 0.03
"""What a choice must gain on the formula to be kept: less is noise, and data that grows stale."""
MOST_LOSS = 0.10
"""What the formula may lose to the best candidate at a shape that nobody measured."""
HELD_OUT: tuple[tuple[str, Shape], ...] = (
    ("attention.decode", dict(rows=4, queries=1, num_kv_heads=2, group=6, head_dim=64,
                              page_size=64, pages=96, window=0)),
    ("attention.decode", dict(rows=32, queries=1, num_kv_heads=6, group=8, head_dim=128,
                              page_size=64, pages=48, window=0)),
    ("linear.product", dict(tokens=16, inputs=3328, outputs=4736)),
    ("linear.parts", dict(inputs=10240, outputs=3072)),
    ("linear.gated", dict(inputs=3328, outputs=17408)),
    ("moe.experts", dict(tokens=64, num_experts=64, top_k=6, hidden_size=2304,
                         intermediate_size=1280)),
)  # fmt: skip
"""Sizes of no published model, which `--check` measures and nothing is ever kept for."""
_KEYS = 2048
"""Keys of the longest row; the others' are spread evenly below."""
_LEAST_BYTES = 2**21
"""A smaller weight is not tuned: so many layers of it would stay in the cache."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One op at one shape."""

    op: str
    shape: Shape

    @property
    def candidates(self) -> tuple[Choice, ...]:
        """The formula's choice first."""
        tunable = TUNED[self.op].tunable
        assert tunable is not None
        return tunable.candidates(self.shape)

    @property
    def layer_bytes(self) -> int:
        """What one call reads of weights or pages; of experts those that are hit on average."""
        s = self.shape
        if self.op.startswith("attention."):
            heads = s["num_kv_heads"] * s["head_dim"]
            read = 4 * heads * int(lens_of(s).sum())
            return read + 2 * heads * s["group"] * s.get("outputs", 0)
        if self.op == "mla.decode":
            return 2 * (s["latent"] + 64) * int(lens_of(s).sum())
        if self.op == "moe.experts":
            hit = 1 - (1 - s["top_k"] / s["num_experts"]) ** s["tokens"]
            expert = 2 * 3 * s["hidden_size"] * s["intermediate_size"]
            return int(hit * s["num_experts"] * expert)
        return 2 * s["inputs"] * s["outputs"]


def lens_of(shape: Shape) -> np.ndarray:
    """i32[R], keys of the rows of an attention job, the longest last."""
    most, rows = min(_KEYS, shape["pages"] * shape["page_size"]), shape["rows"]
    return np.maximum(most * np.arange(1, rows + 1) // rows, 1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the candidates of one job took."""

    job: Job
    seconds: tuple[float, ...]
    """Of each candidate and layer; infinite where it was wrong or could not be compiled."""
    floor_seconds: float

    @property
    def best(self) -> Choice:
        """The fastest; the formula's, unless another one gains what is worth keeping."""
        first = self.job.candidates[0]
        return first if self.loss < WORTH else self._fastest

    @property
    def loss(self) -> float:
        """What the formula's choice loses to the fastest, as a part of the latter."""
        return self.seconds[0] / min(self.seconds) - 1

    @property
    def _fastest(self) -> Choice:
        return self.job.candidates[self.seconds.index(min(self.seconds))]

    def kept_in(self, table: Table, measured: str) -> Table:
        """The table with this choice, or without one where the formula's is as good."""
        entry = None
        if self.best != self.job.candidates[0]:
            us, formula_us = (round(1e6 * x, 2) for x in (min(self.seconds), self.seconds[0]))
            entry = Entry(self.job.op, self.job.shape, self.best, us, formula_us, measured)
        return table.replaced(self.job.op, self.job.shape, entry)


class Bench(Protocol):
    """What jobs are measured on."""

    profile: DeviceProfile

    def measure(self, jobs: Sequence[Job]) -> Iterator[Measured]:
        """One after the other; jobs that the kernels do not cover are left out."""
        ...


# --- the shapes of a model ---


class _Asked(Table):
    """Notes what is looked up, and lets the reference run, which is traced at once."""

    def __init__(self) -> None:
        super().__init__("asked")
        self.jobs: list[Job] = []

    def choice(self, op: str, shape: Shape, candidates: Any) -> Choice:
        if not any(job.op == op and job.shape == shape for job in self.jobs):
            self.jobs.append(Job(op, shape))
        return Choice("reference")


def jobs_of(model: Model, settings: Settings, ops: Iterable[str]) -> list[Job]:
    """What a model's decode programs ask for at every rung, where there is a choice."""
    asked, known = _Asked(), set(ops)
    small = model.first_layers(2)
    # What is noted here must come from no cache, and what is traced here must go to none. A tapped
    # layer would be in none, but norms nothing together with its product.
    jax.clear_caches()
    with TUNING.using(asked):
        for rows in settings.ladder.rows:
            jax.eval_shape(small.forward, *_step(small, settings, rows))
    jax.clear_caches()
    return [
        job
        for job in asked.jobs
        if job.op in known
        and len(job.candidates) > 1
        and (not job.op.startswith("linear.") or job.layer_bytes >= _LEAST_BYTES)
        and job.shape.get("tokens", 0) <= settings.max_rows
    ]


def _step(model: Model, settings: Settings, rows: int) -> tuple[Any, ...]:
    """Parameters, cache, ids and batch of one decode step, abstract."""

    def i32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    spec = model.cache_spec(settings.page_size, settings.dtype)
    pools: Any = spec.pool_shapes(settings.max_pages + 1)
    states: Any = spec.state_shapes(rows + 1)
    here = sharding.named(sharding.make_mesh(jax.devices()[:1]))
    params = checkpoint.abstract(model.leaves(), dtype=settings.dtype, shardings=lambda leaf: here)
    is_real: Any = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    batch = Batch(
        positions=i32(rows),
        rows=i32(rows),
        is_real=is_real,
        kv_lens=i32(rows),
        cu_q_lens=i32(rows + 1),
        num_decode=i32(),
        page_tables=tuple(i32(rows, settings.ladder.widths[-1]) for _ in spec.paged),
        is_decode=True,
        max_chunk_rows=0,
        tiling=settings.profile.tiling,
        state_ids=tuple(i32(rows, 2) for _ in spec.recurrent),
    )
    return params, open_cache(pools, rows, states), i32(rows), batch
