"""The whole table of a checkpoint: every skill at its bar, and the ablations. One JSON file and one picture.

`python -m examples.train_tiny.evaluate --checkpoint DIR --out DIR`; without --full at sizes for a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from examples.train_tiny.setting import describe
from msaserve.config import EngineConfig
from msaserve.errors import InvalidRequestError
from msaserve.eval.answer import InProcess
from msaserve.eval.example import Example
from msaserve.eval.run import Result, Skill, make_examples, plot, rows, run
from msaserve.eval.selection import Selection
from msaserve.models.loader import resolve_device

ROOM = 1024
"""Tokens of a prompt beyond its context, and of the reply: a picture's 576 may all come on top."""


@dataclass(frozen=True)
class Bar:
    skill: Skill
    n: int
    context: int = 1024
    at_least: float = 0.0
    at_most: float = 1.0
    selection: Selection = "index"

    def check(self, accuracy: float) -> tuple[str, bool]:
        """What is asked, and whether it is given."""
        asked = f"≥ {self.at_least:.0%}" if self.at_most == 1.0 else f"≤ {self.at_most:.0%}"
        return asked, self.at_least <= accuracy <= self.at_most


SMALL = (
    *(Bar("needle", 20, context, at_least=0.99) for context in (2048, 4096, 8192)),
    Bar("picture", 50, at_least=0.98),
    Bar("video", 20, at_least=0.95),
    Bar("tool", 50, at_least=0.98),
    Bar("mixed", 5, 4096, at_least=0.95),
)
FULL = (
    *(Bar("needle", 100, context, at_least=0.99) for context in (2048, 4096, 8192, 16384)),
    *(Bar("needle", 50, context, at_least=0.95) for context in (65536, 131072)),
    Bar("picture", 300, at_least=0.98),
    Bar("video", 200, at_least=0.95),
    Bar("tool", 300, at_least=0.98),
    Bar("mixed", 100, 16384, at_least=0.95),
    # The index branch does the work: random blocks fail where dense attention does as well as it.
    *(Bar("needle", 20, context, at_most=0.2, selection="random") for context in (16384, 65536, 131072)),
    *(Bar("needle", 100, context, at_least=0.98, selection="dense") for context in (2048, 4096, 8192, 16384)),
)


@dataclass(frozen=True)
class Task:
    """Some examples of one bar."""

    bar: Bar
    first: int
    n: int

    @property
    def cost(self) -> int:
        """Of all its tokens, to begin with the longest."""
        return self.n * self.bar.context


