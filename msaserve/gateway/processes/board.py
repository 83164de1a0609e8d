"""What the gateway processes behind one port count, where each can read it at any moment: numbers in shared memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Protocol


class InFlight(Protocol):
    """Outputs in flight by worker."""

    def add(self, worker: int, count: int) -> None: ...

    def total(self, worker: int) -> int:
        """Over all gateway processes."""
        ...


class OwnInFlight:
    """Of the only gateway process."""

    def __init__(self, num_workers: int) -> None:
        self._counts = [0] * num_workers

    def add(self, worker: int, count: int) -> None:
        self._counts[worker] += count

    def total(self, worker: int) -> int:
        return self._counts[worker]


class Board:
    """A row for each process, which it alone writes: connections that it has closed, then outputs in flight by worker.

    A number is eight aligned bytes, which are written and read whole: nothing is locked.
    """

    def __init__(self, descriptor: int, num_rows: int, num_workers: int) -> None:
        """descriptor: of `create`, in any process; it stays open."""
        self.descriptor = descriptor
        self.num_rows = num_rows
        self.num_workers = num_workers
        self._width = 1 + num_workers
        self._memory = memoryview(mmap.mmap(descriptor, 8 * num_rows * self._width)).cast("q")

    @classmethod
    def create(cls, num_rows: int, num_workers: int) -> Board:
        with tempfile.TemporaryFile() as file:
            file.truncate(8 * num_rows * (1 + num_workers))
            return cls(os.dup(file.fileno()), num_rows, num_workers)

    def clear(self, row: int) -> None:
        """For a process that is no more."""
        for column in range(self._width):
            self._memory[row * self._width + column] = 0

    def num_closed(self, row: int) -> int:
        return self._memory[row * self._width]

    def count_closed(self, row: int) -> None:
        self._memory[row * self._width] += 1

    def in_flight(self, row: int) -> InFlight:
        """As the process of this row sees and changes it."""
        return _SharedInFlight(self._memory, self._width, row)


class _SharedInFlight:
    def __init__(self, memory: memoryview[int], width: int, row: int) -> None:
        self._memory = memory
        self._width = width
        self._start = row * width + 1

    def add(self, worker: int, count: int) -> None:
        self._memory[self._start + worker] += count

    def total(self, worker: int) -> int:
        return sum(self._memory[1 + worker :: self._width])
