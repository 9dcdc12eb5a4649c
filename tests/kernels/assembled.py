"""Assembles an op's kernels for Hopper and prints what ptxas says of them, as JSON.

    python -m tests.kernels.assembled decode|prefill|qkv|mla_decode|moe|norm|linear PLUGIN.so FOLDER

Mosaic leaves its dumps in FOLDER. The environment is that of `GpuCompilers`.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tests.kernels import (
    linear_cases,
    mla_decode_cases,
    moe_cases,
    norm_cases,
    prefill_cases,
    qkv_cases,
)
from tests.kernels.decode_cases import Case

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
OPS: dict[str, tuple[tuple[Any, ...], Callable[[Any], Callable[..., Any]]]] = {
    "decode": (DECODE, lambda case: case.decode("mosaic")),
    "prefill": (PREFILL, lambda case: case.prefill("mosaic")),
    "qkv": (QKV, lambda case: case.prepare("mosaic")),
    "mla_decode": (MLA_DECODE, lambda case: case.decode("mosaic")),
    "moe": (moe_cases.KERNELS, lambda case: case.call()),
    "norm": (norm_cases.ASSEMBLED, lambda case: case.call("mosaic")),
    "linear": (linear_cases.ASSEMBLED, lambda case: case.call("mosaic")),
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


def assemble(
    call: Callable[..., Any],
    structs: tuple[Any, ...],
    compile_module: Any,
    folder: pathlib.Path,
) -> dict[str, int | bool]:
    """Threads of a block, registers of each, bytes spilled and bytes of shared memory."""
    lowered = jax.jit(call).trace(*structs)
    lowered = lowered.lower(lowering_platforms=("cuda",))
    (module,) = modules(lowered.compiler_ir())
    is_whole = bool(compile_module(module, len(module)))
    (report,), (resources,), (code,) = (folder.glob(f"*.{end}") for end in _DUMPS)
    text, sizes = report.read_text(), resources.read_text()
    threads = re.search(r"\.(?:req|max)ntid[^\d]+(\d+)", code.read_text())
    for path in folder.iterdir():
        path.unlink()
    return {
        "is_compiled": is_whole,
        "threads": int(threads[1]),
        "registers": int(re.search(r"Used (\d+) registers", text)[1]),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", text)),
        "stack": int(re.search(r"(\d+) bytes stack frame", text)[1]),
        "shared": int(re.search(r"smem_scratch_bytes=(\d+)", sizes)[1]),
        "is_serialized": "serializ" in text.lower(),
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
