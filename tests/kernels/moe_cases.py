"""Shapes, inputs and truth of the mixture of experts, for tests and what they start."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.moe import permuted, products, reference, route, tables, unpermuted
from kernels.moe.products import Tile
from kernels.mosaic import round_up

FORMS = {"unpermuted": unpermuted.experts, "permuted": permuted.experts}


def _struct(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the experts, its last tokens padding."""

    form: str
    num_tokens: int
    hidden_size: int = 128
    width: int = 128
    num_experts: int = 6
    top_k: int = 2
    padding: int = 0

    def __str__(self) -> str:
        sizes = f"{self.hidden_size}x{self.width}-experts{self.top_k}of{self.num_experts}"
        return f"{self.form}-tokens{self.num_tokens}-{sizes}-padding{self.padding}"

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """x, ids, weights, gate_up, down."""
        tokens, hidden, width = self.num_tokens, self.hidden_size, self.width
        return (
            _struct("bfloat16", tokens, hidden),
            _struct("int32", tokens, self.top_k),
            _struct("float32", tokens, self.top_k),
            _struct("bfloat16", self.num_experts, 2 * width, hidden),
            _struct("bfloat16", self.num_experts, hidden, width),
        )


def inputs(case: Case, seed: int = 0) -> tuple[jax.Array, ...]:
    """Random values; expert 1 is nobody's."""
    rng = np.random.default_rng(seed)
    x, ids, _, gate_up, down = case.structs
    scores = rng.random((case.num_tokens, case.num_experts - 1))
    chosen = np.argsort(scores, axis=1)[:, : case.top_k].astype(np.int32)
    chosen += chosen >= 1
    weights = rng.uniform(0.2, 1, ids.shape).astype(np.float32)
    real = case.num_tokens - case.padding
    chosen[real:], weights[real:] = case.num_experts, 0
    weight_rng = np.random.default_rng(100)  # the same weights whatever the tokens are
    return (
        jnp.asarray(rng.standard_normal(x.shape), jnp.bfloat16),
        jnp.asarray(chosen),
        jnp.asarray(weights),
        jnp.asarray(
            weight_rng.standard_normal(gate_up.shape) * case.hidden_size**-0.5, jnp.bfloat16
        ),
        jnp.asarray(weight_rng.standard_normal(down.shape) * case.width**-0.5, jnp.bfloat16),
    )


def with_other_tokens(
    arrays: tuple[jax.Array, ...], others: tuple[jax.Array, ...], kept: int
) -> tuple[jax.Array, ...]:
    """The call with everything of all tokens but `kept` taken from another."""
    is_kept = (jnp.arange(arrays[0].shape[0]) == kept)[:, None]
    pairs = zip(arrays[:3], others[:3], strict=True)
    return *(jnp.where(is_kept, mine, other) for mine, other in pairs), *arrays[3:]


def with_nonfinite_tokens(arrays: tuple[jax.Array, ...], kept: int) -> tuple[jax.Array, ...]:
    """The call with no finite value in any token but `kept`."""
    x, *rest = arrays
    token = jnp.arange(x.shape[0])
    values = jnp.where(token % 2 == 0, jnp.nan, jnp.inf)[:, None]
    return jnp.where((token == kept)[:, None], x, values.astype(x.dtype)), *rest


