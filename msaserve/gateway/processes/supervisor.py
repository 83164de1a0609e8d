"""The process behind one port that has children for gateways: it takes connections and hands each to the idlest one.

One listening socket, so that a port which is taken is noticed, connections spread evenly, and none waits at a process
that has died.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from msaserve import errors
from msaserve.errors import EngineError, MsaserveError
from msaserve.gateway.command import Gateway
from msaserve.gateway.processes.board import Board
from msaserve.gateway.processes.messages import (
    Asked,
    Control,
    FromProcess,
    Ready,
    Refused,
    Report,
    Reports,
    Stop,
    Task,
)
from msaserve.observe.merge import Family, lasting, merged
from msaserve.rpc import shm

_log = logging.getLogger(__name__)

_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 64
_PAUSE_SECONDS = 0.02
"""When no process takes a connection, or no descriptor is left for one."""
_TELL_SECONDS = 2.0
"""For a process to say its numbers; then its last ones are taken."""
_BEAT_SECONDS = 10.0
"""From one question whether a process still answers to the next; it also says its numbers, which then outlive it."""
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
"""Seconds until a process that died is replaced; doubled with every one that did not live as long as the longest."""
_MAX_FAILED = 4
"""Starts in a row that may fail while no process is ready; then all end: who started the server may help."""
_END_SECONDS = 15.0
"""For processes to end, besides what they may take for their requests."""
_EXIT_SECONDS = 5.0


class Supervisor:
    """Runs several gateway processes behind a bound socket, until SIGTERM or SIGINT; a second signal kills them.

    Before they are ready SIGINT is not its own (`run_loop` cancels it), and SIGTERM kills them.
    """

    def __init__(self, options: Gateway, num_processes: int, listener: socket.socket) -> None:
        self._options = options
        self._listener = listener
        self._board = Board.create(num_processes, len(options.worker))
        self._created = int(time.time())
        self._slots = [_Slot(number) for number in range(num_processes)]
        self._directory = ""
        """For the processes' temporary files, while `run` runs: one that is killed leaves its own."""
        self._gone: list[Family] = []
        """What processes had counted that are no more."""
        self._is_stopping = asyncio.Event()
        self._is_accepting = False
        self._waiting: socket.socket | None = None
        """A connection that no process has taken yet."""
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, failure: asyncio.Future[str] | None = None) -> None:
        """failure: why nothing can be served any more, once it cannot.

        Raises:
            MsaserveError, ModuleNotFoundError: what the first process raised.
            EngineError: one died before it was ready; none can be started any more; `failure`.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop, signal.SIGTERM)
        failed: asyncio.Future[str] = failure or loop.create_future()
        keeping = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        stopped = asyncio.create_task(self._is_stopping.wait())
        ready = asyncio.create_task(self._all_ready())
        try:
            self._directory = tempfile.mkdtemp(prefix="msaserve-")
            ends: list[asyncio.Future[Any]] = [stopped, failed, *keeping]
            await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                loop.add_signal_handler(signal.SIGINT, self._stop, signal.SIGINT)
                self._listener.listen(_BACKLOG)
                self._listener.setblocking(False)
                self._accept_again()
                print(self._slots[0].text, flush=True)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            raised = next((task.exception() for task in keeping if task.done()), None)
            if raised is not None:
                raise raised
            reason = failed.result() if failed.done() else None
            if ready.done():
                await self._end(reason, keeping)
            if reason is not None:
                raise EngineError(reason)
        finally:
            self._is_stopping.set()
            self._listener.close()
            if self._waiting is not None:
                self._waiting.close()
            for slot in self._slots:
                slot.kill()
            tasks = [*keeping, ready, stopped, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._remove_files()

    async def _all_ready(self) -> None:
        for slot in self._slots:
            await slot.is_ready.wait()

    def _stop(self, number: int) -> None:
        if self._is_stopping.is_set():
            for slot in self._slots:
                slot.kill()
            self._remove_files()
            os._exit(128 + number)
        self._is_stopping.set()

    def _remove_files(self) -> None:
        """What the processes have left, once they are no more."""
        shm.remove_all(os.getpid())
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _end(self, reason: str | None, keeping: list[asyncio.Task[None]]) -> None:
        """Let every process answer what it has."""
        self._is_stopping.set()
        self._pause()
        self._listener.close()
        for slot in self._slots:
            if slot.process is not None:
                slot.process.control.send(Stop(reason))
        _, late = await asyncio.wait(keeping, timeout=self._options.http.drain_seconds + _END_SECONDS)
        if late:
            _log.warning("%d gateway processes did not end and are killed", len(late))

    async def _keep(self, slot: _Slot) -> None:
        """A process in this place, until the end. Raises what a process raised without which there is none."""
        delay = _FIRST_DELAY
        while True:
            start = time.monotonic()
            how = await self._live(slot)
            if self._is_stopping.is_set():
                return
            if not slot.was_ready:
                raise slot.refusal or EngineError(f"a gateway process died before it was ready: {how}")
            if slot.num_failed >= _MAX_FAILED and not any(slot.is_ready.is_set() for slot in self._slots):
                raise slot.refusal or EngineError(f"gateway processes keep dying before they are ready: {how}")
            if time.monotonic() - start > _LONGEST_DELAY:
                delay = _FIRST_DELAY
            _log.error(
                "gateway process %d ended: %s; its requests are lost, another begins in %g s",
                slot.number,
                slot.refusal or how,
                delay,
            )
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), delay)
                return
            delay = min(2 * delay, _LONGEST_DELAY)

    async def _live(self, slot: _Slot) -> str:
        """One process in this place, from its start until it is gone. Returns how it ended."""
        slot.refusal = None
        try:
            process = slot.process = await _Process.start(self._task(slot.number), self._directory)
        except OSError as error:  # no memory or descriptors for one more: those that run go on
            slot.num_failed += 1
            return f"it could not be started: {error}"
        beating = asyncio.create_task(self._beat(slot, process))
        how = await self._follow(slot, process)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        slot.process = None
        slot.num_failed = 0 if slot.is_ready.is_set() else slot.num_failed + 1
        self._bury(slot, process)
        return how

    def _task(self, number: int) -> Callable[[int, int], Task]:
        return lambda control, connections: Task(
            options=self._options,
            number=number,
            count=len(self._slots),
            num_workers=self._board.num_workers,
            created=self._created,
            supervisor=os.getpid(),
            control=control,
            connections=connections,
            board=self._board.descriptor,
        )

    async def _follow(self, slot: _Slot, process: _Process) -> str:
        """Do what a process asks for until it ends; returns how it did."""
        while (message := await process.control.receive()) is not None:
            if isinstance(message, Ready):
                slot.text, slot.was_ready = message.text, True
                slot.is_ready.set()
                if self._is_accepting:
                    self._accept_again()
            elif isinstance(message, Refused):
                slot.refusal = _error(message)
            elif isinstance(message, Asked):
                slot.families = message.families
                task = asyncio.create_task(self._report(message.number, slot))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                slot.families = message.families
                asked = self._asked.get(message.number)
                if asked is not None and not asked.done():
                    asked.set_result(None)
        return await process.wait()

    def _bury(self, slot: _Slot, process: _Process) -> None:
        slot.is_ready.clear()
        self._gone = merged(self._gone, [lasting(slot.families)])
        slot.families = []
        slot.num_given = 0
        self._board.clear(slot.number)
        shm.remove_all(f"{os.getpid()}-{process.pid}")

    async def _report(self, number: int, asker: _Slot) -> None:
        """Tell a process all others' numbers."""
        others = [slot for slot in self._slots if slot is not asker and slot.is_ready.is_set()]
        await asyncio.gather(*(self._refresh(slot) for slot in others))
        if asker.process is not None:
            families = [slot.families for slot in others]
            asker.process.control.send(Reports(number, [*families, self._gone]))

    async def _beat(self, slot: _Slot, process: _Process) -> None:
        """Kill the process once it is hung: clients' connections would wait in it for ever."""
        seconds = self._options.http.hung_seconds
        await slot.is_ready.wait()
        while await self._refresh(slot, seconds):
            await asyncio.sleep(min(_BEAT_SECONDS, seconds / 2))
        _log.error("gateway process %d answers nothing for %g s and is killed", slot.number, seconds)
        process.kill()

    async def _refresh(self, slot: _Slot, seconds: float = _TELL_SECONDS) -> bool:
        """Whether the process in this place says its numbers within the time."""
        if slot.process is None:
            return False
        number = next(self._numbers)
        told = self._asked[number] = asyncio.get_running_loop().create_future()
        slot.process.control.send(Report(number))
        try:
            await asyncio.wait_for(told, seconds)
        except asyncio.TimeoutError:
            return False
        finally:
            del self._asked[number]
        return True

    def _accept_again(self) -> None:
        if not self._is_stopping.is_set():
            self._is_accepting = True
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
            self._accept()  # one may wait that was taken from the listener before

    def _pause(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            slots = [slot for slot in self._slots if slot.is_ready.is_set()]
            if not slots:
                self._pause()  # until one is ready: clients wait
                return
            try:
                self._waiting = self._waiting or self._listener.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("connections cannot be taken for now: %s", error)
                self._rest()
                return
            if not self._hand_over(self._waiting, slots):
                self._rest()
                return
            self._waiting.close()
            self._waiting = None

    def _rest(self) -> None:
        self._pause()
        asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._accept_again)

    def _hand_over(self, connection: socket.socket, slots: list[_Slot]) -> bool:
        """Whether a process took it. None does when all have as many as they can hold unread."""
        for slot in sorted(slots, key=lambda slot: slot.num_given - self._board.num_closed(slot.number)):
            if slot.process is not None and slot.process.give(connection):
                slot.num_given += 1
                return True
        return False


