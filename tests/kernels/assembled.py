"""Assembles an op's kernels for Hopper and prints what ptxas says of them, as JSON.

    python -m tests.kernels.assembled OP PLUGIN.so FOLDER

OP is a name of `OPS`. Mosaic leaves its dumps in FOLDER. The environment is that of `GpuCompilers`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tests.kernels import (
    decode_cases,
    linear_cases,
    mla_decode_cases,
    mla_prefill_cases,
    moe_cases,
    norm_cases,
    prefill_cases,
    qkv_cases,
)
from tests.kernels.decode_cases import Case, Times

FEW, MANY = (512,) * 3, (512,) * 130
DECODE = (
    Case(MANY),
    Case(FEW),
    Case(MANY, head_dim=64, group=7, page_size=16),
    Case(MANY, head_dim=256, group=16),
    Case(FEW, head_dim=256, group=16),
    Case(MANY, group=16, window=100),
    Case(MANY, queries=8, group=16),
    Case(FEW, queries=8, group=6, head_dim=256, page_size=16),
    Case(MANY, soft_cap=50.0),
    Case(FEW, queries=8, group=16, head_dim=256, soft_cap=50.0),
)
_SERVED_TIMES = (
    Times(Case((1000,), num_kv_heads=8), 4096),
    Times(Case((1000,), num_kv_heads=4, group=8), 2048),
    Times(Case((8192,), num_kv_heads=8), 4096),
)
DECODE_TIMES = (
    *_SERVED_TIMES,
    *(
        dataclasses.replace(case, choice=choice)
        for case in _SERVED_TIMES[:2]
        for choice in linear_cases.REGISTERS
    ),
    *(
        dataclasses.replace(case, choice=choice)
        for case in _SERVED_TIMES
        for choice in decode_cases.PREFETCHED
    ),
)
CHUNKS = ((300, 700), (100, 0))
PREFILL = (
    prefill_cases.Case(CHUNKS),
    prefill_cases.Case(CHUNKS, group=3),
    prefill_cases.Case(CHUNKS, group=8, page_size=16, window=100),
    prefill_cases.Case(CHUNKS, group=5, page_size=16),
    prefill_cases.Case(CHUNKS, head_dim=64, group=7, page_size=16),
    prefill_cases.Case(CHUNKS, head_dim=256, group=16),
    prefill_cases.Case(CHUNKS, head_dim=256, group=1, page_size=16),
    prefill_cases.Case(CHUNKS, head_dim=256, group=2, page_size=16, window=100),
    prefill_cases.Case(CHUNKS, soft_cap=50.0),
    prefill_cases.Case(CHUNKS, head_dim=256, group=2, soft_cap=50.0),
)
QKV = (
    qkv_cases.Case(256, num_kv_heads=8),
    qkv_cases.Case(1, num_kv_heads=8),
    qkv_cases.Case(2048, num_kv_heads=8, has_norm=False),
    qkv_cases.Case(64, head_dim=64, group=7, page_size=16),
    qkv_cases.Case(64, head_dim=256, group=16, page_size=8),
    qkv_cases.Case(7, group=1),
)
MLA_DECODE = (
    mla_decode_cases.Case(MANY),
    mla_decode_cases.Case(FEW, page_size=16),
    mla_decode_cases.Case(MANY, num_heads=20),
    mla_decode_cases.Case(FEW, num_heads=20, page_size=16),
    mla_decode_cases.Case(FEW, num_heads=128),
    mla_decode_cases.Case(MANY, num_heads=128, page_size=16),
    mla_decode_cases.Case(FEW, num_heads=16, queries=8),
)
MLA_PREFILL = tuple(
    mla_prefill_cases.Case(CHUNKS, num_heads=num_heads, nope=nope, value=value, page_size=page_size)
    for num_heads, nope, value in ((16, 128, 128), (20, 192, 256))
    for page_size in (16, 64)
)
OPS: dict[str, tuple[tuple[Any, ...], Callable[[Any], Callable[..., Any]]]] = {
    "decode": (DECODE, lambda case: case.decode("mosaic")),
    "decode_times": (DECODE_TIMES, lambda case: case.call("mosaic")),
    "prefill": (PREFILL, lambda case: case.prefill("mosaic")),
    "qkv": (QKV, lambda case: case.prepare("mosaic")),
    "mla_decode": (MLA_DECODE, lambda case: case.decode("mosaic")),
    "mla_prefill": (MLA_PREFILL, lambda case: case.prefill("mosaic")),
    "moe": (moe_cases.KERNELS, lambda case: case.call()),
    "norm": (norm_cases.ASSEMBLED, lambda case: case.call("mosaic")),
    "linear": (linear_cases.ASSEMBLED, lambda case: case.call("mosaic")),
    "normed": (linear_cases.NORMED_ASSEMBLED, lambda case: case.call("mosaic")),
}
"""Cases of each op, and the call that one stands for."""
_DUMPS = ("ptxas", "resources.txt", "ptx")


def modules(op: Any) -> Iterator[bytes]:
    """Mosaic's own programs inside a lowered one."""
    operation = op.operation
    if operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(
        operation.attributes["call_target_name"]
    ):
        yield operation.attributes["mhlo.backend_config"]["module"].value_bytes
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from modules(inner)


