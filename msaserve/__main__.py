"""The command `msaserve`, and `python -m msaserve`."""

from __future__ import annotations

import sys

from msaserve.interrupt import exit_on_interrupt


def main() -> int:
    exit_on_interrupt()
    from msaserve.cli import main as run  # takes a while, in which there may be a Ctrl-C

    return run()


if __name__ == "__main__":
    sys.exit(main())
