"""`python -m examples.train_tiny.plot log.jsonl loss.png`: losses and right replies against minutes."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path


def draw(log: Path, picture: Path) -> None:
    """Needs matplotlib."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 6), layout="constrained")
    losses, right = figure.subplots(2, 1, sharex=True)
    for axes, prefix in ((losses, ""), (right, "right_")):
        names = (
            sorted({n for line in lines for n in line if n.startswith("right_")})
            if prefix
            else ("reply", "text", "index")
        )
        for name in names:
            points = [(line["minutes"], line[name]) for line in lines if name in line]
            axes.plot(*zip(*points, strict=True), label=name.removeprefix(prefix), linewidth=1)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    for before, after in pairwise(lines):
        if after["stage"] != before["stage"]:
            losses.axvline(after["minutes"], color="grey", linewidth=0.8)
            right.axvline(after["minutes"], color="grey", linewidth=0.8)
    losses.set_yscale("log")
    losses.set_ylabel("loss")
    right.set_ylabel("replies right")
    right.set_xlabel("minutes")
    figure.savefig(picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
