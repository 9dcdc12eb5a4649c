"""Assembles decode attention for Hopper and prints what ptxas says of it, as JSON.

    python -m tests.kernels.assembled PLUGIN.so FOLDER

Mosaic leaves its dumps in FOLDER. The environment is that of `GpuCompilers`.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax

from tests.kernels.decode_cases import Case

FEW, MANY = (512,) * 3, (512,) * 130
CASES = (
    Case(MANY),
    Case(FEW),
    Case(MANY, head_dim=64, group=7, page_size=16),
    Case(MANY, head_dim=256, group=16),
    Case(FEW, head_dim=256, group=16),
    Case(MANY, group=16, window=100),
    Case(MANY, queries=8, group=16),
    Case(FEW, queries=8, group=6, head_dim=256, page_size=16),
)


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


def assemble(case: Case, compile_module: Any, folder: pathlib.Path) -> dict[str, int | bool]:
    """Registers of a thread, bytes spilled and bytes of shared memory."""
    lowered = jax.jit(case.decode("mosaic")).trace(*case.structs)
    lowered = lowered.lower(lowering_platforms=("cuda",))
    (module,) = modules(lowered.compiler_ir())
    is_whole = bool(compile_module(module, len(module)))
    (report,) = folder.glob("*.ptxas")
    (resources,) = folder.glob("*.resources.txt")
    text, sizes = report.read_text(), resources.read_text()
    for path in folder.iterdir():
        path.unlink()
    return {
        "is_compiled": is_whole,
        "registers": int(re.search(r"Used (\d+) registers", text)[1]),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", text)),
        "stack": int(re.search(r"(\d+) bytes stack frame", text)[1]),
        "shared": int(re.search(r"smem_scratch_bytes=(\d+)", sizes)[1]),
        "is_serialized": "serializ" in text.lower(),
    }


def main(plugin: str, folder: str) -> None:
    """Assembles every case."""
    for kind in ("PTX", "PTXAS", "RESOURCES"):
        os.environ[f"MOSAIC_GPU_DUMP_{kind}"] = "1"
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    compile_module = ctypes.CDLL(plugin).MosaicGpuCompile
    compile_module.argtypes = [ctypes.c_char_p, ctypes.c_int]
    compile_module.restype = ctypes.c_void_p
    print(json.dumps([assemble(case, compile_module, pathlib.Path(folder)) for case in CASES]))


if __name__ == "__main__":
    main(*sys.argv[1:])