class _Slot:
    """The place of one process, and of those that follow it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: _Process | None = None
        self.is_ready = asyncio.Event()
        self.was_ready = False
        self.num_failed = 0
        """Processes in a row that ended before they were ready."""
        self.text = ""
        self.refusal: Exception | None = None
        self.num_given = 0
        """Connections."""
        self.families: list[Family] = []
        """Its numbers as it last told them."""

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()


class _Process:
    """One gateway process, from the supervisor's side."""

    def __init__(
        self, popen: subprocess.Popen[bytes], control: Control[FromProcess], connections: socket.socket
    ) -> None:
        self._popen = popen
        self.control = control
        self._connections = connections

    @classmethod
    async def start(cls, task: Callable[[int, int], Task], directory: str) -> _Process:
        """task: for the descriptors of its ends of two connections. Raises OSError."""
        package_root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH")) if p)
        with ExitStack() as undo:
            ours, theirs = map(undo.enter_context, socket.socketpair())
            connections, their_connections = map(undo.enter_context, socket.socketpair())
            its = task(theirs.fileno(), their_connections.fileno())
            popen = subprocess.Popen(
                [sys.executable, "-m", "msaserve.gateway.processes.child", directory],
                stdin=subprocess.PIPE,
                pass_fds=[its.control, its.connections, its.board],
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for this process: it lets requests end first
            )
            undo.pop_all()
        theirs.close()
        their_connections.close()
        assert popen.stdin is not None
        with suppress(BrokenPipeError):  # it has died; its control says so too
            popen.stdin.write(msgspec.json.encode(its) + b"\n")
            popen.stdin.flush()
        connections.setblocking(False)
        return cls(popen, await Control.open(ours, FromProcess), connections)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def give(self, connection: socket.socket) -> bool:
        """Hand a client's connection over, if the process is there and takes it."""
        try:
            socket.send_fds(self._connections, [b"c"], [connection.fileno()])
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self._popen.kill()

    async def wait(self) -> str:
        """Once it has nothing more to say. Returns how it ended."""
        try:
            code = await asyncio.to_thread(self._popen.wait, _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = await asyncio.to_thread(self._popen.wait)
        await self.control.close()
        self._connections.close()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        if code >= 0:
            return f"exit code {code}"
        with suppress(ValueError):
            return signal.Signals(-code).name
        return f"signal {-code}"


def _error(refused: Refused) -> Exception:
    if refused.missing_module:
        return ModuleNotFoundError(refused.error, name=refused.missing_module)
    kind: type[MsaserveError] = getattr(errors, refused.kind, MsaserveError)
    return kind(refused.error)
