"""Names of requests and answers."""

from __future__ import annotations

import os
import random

_source = random.Random()
os.register_at_fork(after_in_child=_source.seed)


def new_id() -> str:
    """32 hexadecimal digits that nothing else has. Not a secret: for that a system call for each would be needed."""
    return f"{_source.getrandbits(128):032x}"
