"""States of the recurrent groups: which one each slot goes on from, and which one it may write."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from engine.scheduling.config import GroupConfig
from engine.scheduling.pages import PagePool


class StateGroup:
    """Pool of states of one recurrent group, columns indexed by slot.

    A slot owns the state it goes on from. Once that one must stay as it is (another choice may read
    it: a snapshot), the slot owns a second one, which its next launch writes instead.
    """

    def __init__(
        self, config: GroupConfig, max_slots: int, on_evict: Callable[[int], None]
    ) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages, on_evict)
        self.newest = np.zeros(max_slots, np.int32)
        """State that holds every scheduled token of the slot; 0 where the slot has no owner."""
        self.spare = np.zeros(max_slots, np.int32)
        """State that the next launch writes, if the newest must stay as it is; else 0."""
        self._snapshots: dict[int, list[tuple[int, int]]] = {}
        """Per slot (tokens, state), rising, of launched rows that are not settled."""

    def has_room(self, cached: list[int], num_tokens: int, num_active: int) -> bool:
        """True when there is a state for one more choice: none ever needs a further one."""
        del num_tokens, num_active
        return self.pool.num_available - self.pool.count_idle(cached) >= 1

    def occupy(self, slot: int, cached: list[int], num_tokens: int) -> None:
        """Gives a slot a state to write, and the snapshot that it goes on from, if any."""
        del num_tokens
        self.pool.retain(cached[-1:])
        (own,) = self.pool.allocate(1)
        self.newest[slot], self.spare[slot] = (cached[-1], own) if cached else (own, 0)

    def advance(self, slots: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Books one launch of each slot.

        Returns:
          i32[rows, 2], the state each row goes on from and the one it writes; and the states left
          behind, which the caller releases when this launch is settled.
        """
        before, spare = self.newest[slots], self.spare[slots]
        after = np.where(spare > 0, spare, before)
        self.newest[slots] = after
        self.spare[slots] = 0
        return np.stack([before, after], axis=1), before[spare > 0].tolist()

    def keep(self, slot: int, num_tokens: int) -> None:
        """Makes a snapshot of the newest state, if there is room.

        Args:
          slot: of a row just launched.
          num_tokens: of its request, that row's included: a multiple of the page size.
        """
        if not self.pool.num_available:
            return
        (self.spare[slot],) = self.pool.allocate(1)
        self._snapshots.setdefault(slot, []).append((num_tokens, int(self.newest[slot])))

    def publishable(
        self, slots: np.ndarray, num_tokens: np.ndarray
    ) -> Iterator[tuple[int, int, int]]:
        """(slot, place, state) of snapshots that have settled, each once.

        Args:
          slots: of settled rows.
          num_tokens: i32[rows], leading tokens of each slot that are settled and may be shared.
        """
        if not self._snapshots:
            return
        for slot, end in zip(slots.tolist(), num_tokens.tolist(), strict=True):
            snapshots = self._snapshots.get(slot, [])
            while snapshots and snapshots[0][0] <= end:
                length, state = snapshots.pop(0)
                yield slot, length // self.config.page_size - 1, state
            if not snapshots:
                self._snapshots.pop(slot, None)

    def vacate(self, slot: int) -> None:
        """Returns every state of a slot."""
        states = (int(self.spare[slot]), int(self.newest[slot]))
        self.pool.release(state for state in states if state)
        self.newest[slot] = self.spare[slot] = 0
        self._snapshots.pop(slot, None)

    def count_owners(self) -> np.ndarray:
        """i64[num_states], how many slots own each state."""
        states = np.concatenate([self.newest, self.spare])
        return np.bincount(states, minlength=self.config.num_pages)

    def audit(self, is_owned: np.ndarray, num_settled: np.ndarray) -> None:
        """Checks the columns.

        Args:
          is_owned: bool[slots], the slot has an owner.
          num_settled: i32[slots], tokens with KV in settled steps.

        Raises:
          AssertionError: naming the slot and what is wrong.
        """
        del num_settled
        owners = self.count_owners()
        for slot in range(len(self.newest)):
            newest, spare = int(self.newest[slot]), int(self.spare[slot])
            assert (newest > 0) == is_owned[slot], f"slot {slot}: a state without owner, or none"
            assert is_owned[slot] or (not spare and slot not in self._snapshots), (
                f"free slot {slot} owns a state to write or awaits a snapshot"
            )
            written = spare or newest
            assert not newest or (owners[written] == 1 and not self.pool.is_cached(written)), (
                f"slot {slot} writes state {written}, which others may read"
            )
