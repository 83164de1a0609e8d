"""Measure two of slice.py's servers on one card by turns, point by point: what else the machine does meets both.

    MSASERVE_VLLM=0 python benchmarks/vllm/slice.py --memory 0.45 --serve stock &
    python benchmarks/vllm/slice.py --memory 0.45 --serve ours &
    python benchmarks/vllm/turns.py stock ours --out table.json
    python benchmarks/vllm/compare.py table.json

The first of the rounds is not measured: kernels compile in it, for minutes where no cache has them, and the caches
fill. Each measurement is a line at once, and in the file, so that a run that was stopped is worth what it did.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

CONTEXTS = (8192, 65_536, 131_072, 524_288)
COLD = (8192, 65_536, 131_072)
CONCURRENCY = (1, 8, 32)
FIGURES = ("output_tokens_per_s", "ttft_ms", "step_ms", "cold_ttft_ms")
"""Of a row, what a line says."""
REPEATS = {1: 3}
"""Measurements a round of a concurrency, others once: single requests take little time and vary most."""


class Server:
    """One slice.py, asked by files in its directory."""

    def __init__(self, directory: Path) -> None:
        self.name = directory.name
        self._directory = directory
        self._number = len(list(directory.glob("*.ask")))

    def send(self, call: str, *args: Any) -> Path:
        """Ask for a row; returns the file that will hold the answer."""
        made = self._directory / f"{self._number}.made-ask"
        made.write_text(json.dumps({"call": call, "args": args}))
        made.rename(self._directory / f"{self._number}.ask")
        self._number += 1
        return self._directory / f"{self._number - 1}.answer"

    def ask(self, call: str, *args: Any) -> dict[str, Any]:
        return wait(self.send(call, *args))


def wait(path: Path, timeout: float = 300.0) -> dict[str, Any]:
    """Raises RuntimeError with the server's words when it failed, TimeoutError when it said nothing."""
    until = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no {path} in {timeout:.0f} s")
        time.sleep(0.002)
    answer = json.loads(path.read_text())
    if "error" in answer:
        raise RuntimeError(f"{path}: {answer['error']}")
    row: dict[str, Any] = answer["row"]
    return row


def points(contexts: list[int], concurrency: list[int]) -> list[tuple[str, tuple[int, ...]]]:
    """One round's measurements: the longest context first, before what follows pushes its end out of the cache."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for context in sorted(contexts, reverse=True):
        found += [("together", (context, n)) for n in concurrency for _ in range(REPEATS.get(n, 1))]
    # New prompts would push it out too, were it not used just before.
    found.append(("touch", (max(contexts),)))
    return found + [("cold", (context,)) for context in contexts if context in COLD]


def say(
    begin: float, what: str, server: Server, call: str, values: tuple[int, ...], row: dict[str, Any] | None
) -> None:
    """One measurement; `row` as the server gave it."""
    figures = ", ".join(f"{name} {row[name]:,.1f}" for name in FIGURES if name in row) if row else "done"
    point = " × ".join(f"{value:,}" for value in values)
    print(f"{time.monotonic() - begin:6.1f} s  {what}: {server.name}, {call} {point}: {figures}", flush=True)


def keep(rows: list[dict[str, Any]], path: Path) -> None:
    """Whole at any time, whenever this process is ended."""
    made = path.with_suffix(".made")
    made.write_text(json.dumps(rows))
    made.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stock", type=Path, help="directory of the server without the plugin")
    parser.add_argument("ours", type=Path, help="of the one with it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no measurement begins after that long")
    parser.add_argument("--warm", action=argparse.BooleanOptionalAction, default=True, help="the first round")
    parser.add_argument("--kernels", type=Path, help="at the end write the card's time by kernel there")
    args = parser.parse_args()
    begin = time.monotonic()
    until = begin + args.seconds
    servers = [Server(args.stock), Server(args.ours)]
    round_points = points(args.contexts, args.concurrency)
    rows: list[dict[str, Any]] = []
    keep(rows, args.out)
    for call, values in dict.fromkeys(round_points) if args.warm else ():
        if time.monotonic() < until:
            for server, answer in [(server, server.send(call, *values)) for server in servers]:
                say(begin, "warm", server, call, values, wait(answer))
    turns = [(number, point) for number in range(args.rounds) for point in round_points]
    for turn, (number, (call, values)) in enumerate(turns):
        for server in servers if turn % 2 else servers[::-1]:
            if time.monotonic() >= until:
                break
            if row := server.ask(call, *values):
                rows.append({"server": server.name, "round": number, **row})
                keep(rows, args.out)
            say(begin, f"round {number + 1} of {args.rounds}", server, call, values, row)
    if time.monotonic() >= until:
        print(f"the {args.seconds:.0f} s were over before all was measured", flush=True)
    if args.kernels is not None:
        traces = [
            {"server": server.name, **server.ask("kernels", context, n)}
            for context in args.contexts
            for n in args.concurrency
            for server in servers
            if time.monotonic() < until
        ]
        args.kernels.write_text(json.dumps(traces))


if __name__ == "__main__":
    main()
