"""Does the device see a numpy array that was changed right after JAX got it? Counts how often.

    python benchmarks/poison.py --json benchmarks/results/poison_h200.json

While the device works on a long program, an array of ones is handed over, by `device_put` or as an
argument, and filled with sevens at once. A sum other than that of ones has read the late write. The
engine never writes to an array it has handed over; this shows what that rule is for.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

SIZES = (64, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of the arrays."""
_WAYS = ("device_put", "argument")
_TRIES = 20
_BUSY_SIZE = {"cpu": 512}
_GPU_BUSY_SIZE = 8192
_BUSY_PRODUCTS = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Tries every size in both ways and writes the report."""
    from benchmarks import conditions

    parser = argparse.ArgumentParser(description="Counts late writes that the device sees.")
    parser.add_argument("--json", type=pathlib.Path, help="where the report goes")
    parser.add_argument("--tries", type=int, default=_TRIES, help="of each size and way")
    options = parser.parse_args(arguments)
    size = _BUSY_SIZE.get(jax.devices()[0].platform, _GPU_BUSY_SIZE)
    results = [
        _report_line(num_bytes, way, count_seen(num_bytes, way, options.tries, size), options.tries)
        for num_bytes in SIZES
        for way in _WAYS
    ]
    report = {"benchmark": "poison", "conditions": conditions.of_machine(), "results": results}
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _report_line(num_bytes: int, way: str, seen: int, tries: int) -> dict[str, Any]:
    print(f"{num_bytes:>8} B  {way:<10}  late write seen {seen} of {tries}", flush=True)
    return {"bytes": num_bytes, "way": way, "seen": seen, "tries": tries}


def count_seen(num_bytes: int, way: str, tries: int, busy_size: int) -> int:
    """How many of `tries` sums read the write that came after the array was handed over.

    Args:
      num_bytes: of the array.
      way: `device_put` or `argument`.
      tries: independent arrays.
      busy_size: side of the matrices that keep the device at work meanwhile.
    """
    hand_over: Callable[[np.ndarray], Any]
    hand_over = jax.device_put if way == "device_put" else lambda array: array
    length = num_bytes // np.dtype(np.int32).itemsize
    matrix = jnp.ones((busy_size, busy_size), jnp.bfloat16)
    # Compiled before the first try, so that no try waits for a compiler.
    jax.block_until_ready((_busy(matrix), _total(hand_over(np.ones(length, np.int32)))))
    return sum(is_seen(length, matrix, hand_over) for _ in range(tries))


def is_seen(length: int, matrix: jax.Array, hand_over: Callable[[np.ndarray], Any]) -> bool:
    """True when the sum of an array is not that of the ones it held when it was handed over."""
    array = np.ones(length, np.int32)
    work = _busy(matrix)
    total = _total(hand_over(array))
    array[:] = 7
    is_seen = int(total) != length
    jax.block_until_ready(work)
    return is_seen


@jax.jit
def _busy(matrix: jax.Array) -> jax.Array:
    for _ in range(_BUSY_PRODUCTS):
        matrix = (matrix @ matrix) * jnp.bfloat16(1e-4)
    return matrix


@jax.jit
def _total(array: jax.Array) -> jax.Array:
    return array.sum()


if __name__ == "__main__":
    main()
