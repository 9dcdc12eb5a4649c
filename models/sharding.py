"""The device mesh and where arrays lie on it; one device is a mesh of ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "expert", "tensor")


class Device(Protocol):
    """What is read of a `jax.Device`, whose type is compiled code without a stub."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    def memory_stats(self) -> dict[str, int] | None: ...


def make_mesh(devices: Sequence[Device]) -> Mesh:
    """A mesh over `devices`, all on the `tensor` axis."""
    return Mesh(np.array(devices).reshape(1, 1, len(devices)), AXES)


def named(mesh: Mesh, partition: tuple[str | None, ...] = ()) -> NamedSharding:
    """The sharding of an array whose dimensions lie on the named axes; () is replicated."""
    return NamedSharding(mesh, PartitionSpec(*partition))
