"""What the GPU's own compilers make of the kernels: registers, memory, kernels of a layer.

Needs `requirements/install gpu-gates` and no GPU.
"""

import math

import pytest

from models.batch import Tiling
from tests.kernels import assembled, compiled, compiled_moe, decode_cases

# Of one multiprocessor, 1 KB for each block aside. NVIDIA H200.
REGISTERS = 65536
SHARED_BYTES = 233472
BLOCK_BYTES = 1024
POOL_BYTES = math.prod((compiled.PAGES, 8, 2, compiled.PAGE_SIZE, 128)) * 2
LATENT_POOL_BYTES = compiled.PAGES * compiled.PAGE_SIZE * 576 * 2
WORKSPACE_BYTES = Tiling().block_bytes
"""Of expanded latents, at most."""

CALLS = {256: 4, 64: 8, 8: 8, 1: 6}
"""Kernels of our own in a decode layer by rows: of few tokens the four products are too, and of one
two of them norm it."""


def blocks_at_once(case) -> int:
    by_memory = SHARED_BYTES // (case["shared"] + BLOCK_BYTES)
    return min(by_memory, REGISTERS // (case["registers"] * case["threads"]))


@pytest.fixture(scope="module")
def reports(gpu_compilers, tmp_path_factory):
    """What is said of each op's cases, by their names."""

    def of(op):
        folder = tmp_path_factory.mktemp("mosaic")
        found = gpu_compilers.run("assembled", op, str(gpu_compilers.plugin), str(folder))
        return dict(zip(map(str, assembled.OPS[op][0]), found, strict=True))

    return {op: of(op) for op in assembled.OPS}


@pytest.mark.parametrize(
    ("op", "case"),
    [(op, case) for op, (cases, _) in assembled.OPS.items() for case in cases],
    ids=str,
)
def test_kernel_assembles_without_spills(reports, op, case):
    report = reports[op][str(case)]
    print(report)
    assert report["is_compiled"]
    assert report["spilled"] == report["stack"] == 0
    assert not report["is_serialized"]
    assert not report["leaves_registers"], "wait for products of registers with wgmma_wait(0)"
    assert blocks_at_once(report) >= 1


def test_served_decode_shares_a_multiprocessor_between_two_blocks(reports):
    report = reports["decode"][str(assembled.DECODE[0])]
    assert blocks_at_once(report) == 2
    assert report["registers"] <= 64


def test_weights_are_prefetched_as_often_as_planned(reports):
    """Of 16 MB a copy is 16 KB, and the blocks of attention share them."""
    splits = {1000: 8, 8192: 16}
    for case in assembled.DECODE_TIMES:
        blocks = splits[case.attention.kv_lens[0]] * case.attention.num_kv_heads
        expected = 1024 // blocks if case.choice in decode_cases.PREFETCHED else 0
        assert reports["decode_times"][str(case)]["prefetches"] == expected, case


def test_served_qkv_shares_a_multiprocessor_between_enough_blocks(reports):
    """A block waits for its one copy, so the copies of others must be under way."""
    assert blocks_at_once(reports["qkv"][str(assembled.QKV[0])]) >= 4


@pytest.fixture(scope="module", params=[256, 64, 8, 1])
def layer(request, gpu_compilers):
    """Rows of a decode step, and what is compiled for it."""
    return request.param, gpu_compilers.run("compiled", str(request.param), "mosaic")


def test_decode_layer_is_so_few_kernels(layer):
    rows, found = layer
    print(found)
    assert found["layer"]["mosaic_gpu_v2"] == CALLS[rows]
    assert sum(found["layer"].values()) <= {256: 10, 64: 8, 8: 9, 1: 6}[rows]


def test_kernel_is_given_arrays_of_its_own(layer):
    """A slice would be handed over where it lies, and the kernel refuses what is not aligned."""
    rows, found = layer
    # The first layer's norm has nothing to add: of one token its product is a kernel of few tokens.
    # The last norm is a kernel of its own.
    assert found["calls"] == found["all"]["mosaic_gpu_v2"] == 3 * CALLS[rows] + (rows == 1)


def test_pools_are_updated_in_place(layer):
    _, found = layer
    assert found["pools updated"] == 3
    assert found["pools made"] == 0
    assert found["temporary bytes"] < POOL_BYTES / 10


# --- a mixed step ---


@pytest.fixture(scope="module")
def mixed_layer(gpu_compilers):
    """What is compiled for decode rows and chunks together."""
    return gpu_compilers.run("compiled", "256", "mosaic", "2048")


def test_mixed_layer_is_so_few_kernels(mixed_layer):
    print(mixed_layer)
    # Decode attention reads a slice of the queries, and XLA calls that a fusion.
    assert mixed_layer["layer"]["mosaic_gpu_v2"] == 4
    assert mixed_layer["calls"] == 15
    assert "conditional" not in mixed_layer["layer"]
    assert sum(mixed_layer["layer"].values()) <= 11


def test_mixed_step_updates_pools_in_place(mixed_layer):
    assert mixed_layer["pools updated"] == 3
    assert mixed_layer["pools made"] == 0


# --- a mixed step of latent attention ---


@pytest.fixture(scope="module")
def latent_layer(gpu_compilers):
    """What is compiled for decode rows and chunks of DeepSeek-V2-Lite together."""
    return gpu_compilers.run("compiled", "64", "mosaic", "2048", "deepseek_v2_lite")


def test_latent_chunks_are_expanded_and_attended_in_two_kernels(latent_layer):
    """One loop takes the turns, one branch the decode rows."""
    print(latent_layer)
    layers = 3
    assert latent_layer["latent kernels"] == {"latent_expand": layers, "latent_prefill": layers}
    assert latent_layer["layer"]["while"] == 1
    assert latent_layer["layer"]["conditional"] == 1


def test_latent_pools_are_updated_in_place_and_read_where_they_lie(latent_layer):
    assert latent_layer["latent pools made"] == 3
    assert latent_layer["temporary bytes"] < WORKSPACE_BYTES + LATENT_POOL_BYTES / 2


# --- a mixture of experts ---


@pytest.fixture(scope="module")
def moe_layers(gpu_compilers):
    """What is compiled for the router, the choice, the experts and the residual, by tokens."""
    return {int(tokens): found for tokens, found in gpu_compilers.run("compiled_moe").items()}


@pytest.mark.parametrize("num_tokens", compiled_moe.TOKENS)
def test_mixture_of_experts_is_so_few_kernels(moe_layers, num_tokens):
    found = moe_layers[num_tokens]
    print(found)
    assert found["calls"] == found["layer"]["mosaic_gpu_v2"]
    assert "conditional" not in found["layer"] and "while" not in found["layer"]
    most_calls, most = compiled_moe.TOKENS[num_tokens]
    assert found["calls"] == most_calls
    assert sum(found["layer"].values()) <= most


def test_tokens_of_a_large_batch_take_little_memory_beside(moe_layers):
    """Grouped by expert they are k times as many, before, between and after the products."""
    assert moe_layers[2048]["temporary bytes"] < 256 * 2**20
