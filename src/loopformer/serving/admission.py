"""Who may come in, and at which budget: a bounded queue, and elastic depth as graceful degradation.

    admission = Admission(rows=16, queue=64, memory=2**30, degrade=True)
    place = admission.enter(1, bytes_of, Trajectory.uniform(8), least=2)   # Overloaded when the queue is full
    place.trajectory                                                       # what was granted
    admission.leave(place, seconds)

Requests in flight are those that run, at most `rows`, and those that wait, at most `queue`. Their keys and values
are counted in the same proportion: the queue holds as many bytes as its requests' share of the memory.

With `degrade` a fuller queue grants smaller budgets. The load is how full the queue is; a level is entered at a
higher load than it is left at (hysteresis), so that budgets do not flicker. Only what comes in is lowered: the
cache of a request that runs is bound to its trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from loopformer.errors import LoopformerError, require
from loopformer.trajectory import Trajectory

SHARES = (Fraction(1), Fraction(3, 4), Fraction(1, 2), Fraction(1, 4))  # of the budget asked for, by level
ENTER = (0.25, 0.5, 0.75)  # loads at which levels 1, 2 and 3 are entered
LEAVE = (0.1, 0.3, 0.55)  # loads below which they are left
LONGEST_WAIT = 60  # seconds that a client is told to wait at most
FIRST_GUESS = 5.0  # seconds that a request takes, until the first has ended


class Overloaded(LoopformerError):
    """There is no room now; `retry_after` says in how many seconds there may be."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The server is busy; try again in {retry_after} s.")
        self.retry_after = retry_after


def next_level(level: int, load: float) -> int:
    """The level of degradation after the load became this."""
    while level < len(ENTER) and load >= ENTER[level]:
        level += 1
    while level > 0 and load < LEAVE[level - 1]:
        level -= 1
    return level


def granted(asked: Trajectory, least: int, level: int) -> Trajectory:
    """What is followed at a level: a share of the budget, rounded up, `least` or more, then in equal steps."""
    budget = max(math.ceil(asked.budget * SHARES[level]), min(least, asked.budget))
    return asked if budget == asked.budget else Trajectory.uniform(budget)


def seconds_to_wait(waiting: int, rows: int, seconds: float) -> int:
    """When half the queue, or one place of it, may be empty, if a request takes so many seconds on average, waiting
    included.

    By Little's law as many leave in these seconds as are in flight.
    """
    return min(LONGEST_WAIT, max(1, math.ceil(seconds * max(1.0, waiting / 2) / (rows + waiting))))


@dataclass(frozen=True)
class Admitted:
    """Requests of one client that were let in together."""

    count: int
    bytes: int
    asked: Trajectory
    trajectory: Trajectory

    @property
    def degraded(self) -> bool:
        return self.trajectory != self.asked


class Admission:
    """Counts what is in flight, and decides."""

    def __init__(self, rows: int, queue: int, memory: int, degrade: bool = False) -> None:
        require(queue >= 1, f"The queue must hold 1 request or more, got {queue}.")
        self.rows, self.queue, self.degrade = rows, queue, degrade
        self._memory = memory
        self._count = self._bytes = 0
        self._seconds: float | None = None  # that a request takes, lately
        self.level = 0

    @property
    def in_flight(self) -> int:
        return self._count

    @property
    def load(self) -> float:
        """How full the queue is, by requests or by bytes; 0 while nobody has to wait."""
        by_count = (self._count - self.rows) / self.queue
        by_bytes = (self._bytes / self._memory - 1) * self.rows / self.queue
        return max(0.0, by_count, by_bytes)

    def enter(
        self, count: int, bytes_of: Callable[[Trajectory], int], asked: Trajectory, least: int = 1
    ) -> Admitted:
        """Let requests in together or not at all; `bytes_of` says what they take of the memory along which path."""
        require(
            count <= self.rows + self.queue,
            f"{count} texts at once are more than the {self.rows + self.queue} that this server takes in.",
        )
        self._settle()
        trajectory = granted(asked, least, self.level)
        size = bytes_of(trajectory)
        most_bytes = self._memory * (self.rows + self.queue) / self.rows
        alone = self._count == 0  # what can never fit is refused by the engine, in better words
        full = self._count + count > self.rows + self.queue or self._bytes + size > most_bytes
        if full and not alone:
            seconds = FIRST_GUESS if self._seconds is None else self._seconds
            raise Overloaded(seconds_to_wait(max(0, self._count - self.rows), self.rows, seconds))
        self._count += count
        self._bytes += size
        return Admitted(count, size, asked, trajectory)

    def leave(self, place: Admitted, seconds: float) -> None:
        """Requests are done, or gone."""
        self._count -= place.count
        self._bytes -= place.bytes
        self._seconds = seconds if self._seconds is None else self._seconds + (seconds - self._seconds) / 4
        self._settle()

    def _settle(self) -> None:
        self.level = next_level(self.level, self.load) if self.degrade else 0