def _leaves_registers(code: str) -> bool:
    """Whether a product may still read registers behind its wait, where they are written anew."""
    reads_registers = re.search(r"wgmma\.mma_async\S* \{[^}]*\}, \{", code)
    waits_for_part = re.search(r"wgmma\.wait_group\S* +[1-9]", code)
    return bool(reads_registers and waits_for_part)


def assemble(
    call: Callable[..., Any],
    structs: tuple[Any, ...],
    compile_module: Any,
    folder: pathlib.Path,
) -> dict[str, int | bool]:
    """Of a block: its threads, their registers, bytes spilled, shared memory.

    Of two kernels the most; threads and registers are those of the kernel whose block takes the
    most registers.
    """
    lowered = jax.jit(call).trace(*structs)
    lowered = lowered.lower(lowering_platforms=("cuda",))
    is_whole = all([bool(compile_module(x, len(x))) for x in modules(lowered.compiler_ir())])
    dumps = [sorted(folder.glob(f"*.{end}")) for end in _DUMPS]
    reports, resources, codes = ([path.read_text() for path in paths] for paths in dumps)
    for path in folder.iterdir():
        path.unlink()

    def numbers(pattern: str, texts: list[str]) -> list[int]:
        found = [[int(number) for number in re.findall(pattern, text)] for text in texts]
        assert all(found)
        return [sum(of_kernel) for of_kernel in found]

    registers = numbers(r"Used (\d+) registers", reports)
    threads = numbers(r"\.(?:req|max)ntid[^\d]+(\d+)", codes)
    most = max(zip(registers, threads, strict=True), key=math.prod)
    return {
        "is_compiled": is_whole,
        "registers": most[0],
        "threads": most[1],
        "spilled": max(numbers(r"(\d+) bytes spill", reports)),
        "stack": max(numbers(r"(\d+) bytes stack frame", reports)),
        "shared": max(numbers(r"smem_scratch_bytes=(\d+)", resources)),
        "is_serialized": any("serializ" in text.lower() for text in reports),
        "leaves_registers": any(_leaves_registers(code) for code in codes),
        "prefetches": sum(code.count("cp.async.bulk.prefetch.tensor") for code in codes),
    }


def main(op: str, plugin: str, folder: str) -> None:
    """Assembles every case of an op."""
    for kind in ("PTX", "PTXAS", "RESOURCES"):
        os.environ[f"MOSAIC_GPU_DUMP_{kind}"] = "1"
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    compile_module = ctypes.CDLL(plugin).MosaicGpuCompile
    compile_module.argtypes = [ctypes.c_char_p, ctypes.c_int]
    compile_module.restype = ctypes.c_void_p
    cases, call_of = OPS[op]
    dumps = pathlib.Path(folder)
    reports = [assemble(call_of(case), case.structs, compile_module, dumps) for case in cases]
    print(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
