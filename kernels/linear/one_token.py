"""What makes one token and its product on Hopper in one kernel: weights stream meanwhile.

A token is the norm of a sum, or the merged splits of its attention. Every block makes it for
itself, of it what its own product reads. Its first weights are on their way meanwhile, so that
costs little. The rest is as in `few_tokens`.

A product takes 64 rows, of which the token is one. They are written to shared memory a step after
the other, or they are all alike and stay in registers, where a step must end before the next one's
are made. Both add up in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.linear import few_tokens
from kernels.linear.few_tokens import Memory, Plan, Share
from kernels.mosaic import SWIZZLED, Ref, div_rem
from kernels.norm import rows
from kernels.tuning import Choice, Shape, rung

_MULTIPROCESSORS = 132
"""Of an H100 or H200."""
_TILES = 2
"""Steps whose inputs lie ready: one is multiplied while the next is written."""
_WARPS, _LANES = 4, 32
_PER_INPUT = plgpu.Layout.WGMMA.reduce(1)
"""Of inputs that are the rows of a tile which lies on its side."""
_OF_ROW = plgpu.Layout.WGMMA.reduce(0)
_ROWS_IN_REGISTERS = True
"""False only where the kernel is interpreted, which knows no product of registers."""


@dataclasses.dataclass(frozen=True)
class _Plan(Plan):
    """Everything static of one kernel's product."""

    kept: int
    """Inputs that a block makes: all, or those of its split."""
    from_registers: bool
    """Whether a step's rows stay in registers."""

    @property
    def blocks(self) -> int:
        """So few have a multiprocessor each: more weights are on their way then."""
        num_blocks = self.outputs // few_tokens.WIDTH * self.splits
        return 1 if num_blocks <= _MULTIPROCESSORS else super().blocks

    @property
    def tiles(self) -> int:
        """Of rows in shared memory."""
        return _TILES if not self.from_registers else 0 if _ROWS_IN_REGISTERS else 1

    @property
    def token_bytes(self) -> tuple[int, int]:
        """Nothing comes with a step; the token, its tiles and a reduction's scratch are kept."""
        return 0, self.kept * 2 + self.tiles * 64 * self.depth * 2 + 1024