def with_padding_alone(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The call with nothing chosen, whatever the weights are."""
    x, ids, *rest = arrays
    return x, jnp.full_like(ids, rest[2].shape[0]), *rest


def expected(arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """The reference's result."""
    return np.asarray(reference.experts(*arrays)[0].astype(jnp.float32))


GUARDED = (
    Case("unpermuted", 5, 256, 192, padding=1),
    Case("permuted", 43, 256, 128, padding=3),
)
"""Run among other tokens too, among tokens that are not finite, and with nothing but padding."""
VALUES = (
    *GUARDED,
    Case("unpermuted", 20, 192, 64, num_experts=4, padding=3),
    Case("unpermuted", 40, 256, 128),
    Case("permuted", 70, 192, 192, num_experts=3, padding=3),
    Case("permuted", 50, 128, 128, num_experts=3),
)
"""Between them: one and two warpgroups that multiply, all and half of their rows, late steps."""
KEPT = 3
"""The token whose result must stay the same."""


# --- tables ---

TABLE_EXPERTS = 80
TILE = 16
"""Rows of a tile."""
TABLES = ((7, 2), (130, 5))
"""Tokens, and how many of them are padding."""


def random_ids(num_tokens: int, num_experts: int, top_k: int, padding: int) -> np.ndarray:
    """Low ids are chosen most."""
    rng = np.random.default_rng(num_tokens)
    scores = rng.gumbel(size=(num_tokens, num_experts)) - 0.1 * np.arange(num_experts)
    ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    ids[num_tokens - padding :] = num_experts
    return ids


def table_inputs(num_tokens: int, padding: int) -> tuple[jax.Array, jax.Array]:
    """Ids and weights, one of them 0 and one NaN; weights of padding are not."""
    ids = random_ids(num_tokens, TABLE_EXPERTS, 3, padding)
    weights = np.random.default_rng(0).uniform(0.1, 1, ids.shape).astype(np.float32)
    weights[0] = 0.5, 0.0, np.nan
    return jnp.asarray(ids), jnp.asarray(weights)


PLACED_BLOCKS = 70
"""Of 64 tokens: more than one matrix holds."""
PLACED_TILES = PLACED_BLOCKS * 64 * 64 // TILE + 64


def block_counts() -> jax.Array:
    """f32[128, 64], tokens of each block that chose each expert; past the last one, anything."""
    counts = np.random.default_rng(0).integers(0, 65, (128, 64)).astype(np.float32)
    counts[PLACED_BLOCKS:] = np.nan
    counts[:PLACED_BLOCKS, 5] = 0
    return jnp.asarray(counts)


# --- tiles that are not full ---

WIDE = 128
"""Rows of a tile whose tail is narrower."""
RAGGED = (0, 1, 31, 32, 33, 100, 128, 129)
"""Tokens of each expert."""


def ragged_inputs() -> tuple[jax.Array, ...]:
    """Ids of two experts a token, rows of their tiles, gate-up and down weights."""
    rng = np.random.default_rng(0)
    hidden_size, width, num_experts = 256, 64, len(RAGGED)
    halves = np.repeat(np.arange(num_experts), RAGGED).reshape(2, -1)
    ids = rng.permutation(halves.T)
    x = rng.standard_normal((tables.SIDE * WIDE, hidden_size))
    gate_up = rng.standard_normal((num_experts, 2 * width, hidden_size)) * hidden_size**-0.5
    down = rng.standard_normal((num_experts, hidden_size, width)) * width**-0.5
    return jnp.asarray(ids, jnp.int32), *(jnp.asarray(a, jnp.bfloat16) for a in (x, gate_up, down))


def ragged_tiles() -> list[tuple[int, int]]:
    """Each tile's expert, and how many tokens it holds."""
    return [
        (expert, min(WIDE, count - start))
        for expert, count in enumerate(RAGGED)
        for start in range(0, count, WIDE)
    ]


# --- the choice ---


@dataclasses.dataclass(frozen=True)
class Choice:
    """One call of the route, its last token padding."""

    num_tokens: int
    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    has_bias: bool = False

    def __str__(self) -> str:
        bias = "-bias" if self.has_bias else ""
        return f"{self.scoring}{bias}-tokens{self.num_tokens}-{self.top_k}of{self.num_experts}"

    @property
    def static(self) -> dict[str, Any]:
        return {
            "top_k": self.top_k,
            "scoring": self.scoring,
            "renormalize": self.renormalize,
            "scale": 1.5,
        }

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """logits, bias, is_real."""
        return (
            _struct("float32", self.num_tokens, self.num_experts),
            _struct("float32", self.num_experts) if self.has_bias else None,
            _struct("bool", self.num_tokens),
        )

    def call(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """The kernel with everything static bound."""
        return functools.partial(route.route, **self.static, kernels="mosaic")


def choice_inputs(case: Choice) -> tuple[jax.Array | None, ...]:
    """Random logits; some are equal, one is NaN, one token's are all the same."""
    rng = np.random.default_rng(case.num_tokens)
    logits = 2 * rng.standard_normal((case.num_tokens, case.num_experts)).astype(np.float32)
    logits[0, 3:9] = logits[0].max() + 1
    logits[1] = 0.25
    logits[2, 5] = np.nan
    logits[3, 1:] = -1e4  # nothing is left of all but one
    bias = rng.integers(-2, 3, case.num_experts).astype(np.float32) / 8
    return (
        jnp.asarray(logits),
        jnp.asarray(bias) if case.has_bias else None,
        jnp.arange(case.num_tokens) < case.num_tokens - 1,
    )


CHOICES = (
    Choice(5, 128, 8),
    Choice(8, 64, 6, renormalize=False),
    Choice(6, 64, 4, "sigmoid", has_bias=True),
    Choice(8, 32, 3, "sigmoid"),
)


# --- single kernels, at the sizes that are served ---


@dataclasses.dataclass(frozen=True)
class Size:
    """Experts of one layer."""

    name: str
    num_experts: int
    top_k: int
    width: int
    hidden_size: int = 2048

    def case(self, num_tokens: int) -> Case:
        """The call of so many tokens in the form that serves it."""
        form = "unpermuted" if num_tokens <= unpermuted.MAX_TOKENS else "permuted"
        return Case(form, num_tokens, self.hidden_size, self.width, self.num_experts, self.top_k)


QWEN = Size("qwen3-30b-a3b", 128, 8, 768)
DEEPSEEK = Size("deepseek-v2-lite", 64, 6, 1408)
GLM = Size("glm-4.7-flash", 64, 4, 1536)
ODD = Size("odd", 8, 2, 64, hidden_size=192)
SERVED = (
    *((QWEN, tokens) for tokens in (1, 32, 64, 128, 256, 8192)),
    *((DEEPSEEK, tokens) for tokens in (8, 64, 256)),
    (GLM, 16),
    (GLM, 2048),
    *((ODD, tokens) for tokens in (64, 200, 2048)),
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a call."""

    name: str
    size: Size
    num_tokens: int
    is_whole: bool = False
    """Whether an expert's last tile is multiplied as if it were full, whatever the formula."""

    def __str__(self) -> str:
        whole = "-whole" if self.is_whole else ""
        return f"{self.name}-{self.size.name}-tokens{self.num_tokens}{whole}"

    @property
    def _columns(self) -> int:
        if self.size.case(self.num_tokens).form == "unpermuted":
            return unpermuted._columns(self.num_tokens)
        return permuted._columns(self.num_tokens * self.size.top_k, self.size.num_experts)

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What the kernel takes."""
        size, columns = self.size, self._columns
        x, ids, _, gate_up, down = size.case(self.num_tokens).structs
        if self.name == "dispatch":
            return x, ids
        if self.name == "combine":
            outputs = _struct("bfloat16", 2 * self.num_tokens * size.top_k, size.hidden_size)
            return outputs, ids, _struct("float32", *ids.shape)
        if self.name == "choose":
            shape = size.top_k, columns
            return _struct("int32", *shape), _struct("float32", *shape)
        if self.name == "count":
            return (_struct("int32", size.top_k, round_up(self.num_tokens, 64)),)
        if self.name == "place":
            num_blocks = -(-self.num_tokens // 64)
            shape = round_up(num_blocks, 64), round_up(size.num_experts, 64)
            return (_struct("float32", *shape),)
        if self.name == "route":
            logits = _struct("float32", self.num_tokens, size.num_experts)
            return logits, _struct("bool", self.num_tokens)
        tiles = size.num_experts
        experts = _struct("int32", tiles), _struct("int32", size.num_experts)
        tokens = _struct("bfloat16", max(columns, x.shape[0]), size.hidden_size)
        hidden = _struct("bfloat16", tiles * columns, size.width)
        grouped = _struct("bfloat16", tiles * columns, size.hidden_size)
        return {
            "shared_gate_up": (gate_up, tokens, *experts, _struct("float32", tiles, columns)),
            "gate_up": (gate_up, grouped, *experts, _struct("int32", tiles)),
            "down": (down, hidden, *experts, _struct("int32", tiles)),
            "summed_down": (down, hidden, *experts),
        }[self.name]

    def call(self) -> Callable[..., Any]:
        """The kernel with the tile that serves it."""
        size, columns = self.size, self._columns
        if self.name == "dispatch":
            return functools.partial(permuted._dispatch, num_rows=self.num_tokens * size.top_k)
        if self.name == "combine":
            return permuted._combine
        if self.name == "choose":
            return functools.partial(tables.choose, num_experts=size.num_experts)
        if self.name == "count":
            return functools.partial(tables._count, size=round_up(size.num_experts, 64))
        if self.name == "place":
            most = permuted._num_tiles(self.num_tokens * size.top_k, size.num_experts, columns)
            return functools.partial(
                tables._place,
                num_blocks=-(-self.num_tokens // 64),
                num_experts=size.num_experts,
                num_tiles=most,
                columns=columns,
            )
        if self.name == "route":
            choice = Choice(self.num_tokens, size.num_experts, size.top_k)
            return lambda logits, is_real: choice.call()(logits, None, is_real)
        if self.name == "summed_down":
            tile, splits = unpermuted._down_tile(columns, size.hidden_size, size.width)
            return functools.partial(
                products.summed_down, num_tokens=self.num_tokens, splits=splits, tile=tile
            )
        tail = columns if self.is_whole else permuted._tails(columns)[0]
        tile: Tile = {
            "shared_gate_up": lambda: unpermuted._gate_up_tile(columns, 2 * size.width),
            "gate_up": lambda: permuted._tile(columns, tail, 2 * size.width),
            "down": lambda: permuted._tile(columns, tail, size.hidden_size),
        }[self.name]()
        return functools.partial(getattr(products, self.name), tile=tile)


_OF_FORM = {"unpermuted": ("shared_gate_up", "summed_down"), "permuted": ("gate_up", "down")}
KERNELS = (
    *(
        Kernel(name, size, num_tokens)
        for size, num_tokens in SERVED
        for name in _OF_FORM[size.case(num_tokens).form]
    ),
    *(Kernel(name, QWEN, 8192, is_whole=True) for name in ("gate_up", "down")),
    *(Kernel("choose", size, num_tokens) for size, num_tokens in ((GLM, 1), (QWEN, 128))),
    *(Kernel("dispatch", size, 256) for size in (QWEN, ODD)),
    *(Kernel("combine", size, 256) for size in (QWEN, GLM)),
    *(Kernel(name, QWEN, num_tokens) for name in ("count", "place") for num_tokens in (256, 16384)),
    *(Kernel("place", size, 200) for size in (GLM, ODD)),
    *(
        Kernel("route", size, num_tokens)
        for size, num_tokens in ((QWEN, 1), (QWEN, 256), (GLM, 64))
    ),
)
