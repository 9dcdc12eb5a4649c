"""What each program of an engine is traced from: a function, abstract arguments, where results lie.

A recipe's traced form can be made in one process and compiled in another: it is exported as bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.export

from engine.execution.buckets import ProgramKey
from engine.execution.packing import InstallShape, batch_ranges, install_ranges
from engine.execution.step import StateShape, StepState, make_install, make_step
from kernels import mosaic
from models import checkpoint, sharding
from models.batch import Tiling
from models.cache import CacheSpec
from models.registry import Model


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One program before it is traced."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Pytrees of jax.ShapeDtypeStruct with shardings."""
    out_shardings: Any
    """Of every result, in a pytree like theirs."""
    donate_argnums: tuple[int, ...] = ()

    def trace(self) -> jax.stages.Traced:
        """The program's jaxpr, to be lowered."""
        return self._jitted().trace(*self.arguments)

    def export(self, platform: str) -> bytes:
        """The program lowered for a platform that need not be here. Leaves alone cross with it."""
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in mosaic.CUSTOM_CALLS]
        export = jax.export.export(self._jitted(), platforms=[platform], disabled_checks=checks)
        made = export(*self.arguments)
        flat = {
            "in_tree": jax.tree.structure(((0,) * self.in_tree.num_leaves, {})),
            "out_tree": jax.tree.structure((0,) * self.out_tree.num_leaves),
        }
        return bytes(dataclasses.replace(made, **flat).serialize())

    def imported(self, data: bytes) -> Recipe:
        """The same program, of whose function only the name is left: its body is an export."""
        body = jax.export.deserialize(bytearray(data))

        @functools.wraps(self.function)
        def function(*arguments: Any) -> Any:
            return jax.tree.unflatten(self.out_tree, body.call(*jax.tree.leaves(arguments)))

        return dataclasses.replace(self, function=function)

    @property
    def in_tree(self) -> Any:
        """Structure of what the compiled program is called with."""
        return jax.tree.structure((self.arguments, {}))

    @property
    def out_tree(self) -> Any:
        """Structure of what it returns."""
        return jax.tree.structure(self.out_shardings)

    @property
    def devices(self) -> list[Any]:
        """Where results lie, by number."""
        found = {one for leaf in jax.tree.leaves(self.out_shardings) for one in leaf.device_set}
        return sorted(found, key=lambda device: device.id)

    def _jitted(self) -> Any:
        """`keep_unused`: parameter numbers stay leaf numbers."""
        return jax.jit(
            self.function,
            donate_argnums=self.donate_argnums,
            keep_unused=True,
            out_shardings=self.out_shardings,
        )


@dataclasses.dataclass(frozen=True)
class ProgramShapes:
    """What every program of an engine has in common."""

    model: Model
    dtype: str
    """Of weights, activations and host rows."""
    page_size: int
    tiling: Tiling
    state: StateShape
    mesh: jax.sharding.Mesh
    compiler_options: Mapping[str, Any]

    @functools.cached_property
    def params(self) -> Any:
        """Pytree of jax.ShapeDtypeStruct with shardings."""
        return checkpoint.abstract(
            self.model.leaves(),
            dtype=self.dtype,
            shardings=lambda leaf: sharding.named(self.mesh, leaf.partition),
        )

    @functools.cached_property
    def placing(self) -> str:
        """What the compiler is told besides a program: its options, and where arguments lie."""
        arguments = jax.tree.leaves((self.params, self.state_shapes()))
        return repr((sorted(self.compiler_options.items()), arguments))

    @property
    def about(self) -> tuple[Any, ...]:
        """All that programs are made from besides their keys and code; told apart by its repr."""
        name, config = self.model.registration.architecture, self.model.config
        return (name, config, self.dtype, self.page_size, self.tiling, self.state, self.placing)

    @property
    def replicated(self) -> jax.sharding.Sharding:
        """Where packed arrays and small state leaves lie."""
        return sharding.named(self.mesh)

    @property
    def host_row(self) -> jax.ShapeDtypeStruct | None:
        """One token's embedding [D] that the host makes; None: the forward embeds ids itself."""
        if self.model.registration.host_embed is None:
            return None
        return jax.ShapeDtypeStruct((self.model.config.hidden_size,), jax.numpy.dtype(self.dtype))

    @property
    def num_groups(self) -> int:
        """Paged cache groups of the model."""
        return len(self.state.pools)

    @property
    def num_recurrent(self) -> int:
        """Recurrent groups of the model."""
        return len(self.state.states)

    def state_shapes(self) -> StepState:
        """Abstract StepState with shardings."""
        shapes = jax.eval_shape(self.state.fresh)
        small = dataclasses.replace(shapes, pools=())
        small = jax.tree.map(lambda s: self._placed(s, self.replicated), small)
        pools = tuple(
            tuple(self._placed(pool, sharding.named(self.mesh, group.partition)) for pool in pools)
            for pools, group in zip(shapes.pools, self._spec.paged, strict=True)
        )
        return dataclasses.replace(small, pools=pools)

    @property
    def _spec(self) -> CacheSpec:
        return self.model.cache_spec(self.page_size, self.dtype)

    def _placed(self, shape: Any, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

    def packed(self, size: int) -> jax.ShapeDtypeStruct:
        """Abstract packed array."""
        return jax.ShapeDtypeStruct((size,), jax.numpy.int32, sharding=self.replicated)

    def step(self, key: ProgramKey) -> Recipe:
        """The step of one key."""
        state = self.state_shapes()
        size = batch_ranges(key, self.num_groups, self.num_recurrent).size
        return Recipe(
            make_step(self.model, key, self.tiling, self.num_groups, self.num_recurrent),
            (self.params, state, self.packed(size), *self.host_rows(key)),
            out_shardings=(_shardings(state), self.replicated),
            donate_argnums=(1,),
        )

    def host_rows(self, key: ProgramKey) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Abstract embeddings [T, D], the last argument where the host makes them, else none."""
        if self.host_row is None:
            return ()
        row = self.host_row
        rows = jax.ShapeDtypeStruct((key.tokens, *row.shape), row.dtype, sharding=self.replicated)
        return (rows,)

    def install(self, shape: InstallShape) -> Recipe:
        """The install program."""
        state = self.state_shapes()
        return Recipe(
            make_install(shape),
            (state, self.packed(install_ranges(shape).size)),
            out_shardings=_shardings(state),
            donate_argnums=(0,),
        )

    def fresh(self) -> Recipe:
        """The program that makes an empty state."""
        return Recipe(self.state.fresh, (), out_shardings=_shardings(self.state_shapes()))


def _shardings(shapes: Any) -> Any:
    return jax.tree.map(lambda shape: shape.sharding, shapes)
