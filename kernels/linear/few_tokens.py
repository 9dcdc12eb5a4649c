"""Products of few tokens on Hopper, bound by their weights: a block streams some columns of them.

Tokens lie on the 64-wide side of a product, so up to 64 cost the same; weights come as they are
stored. Rows of that side past the tokens hold other steps' tokens or anything: no result reads
another row, and they are not written.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import SWIZZLED, SWIZZLED_FLOATS, Ref, round_up
from kernels.tuning import Choice, Shape, rung

MAX_TOKENS = 64
_WIDTH = 64
"""Weight columns of a block."""
_BLOCKS = 128
"""Blocks that keep the memory of an H100 or H200 busy."""
_MAX_STAGES = 16
_SHARED_BYTES = 220 * 1024
"""Of one block; two that share a multiprocessor have half each."""
_DEPTHS = (64, 128)
"""Inputs of one step. Blocks of the smaller one share a multiprocessor with another."""
_MAX_SPLITS = 8
_MOST_BLOCKS = 512
"""Blocks of more splits than the formula's are tried up to here."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static of one kernel."""

    num_tokens: int
    inputs: int
    outputs: int
    halves: int
    """Weights of as many columns that a block multiplies side by side."""
    splits: int
    depth: int
    """Inputs of one step."""
    out_dtype: str

    @property
    def shared_bytes(self) -> int:
        """Of one block."""
        return _SHARED_BYTES // (2 if self.depth == _DEPTHS[0] else 1)

    @property
    def rows(self) -> int:
        """Tokens of one step's copy: whole rows of 8, those past the tokens come as zeros."""
        return round_up(self.num_tokens, 8)

    @property
    def num_steps(self) -> int:
        """Of all splits."""
        return self.inputs // self.depth

    @property
    def stages(self) -> int:
        """Steps on their way at once: as many as memory holds."""
        result = 64 * _WIDTH * jnp.dtype(self.out_dtype).itemsize
        window = 64 * self.depth * 2
        step = (self.halves * _WIDTH + self.rows) * self.depth * 2
        return min(_MAX_STAGES, (self.shared_bytes - result - window - 1024) // step)


def product(
    x: jax.Array, weight: jax.Array, *, kernels: str, depth: int | None = None
) -> jax.Array:
    """See `reference.product`. Steps of `depth` inputs; None: by formula.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    shape = (x.shape[0], *weight.shape[1:])
    weight = weight.reshape(weight.shape[0], -1)
    _decline(x, weight, 1, kernels)
    panels = weight.shape[1] // _WIDTH
    if panels < _BLOCKS // 2:
        raise NotImplementedError(
            f"{weight.shape[1]} outputs are too few for blocks of {_WIDTH}, "
            f"at least {_BLOCKS // 2 * _WIDTH} keep the device busy"
        )
    plan = _plan(x, weight, depth=depth or _product_depth(x.shape[0]))
    return _product(plan, "linear")(x, weight).reshape(shape)


def _product_depth(num_tokens: int) -> int:
    # Of few tokens small copies start sooner, of more large ones cost less (H200, 2026-11-30).
    return 64 if num_tokens <= 16 else 128


def parts(
    x: jax.Array,
    weight: jax.Array,
    *,
    kernels: str,
    depth: int = 128,
    splits: int | None = None,
) -> jax.Array:
    """See `reference.parts`: f32[S, T, N] of `splits`; None: what keeps the device busy.

    The weight alone decides the splits, so that a token adds up the same however many there are.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    if weight.ndim != 2:
        raise NotImplementedError(f"parts of a weight of {weight.ndim} dimensions, not 2")
    _decline(x, weight, 1, kernels)
    splits = splits or _splits(*weight.shape)
    plan = _plan(x, weight, splits=splits, depth=depth, out_dtype="float32")
    return _product(plan, "linear_parts")(x, weight)


def _splits(inputs: int, outputs: int) -> int:
    return max(1, min(_BLOCKS // (outputs // _WIDTH), 4, inputs // 512))


def gated(x: jax.Array, weight: jax.Array, *, kernels: str, depth: int = 64) -> jax.Array:
    """See `reference.gated`. Steps of `depth` inputs.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    weight = weight.reshape(weight.shape[0], -1)
    _decline(x, weight, 2, kernels)
    return _product(_plan(x, weight, halves=2, depth=depth), "linear_gated")(x, weight)


def shape_of(x: jax.Array, weight: jax.Array, **_: object) -> Shape:
    """What a product is tuned by."""
    return {"tokens": rung(x.shape[0], least=8), **weight_shape_of(x, weight)}


def weight_shape_of(x: jax.Array, weight: jax.Array, **_: object) -> Shape:
    """What parts and gated products are tuned by; outputs are those of both halves.

    As in their formulas tokens are not among it: whatever it decides, a token adds up the same.
    """
    del x
    return {"inputs": weight.shape[0], "outputs": weight.size // weight.shape[0]}


def product_candidates(shape: Shape) -> tuple[Choice, ...]:
    """Depths, the formula's first; none for more tokens than are covered."""
    if shape["tokens"] > MAX_TOKENS:
        return ()
    return _depths(_product_depth(shape["tokens"]))


def gated_candidates(shape: Shape) -> tuple[Choice, ...]:
    """Depths, the formula's first."""
    del shape
    return _depths(64)


def _depths(first: int) -> tuple[Choice, ...]:
    return tuple(Choice.of("mosaic", depth=depth) for depth in dict.fromkeys([first, *_DEPTHS]))


def parts_candidates(shape: Shape) -> tuple[Choice, ...]:
    """Depths and splits, the formula's first."""
    inputs, panels = shape["inputs"], shape["outputs"] // _WIDTH
    formula = 128, _splits(inputs, shape["outputs"])
    powers = [1 << i for i in range(_MAX_SPLITS.bit_length())]
    tried = [n for n in powers if n * 512 <= inputs and n * panels <= _MOST_BLOCKS]
    # Whoever adds up the parts takes no more values of a token: see `kernels.norm`.
    tried = [n for n in tried if n * shape["outputs"] <= 2**15]
    pairs = dict.fromkeys([formula, *((depth, n) for depth in _DEPTHS for n in tried)])
    return tuple(Choice.of("mosaic", depth=depth, splits=n) for depth, n in pairs)


def _decline(x: jax.Array, weight: jax.Array, halves: int, kernels: str) -> None:
    if kernels != "mosaic":
        raise NotImplementedError(f"kernels are {kernels!r}, not 'mosaic'")
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        raise NotImplementedError(f"x is {x.dtype} and weight {weight.dtype}, not bfloat16")
    if x.shape[0] > 8 and x.shape[0] % 8:
        raise NotImplementedError(f"{x.shape[0]} tokens are no whole rows of 8")
    if x.shape[0] > MAX_TOKENS:
        raise NotImplementedError(f"{x.shape[0]} tokens, at most {MAX_TOKENS} may be")
    inputs, outputs = weight.shape
    if inputs % 128 or outputs % (halves * _WIDTH):
        raise NotImplementedError(
            f"weight is {inputs} x {outputs}, not multiples of 128 and {halves * _WIDTH}"
        )


def _plan(
    x: jax.Array,
    weight: jax.Array,
    *,
    depth: int,
    halves: int = 1,
    splits: int = 1,
    out_dtype: str = "bfloat16",
) -> _Plan:
    inputs, outputs = weight.shape
    return _Plan(
        num_tokens=x.shape[0],
        inputs=inputs,
        outputs=outputs // halves,
        halves=halves,
        splits=splits,
        depth=depth,
        out_dtype=out_dtype,
    )


def _product(plan: _Plan, name: str) -> Any:
    """(x, weight) -> [T, N], or [S, T, N] where it is float32."""
    dtype, is_float = jnp.dtype(plan.out_dtype), plan.out_dtype == "float32"
    shape = (plan.num_tokens, plan.outputs)
    tokens = ((plan.stages - 1) * plan.rows + 64, plan.depth)
    weights = (plan.stages, plan.halves, plan.depth, _WIDTH)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((plan.splits, *shape) if is_float else shape, dtype),
        kernel_name=name,
        grid=(plan.outputs // _WIDTH, plan.splits),
        grid_names=("panel", "split"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=dict(
            token_ring=plgpu.SMEM(tokens, jnp.bfloat16, transforms=SWIZZLED),
            weight_ring=plgpu.SMEM(weights, jnp.bfloat16, transforms=SWIZZLED),
            result=plgpu.SMEM(
                (64, _WIDTH), dtype, transforms=SWIZZLED_FLOATS if is_float else SWIZZLED
            ),
            here=plgpu.Barrier(num_barriers=plan.stages, num_arrivals=1 + plan.halves),
            free=plgpu.Barrier(num_barriers=plan.stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Shared memory and barriers of one block."""

    token_ring: Ref
    """A step's tokens, then the next one's; a product reads 64 rows from where its own begin."""
    weight_ring: Ref
    """[stages, halves, depth, columns]."""
    here: Ref
    free: Ref


def _kernel(x: Ref, weight: Ref, out: Ref, result: Ref, *, plan: _Plan, **scratch: Ref) -> None:
    """One block: some columns, and some inputs of theirs."""
    memory = _Memory(**scratch)
    warpgroup, panel, split = (jax.lax.axis_index(name) for name in ("warpgroup", "panel", "split"))
    first, end = (
        jax.lax.div(number * plan.num_steps, jnp.int32(plan.splits))
        for number in (split, split + 1)
    )
    # A start that is not known is not checked against the tokens: past them zeros come.
    start = pl.multiple_of(jax.lax.div(split, jnp.int32(plan.splits)) * 8, 8)
    tokens = pl.ds(start, plan.rows)

    @pl.when(warpgroup == 0)
    def _() -> None:
        sums = _multiplied(memory, end - first, plan)
        result[...] = (_gated(*sums) if plan.halves == 2 else sums[0]).astype(result.dtype)
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(panel * _WIDTH, _WIDTH), _WIDTH)
        target = out.at[split] if plan.out_dtype == "float32" else out
        plgpu.copy_smem_to_gmem(result.at[pl.ds(0, plan.rows)], target.at[tokens, columns])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 1)
    def _() -> None:
        @pl.loop(0, end - first)
        def _(i: jax.Array) -> None:
            slot = _slot(i, plan)
            here = memory.here.at[slot]
            free = functools.partial(plgpu.barrier_wait, memory.free.at[slot])
            pl.when(i >= plan.stages)(free)
            inputs = pl.ds(pl.multiple_of((first + i) * plan.depth, plan.depth), plan.depth)
            place = pl.ds(pl.multiple_of(slot * plan.rows, 8), plan.rows)
            plgpu.copy_gmem_to_smem(x.at[tokens, inputs], memory.token_ring.at[place], here)
            for half in range(plan.halves):
                column = pl.multiple_of(half * plan.outputs + panel * _WIDTH, _WIDTH)
                source = weight.at[inputs, pl.ds(column, _WIDTH)]
                plgpu.copy_gmem_to_smem(source, memory.weight_ring.at[slot, half], here)

        @pl.loop(jnp.maximum(end - first - plan.stages, 0), end - first)
        def _(i: jax.Array) -> None:
            plgpu.barrier_wait(memory.free.at[_slot(i, plan)])


def _multiplied(memory: _Memory, num_steps: jax.Array, plan: _Plan) -> tuple[jax.Array, ...]:
    """f32[64, columns] of each half, summed over the block's steps."""

    def release(i: jax.Array) -> None:
        plgpu.barrier_arrive(memory.free.at[_slot(i, plan)])

    def multiply(*sums: Ref) -> tuple[jax.Array, ...]:
        @pl.loop(0, num_steps)
        def _(i: jax.Array) -> None:
            slot = _slot(i, plan)
            plgpu.barrier_wait(memory.here.at[slot])
            tokens = memory.token_ring.at[pl.ds(pl.multiple_of(slot * plan.rows, 8), 64)]
            for half, total in enumerate(sums):
                plgpu.wgmma(total, tokens, memory.weight_ring.at[slot, half])
            plgpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: release(i - 1))

        plgpu.wgmma_wait(0)
        return tuple(total[...] for total in sums)

    # Public, though listed in a way that type checkers do not see.
    total = plgpu.ACC((64, _WIDTH), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    products = pl.run_scoped(multiply, *[total] * plan.halves)
    release(num_steps - 1)
    return products


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, rounded as the reference's text has it."""
    gate, up = _rounded(gate), _rounded(up)
    return _rounded(gate / (1.0 + jnp.exp(-gate))) * up


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _slot(number: jax.Array, plan: _Plan) -> jax.Array:
    return jax.lax.rem(number, jnp.int32(plan.stages))
