"""Mixture of experts on the GPU: first that the kernels are right, then what a layer costs.

    PYTHONPATH=. python benchmarks/kernels/moe.py --json OUT.json [--quick] [--profile]

Experts' outputs are compared with float32 products on the same device, choices of experts with the
reference's; what must not change a bit is checked to change none. A failure ends the run with
status 1. Then the time of one layer at the sizes of Qwen3-30B-A3B: of the experts alone, of many
tokens with and without narrower last tiles, and with the router, the choice and the residual sum. A
program runs over weights of several layers, and many calls of it are under way between two waits.
Beside it stands what reading the distinct experts' weights, and what multiplying, would take.

`--quick` leaves out the checks that tell least. `--profile` prints the time of every kernel.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.kernels import harness
from benchmarks.kernels.harness import Checks
from benchmarks.roofline import Ceilings
from kernels.dispatch import Dispatch
from kernels.moe import api, permuted, reference, unpermuted

TOKENS = (8, 256, 64, 1, 2048, 32, 128, 8192)
COMPARED = (64, 128)
"""Tokens that are timed in both forms."""
TAILED = (2048, 8192)
"""Tokens that are timed in tiles of 128 with narrower last ones and without."""
TOLERANCE = 2.0**-7
"""Of a token's length: hidden values, experts' outputs and their sum are rounded to bfloat16, each
by at most 2^-9."""
NUM_LAYERS = 12
_TRUTH_ROWS = 256
_SAMPLE_SECONDS = 0.05

Arrays = tuple[Any, ...]
Form = Callable[..., jax.Array]
TAILS: dict[str, Form] = {
    "tiles of 128, narrow tails": functools.partial(permuted.experts, columns=128, tail=32),
    "tiles of 128, all whole": functools.partial(permuted.experts, columns=128, tail=128),
}
FORMS: dict[str, Form] = {
    "unpermuted": unpermuted.experts,
    "permuted": permuted.experts,
    **TAILS,
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Experts of one layer of a published model."""

    name: str
    num_experts: int
    top_k: int
    width: int
    scoring: str
    hidden_size: int = 2048

    @property
    def expert_bytes(self) -> int:
        return 2 * 3 * self.hidden_size * self.width

    @property
    def token_flops(self) -> int:
        """Of one token and its experts."""
        return 2 * 3 * self.hidden_size * self.width * self.top_k

    @property
    def routing(self) -> dict[str, Any]:
        """Everything static of the choice."""
        is_softmax = self.scoring == "softmax"
        renormalize = self.num_experts != 64 or not is_softmax
        scale = 1.0 if is_softmax else 1.8
        return {
            "top_k": self.top_k,
            "scoring": self.scoring,
            "renormalize": renormalize,
            "scale": scale,
        }


QWEN = Size("Qwen3-30B-A3B", 128, 8, 768, "softmax")
DEEPSEEK = Size("DeepSeek-V2-Lite", 64, 6, 1408, "softmax")
GLM = Size("GLM-4.7-Flash", 64, 4, 1536, "sigmoid")
FEWEST = Size("32 experts", 32, 2, 64, "softmax")
MOST = Size("256 experts", 256, 8, 64, "sigmoid")
"""Only chosen: the ends of what the choice covers."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; an eighth of its tokens are padding."""

    size: Size
    num_tokens: int
    routing: str = "even"
    """"even": any experts; "skewed": the low ids most; "same": all tokens have the same; "none"."""

    def __str__(self) -> str:
        return f"{self.size.name}, {self.num_tokens} tokens, {self.routing} routing"

    @property
    def num_real(self) -> int:
        return 0 if self.routing == "none" else self.num_tokens - self.num_tokens // 8


TELLING = (
    *(Case(QWEN, tokens) for tokens in (8, 256, 64, 1, 2048, 32, 128)),
    Case(QWEN, 64, "skewed"),
    Case(QWEN, 256, "same"),
    Case(QWEN, 8, "none"),
    Case(QWEN, 256, "none"),
    Case(DEEPSEEK, 8),
    Case(DEEPSEEK, 256),
    Case(GLM, 64),
    Case(GLM, 256, "skewed"),
)
OTHERS = (
    *(Case(QWEN, tokens) for tokens in (3, 16, 24, 100, 129, 1000, 8192)),
    *(Case(QWEN, tokens, "same") for tokens in (8, 64, 2048)),
    *(Case(DEEPSEEK, tokens) for tokens in (1, 16, 32, 64, 128, 2048)),
    *(Case(GLM, tokens) for tokens in (1, 8, 16, 32, 128, 256, 2048)),
)


