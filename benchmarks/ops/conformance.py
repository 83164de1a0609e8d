"""Every kernel of every operator on every named case, on a card: python benchmarks/ops/conformance.py

Prints a table operator × implementation: cases served, for how many of them `impl=None` takes it, the worst relative
error, failures; then each failure, and each case that no kernel serves. Exit status 1 if anything failed.

    --cases small | decode | prefill | all     small: those of CI's interpreter and of compute-sanitizer
    --only REGEX, --first REGEX                cases whose name matches, and cases that come before the others
    --operators a,b                            these operators only
    --jobs N                                   processes; compiling and the first call in each are most of the time
    --record FILE                              append what was found to FILE, case by case
    --known FILE...                            leave out what these records hold without a failure
    --report FILE...                           run nothing: the table of these records, the latest of each check
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from msaserve.ops.conformance import (
    OPERATORS,
    Conformance,
    MismatchError,
    RefusedError,
    Trial,
    implementations,
)
from msaserve.ops.testing import CASES_8_BITS, DECODE_CASES, KERNEL_CASES, PREFILL_CASES

FATAL = ("CUDA error", "illegal memory access", "unspecified launch failure", "misaligned address")
"""Messages after which a process can use the card no more."""


class Result(NamedTuple):
    operator: str
    impl: str
    trial: str
    dtype: str
    error: float = 0.0
    failure: str | None = None
    refusal: str | None = None
    is_default: bool = False
    seconds: float = 0.0


class Task(NamedTuple):
    trial: Trial
    operators: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.trial.name, dtype_name(self.trial)


def dtype_name(trial: Trial) -> str:
    return str(trial.dtype).removeprefix("torch.")


def use_large_tiles() -> None:
    """Let the references hold as much at once as a card has room for; they go tile by tile from Python."""
    sizes = {
        "index_score.reference": {"TILE_SCORES": 1 << 27, "TILE_KEYS": 1 << 23},
        "topk_blocks.reference": {"TILE_SCORES": 1 << 27},
        "select_blocks.reference": {"TILE_SCORES": 1 << 27},
        "sparse_attend.reference": {"TILE_KEYS": 1 << 26},
        "dense_attend.reference": {"TILE_TOKENS": 8192, "TILE_SCORES": 1 << 27},
    }
    for module, constants in sizes.items():
        for name, value in constants.items():
            assert hasattr(import_module(f"msaserve.ops.{module}"), name)
            setattr(import_module(f"msaserve.ops.{module}"), name, value)


def trials(cases: str, device: str, dtype: torch.dtype) -> list[Trial]:
    """The largest first, but one of each shape before a second, whose kernels are compiled by then."""
    chosen = {"small": KERNEL_CASES, "decode": DECODE_CASES, "prefill": PREFILL_CASES}.get(cases)
    specs = chosen or (*PREFILL_CASES, *DECODE_CASES, *KERNEL_CASES)
    found = [Trial(spec, dtype, device) for spec in specs]
    for spec in specs:
        if spec.name in CASES_8_BITS or spec in KERNEL_CASES:
            found += [Trial(spec, dtype, device, scales) for scales in ("tensor", "head")]
    found.sort(key=lambda trial: -sum(length for length, _ in trial.spec.requests))
    same = {"name": "", "requests": (), "tail_rows": 0, "index_values": "equal", "pool_pages": 0, "spare_pages": 0}
    kinds = [
        (replace(trial.spec, **same, layout="odd" if trial.spec.layout == "odd" else "vllm"), trial.scales)
        for trial in found
    ]
    return [found[i] for i in sorted(range(len(found)), key=lambda i: kinds[:i].count(kinds[i]))]


def run(task: Task, is_short: bool) -> list[Result]:
    """All results of one trial."""
    trial = task.trial
    result = partial(Result, trial=trial.name, dtype=dtype_name(trial))
    if trial.device == "cuda":
        use_large_tiles()
    results = []
    conformance = Conformance(trial, is_short=is_short)
    for operator in task.operators:
        try:
            default = conformance.default(operator)
        except RefusedError as reason:
            results += [result(operator, impl, refusal=str(reason)) for impl in implementations(operator)]
            continue
        except Exception as error:
            default = ""
            results.append(result(operator, "default", failure=describe(error)))
        for impl in implementations(operator):
            start, error, failure, refusal = time.monotonic(), 0.0, None, None
            try:
                error = conformance.check(operator, impl)
                if trial.device == "cuda":
                    torch.cuda.synchronize()
            except RefusedError as reason:
                refusal = str(reason)
            except Exception as wrong:
                failure = describe(wrong)
            found = {"error": error, "failure": failure, "refusal": refusal, "is_default": default == impl}
            results.append(result(operator, impl, seconds=time.monotonic() - start, **found))
            if failure and any(text in failure for text in FATAL):
                return [*results, result(operator, impl, failure="the rest of the case was not run")]
    return results


def describe(error: Exception) -> str:
    if isinstance(error, MismatchError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}{where}"


def attempt(task: Task, is_short: bool) -> list[Result]:
    """As `run`; what cannot even be built is a failure of the whole case."""
    try:
        return run(task, is_short)
    except Exception as error:
        return [Result("all", "all", *task.key, failure=describe(error))]
    finally:
        gc.collect()
        if task.trial.device == "cuda":
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


class Processes(threading.local):
    """One process for each thread, another one after a failure: that may have broken its use of the card."""

    pool: ProcessPoolExecutor | None = None

    def attempt(self, task: Task, is_short: bool) -> list[Result]:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            results = self.pool.submit(attempt, task, is_short).result()
        except Exception as error:
            results = [Result("all", "all", *task.key, failure=describe(error))]
        if any(result.failure is not None for result in results):
            self.pool.shutdown(wait=False)
            self.pool = None
        return results


def run_all(tasks: list[Task], is_short: bool, jobs: int, seconds: float, keep: Callable[[list[Result]], None]) -> None:
    """Calls `keep` with the results of task after task, as they come, until the time is up."""
    end = time.monotonic() + seconds
    if jobs == 1:
        for task in tasks:
            if time.monotonic() < end:
                keep(attempt(task, is_short))
        return
    processes = Processes()
    with ThreadPoolExecutor(jobs) as threads:
        running = [threads.submit(processes.attempt, task, is_short) for task in tasks]
        try:
            for future in futures.as_completed(running, timeout=seconds):
                keep(future.result())
        except futures.TimeoutError:
            for future in running:
                future.cancel()
            for process in multiprocessing.active_children():
                process.kill()


def sources() -> str:
    """Which kernels these are: a digest of the operators' sources."""
    digest = hashlib.sha256()
    folder = Path(__file__).resolve().parents[2] / "msaserve/ops"
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def machine(device: str) -> dict[str, str]:
    found = {"sources": sources(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "torch": torch.__version__}
    if device == "cuda":
        import triton

        found |= {"card": torch.cuda.get_device_name(), "triton": triton.__version__}
    return found


def read_records(paths: Iterable[str]) -> tuple[list[Result], set[str]]:
    """(the latest result of each check, on what machines and sources they were found)."""
    latest: dict[tuple[str, ...], tuple[Result, str]] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            # A run that was killed leaves part of a line.
            with suppress(json.JSONDecodeError):
                record: dict[str, Any] = json.loads(line)
                results = [Result(*fields) for fields in record["results"]]
                for result in results:
                    latest.pop(("all", "all", result.trial, result.dtype), None)
                for result in results:
                    key = result.operator, result.impl, result.trial, result.dtype
                    latest[key] = result, ", ".join(f"{name} {value}" for name, value in record["machine"].items())
    return [result for result, _ in latest.values()], {where for _, where in latest.values()}


def without_known(tasks: list[Task], known: list[Result]) -> list[Task]:
    """What is left to do: operators of a trial that have no results yet, or a failure among them."""
    right: dict[tuple[str, str, str], bool] = {}
    for result in known:
        key = result.operator, result.trial, result.dtype
        right[key] = right.get(key, True) and result.failure is None
    left = [
        Task(task.trial, tuple(operator for operator in task.operators if not right.get((operator, *task.key))))
        for task in tasks
    ]
    return [task for task in left if task.operators]


def report(results: list[Result]) -> int:
    """Prints the table; the number of failures."""
    rows: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        rows[result.operator, result.impl, result.dtype].append(result)
    print("\n| operator | implementation | dtype | cases | default in | refused | worst error | failures |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for row, found in rows.items():
        served = [result for result in found if result.refusal is None]
        worst = max((result.error for result in served), default=0.0)
        cells = [len(served), sum(result.is_default for result in served), len(found) - len(served)]
        failures = sum(result.failure is not None for result in served)
        print(f"| {' | '.join(row)} | {' | '.join(map(str, cells))} | {worst:.1e} | {failures} |")
    failures = [result for result in results if result.failure is not None]
    for result in failures:
        print(f"FAILED {result.operator} {result.impl} [{result.trial}, {result.dtype}]: {result.failure}")
    by_case: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        by_case[result.operator, result.trial, result.dtype].append(result)
    for (operator, trial, dtype), found in by_case.items():
        if all(result.refusal is not None for result in found):
            reasons = "; ".join(f"{result.impl}: {result.refusal}" for result in found)
            print(f"no kernel: {operator} [{trial}, {dtype}]: {reasons}")
    slowest = sorted(results, key=lambda result: -result.seconds)[:5]
    print("slowest:", ", ".join(f"{r.operator} {r.impl} [{r.trial}] {r.seconds:.0f} s" for r in slowest))
    num_cases = len({(result.trial, result.dtype) for result in results})
    print(f"{num_cases} cases, {len(results)} checks, {len(failures)} failures")
    return len(failures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=("small", "decode", "prefill", "all"), default="all")
    parser.add_argument("--only", default="", type=re.compile)
    parser.add_argument("--first", default="^$", type=re.compile)
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of bfloat16, float16 and float32, by commas")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so many")
    parser.add_argument("--record")
    parser.add_argument("--known", nargs="*", default=[])
    parser.add_argument("--report", nargs="*", default=[])
    options = parser.parse_args()
    if options.report:
        recorded, machines = read_records(options.report)
        print(*sorted(machines), sep="\n")
        sys.exit(1 if report(recorded) else 0)
    operators = tuple(options.operators.split(","))
    tasks = [
        Task(trial, operators)
        for dtype in options.dtype.split(",")
        for trial in trials(options.cases, options.device, getattr(torch, dtype))
        if options.only.search(trial.name)
    ]
    tasks.sort(key=lambda task: options.first.search(task.trial.name) is None)
    tasks = without_known(tasks, read_records(options.known)[0])
    where = machine(options.device)
    results: list[Result] = []
    done: set[tuple[str, str]] = set()

    def keep(found: list[Result]) -> None:
        """Said at once: a run that is cut off leaves what it found."""
        results.extend(found)
        failures = [result for result in found if result.failure is not None]
        done.update((result.trial, result.dtype) for result in found)
        name = f"{found[0].trial}, {found[0].dtype}"
        print(f"{len(done)}/{len(tasks)} {name}: {len(found)} checks, {len(failures)} failures", flush=True)
        for result in failures:
            print(f"    {result.operator} {result.impl}: {result.failure}", flush=True)
        if options.record:
            with open(options.record, "a") as file:
                # A line of its own, also after a part of one.
                file.write("\n" + json.dumps({"machine": where, "results": found}) + "\n")

    run_all(tasks, options.cases == "small", options.jobs, options.seconds, keep)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    failures = report(results)
    skipped = [", ".join(task.key) for task in tasks if task.key not in done]
    if skipped:
        print(f"not run, out of time: {'; '.join(skipped)}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
