"""Media processes, one job at a time each, and the items they prepared last."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msaserve.errors import BusyError, EngineError, InvalidRequestError
from msaserve.gateway.media.limits import MIB, MediaLimits
from msaserve.gateway.media.process import Done, Failed, Job, Setup, receive, send
from msaserve.gateway.media.spec import Hints, Prepared, SpecSource
from msaserve.gateway.media.stages import Stages
from msaserve.types import Modality

_MAX_JOBS = 10_000
"""Then a process is replaced, whatever its libraries have kept."""

_Key = tuple[bytes, Modality, Hints]


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class MediaPool:
    """Prepares files in other processes; the same file is prepared once, however many ask for it.

    Args:
        num_processes: None: one per core. They start when they are needed.
        stages: is told what becomes of items.
    """

    def __init__(
        self,
        source: SpecSource,
        limits: MediaLimits,
        *,
        num_processes: int | None = None,
        stages: Stages | None = None,
    ) -> None:
        count = num_cores() if num_processes is None else num_processes
        assert count >= 1
        self._setup = Setup(source, limits)
        self._limits = limits
        self._stages = stages or Stages()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="media")
        self._places = asyncio.Semaphore(count)
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._flights: dict[_Key, _Flight] = {}
        self._recent = _Recent(limits.max_cache_bytes)
        self._is_closed = False

    async def prepare(self, modality: Modality, data: bytes, hints: Hints) -> Prepared:
        """
        Raises:
            InvalidRequestError: the file cannot be served; also when its decoder crashed or took too long.
            BusyError: no process was free within the waiting time.
            EngineError: a fault of the server.
        """
        digest = _digest(data) if len(data) < MIB else await asyncio.to_thread(_digest, data)
        key = (digest, modality, hints)
        item = self._recent.get(key)
        if item is not None:
            self._stages.count(modality, "cached")
            return item
        flight = self._flights.get(key)
        is_new = flight is None
        if flight is None:
            flight = self._flights[key] = _Flight()
            flight.task = asyncio.ensure_future(self._run(flight, key, data))
            flight.task.add_done_callback(_note_failure)
        assert flight.task is not None
        flight.num_waiting += 1
        try:
            item = await asyncio.shield(flight.task)
            self._stages.count(modality, "prepared" if is_new else "joined")
            return item
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0 and not flight.has_begun:
                flight.task.cancel()
                # At once, not when it has ended: who asks meanwhile must not wait for what was given up.
                self._land(flight, key)

    @property
    def cache_bytes(self) -> int:
        return self._recent.num_bytes

    @property
    def num_running(self) -> int:
        """Processes."""
        return sum(process.is_running for process in [*self._idle, *self._busy])

    async def warm(self) -> None:
        """Start one process ahead of the first job."""
        process = _Process(self._setup)
        await asyncio.get_running_loop().run_in_executor(self._threads, process.start)
        self._idle.append(process)

    async def close(self) -> None:
        """End every process; jobs under way fail."""
        self._is_closed = True
        for process in [*self._idle, *self._busy]:
            process.kill()
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, flight: _Flight, key: _Key, data: bytes) -> Prepared:
        _, modality, hints = key
        try:
            try:
                with self._stages.stage(modality, "wait"):
                    await asyncio.wait_for(self._places.acquire(), self._limits.max_wait_s)
            except asyncio.TimeoutError as error:
                raise BusyError(f"no media process was free for {self._limits.max_wait_s:g} s") from error
            flight.has_begun = True
            try:
                with self._stages.stage(modality, "prepare"):
                    item = await self._run_in_process(Job(modality, hints), data)
            finally:
                self._places.release()
            self._recent.put(key, item)
            return item
        finally:
            self._land(flight, key)

    def _land(self, flight: _Flight, key: _Key) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _run_in_process(self, job: Job, data: bytes) -> Prepared:
        process = _Process(self._setup)
        while self._idle:
            idle = self._idle.pop()
            # One may have been ended from outside, for want of memory or by an operator.
            if idle.is_running:
                process = idle
                break
        self._busy.add(process)
        timeout = self._limits.image_timeout_s if job.modality == "image" else self._limits.video_timeout_s
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, process.run, job, data, timeout)
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            self._busy.discard(process)
            if process.is_alive and not self._is_closed and process.num_jobs < _MAX_JOBS:
                self._idle.append(process)
            else:
                process.kill()


class _Flight:
    """A file being prepared, and how many wait for it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Prepared] | None = None
        self.num_waiting = 0
        self.has_begun = False


class _Recent:
    """Items by key, the least recently used dropped first. Holds at most `max_bytes` of patches."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._items: OrderedDict[_Key, Prepared] = OrderedDict()

    def get(self, key: _Key) -> Prepared | None:
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
        return item

    def put(self, key: _Key, item: Prepared) -> None:
        # One large clip must not drive out everything else.
        if key in self._items or item.patches.nbytes > self._max_bytes // 2:
            return
        self._items[key] = item
        self.num_bytes += item.patches.nbytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._items.popitem(last=False)
            self.num_bytes -= dropped.patches.nbytes


class _Process:
    """One media process; `run` is called from one thread at a time."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._popen: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.is_alive = True
        self.num_jobs = 0

    def run(self, job: Job, data: bytes, timeout: float) -> Prepared:
        """Raises InvalidRequestError or EngineError."""
        deadline = time.monotonic() + timeout
        self.num_jobs += 1
        kind = "picture" if job.modality == "image" else "clip"
        try:
            sock = self.start() if self._socket is None else self._socket
            sock.settimeout(timeout)
            send(sock, job, data)
            # The answer's first bytes come when the work is done: that wait is the one to bound.
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            message, payload = receive(sock)
        except TimeoutError as error:
            self._end()
            raise InvalidRequestError(
                f"preparing the {kind} took longer than {timeout:g} s", code="media_timeout"
            ) from error
        except (OSError, EOFError) as error:
            self._end()
            raise InvalidRequestError(
                f"the decoder crashed on the {kind}: it is damaged or of an unusual kind", code="media_decoder_crashed"
            ) from error
        if isinstance(message, Failed):
            if message.is_fault:
                raise EngineError(f"preparing a {kind} failed: {message.message}")
            raise InvalidRequestError(message.message, code=message.code)
        assert isinstance(message, Done)
        return message.item(payload)

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def kill(self) -> None:
        """End the process; a `run` under way in another thread fails and closes the socket."""
        self.is_alive = False
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()

    def _end(self) -> None:
        self.kill()
        if self._socket is not None:
            self._socket.close()

    def start(self) -> socket.socket:
        """Start it and tell it what it serves; it answers once a job is sent."""
        ours, theirs = socket.socketpair()
        package_root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH")) if p)
        # The pool is as wide as the machine: a process needs no threads of its own for arithmetic.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "msaserve.gateway.media.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, **threads},
                start_new_session=True,  # a Ctrl-C is for the gateway, which ends it when its requests have ended
            )
        self._socket = ours
        if not self.is_alive:  # killed while it started
            self.kill()
        send(ours, self._setup)
        return ours


def _note_failure(task: asyncio.Task[Prepared]) -> None:
    """Nobody may wait for it any more; asyncio would log that."""
    if not task.cancelled():
        task.exception()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
