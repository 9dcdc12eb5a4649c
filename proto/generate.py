"""Makes the Python code of every .proto file in this folder: `python proto/generate.py`."""

from __future__ import annotations

import importlib.resources
import pathlib
import sys

from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[1]


def generate(out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the messages, their stubs and the service code under `out`, and returns the sources.

    The include root is the repository, so that generated files import each other as `proto.*`.
    """
    sources = sorted((ROOT / "proto").rglob("*.proto"))
    out.mkdir(parents=True, exist_ok=True)
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{importlib.resources.files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *(str(source.relative_to(ROOT)) for source in sources),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; its message stands above")
    return sources


if __name__ == "__main__":
    for path in generate(ROOT):
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
