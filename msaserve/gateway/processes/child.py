"""One of several gateway processes. Run as `python -m`; it never outlives its supervisor.

Standard input brings the task and then stays open: when it ends, however the supervisor ended, so does this process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from msaserve.errors import MsaserveError
from msaserve.gateway.place import Place
from msaserve.gateway.processes.board import Board
from msaserve.gateway.processes.messages import (
    Asked,
    Control,
    Ready,
    Refused,
    Report,
    Reports,
    Task,
    Told,
    ToProcess,
)
from msaserve.loop import run_loop
from msaserve.observe.log import configure_logging
from msaserve.observe.merge import Family

if TYPE_CHECKING:
    from msaserve.gateway.server import Server

_REPORT_SECONDS = 5.0


class SharedPlace(Place):
    """Of one process among several."""

    def __init__(self, task: Task, directory: str, control: Control[ToProcess]) -> None:
        self.board = Board(task.board, task.count, task.num_workers)
        super().__init__(
            number=task.number,
            count=task.count,
            created=task.created,
            shm_owner=f"{task.supervisor}-{os.getpid()}",
            directory=directory,
            in_flight=self.board.in_flight(task.number),
        )
        self._control = control
        self._asked: dict[int, asyncio.Future[list[list[Family]]]] = {}
        self._numbers = count()

    async def others(self, own: Callable[[], list[Family]]) -> list[list[Family]]:
        """Also of those that are no more. None if the supervisor does not answer."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._control.send(Asked(number, own()))
        try:
            return await asyncio.wait_for(answer, _REPORT_SECONDS)
        except asyncio.TimeoutError:
            return []
        finally:
            del self._asked[number]

    def take(self, reports: Reports) -> None:
        answer = self._asked.get(reports.number)
        if answer is not None and not answer.done():
            answer.set_result(reports.families)


class HandedOver:
    """The entrance of one process among several: connections come from the supervisor, and its word."""

    def __init__(self, connections: socket.socket, place: SharedPlace, control: Control[ToProcess]) -> None:
        self.sockets: list[socket.socket] = []
        self._connections = connections
        self._connections.setblocking(False)
        self._place = place
        self._control = control
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_lost: Callable[[], None] | None = self._count_closed

    def _count_closed(self) -> None:
        self._place.board.count_closed(self._place.number)

    def begin(self, server: Server) -> None:
        self._keep(self._obey(server))

    def open(self, server: Server) -> None:
        asyncio.get_running_loop().add_reader(self._connections, self._take, server)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connections)
        self._connections.close()

    async def _obey(self, server: Server) -> None:
        while (message := await self._control.receive()) is not None:
            if isinstance(message, Report):
                self._control.send(Told(message.number, server.gateway.numbers()))
            elif isinstance(message, Reports):
                self._place.take(message)
            else:
                self._take(server)  # what came before this word is served
                if message.failure is not None:
                    server.fail(message.failure)
                server.stop()

    def _take(self, server: Server) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._connections, 1, 1)
            except OSError:  # there is none, for now or for good
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self._connections)
                return
            for descriptor in descriptors:
                self._keep(self._connect(socket.socket(fileno=descriptor), server))

    async def _connect(self, sock: socket.socket, server: Server) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(server.new_connection, sock)
        except OSError:  # the client has gone
            sock.close()
            self._count_closed()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def main(directory: str) -> int:
    """directory: for temporary files; whichever process ends last removes it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they may come to all processes; the supervisor says what follows
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65_536)
        if not chunk:
            shutil.rmtree(directory, ignore_errors=True)
            return 1  # the supervisor has gone already
        line += chunk
    task = msgspec.json.decode(line, type=Task)
    configure_logging(access_log=task.options.http.access_log)
    code: list[int] = []
    run_loop(_serve(task, directory, code.append))
    return code[0]


def _watch(task: Task, directory: str) -> None:
    while os.read(0, 1024):  # not sys.stdin, whose lock an exit would find taken
        pass
    try:
        from msaserve.rpc import shm

        shm.remove_all(f"{task.supervisor}-{os.getpid()}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)


async def _serve(task: Task, directory: str, ends_with: Callable[[int], None]) -> None:
    threading.Thread(target=_watch, args=(task, directory), name="msaserve-lifeline", daemon=True).start()
    control: Control[ToProcess] = await Control.open(socket.socket(fileno=task.control), ToProcess)
    try:
        from msaserve.gateway.launch import serve

        place = SharedPlace(task, directory, control)
        entrance = HandedOver(socket.socket(fileno=task.connections), place, control)
        await serve(task.options, entrance, place=place, on_ready=lambda text: control.send(Ready(text)))
    except MsaserveError as error:
        control.send(Refused(str(error), type(error).__name__))
        ends_with(1)
    except ModuleNotFoundError as error:
        control.send(Refused(str(error), "", error.name or ""))
        ends_with(1)
    else:
        ends_with(0)
    finally:
        await control.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
