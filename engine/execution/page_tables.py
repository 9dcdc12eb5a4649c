"""The page tables that lie in a runner's state, as the host knows them: what a step must change.

A schedule names every page its rows own. Most of them the device knows from steps before, so only
the entries that differ travel: 256 rows of 128 pages would be 131 KB a step, and a copy that large
waits for the step in flight (6.2 ms a launch against 1.4, H200, 2026-11-29).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from engine.scheduling.schedule import Schedule
from models.cache import TRASH_PAGE


@dataclasses.dataclass(frozen=True)
class TableChanges:
    """Entries of one step, per paged group i32[3, n]: slot, place in its table, page."""

    before: tuple[np.ndarray, ...]
    """Written by install programs ahead of the step: those of slots installed now, and the rest."""
    within: tuple[np.ndarray, ...]
    """Written by the step itself."""


class DeviceTables:
    """Mirrors `StepState.page_tables` from what was launched."""

    def __init__(self, max_slots: int, width: int, num_groups: int) -> None:
        self._held = tuple(np.zeros((max_slots, width), np.int32) for _ in range(num_groups))

    def changes(self, schedule: Schedule, carried: int) -> TableChanges:
        """What the state lacks for a schedule.

        Args:
          schedule: the next one to launch, already checked.
          carried: entries per group that the step's own batch has room for.
        """
        slots = schedule.slots
        installed = np.array([install.slot for install in schedule.installs], np.int32)
        is_installed = np.isin(slots, installed) if installed.size else None
        before, within = [], []
        for table, held in zip(schedule.page_tables, self._held, strict=True):
            old = held[:, : table.shape[1]][slots]
            if is_installed is not None:
                old[is_installed] = TRASH_PAGE  # an install empties its slot's table
            rows, places = np.nonzero(table != old)
            entries = np.stack([slots[rows], places, table[rows, places]]).astype(np.int32)
            is_early = np.arange(len(rows)) >= carried
            if is_installed is not None:
                order = np.argsort(is_installed[rows], kind="stable")  # installed slots last
                entries, is_early = entries[:, order], is_early | is_installed[rows[order]]
            before.append(entries[:, is_early])
            within.append(entries[:, ~is_early])
        return TableChanges(tuple(before), tuple(within))

    def note(self, schedule: Schedule, changes: TableChanges) -> None:
        """Remembers what a launched schedule wrote."""
        for held, before, within in zip(self._held, changes.before, changes.within, strict=True):
            held[[install.slot for install in schedule.installs]] = TRASH_PAGE
            for slots, places, pages in (before, within):
                held[slots, places] = pages

    def reset(self) -> None:
        """The state is empty again: every entry is trash."""
        for held in self._held:
            held.fill(TRASH_PAGE)