def tasks(bars: Sequence[Bar], num_processes: int) -> list[Task]:
    """Bars cut so that all processes have work until the end, longest first."""
    total = sum(bar.n * bar.context for bar in bars)
    result = []
    for bar in bars:
        share = max(1, round(2 * num_processes * bar.n * bar.context / total)) if num_processes > 1 else 1
        size = -(-bar.n // min(share, bar.n))
        result += [Task(bar, first, min(size, bar.n - first)) for first in range(0, bar.n, size)]
    return sorted(result, key=lambda task: -task.cost)


_answerers: dict[tuple[Selection, int], InProcess] = {}
"""The last one of this process."""


def ask(task: Task, arguments: argparse.Namespace) -> list[Result]:
    """The results of a task, without what was shown."""
    bar = task.bar
    is_long = bar.context > 16384
    key = (bar.selection, bar.context)
    if key not in _answerers:
        _answerers.clear()
        config = EngineConfig(
            device=arguments.device,
            max_model_len=max(bar.context, 4096) + ROOM,
            max_num_seqs=4 if is_long else 16,
            max_num_batched_tokens=arguments.chunk,
            kv_cache_gib=2.0 if is_long else 0.5,
            attend_impl=arguments.attend_impl,
        )
        _answerers[key] = InProcess(arguments.checkpoint, config, selection=bar.selection)
    answerer = _answerers[key]
    examples = make_examples(
        bar.skill,
        n=task.n,
        contexts=(bar.context,),
        seed=arguments.seed,
        count=lambda text: len(answerer.tokenizer.encode_plain(text)),
        first=task.first,
    )
    results = run(examples, answerer, on_result=_ignore)
    return [replace(result, example=_without_parts(result)) for result in results]


def _without_parts(result: Result) -> Example:
    turn = result.example.turns[0]
    return replace(result.example, turns=(replace(turn, parts=turn.parts[-1:]),), tools=())


def _all(bars: Sequence[Bar], arguments: argparse.Namespace) -> Iterator[tuple[Task, list[Result]]]:
    """Tasks as they are done."""
    if arguments.processes == 1:
        for task in tasks(bars, 1):
            yield task, ask(task, arguments)
        return
    # Read when a process imports torch: each would otherwise start threads for every core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // arguments.processes)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        futures = {pool.submit(ask, task, arguments): task for task in tasks(bars, arguments.processes)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def evaluate(arguments: argparse.Namespace) -> bool:
    """Whether every bar is passed. The report is written anew with each part that is done."""
    bars = FULL if arguments.full else SMALL
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[Bar, dict[int, Result]] = {bar: {} for bar in bars}
    setting = {"checkpoint": str(arguments.checkpoint), "seed": arguments.seed}
    setting |= describe(resolve_device(arguments.device))
    start = time.monotonic()
    for task, results in _all(bars, arguments):
        found[task.bar] |= {task.first + i: result for i, result in enumerate(results)}
        is_whole = len(found[task.bar]) == task.bar.n
        if is_whole:
            print(f"{time.monotonic() - start:6.0f} s  {_line(task.bar, found[task.bar])}", flush=True)
            for result in [r for r in found[task.bar].values() if not r.is_right and task.bar.selection == "index"][:3]:
                turn = result.example.turns[0]
                print(f"    {turn.parts[-1]!s:.60} → {result.reply} instead of {turn.reply}", flush=True)
        report = [_entry(bar, results) for bar, results in found.items() if results]
        text = json.dumps({**setting, "seconds": round(time.monotonic() - start, 1), "rows": report}, indent=1)
        (arguments.out / "evaluation.json").write_text(text + "\n")
    print()
    for bar, answered in found.items():
        print(_line(bar, answered))
    needles = [
        result
        for bar, answered in found.items()
        if bar.skill == "needle" and bar.selection == "index"
        for result in answered.values()
    ]
    try:
        if needles:
            plot(needles, arguments.out / "needle.png", title="needle")
    except InvalidRequestError as error:
        print(f"no picture: {error}")
    return all(entry["is_passed"] for entry in report)


def _accuracy(answered: dict[int, Result]) -> float:
    return sum(result.is_right for result in answered.values()) / len(answered)


def _line(bar: Bar, answered: dict[int, Result]) -> str:
    asked, is_passed = bar.check(_accuracy(answered))
    (row,) = rows(list(answered.values()))
    verdict = "passed" if is_passed else "MISSED"
    return (
        f"{row.label:<28} {bar.selection:<7} {row.num_right:>4} of {row.num_asked:<4} {row.accuracy:7.1%}  "
        f"{asked:<6} {verdict}"
    )


def _entry(bar: Bar, answered: dict[int, Result]) -> dict[str, object]:
    (row,) = rows(list(answered.values()))
    by_depth: dict[str, list[bool]] = {}
    for result in answered.values():
        if "depth" in result.example.labels:
            by_depth.setdefault(f"{result.example.labels['depth']:.2f}", []).append(result.is_right)
    return {
        "what": row.label,
        "selection": bar.selection,
        "right": row.num_right,
        "asked": row.num_asked,
        "bar": bar.check(row.accuracy)[0],
        "is_passed": bar.check(row.accuracy)[1],
        "by_depth": {depth: f"{sum(right)} of {len(right)}" for depth, right in sorted(by_depth.items())},
    }


def _ignore(result: Result) -> None:
    pass


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.train_tiny.evaluate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="evaluation.json and needle.png go here")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--full", action="store_true", help="up to 131,072 tokens and with ablations: for a GPU")
    parser.add_argument("--processes", type=int, default=1, help="each with an engine of its own")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--attend-impl", help="of ops.sparse_attend")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(0 if evaluate(parse_arguments()) else 1)
