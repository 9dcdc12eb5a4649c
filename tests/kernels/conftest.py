"""The GPU's compilers on a machine without one: wheels, and a stand-in for the driver."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
WHEELS = "the wheels of requirements/gpu-gates.txt"


@dataclasses.dataclass(frozen=True)
class GpuCompilers:
    """Runs modules of this folder where XLA and Mosaic compile for an H200."""

    plugin: pathlib.Path
    """Shared library of XLA for CUDA."""
    mosaic_runtime: pathlib.Path
    cuda_root: pathlib.Path
    """Holds bin/ptxas."""
    driver: pathlib.Path
    """Folder of the stand-in for the CUDA driver."""

    def run(self, module: str, *words: str, env: dict[str, str] | None = None) -> Any:
        """The JSON that a module prints as its last line."""
        settings = {
            "LD_LIBRARY_PATH": str(self.driver),
            "MOSAIC_GPU_CUDA_ROOT": str(self.cuda_root),
            "MOSAIC_GPU_RUNTIME_LIB_PATH": str(self.mosaic_runtime),
            # XLA looks for its tools on the path too.
            "PATH": f"{self.cuda_root / 'bin'}{os.pathsep}{os.environ['PATH']}",
            # Programs compiled without tuning are not for a cache that others read.
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
        done = subprocess.run(
            [sys.executable, "-m", f"tests.kernels.{module}", *words],
            cwd=ROOT,
            env=os.environ | settings | (env or {}),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def gpu_compilers(tmp_path_factory: pytest.TempPathFactory) -> GpuCompilers:
    """The compilers, or a skip that names what is missing."""
    plugin = _file_of("jax_plugins.xla_cuda13", "xla_cuda_plugin.so")
    runtime = _file_of("jax_cuda13_plugin", "libmosaic_gpu_runtime.so")
    ptxas = _file_of("nvidia", "cu13/bin/ptxas")
    if plugin is None or runtime is None or ptxas is None:
        pytest.skip(WHEELS)
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler (cc), for the stand-in of the CUDA driver")
    driver = tmp_path_factory.mktemp("driver")
    source, library = HERE / "driver_stand_in.c", driver / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return GpuCompilers(plugin, runtime, ptxas.parents[1], driver)


def _file_of(package: str, name: str) -> pathlib.Path | None:
    """A file of an installed package; None where it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    folders = (spec and spec.submodule_search_locations) or []
    return next((path for folder in folders if (path := pathlib.Path(folder, name)).exists()), None)
