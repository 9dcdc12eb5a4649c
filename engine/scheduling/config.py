"""Settings of the scheduler: the bounds of one step and the pool of each cache group."""

from __future__ import annotations

import dataclasses
from typing import Literal

from engine.config import LIMITS


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """Pool of one cache group.

    A page of a recurrent group is a state: it stands for every token before its end.
    """

    num_pages: int
    """Pages on the device, page 0 included, which is trash and never given."""
    page_size: int
    """Tokens of one page; of a recurrent group the tokens between two snapshots."""
    window: int | None = None
    """Tokens a query looks back at most; pages wholly below are returned. None: all."""
    prefix_cacheable: bool = True
    """False: a prefix cannot be restored from this group's pages, so no request hits the cache."""
    is_recurrent: bool = False
    """True: a request owns one state, whatever its length."""

    def __post_init__(self) -> None:
        if self.num_pages < 2:
            raise ValueError(
                f"num_pages is {self.num_pages}, it must be at least 2 (page 0 is trash)"
            )
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}, it must be at least 1")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}, it must be at least 1 or None")
        if self.is_recurrent and self.window is not None:
            raise ValueError(f"window is {self.window}, a recurrent group has none")
        if self.is_recurrent and self.num_pages < 3:
            raise ValueError(
                f"num_pages is {self.num_pages}, a recurrent group needs at least 3: trash, a "
                "state to go on from and one to write"
            )

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def first_page_read(self, num_pages: int) -> int:
        """The first of `num_pages` full pages that the token after them still needs."""
        if self.is_recurrent:
            return max(0, num_pages - 1)
        if self.window is None:
            return 0
        return max(0, num_pages * self.page_size - self.window) // self.page_size


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Everything the scheduler decides by, complete when built."""

    max_rows: int
    """Rows of one step."""
    max_slots: int
    """Choices with device state: those that run and those whose last launches are unsettled."""
    max_model_len: int
    """Tokens of prompt plus output."""
    token_budget: int
    """Tokens of one step that holds chunks."""
    max_chunk_rows: int
    """Chunks of one step."""
    groups: tuple[GroupConfig, ...]
    """One pool per cache group."""
    token_rungs: tuple[int, ...] = ()
    """Tokens that steps with chunks are padded to, rising; () where it does not matter."""
    max_chunk: int | None = None
    """Tokens of one chunk. None: `token_budget` alone bounds it."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of admission; the reverse is the order of preemption."""
    prefix_cache: bool = True
    """Reuse full pages of equal prefixes."""
    deterministic: bool = False
    """Steps are never mixed and outputs are replayed as decode rows after a preemption."""
    ids_from_host: bool = False
    """The sync lane: decode rows carry their id and wait for their last launch to settle."""
    queue_limit: int = LIMITS.queued_requests
    """Requests that wait for their first admission."""
    masked_rows: int = 0
    """Rows of one step that a grammar may bound. 0: such requests are refused."""
    mask_ms: int = LIMITS.grammar_mask_ms
    """Milliseconds that one mask may take; its request ends with an error when they are over."""
    weights_version: int = 0
    """Part of every page key."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_model_len", "token_budget", "max_chunk_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.max_chunk is not None and self.max_chunk < 1:
            raise ValueError(f"max_chunk is {self.max_chunk}, it must be at least 1 or None")
        if self.max_slots < self.max_rows:
            raise ValueError(
                f"max_slots is {self.max_slots}, it must be at least max_rows, {self.max_rows}"
            )
        if not self.groups:
            raise ValueError("groups is empty, a model has at least one cache group")
