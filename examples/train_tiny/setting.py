"""Where something was made: what a report or a checkpoint must say so that it can be made again."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch

from msaserve import __version__


def describe(device: torch.device) -> dict[str, str]:
    """The date (UTC), the card or processor, and versions; of what is not installed none."""
    is_gpu = device.type == "cuda"
    found = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "python": platform.python_version(),
        "msaserve": __version__,
        "torch": torch.__version__,
    }
    try:
        return found | {"triton": version("triton")}
    except PackageNotFoundError:
        return found
