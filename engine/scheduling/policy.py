"""Who goes first: the key of each choice and the queue of those that wait for a slot."""

from __future__ import annotations

import heapq
from typing import Literal

from engine.request import Request
from engine.scheduling.choices import Choice, Order


def order_of(
    policy: Literal["fcfs", "priority"], request: Request, arrival: int, choice: int
) -> Order:
    """Smaller runs earlier and is preempted later."""
    return (request.priority if policy == "priority" else 0, arrival, choice)


class WaitingQueue:
    """Choices in order of admission. A discarded one costs memory only until the next sweep."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Choice]] = []
        self._members: set[Order] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, choice: Choice) -> None:
        """Adds a choice; one that ran before returns to its old place."""
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[0] in self._members]
            heapq.heapify(self._heap)
        self._members.add(choice.order)
        heapq.heappush(self._heap, (choice.order, choice))

    def peek(self) -> Choice:
        """The choice that goes next."""
        while self._heap[0][0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Choice:
        """Removes and returns the choice that goes next."""
        choice = self.peek()
        heapq.heappop(self._heap)
        self._members.remove(choice.order)
        return choice

    def discard(self, choice: Choice) -> None:
        """Removes a choice if it waits here."""
        self._members.discard(choice.order)
        if not self._members:
            self._heap.clear()

    def __contains__(self, choice: Choice) -> bool:
        return choice.order in self._members
