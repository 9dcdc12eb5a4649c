"""Products of few tokens on Hopper, bound by their weights: a block streams some columns of them.

Tokens lie on the 64-wide side of a product, so up to 64 cost the same; weights come as they are
stored. Rows of that side past the tokens hold other steps' tokens or anything: no result reads
another row, and they are not written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import SWIZZLED, SWIZZLED_FLOATS, Ref, div_rem, round_up
from kernels.tuning import Choice, Shape, rung

MAX_TOKENS = 64
WIDTH = 64
"""Weight columns of a block."""
NAMES = {"product": "linear", "parts": "linear_parts", "gated": "linear_gated"}
"""Of the kernels, by form."""
_BLOCKS = 128
"""Blocks that keep the memory of an H100 or H200 busy."""
LEAST_OUTPUTS = _BLOCKS // 2 * WIDTH
"""Of a product that is not split."""
_MAX_STAGES = 16
_SHARED_BYTES = 220 * 1024
"""Of one block; two that share a multiprocessor have half each."""
_DEPTHS = (64, 128)
"""Inputs of one step. Blocks of the smaller one share a multiprocessor with another."""
_MAX_SPLITS = 8
_MOST_BLOCKS = 512
"""Blocks of more splits than the formula's are tried up to here."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static of one kernel."""

    form: str
    """What is made of the sums: `product` rounds them, `parts` leaves them, `gated` takes two."""
    num_tokens: int
    inputs: int
    outputs: int
    splits: int
    depth: int
    """Inputs of one step."""

    @property
    def halves(self) -> int:
        """Weights of as many columns that a block multiplies side by side."""
        return 2 if self.form == "gated" else 1

    @property
    def blocks(self) -> int:
        """That share a multiprocessor."""
        return 2 if self.depth == _DEPTHS[0] else 1

    @property
    def out_type(self) -> jax.ShapeDtypeStruct:
        """[T, N], or f32[S, T, N] of parts."""
        shape = (self.num_tokens, self.outputs)
        if self.form == "parts":
            return jax.ShapeDtypeStruct((self.splits, *shape), jnp.float32)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    @property
    def rows(self) -> int:
        """Tokens of one step's copy: whole rows of 8, those past the tokens come as zeros."""
        return round_up(self.num_tokens, 8)

    @property
    def num_steps(self) -> int:
        """Of all splits."""
        return self.inputs // self.depth

    def copies_of(self, megabytes: int) -> int:
        """Copies of weights within so much memory: whole steps of all blocks, in each as many."""
        of_step = self.halves * self.outputs // WIDTH * self.splits
        steps = megabytes * 2**20 // (of_step * self.depth * WIDTH * 2)
        return min(steps, self.num_steps // self.splits) * of_step

    @property
    def token_bytes(self) -> tuple[int, int]:
        """Shared memory that tokens take: in every step's place, and once."""
        return self.rows * self.depth * 2, 64 * self.depth * 2

    @property
    def stages(self) -> int:
        """Steps on their way at once: as many as memory holds."""
        of_step, once = self.token_bytes
        result = 64 * WIDTH * self.out_type.dtype.itemsize
        step = self.halves * WIDTH * self.depth * 2 + of_step
        return min(_MAX_STAGES, (_SHARED_BYTES // self.blocks - result - once - 1024) // step)

    @property
    def arrivals(self) -> int:
        """Copies of one step."""
        return self.halves + (self.token_bytes[0] > 0)

    @property
    def scratch(self) -> dict[str, Any]:
        """Where weights arrive, and what becomes of them."""
        weights = (self.stages, self.halves, self.depth, WIDTH)
        is_float = self.out_type.dtype == jnp.float32
        return dict(
            weight_ring=plgpu.SMEM(weights, jnp.bfloat16, transforms=SWIZZLED),
            result=plgpu.SMEM(
                (64, WIDTH),
                self.out_type.dtype,
                transforms=SWIZZLED_FLOATS if is_float else SWIZZLED,
            ),
            here=plgpu.Barrier(num_barriers=self.stages, num_arrivals=self.arrivals),
            free=plgpu.Barrier(num_barriers=self.stages),
        )


def product(
    x: jax.Array, weight: jax.Array, *, kernels: str, depth: int | None = None
) -> jax.Array:
    """See `reference.product`. Steps of `depth` inputs; None: by formula.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    return _called("product", x, weight, kernels, depth)


def parts(
    x: jax.Array,
    weight: jax.Array,
    *,
    kernels: str,
    depth: int | None = None,
    splits: int | None = None,
) -> jax.Array:
    """See `reference.parts`: f32[S, T, N] of `splits`; None: what keeps the device busy.

    The weight alone decides the splits, so that a token adds up the same however many there are.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    return _called("parts", x, weight, kernels, depth, splits)


def gated(x: jax.Array, weight: jax.Array, *, kernels: str, depth: int | None = None) -> jax.Array:
    """See `reference.gated`. Steps of `depth` inputs; None: by formula.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    return _called("gated", x, weight, kernels, depth)


def _called(
    form: str,
    x: jax.Array,
    weight: jax.Array,
    kernels: str,
    depth: int | None,
    splits: int | None = None,
) -> jax.Array:
    plan, shape = planned(form, x, weight, kernels, depth, splits)
    return _product(plan)(x, weight.reshape(plan.inputs, -1)).reshape(shape)


def planned(
    form: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: jax.Array,
    kernels: str,
    depth: int | None = None,
    splits: int | None = None,
) -> tuple[Plan, tuple[int, ...]]:
    """How a product of x [T, K] is made, and what its shape is; None: by formula.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    if form == "parts" and weight.ndim != 2:
        raise NotImplementedError(f"parts of a weight of {weight.ndim} dimensions, not 2")
    halves = 2 if form == "gated" else 1
    inputs, outputs = weight.shape[0], weight.size // weight.shape[0] // halves
    _decline(x, weight, halves, outputs, kernels)
    num_tokens = x.shape[0]
    if form == "product" and outputs < LEAST_OUTPUTS:
        raise NotImplementedError(
            f"{outputs} outputs are too few for blocks of {WIDTH}, "
            f"at least {LEAST_OUTPUTS} keep the device busy"
        )
    plan = Plan(
        form=form,
        num_tokens=num_tokens,
        inputs=inputs,
        outputs=outputs,
        splits=(splits or splits_of(inputs, outputs)) if form == "parts" else 1,
        depth=depth or _depth(form, num_tokens),
    )
    shape = (num_tokens, *(weight.shape[1:] if form == "product" else (outputs,)))
    return plan, (plan.splits, *shape) if form == "parts" else shape


def _depth(form: str, num_tokens: int) -> int:
    # Of few tokens small copies start sooner, of more large ones cost less (H200, 2026-11-30).
    is_small = form == "gated" or (form == "product" and num_tokens <= 16)
    return _DEPTHS[0] if is_small else _DEPTHS[1]


def splits_of(inputs: int, outputs: int) -> int:
    """Parts of a weight's products, by formula."""
    return max(1, min(_BLOCKS // (outputs // WIDTH), 4, inputs // 512))


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
    return _choices(depths("product", shape["tokens"]))


def gated_candidates(shape: Shape) -> tuple[Choice, ...]:
    """Depths, the formula's first."""
    del shape
    return _choices(depths("gated", 0))


def depths(form: str, num_tokens: int) -> tuple[int, ...]:
    """Inputs of one step that are tried, the formula's first."""
    return tuple(dict.fromkeys([_depth(form, num_tokens), *_DEPTHS]))


def _choices(depths: tuple[int, ...]) -> tuple[Choice, ...]:
    return tuple(Choice.of("mosaic", depth=depth) for depth in depths)


def parts_candidates(shape: Shape) -> tuple[Choice, ...]:
    """Depths and splits, the formula's first."""
    inputs, panels = shape["inputs"], shape["outputs"] // WIDTH
    formula = _depth("parts", 0), splits_of(inputs, shape["outputs"])
    powers = [1 << i for i in range(_MAX_SPLITS.bit_length())]
    tried = [n for n in powers if n * 512 <= inputs and n * panels <= _MOST_BLOCKS]
    # Whoever adds up the parts takes no more values of a token: see `kernels.norm`.
    tried = [n for n in tried if n * shape["outputs"] <= 2**15]
    pairs = dict.fromkeys([formula, *((depth, n) for depth in _DEPTHS for n in tried)])
    return tuple(Choice.of("mosaic", depth=depth, splits=n) for depth, n in pairs)


def _decline(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: jax.Array,
    halves: int,
    outputs: int,
    kernels: str,
) -> None:
    if kernels != "mosaic":
        raise NotImplementedError(f"kernels are {kernels!r}, not 'mosaic'")
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        raise NotImplementedError(f"x is {x.dtype} and weight {weight.dtype}, not bfloat16")
    if x.shape[0] > 8 and x.shape[0] % 8:
        raise NotImplementedError(f"{x.shape[0]} tokens are no whole rows of 8")
    if x.shape[0] > MAX_TOKENS:
        raise NotImplementedError(f"{x.shape[0]} tokens, at most {MAX_TOKENS} may be")
    inputs = weight.shape[0]
    if inputs % 128 or outputs % WIDTH:
        raise NotImplementedError(
            f"weight is {inputs} x {halves * outputs}, not multiples of 128 and {halves * WIDTH}"
        )


def _product(plan: Plan) -> Any:
    """(x, weight) -> what `Plan.out_type` says."""
    tokens = ((plan.stages - 1) * plan.rows + 64, plan.depth)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=plan.out_type,
        kernel_name=NAMES[plan.form],
        grid=(plan.outputs // WIDTH, plan.splits),
        grid_names=("panel", "split"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=dict(
            token_ring=plgpu.SMEM(tokens, jnp.bfloat16, transforms=SWIZZLED), **plan.scratch
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


@dataclasses.dataclass(frozen=True)
class Memory:
    """Shared memory and barriers of one block."""

    weight_ring: Ref
    """[stages, halves, depth, columns]."""
    result: Ref
    here: Ref
    free: Ref


@dataclasses.dataclass(frozen=True)
class Share:
    """What one block makes: some columns, and some inputs of theirs."""

    panel: jax.Array
    split: jax.Array
    first: jax.Array
    """Step."""
    num_steps: jax.Array
    tokens: Any
    """Rows of the step's copies."""


def own_share(plan: Plan) -> Share:
    """Of the block that asks."""
    panel, split = jax.lax.axis_index("panel"), jax.lax.axis_index("split")
    first, end = (_first_step(number, plan) for number in (split, split + 1))
    # A start that is not known is not checked against the tokens: past them zeros come.
    start = pl.multiple_of(jax.lax.div(split, jnp.int32(plan.splits)) * 8, 8)
    return Share(panel, split, first, end - first, pl.ds(start, plan.rows))


def _first_step(split: jax.Array, plan: Plan) -> jax.Array:
    return jax.lax.div(split * plan.num_steps, jnp.int32(plan.splits))


def _kernel(x: Ref, weight: Ref, out: Ref, token_ring: Ref, *, plan: Plan, **scratch: Ref) -> None:
    """One block. A step's tokens lie in the ring before the next one's."""
    memory, share = Memory(**scratch), own_share(plan)

    def place(slot: jax.Array, count: int) -> Ref:
        """A product reads 64 rows from where a step's own begin."""
        return token_ring.at[pl.ds(pl.multiple_of(slot * plan.rows, 8), count)]

    def fetch_tokens(slot: jax.Array, inputs: Any) -> None:
        source = x.at[share.tokens, inputs]
        plgpu.copy_gmem_to_smem(source, place(slot, plan.rows), memory.here.at[slot])

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def _() -> None:
        sums = multiplied(memory, share, lambda i: place(slot_of(i, plan), 64), plan)
        write(sums, out, memory, share, plan)

    @pl.when(jax.lax.axis_index("warpgroup") == 1)
    def _() -> None:
        fetch(weight, memory, share, plan, fetch_tokens)


def fetch(
    weight: Ref,
    memory: Memory,
    share: Share,
    plan: Plan,
    fetch_more: Callable[[jax.Array, Any], None] = lambda slot, inputs: None,
) -> None:
    """Streams a block's weights, and what else comes with a step."""

    @pl.loop(0, share.num_steps)
    def _(i: jax.Array) -> None:
        slot = slot_of(i, plan)
        free = functools.partial(plgpu.barrier_wait, memory.free.at[slot])
        pl.when(i >= plan.stages)(free)
        inputs = pl.ds(pl.multiple_of((share.first + i) * plan.depth, plan.depth), plan.depth)
        fetch_more(slot, inputs)
        for half in range(plan.halves):
            column = pl.multiple_of(half * plan.outputs + share.panel * WIDTH, WIDTH)
            source = weight.at[inputs, pl.ds(column, WIDTH)]
            target = memory.weight_ring.at[slot, half]
            plgpu.copy_gmem_to_smem(source, target, memory.here.at[slot])

    @pl.loop(jnp.maximum(share.num_steps - plan.stages, 0), share.num_steps)
    def _(i: jax.Array) -> None:
        plgpu.barrier_wait(memory.free.at[slot_of(i, plan)])


def prefetch(weight: Ref, plan: Plan, megabytes: int, num_blocks: int, block: jax.Array) -> None:
    """Brings what `fetch` will copy first to the second-level cache, for a kernel yet to start.

    Args:
      weight: of that kernel.
      plan: of that kernel.
      megabytes: at most, of the whole weight.
      num_blocks: of the kernel that runs meanwhile, which share the work.
      block: the one that asks.
    """
    num_copies = plan.copies_of(megabytes)

    @pl.loop(0, -(-num_copies // num_blocks))
    def _(i: jax.Array) -> None:
        number = block + i * num_blocks
        inputs, column = copied(number, plan)
        source = weight.at[pl.ds(inputs, plan.depth), pl.ds(column, WIDTH)]
        plgpu.async_prefetch(source, predicate=number < num_copies)


def copied(number: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """First input and column of a copy, where the first steps of all blocks are counted first."""
    step_split, panel = div_rem(number, plan.halves * plan.outputs // WIDTH)
    step, split = div_rem(step_split, plan.splits)
    return (_first_step(split, plan) + step) * plan.depth, panel * WIDTH


def multiplied(
    memory: Memory,
    share: Share,
    tokens_of: Callable[[jax.Array], Any],
    plan: Plan,
    *,
    is_late: bool = True,
) -> tuple[jax.Array, ...]:
    """f32[64, columns] of each half, summed over the block's steps.

    Args:
      memory: of the block, to which its weights come.
      share: what the block makes.
      tokens_of: gives the 64 rows that a step multiplies.
      plan: of the kernel.
      is_late: a step's products may go on while the next one's tokens are made, so those that
        `tokens_of` gave two steps before are free. Not of registers, which are written anew.
    """

    def release(i: jax.Array) -> None:
        plgpu.barrier_arrive(memory.free.at[slot_of(i, plan)])

    def multiply(*sums: Ref) -> tuple[jax.Array, ...]:
        @pl.loop(0, share.num_steps)
        def _(i: jax.Array) -> None:
            slot = slot_of(i, plan)
            tokens = tokens_of(i)
            plgpu.barrier_wait(memory.here.at[slot])
            for half, total in enumerate(sums):
                plgpu.wgmma(total, tokens, memory.weight_ring.at[slot, half])
            plgpu.wgmma_wait(1 if is_late else 0)
            if is_late:
                pl.when(i > 0)(lambda: release(i - 1))
            else:
                release(i)

        plgpu.wgmma_wait(0)
        return tuple(total[...] for total in sums)

    # Public, though listed in a way that type checkers do not see.
    total = plgpu.ACC((64, WIDTH), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    products = pl.run_scoped(multiply, *[total] * plan.halves)
    if is_late:
        release(share.num_steps - 1)
    return products


def write(sums: tuple[jax.Array, ...], out: Ref, memory: Memory, share: Share, plan: Plan) -> None:
    """What the form makes of a block's sums."""
    result = memory.result
    result[...] = (_gated(*sums) if plan.form == "gated" else sums[0]).astype(result.dtype)
    plgpu.commit_smem()
    columns = pl.ds(pl.multiple_of(share.panel * WIDTH, WIDTH), WIDTH)
    target = out.at[share.split] if plan.form == "parts" else out
    plgpu.copy_smem_to_gmem(result.at[pl.ds(0, plan.rows)], target.at[share.tokens, columns])
    plgpu.wait_smem_to_gmem(0)


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, rounded as the reference's text has it."""
    gate, up = _rounded(gate), _rounded(up)
    return _rounded(gate / (1.0 + jnp.exp(-gate))) * up


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def slot_of(number: jax.Array, plan: Plan) -> jax.Array:
    """Where in the ring a step's weights are."""
    return jax.lax.rem(number, jnp.int32(plan.stages))
