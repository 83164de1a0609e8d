"""The server's log: one line an event, on standard error."""

from __future__ import annotations

import logging
import sys

from msaserve import env

ACCESS_LOGGER = "msaserve.access"
"""Its lines are JSON objects, without a prefix."""


def configure_logging(*, access_log: bool = False) -> None:
    """Send the package's log to standard error. access_log: also one line for every request answered."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("msaserve")
    logger.handlers[:] = [stream]
    logger.propagate = False
    level = logging.getLevelName(env.log_level())
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
    access = logging.getLogger(ACCESS_LOGGER)
    access.handlers[:] = [logging.StreamHandler(sys.stderr)]
    access.propagate = False
    access.setLevel(logging.INFO if access_log else logging.WARNING)