@functools.cache
def weights_of(size: Size) -> tuple[jax.Array, jax.Array]:
    """Random gate-up and down weights on the device."""

    def make(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        experts, hidden, width = size.num_experts, size.hidden_size, size.width
        first, second = jax.random.split(key)
        gate_up = jax.random.normal(first, (experts, 2 * width, hidden), jnp.bfloat16)
        down = jax.random.normal(second, (experts, hidden, width), jnp.bfloat16)
        return gate_up * hidden**-0.5, down * width**-0.5

    return jax.jit(make)(jax.random.key(0))


def inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, ids and weights on the host."""
    size, rng = case.size, np.random.default_rng(seed)
    shape = (case.num_tokens, size.num_experts)
    scores = rng.gumbel(size=shape)
    if case.routing == "skewed":
        scores -= 1.5 * np.log1p(np.arange(size.num_experts))
    if case.routing == "same":
        scores = np.broadcast_to(scores[:1], shape)
    ids = np.argsort(-scores, axis=1)[:, : size.top_k].astype(np.int32)
    weights = rng.dirichlet(np.ones(size.top_k), case.num_tokens).astype(np.float32)
    ids[case.num_real :], weights[case.num_real :] = size.num_experts, 0
    x = rng.standard_normal((case.num_tokens, size.hidden_size), np.float32)
    return x.astype(jnp.bfloat16), ids, weights


@jax.jit
def _exact(
    x: jax.Array, ids: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Every token through every expert in float32 -> f32 [rows, D]."""
    x = x.astype(jnp.float32)

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.dot(x, weight.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)

    def add(expert: jax.Array, total: jax.Array) -> jax.Array:
        halves = product(x, gate_up[expert]).reshape(x.shape[0], -1, 2, 64)
        hidden = jax.nn.silu(halves[:, :, 0]) * halves[:, :, 1]
        out = product(hidden.reshape(x.shape[0], -1), down[expert])
        share = jnp.sum(jnp.where(ids == expert, weights, 0.0), axis=1)
        return total + jnp.where(share[:, None] == 0, 0.0, out * share[:, None])

    return jax.lax.fori_loop(0, down.shape[0], add, jnp.zeros(x.shape, jnp.float32))


def exact(case: Case, arrays: Arrays) -> np.ndarray:
    """The truth, some rows at a time, so that every case runs the same program."""
    parts = []
    for start in range(0, case.num_tokens, _TRUTH_ROWS):
        rows = [array[start : start + _TRUTH_ROWS] for array in arrays]
        spare = _TRUTH_ROWS - len(rows[0])
        rows = [np.pad(array, ((0, spare), (0, 0))) for array in rows]
        parts.append(np.asarray(_exact(*rows, *weights_of(case.size))))
    return np.concatenate(parts)[: case.num_tokens]


def _summed(parts: jax.Array, x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, list(parts)).astype(x.dtype)


@jax.jit
def _experts(*arrays: jax.Array) -> jax.Array:
    return _summed(api.experts(*arrays, kernels="mosaic"), arrays[0])


def call(case: Case, arrays: Arrays) -> np.ndarray:
    """One call."""
    return np.asarray(_experts(*arrays, *weights_of(case.size)))


def _num_run(dispatch: Dispatch) -> int:
    """Calls that were traced with a kernel."""
    return sum(count for name, count in dispatch.counts.items() if name != "reference")


def check_values(cases: Sequence[Case]) -> Checks:
    """Experts' outputs."""
    for case in cases:
        arrays = inputs(case)
        before = api.experts.counts["reference"]
        found = call(case, arrays).astype(np.float32)
        error = harness.worst_error(found, exact(case, arrays))
        is_right = error <= TOLERANCE and api.experts.counts["reference"] == before
        yield str(case), is_right, f"{error:.1e}"


def check_bits(tokens: Sequence[int]) -> Checks:
    """What must change no bit of a token."""
    for num_tokens in tokens:
        case = Case(QWEN, num_tokens)
        x, ids, weights = inputs(case)
        clean = call(case, (x, ids, weights))
        runs = [call(case, (x, ids, weights)) for _ in range(5)]
        same = all(_bits_equal(run, clean) for run in runs)
        yield f"{case}: 5 more runs", same, ""

        kept = np.arange(num_tokens) % 3 == 1
        other, other_ids, other_weights = inputs(case, seed=1)
        mixed = [
            np.where(kept[:, None], one, two)
            for one, two in ((x, other), (ids, other_ids), (weights, other_weights))
        ]
        same = _bits_equal(call(case, tuple(mixed))[kept], clean[kept])
        yield f"{case}: other neighbours", same, ""

        values = np.array([np.nan, np.inf, -np.inf], x.dtype)[np.arange(num_tokens) % 3]
        poisoned = np.where(kept[:, None], x, values[:, None])
        found = call(case, (poisoned, ids, weights))
        same = _bits_equal(found[kept], clean[kept])
        yield f"{case}: neighbours that are not finite", same, ""
        is_bad = ~np.isfinite(found.astype(np.float32)).all(axis=1)
        is_expected = ~kept & (np.arange(num_tokens) < case.num_real)
        yield f"{case}: only they are flagged", np.array_equal(is_bad, is_expected), ""

        order = np.random.default_rng(2).permutation(num_tokens)
        same = _bits_equal(call(case, (x[order], ids[order], weights[order])), clean[order])
        yield f"{case}: in another order", same, ""


def _bits_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one.view(np.uint16), other.view(np.uint16))


