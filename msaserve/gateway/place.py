"""Which of the gateway processes behind one port this one is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msaserve.gateway.processes.board import InFlight
    from msaserve.observe.merge import Family


@dataclass
class Place:
    """The default: the only one."""

    number: int = 0
    count: int = 1
    """Of processes, which share what the server may hold."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When the server began."""
    shm_owner: str = ""
    """See `rpc.shm.write`."""
    directory: str | None = None
    """For temporary files. None: the system's."""
    in_flight: InFlight | None = None
    """By worker, over all processes; None: nobody else has any."""

    async def others(self, own: Callable[[], list[Family]]) -> list[list[Family]]:
        """The numbers of all other processes. own: says this one's."""
        return []
