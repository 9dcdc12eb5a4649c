"""The late-write test counts a write that was seen and none that was not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import poison

MATRIX = jnp.ones((8, 8), jnp.bfloat16)


@pytest.mark.parametrize("num_bytes", [64, 4096])
def test_a_copy_never_shows_a_late_write(num_bytes):
    copied = lambda array: jax.device_put(array.copy())  # noqa: E731
    assert not any(poison.is_seen(num_bytes // 4, MATRIX, copied) for _ in range(5))


def test_a_write_before_the_sum_is_seen():
    def written(array: np.ndarray) -> jax.Array:
        array[-1] = 7
        return jax.device_put(array.copy())

    assert poison.is_seen(16, MATRIX, written)


@pytest.mark.parametrize("way", ["device_put", "argument"])
def test_counts_stay_within_the_tries(way):
    assert 0 <= poison.count_seen(64, way, tries=3, busy_size=8) <= 3