def normed(
    residual: jax.Array,
    parts: jax.Array,
    vectors: jax.Array,
    weight: jax.Array,
    *,
    form: str,
    scale_at: int,
    eps: float,
    kernels: str,
    depth: int | None = None,
    from_registers: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds, norms and multiplies; see `api.normed`. Steps of `depth` inputs; None: by formula.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    num_tokens, hidden_size = residual.shape
    if num_tokens > 1:
        raise NotImplementedError(f"{num_tokens} tokens, not one")
    norm = rows.planned(residual, parts, vectors, scale_at=scale_at, eps=eps, kernels=kernels)
    plan, shape = few_tokens.planned(form, residual, weight, kernels, depth)
    plan = _Plan(**dataclasses.asdict(plan), kept=hidden_size, from_registers=from_registers)
    total, token, out = _normed(plan, norm)(
        residual, parts, vectors, weight.reshape(hidden_size, -1)
    )
    return total, token, out.reshape(shape)


def merging(
    num_heads: int,
    head_dim: int,
    weight: jax.Array,
    *,
    kernels: str,
    depth: int | None = None,
    from_registers: bool = False,
) -> _Plan:
    """How `merged` multiplies one query's attention.

    Args:
      num_heads: N.
      head_dim: H.
      weight: [N * H, D].
      kernels: what the device can run.
      depth: inputs of one step, at most those of a head; None: by formula.
      from_registers: whether a step's rows stay in registers.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    token = jax.ShapeDtypeStruct((1, num_heads * head_dim), jnp.bfloat16)
    plan, _ = few_tokens.planned("parts", token, weight, kernels, depth)
    heads, rest = divmod(num_heads, plan.splits)
    if rest or heads % _WARPS:
        raise NotImplementedError(
            f"{num_heads} heads in {plan.splits} splits, not {_WARPS} or a multiple in each"
        )
    plan = dataclasses.replace(plan, depth=min(plan.depth, head_dim))
    return _Plan(**dataclasses.asdict(plan), kept=heads * head_dim, from_registers=from_registers)


def merged(values: jax.Array, logs: jax.Array, weight: jax.Array, plan: _Plan) -> jax.Array:
    """Merges the splits of one query's attention and multiplies what comes of it.

    Args:
      values: f32[splits, N, H], normalised.
      logs: f32[splits, N], log2 of what each weighs.
      weight: [N * H, D].
      plan: what `merging` gives.

    Returns:
      Parts f32[S, 1, D] of the product, see `reference.parts`.
    """
    head_dim = values.shape[-1]
    token = (plan.kept // head_dim, head_dim)
    return _kernel_of(plan, _merged_kernel, plan.out_type, token, "merged")(values, logs, weight)


def shape_of(
    residual: jax.Array,
    parts: jax.Array,
    vectors: jax.Array,
    weight: jax.Array,
    *,
    form: str,
    **_: object,
) -> Shape:
    """What a norm and its product are tuned by; outputs are those of both halves of a gated one."""
    del parts, vectors
    weights = few_tokens.weight_shape_of(residual, weight)
    return {"tokens": rung(residual.shape[0]), "halves": 1 + (form == "gated"), **weights}


def candidates(shape: Shape) -> tuple[Choice, ...]:
    """Both ways to multiply one token, and depths; parts are a router's, too few to matter."""
    is_product = shape["halves"] == 1
    if shape["tokens"] > 1 or (is_product and shape["outputs"] < few_tokens.LEAST_OUTPUTS):
        return ()
    return choices(few_tokens.depths("product" if is_product else "gated", 1))


def choices(depths: Sequence[int]) -> tuple[Choice, ...]:
    """The implementations of an op of one token, each with these depths."""
    forms = ("mosaic", "registers")
    return tuple(Choice.of(form, depth=depth) for form in forms for depth in depths)


def _normed(plan: _Plan, norm: rows.Plan) -> Any:
    """(residual, parts, vectors, weight) -> sum, norm, and what `Plan.out_type` says."""
    token = jax.ShapeDtypeStruct((1, plan.inputs), jnp.bfloat16)
    body = functools.partial(_normed_kernel, norm=norm)
    return _kernel_of(plan, body, (token, token, plan.out_type), (plan.inputs,), "normed")


def _kernel_of(
    plan: _Plan, body: Callable[..., None], out_type: Any, token: tuple[int, ...], name: str
) -> Any:
    scratch = dict(token=plgpu.SMEM(token, jnp.bfloat16), **plan.scratch)
    if plan.tiles:
        tiles = (plan.tiles, 64, plan.depth)
        scratch["tiles"] = plgpu.SMEM(tiles, jnp.bfloat16, transforms=SWIZZLED)
    return plgpu.kernel(
        functools.partial(body, plan=plan),
        out_type=out_type,
        kernel_name=f"{name}_{few_tokens.NAMES[plan.form]}",
        grid=(plan.outputs // few_tokens.WIDTH, plan.splits),
        grid_names=("panel", "split"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )


def _normed_kernel(
    residual: Ref,
    parts: Ref,
    vectors: Ref,
    weight: Ref,
    hidden: Ref,
    normed: Ref,
    out: Ref,
    *,
    token: Ref,
    plan: _Plan,
    norm: rows.Plan,
    tiles: Ref | None = None,
    **scratch: Ref,
) -> None:
    """One block."""
    share = few_tokens.own_share(plan)

    def make_token() -> None:
        total, result = rows.normed_token(residual, parts, vectors, 0, norm)
        token[...] = result

        @pl.when(share.panel + share.split == 0)
        def _() -> None:
            hidden[0] = total
            normed[0] = result

    def inputs_of(i: jax.Array) -> Ref:
        start = pl.multiple_of((share.first + i) * plan.depth, plan.depth)
        return token.at[pl.ds(start, plan.depth)]

    _multiply(make_token, inputs_of, weight, out, tiles, Memory(**scratch), share, plan)


def _merged_kernel(
    values: Ref,
    logs: Ref,
    weight: Ref,
    out: Ref,
    *,
    token: Ref,
    plan: _Plan,
    tiles: Ref | None = None,
    **scratch: Ref,
) -> None:
    """One block: of the heads those that its split of the product reads."""
    share = few_tokens.own_share(plan)
    heads, head_dim = token.shape
    layout = _heads_layout(head_dim)
    own = pl.ds(share.split * heads, heads)

    def make_token() -> None:
        # Asked for before anything waits: the loads are under way together.
        weights = [
            plgpu.load(logs.at[i, own], layout=layout.reduce(1), optimized=False)
            for i in range(logs.shape[0])
        ]
        parts = [
            plgpu.load(values.at[i, own], layout=layout, optimized=False)
            for i in range(values.shape[0])
        ]
        high = functools.reduce(jnp.maximum, weights)
        weights = [jnp.exp2(weight - high) for weight in weights]
        total = functools.reduce(jnp.add, weights)
        pairs = zip(parts, weights, strict=True)
        result = functools.reduce(jnp.add, [x * _per_head(w, x) for x, w in pairs])
        token[...] = (result / _per_head(total, result)).astype(jnp.bfloat16)

    steps_per_head = head_dim // plan.depth

    def inputs_of(i: jax.Array) -> Ref:
        head, step = div_rem(i, steps_per_head)
        return token.at[head, pl.ds(pl.multiple_of(step * plan.depth, plan.depth), plan.depth)]

    _multiply(make_token, inputs_of, weight, out, tiles, Memory(**scratch), share, plan)


def _heads_layout(head_dim: int) -> Any:
    """Of [heads, H]: a head lies in the lanes of one warp."""
    tiling = fragmented_array.Tiling(((_WARPS, head_dim), (head_dim // _LANES,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _per_head(x: jax.Array, like: jax.Array) -> jax.Array:
    """x [heads] -> [heads, H] of `like`."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def _multiply(
    make_token: Callable[[], None],
    inputs_of: Callable[[jax.Array], Ref],
    weight: Ref,
    out: Ref,
    tiles: Ref | None,
    memory: Memory,
    share: Share,
    plan: _Plan,
) -> None:
    """One warpgroup makes the token and multiplies it, the other fetches weights."""

    def rows_of(i: jax.Array) -> Any:
        return (_kept if plan.from_registers else _written)(inputs_of(i), i, tiles, plan)

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def _() -> None:
        make_token()
        plgpu.commit_smem()
        is_late = not plan.from_registers
        sums = few_tokens.multiplied(memory, share, rows_of, plan, is_late=is_late)
        few_tokens.write(sums, out, memory, share, plan)

    @pl.when(jax.lax.axis_index("warpgroup") == 1)
    def _() -> None:
        few_tokens.fetch(weight, memory, share, plan)


def _written(inputs: Ref, i: jax.Array, tiles: Ref, plan: _Plan) -> Ref:
    """Step i's inputs as rows in a tile: the first 8 are alike, others hold anything."""
    slot = jax.lax.rem(i, jnp.int32(_TILES))
    values = plgpu.load(inputs, layout=_PER_INPUT, optimized=False)
    alike = tiles.at[slot, pl.ds(0, 8)]
    alike.T[...] = jax.lax.broadcast_in_dim(values, (plan.depth, 8), [0])
    plgpu.commit_smem()
    return tiles.at[slot]


def _kept(inputs: Ref, i: jax.Array, tiles: Ref | None, plan: _Plan) -> Any:
    """A step's inputs as rows in registers, all alike."""
    del i
    values = plgpu.load(inputs, layout=_OF_ROW, optimized=False)
    alike = jax.lax.broadcast_in_dim(values, (64, plan.depth), [1])
    if tiles is None:
        return alike
    tiles[0] = alike
    plgpu.commit_smem()
    return tiles.at[0]