def check_tails(cases: Sequence[Case]) -> Checks:
    """That narrower last tiles change no bit."""
    for case in cases:
        arrays = inputs(case)
        programs = [jax.jit(functools.partial(form, kernels="mosaic")) for form in TAILS.values()]
        weights = weights_of(case.size)
        narrow, whole = (np.asarray(program(*arrays, *weights)[0]) for program in programs)
        error = harness.worst_error(narrow.astype(np.float32), exact(case, arrays))
        holds = error <= TOLERANCE and _bits_equal(narrow, whole)
        yield f"{case}: narrow last tiles", holds, f"{error:.1e}"


def check_routes(tokens: Sequence[int]) -> Checks:
    """Choices of experts and their weights."""
    for size in (QWEN, DEEPSEEK, GLM, FEWEST, MOST):
        options = size.routing
        choose = jax.jit(functools.partial(api.route, **options, kernels="mosaic"))
        truth = jax.jit(functools.partial(reference.route, **options))
        for num_tokens in tokens:
            rng = np.random.default_rng(num_tokens)
            # Of few different values, so that some are equal.
            logits = rng.standard_normal((num_tokens, size.num_experts)).astype(jnp.bfloat16)
            logits = logits.astype(np.float32)
            if num_tokens > 3:
                logits[1], logits[2, 5] = 0.25, np.nan
            bias = None
            if size.scoring == "sigmoid":
                bias = rng.integers(-2, 3, size.num_experts).astype(np.float32) / 8
            is_real = np.arange(num_tokens) < max(1, num_tokens - num_tokens // 8)
            before = _num_run(api.route)
            ids, weights = (np.asarray(out) for out in choose(logits, bias, is_real))
            did_run = _num_run(api.route) == before + 1
            known, expected = (np.asarray(out) for out in truth(logits, bias, is_real))
            differ = int((ids != known).any(axis=1).sum())
            is_nan = np.isnan(expected)
            error = np.abs(weights - expected)[~is_nan].max() / options["scale"]
            holds = differ == 0 and error < 1e-5 and np.array_equal(np.isnan(weights), is_nan)
            figure = f"{differ} tokens differ, {error:.1e}" if did_run else "declined"
            name = f"{size.name}: choice for {num_tokens} tokens"
            yield name, bool(holds and did_run), figure


@functools.cache
def layers() -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Router, gate-up and down weights of each layer."""
    gate_up, down = weights_of(QWEN)
    shape = (QWEN.hidden_size, QWEN.num_experts)
    router = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16) * QWEN.hidden_size**-0.5
    scaled = jax.jit(lambda x, by: (x * by).astype(x.dtype))
    return [
        (jnp.roll(router, 17 * i, 0), scaled(gate_up, 1 + 0.01 * i), scaled(down, 1 - 0.01 * i))
        for i in range(NUM_LAYERS)
    ]


def experts_program(form: Form) -> Callable[..., jax.Array]:
    """(x, weights of the layers, ids and weights of each) -> x after them."""

    def program(x: jax.Array, weights: Any, chosen: Any) -> jax.Array:
        for (_, gate_up, down), (ids, shares) in zip(weights, chosen, strict=True):
            x = x + form(x, ids, shares, gate_up, down, kernels="mosaic")
            x = (x * 0.7).astype(x.dtype)
        return x

    return jax.jit(program)


@jax.jit
def layer_program(x: jax.Array, weights: Any) -> tuple[jax.Array, list[jax.Array]]:
    """x after the layers, and the ids that each chose."""
    chosen = []
    is_real = jnp.ones(x.shape[0], jnp.bool_)
    for router, gate_up, down in weights:
        logits = jnp.dot(x, router, preferred_element_type=jnp.float32)
        ids, shares = api.route(logits, None, is_real, **QWEN.routing, kernels="mosaic")
        out = api.experts(x, ids, shares, gate_up, down, kernels="mosaic")
        x = x + _summed(out, x)
        x = (x * 0.7).astype(x.dtype)
        chosen.append(ids)
    return x, chosen


def measure(num_tokens: int, what: str, ceilings: Ceilings | None, profile: bool) -> dict[str, Any]:
    """Time of one layer of `what`: the experts by a form's name, or the whole layer."""
    case = Case(QWEN, num_tokens)
    x = jax.device_put(inputs(case)[0])
    if what == "layer":
        chosen = layer_program(x, layers())[1]
        call = functools.partial(layer_program, x, layers())
    else:
        seeds = range(NUM_LAYERS)
        routes = [_all_real(case, seed) for seed in seeds]
        chosen = [ids for ids, _ in routes]
        call = functools.partial(experts_program(FORMS[what]), x, layers(), jax.device_put(routes))
    distinct = statistics.mean(len(np.unique(np.asarray(ids))) for ids in chosen)
    seconds = harness.seconds(call, _SAMPLE_SECONDS) / NUM_LAYERS
    moved, flops = distinct * QWEN.expert_bytes, num_tokens * QWEN.token_flops
    figures: dict[str, Any] = {
        "tokens": num_tokens,
        "what": what,
        "us": round(1e6 * seconds, 1),
        "distinct_experts": round(distinct, 1),
        "tb_per_s": round(moved / seconds / 1e12, 2),
        "tflop_per_s": round(flops / seconds / 1e12, 1),
    }
    if ceilings:
        read = moved / ceilings.read_bytes_per_second
        multiplied = flops / ceilings.flops_per_second
        figures["floor_us"] = round(1e6 * max(read, multiplied), 1)
        figures["share"] = round(max(read, multiplied) / seconds, 3)
    print("  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
    if profile:
        figures["kernels"] = kernel_times(call)
    return figures


def _all_real(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights without padding."""
    whole = dataclasses.replace(case, num_tokens=case.num_tokens + case.num_tokens // 7 + 1)
    _, ids, weights = inputs(whole, seed)
    assert whole.num_real >= case.num_tokens
    return ids[: case.num_tokens], weights[: case.num_tokens]


def kernel_times(call: functools.partial[Any]) -> dict[str, dict[str, float]]:
    """Microseconds of each kernel and how often it runs, per layer."""
    from jax.experimental.mosaic.gpu import profiler  # needs a GPU's libraries

    # The weights go in as arguments: closed over they would be constants of another program.
    measured = profiler.Cupti(finalize=False).measure(call.func, aggregate=False)
    _, times = cast("Any", measured)(*call.args)
    by_name = collections.defaultdict(list)
    for name, milliseconds in times:
        by_name[name.removesuffix("_mosaic_gpu_kernel")[:48]].append(1e3 * milliseconds)
    found = {
        name: {
            "us": round(statistics.median(each), 2),
            "per_layer": round(len(each) / NUM_LAYERS, 2),
        }
        for name, each in sorted(by_name.items(), key=lambda item: -sum(item[1]))
    }
    total = sum(map(sum, by_name.values())) / NUM_LAYERS
    print(
        f"        kernels {total:.1f} us: "
        + "; ".join(
            f"{name} {of['us']} x {of['per_layer']}" for name, of in list(found.items())[:14]
        ),
        flush=True,
    )
    return found


def measured(ceilings: Ceilings | None, profile: bool) -> Iterable[dict[str, Any]]:
    """One shape after another."""
    for num_tokens in TOKENS:
        served = "unpermuted" if num_tokens <= unpermuted.MAX_TOKENS else "permuted"
        whats = [served, "layer"]
        if num_tokens in COMPARED:
            whats.append("permuted" if served == "unpermuted" else "unpermuted")
        if num_tokens in TAILED:
            whats.extend(TAILS)
        for what in whats:
            yield measure(num_tokens, what, ceilings, profile)


def declined() -> dict[str, str]:
    """Why calls ran the reference, by operation."""
    return {
        dispatch.op: str(dispatch.declined)
        for dispatch in (api.experts, api.route)
        if dispatch.counts["reference"]
    }


def checks(quick: bool) -> Iterator[Callable[[], Checks]]:
    """Those that tell most first."""
    yield lambda: check_values(TELLING)
    yield lambda: check_bits((8, 64, 256) if quick else (8, 32, 64, 128, 256, 2048))
    yield lambda: check_tails((Case(QWEN, 2048), Case(QWEN, 2048, "skewed")))
    yield lambda: check_routes((1, 64, 256) if quick else (1, 2, 3, 8, 64, 256, 1000, 2048))
    if not quick:
        yield lambda: check_values(OTHERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, measures and writes the report; the exit status is 1 when a check failed."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    return harness.run(
        "moe",
        "Checks and times the choice of experts and their products. --quick: the checks that tell "
        "most; --profile: the time of every kernel.",
        tuple(checks(options.quick)),
        lambda ceilings: measured(ceilings, options.profile),
        lambda: ("declined", declined(), not declined()),
        rest,
    )


if __name__ == "__main__":
    raise SystemExit(main())
