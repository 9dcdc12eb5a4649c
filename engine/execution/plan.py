"""The memory plan: bytes of weights, state, temporaries and outputs; pages that the rest holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from engine.config import Setting, SettingError

GIB = 2**30
PROBE_SLACK = 2**28
"""Bytes kept free of pages beside the probed temporaries.

Probes are compiled without autotuning, which chooses workspaces: the final programs may need a
little more or less. One layer's pool is far larger, so a hidden copy still shows.
"""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device."""

    limit: int
    """What the plan may use."""
    weights: int
    small_state: int
    """State without pools."""
    temporaries: int
    """Of the program that needs most."""
    outputs: int
    """Of all launches in flight."""
    page_bytes: int
    """One page in every group."""
    num_pages: int
    states: int = 0
    """All states of recurrent groups."""
    host_rows: int = 0
    """Embeddings of one step that the host made and sent."""
    host_tables: int = 0
    """Tables in host memory. They take nothing of the device: no part of the total."""

    @property
    def pools(self) -> int:
        """Bytes of all pages."""
        return self.page_bytes * self.num_pages

    @property
    def total(self) -> int:
        """Everything planned."""
        fixed = self.weights + self.small_state + self.states + self.temporaries + self.outputs
        return fixed + self.host_rows + self.pools

    def __str__(self) -> str:
        rows = [
            ("weights", self.weights),
            ("state without pages", self.small_state),
            *([("recurrent states", self.states)] if self.states else []),
            ("temporaries", self.temporaries),
            ("outputs in flight", self.outputs),
            *([("embeddings sent", self.host_rows)] if self.host_rows else []),
            (f"{self.num_pages} pages", self.pools),
            ("total", self.total),
            ("limit", self.limit),
            *([("tables on the host", self.host_tables)] if self.host_tables else []),
        ]
        return "\n".join(f"  {name:<22}{size / GIB:9.3f} GiB" for name, size in rows)


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves, arrays or shapes."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def temporaries_of(programs: Iterable[jax.stages.Compiled]) -> int:
    """Most temporary bytes any of the programs needs, generated code included."""
    sizes = [0]
    for program in programs:
        analysis = program.memory_analysis()
        if analysis is not None:
            sizes.append(int(analysis.temp_size_in_bytes + analysis.generated_code_size_in_bytes))
    return max(sizes)


def num_pages_that_fit(plan: MemoryPlan, *, least: int, most: int) -> int:
    """Pages that the plan's rest holds, between `least` and `most`.

    Raises:
      ValueError: fewer than `least` fit, with the numbers.
    """
    rest = plan.limit - (plan.total - plan.pools) - PROBE_SLACK
    pages = rest // plan.page_bytes
    if pages < least:
        length = Setting("max_model_len")
        raise SettingError(
            f"the model does not fit: {max(pages, 0)} pages of {plan.page_bytes / 2**20:.2f} MiB "
            "fit but one request of ",
            length,
            f" needs {least}; lower ",
            length,
            " or ",
            Setting("max_rows"),
            ", or raise ",
            Setting("memory_fraction"),
            f"\n{dataclasses.replace(plan, num_pages=0)}",
        )
    return int(min(pages, most))


def check_hidden_copy(planned: int, compiled: int) -> None:
    """Refuses a program whose temporaries grew with the pools: some step copies a pool.

    Raises:
      RuntimeError: with both sizes.
    """
    if compiled > planned + PROBE_SLACK:
        raise RuntimeError(
            f"temporaries grew from {planned / 2**20:.1f} to {compiled / 2**20:.1f} MiB with the "
            "pools: a program copies a pool instead of updating it in place"
        )
