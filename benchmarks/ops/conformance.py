"""Every kernel of every operator on every named case, on a card: python benchmarks/ops/conformance.py

Prints a table operator × implementation: cases served, for how many of them `impl=None` takes it, the worst relative
error, failures; then each failure, and each case that no kernel serves. Exit status 1 if anything failed.

    --cases small | decode | prefill | all     small: those of CI's interpreter and of compute-sanitizer
    --only TEXT                                cases whose name contains TEXT
    --operators a,b                            these operators only
    --jobs N                                   processes; compiling is most of the time
    --first N                                  leave out N cases, which an earlier run had
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

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
    error: float
    failure: str | None = None
    refusal: str | None = None
    is_default: bool = False
    seconds: float = 0.0


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


def trials(cases: str, only: str, device: str, dtype: torch.dtype) -> list[Trial]:
    """The largest first, but one of each shape before a second, whose kernels are compiled by then."""
    chosen = {"small": KERNEL_CASES, "decode": DECODE_CASES, "prefill": PREFILL_CASES}.get(cases)
    specs = chosen or (*PREFILL_CASES, *DECODE_CASES, *KERNEL_CASES)
    found = [Trial(spec, dtype, device) for spec in specs]
    for spec in specs:
        if spec.name in CASES_8_BITS or cases == "small":
            found += [Trial(spec, dtype, device, scales) for scales in ("tensor", "head")]
    found = [trial for trial in found if only in trial.name]
    found.sort(key=lambda trial: -sum(length for length, _ in trial.spec.requests))
    same = {"name": "", "requests": (), "tail_rows": 0, "index_values": "equal", "pool_pages": 0, "spare_pages": 0}
    kinds = [
        (replace(trial.spec, **same, layout="odd" if trial.spec.layout == "odd" else "vllm"), trial.scales)
        for trial in found
    ]
    return [found[i] for i in sorted(range(len(found)), key=lambda i: kinds[:i].count(kinds[i]))]


def run(trial: Trial, operators: Iterable[str], is_short: bool) -> list[Result]:
    """All results of one trial."""
    if trial.device == "cuda":
        use_large_tiles()
    results = []
    conformance = Conformance(trial, is_short=is_short)
    for operator in operators:
        try:
            default = conformance.default(operator)
        except RefusedError:
            continue
        except Exception as error:
            default = ""
            results.append(Result(operator, "default", trial.name, 0.0, describe(error)))
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
            seconds = time.monotonic() - start
            results.append(Result(operator, impl, trial.name, error, failure, refusal, default == impl, seconds))
            if failure and any(text in failure for text in FATAL):
                return [*results, Result(operator, impl, trial.name, 0.0, "the rest of the case was not run")]
    return results


def describe(error: Exception) -> str:
    if isinstance(error, MismatchError):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]} ({Path(where.filename).name}:{where.lineno})"


def run_alone(trial: Trial, operators: tuple[str, ...], is_short: bool) -> list[Result]:
    """In a process of its own: what breaks the card's context harms no other case."""
    try:
        return run(trial, operators, is_short)
    except Exception as error:
        return [Result("all", "all", trial.name, 0.0, describe(error))]


def report(results: list[Result]) -> int:
    """Prints the table; the number of failures."""
    rows: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        rows[result.operator, result.impl].append(result)
    print("\n| operator | implementation | cases | default in | refused | worst error | failures |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for (operator, impl), found in rows.items():
        served = [result for result in found if result.refusal is None]
        worst = max((result.error for result in served), default=0.0)
        cells = [len(served), sum(result.is_default for result in served), len(found) - len(served)]
        failures = sum(result.failure is not None for result in served)
        print(f"| {operator} | {impl} | {' | '.join(map(str, cells))} | {worst:.1e} | {failures} |")
    failures = [result for result in results if result.failure is not None]
    for result in failures:
        print(f"FAILED {result.operator} {result.impl} [{result.trial}]: {result.failure}")
    by_case: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        by_case[result.operator, result.trial].append(result)
    for (operator, trial), found in by_case.items():
        if all(result.refusal is not None for result in found):
            print(f"no kernel: {operator} [{trial}]: {'; '.join(f'{r.impl}: {r.refusal}' for r in found)}")
    return len(failures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=("small", "decode", "prefill", "all"), default="all")
    parser.add_argument("--only", default="")
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after so many")
    parser.add_argument("--first", type=int, default=0, help="leave out so many cases, which an earlier run had")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    operators = tuple(options.operators.split(","))
    wanted = trials(options.cases, options.only, options.device, getattr(torch, options.dtype))[options.first :]
    results: list[Result] = []
    done: set[str] = set()

    def keep(found: list[Result]) -> None:
        """Said at once: a run that is cut off leaves what it found."""
        results.extend(found)
        failures = [result for result in found if result.failure is not None]
        done.update(result.trial for result in found)
        print(f"{len(done)}/{len(wanted)} {found[0].trial}: {len(found)} checks, {len(failures)} failures", flush=True)
        for result in failures:
            print(f"    {result.operator} {result.impl}: {result.failure}", flush=True)

    task = partial(run_alone, operators=operators, is_short=options.cases == "small")
    if options.jobs == 1:
        for trial in wanted:
            if time.monotonic() < end:
                keep(task(trial))
    else:
        context = multiprocessing.get_context("spawn")
        with context.Pool(options.jobs, maxtasksperchild=1 if options.device == "cuda" else None) as pool:
            found = pool.imap_unordered(task, wanted)
            with suppress(StopIteration, multiprocessing.TimeoutError):
                while True:
                    keep(found.next(timeout=max(0.1, end - time.monotonic())))
            pool.terminate()
    skipped = [trial.name for trial in wanted if trial.name not in done]
    if options.device == "cuda":
        import triton

        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    failures = report(results)
    slowest = sorted(results, key=lambda result: -result.seconds)[:5]
    print("slowest:", ", ".join(f"{r.operator} {r.impl} [{r.trial}] {r.seconds:.0f} s" for r in slowest))
    if skipped:
        print(f"not run, out of time: {', '.join(skipped)}")
    print(f"{len(wanted) - len(skipped)} cases, {len(results)} checks, {failures} failures")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
