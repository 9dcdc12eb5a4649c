"""The device mesh and where arrays lie on it; one device is a mesh of ones."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "expert", "tensor")


def make_mesh(devices: list[jax.Device]) -> Mesh:
    """A mesh over `devices`, all on the `tensor` axis."""
    return Mesh(np.array(devices).reshape(1, 1, len(devices)), AXES)


def named(mesh: Mesh, partition: tuple[str | None, ...] = ()) -> NamedSharding:
    """The sharding of an array whose dimensions lie on the named axes; () is replicated."""
    return NamedSharding(mesh, PartitionSpec(*partition))
