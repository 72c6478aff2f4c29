"""The rooms for engines in a cluster that grows and shrinks (`rollout.engines` from `least` to `most`).

A room is what the cluster holds for one engine, or looks for (`Workers.rooms`), and an engine has the number of its
room. A `Fleet` looks at the rooms from time to time:

    the room is found         an engine starts in it, as one starts in the place of an engine that was lost
    its node is to leave      its engine gets no new jobs, and ends with the last one that it has
    the room is gone          its engine is dropped and its jobs begin anew; none takes its place until there is room

While fewer than `least` rooms are found, no job begins. Engines that left with their rooms are no losses.
"""

from __future__ import annotations

from collections.abc import Callable

from .workers import Room, Workers


class Rooms:
    """The rooms of a fleet's engines; see the module's description.

    Args:
        workers: knows the rooms.
        least: smallest number of engines with which jobs begin.
        most: largest number of engines.
        note: called with a sentence for the user when the number of rooms has changed.
    """

    def __init__(self, workers: Workers, least: int, most: int, note: Callable[[str], object]) -> None:
        self._workers, self._least, self._most, self._note = workers, least, most, note
        self._count = -1

    @property
    def few(self) -> bool:
        """Fewer than `least` rooms were found."""
        return self._count < self._least

    def look(self) -> list[Room]:
        """Return the rooms by the numbers of their engines."""
        rooms = self._workers.rooms("engine", self._most)
        if (count := rooms.count(Room.FOUND)) != self._count:
            self._count = count
            of_them = f"{count} of {self._least} to {self._most} rollout engines (rollout.engines)"
            waits = f"; the run waits until it has room for {self._least}" if self.few else ""
            self._note(f"The cluster has room for {of_them}{waits}.")
        return rooms
