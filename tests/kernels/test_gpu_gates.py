"""What the GPU's own compilers make of decode attention: registers, memory, kernels of a layer.

Needs `requirements/install gpu-gates` and no GPU.
"""

import pytest

from tests.kernels import assembled

# Of one multiprocessor, 1 KB for each block aside. NVIDIA H200.
REGISTERS = 65536
SHARED_BYTES = 233472
BLOCK_BYTES = 1024
THREADS = 128


def blocks_at_once(case) -> int:
    by_memory = SHARED_BYTES // (case["shared"] + BLOCK_BYTES)
    return min(by_memory, REGISTERS // (case["registers"] * THREADS))


@pytest.fixture(scope="module")
def reports(gpu_compilers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mosaic")
    found = gpu_compilers.run("assembled", str(gpu_compilers.plugin), str(folder))
    return dict(zip(map(str, assembled.CASES), found, strict=True))


@pytest.mark.parametrize("case", assembled.CASES, ids=str)
def test_kernel_assembles_without_spills(reports, case):
    report = reports[str(case)]
    print(report)
    assert report["is_compiled"]
    assert report["spilled"] == report["stack"] == 0
    assert not report["is_serialized"]
    assert report["registers"] <= 168
    assert blocks_at_once(report) >= 1


def test_served_shape_shares_a_multiprocessor_between_two_blocks(reports):
    report = reports[str(assembled.CASES[0])]
    assert blocks_at_once(report) == 2
    assert report["registers"] <= 64


@pytest.fixture(scope="module", params=[256, 8])
def layer(request, gpu_compilers):
    """Rows of a decode step, and what is compiled for it."""
    return request.param, gpu_compilers.run("compiled", str(request.param), "mosaic")


def test_decode_layer_is_so_few_kernels(layer):
    rows, found = layer
    print(found)
    assert found["layer"]["mosaic_gpu_v2"] == 1
    assert sum(found["layer"].values()) <= {256: 13, 8: 15}[rows]


def test_kernel_is_given_arrays_of_its_own(layer):
    """A slice would be handed over where it lies, and the kernel refuses what is not aligned."""
    _, found = layer
    assert found["calls"] == found["all"]["mosaic_gpu_v2"] == 3
