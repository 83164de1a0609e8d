"""What a decode step costs as the context grows, and which part of it grows.

One request decodes one token at a time through the engine's runner at each context length; the cache is filled with
random numbers instead of a prompt's K, V and index-K, whose values change nothing in the cost. Prints a Markdown
table of medians in milliseconds. The parts are timed inside the same steps, summed over the layers; the operators then
run one after the other even where a kernel does both in one.

    python benchmarks/serve/decode_cost.py --threads 1
    python benchmarks/serve/decode_cost.py --device cuda --graphs --batch 8

With --graphs the columns are the step launched kernel by kernel and as one CUDA graph instead.
"""

from __future__ import annotations

import platform
import statistics
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import tyro

from msaserve import ops
from msaserve.cache.kv import KVCache
from msaserve.engine.graphs import DecodeGraphs
from msaserve.engine.plan import PlanRow, StepPlan
from msaserve.engine.runner import Runner
from msaserve.models.loader import load_model, resolve_device, resolve_dtype
from msaserve.ops.select_attend import two_steps
from msaserve.types import SamplingParams

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
PARTS = {"select_blocks": "index scan and selection", "sparse_attend": "attend"}


@dataclass(frozen=True)
class Options:
    checkpoint: Path = GOLDEN / "geometry"
    contexts: tuple[int, ...] = (1024, 4096, 16384, 65536)
    """Tokens of the sequence, the new one included."""
    repeats: int = 50
    """Steps at each length, after a tenth as many that are not counted."""
    threads: int = 1
    device: str = "cpu"
    batch: int = 1
    """Requests, each of that length."""
    graphs: bool = False


@dataclass
class Stopwatch:
    """Seconds spent in each of the timed operators since the last `take`."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            result = function(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start
            return result

        return call

    def take(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def make_plan(context: int, pages: array[int], batch: int) -> StepPlan:
    """One token for each request. Their pages are a request's share of all."""
    num_pages = len(pages) // batch
    return StepPlan(
        [
            PlanRow(
                request_id=str(i),
                token_ids=[5],
                prefix_len=context - 1,
                pages=pages[i * num_pages : (i + 1) * num_pages],
                sampling=SamplingParams(temperature=0.0),
                seed=0,
                is_sampled=True,
            )
            for i in range(batch)
        ]
    )


def measure(runner: Runner, context: int, pages: array[int], options: Options, *, with_parts: bool) -> dict[str, float]:
    """Median milliseconds of a step and of its parts."""
    watch = Stopwatch(resolve_device(options.device))
    plan = make_plan(context, pages, options.batch)
    steps: list[dict[str, float]] = []
    timed = {name: watch.timed(name, getattr(two_steps, name)) for name in PARTS}
    with ExitStack() as patches:
        if with_parts:
            # Kernels that do both in one have no parts.
            patches.enter_context(patch.multiple(two_steps, **timed))
            patches.enter_context(patch.object(ops, "select_attend", partial(ops.select_attend, impl="two_steps")))
        for _ in range(options.repeats + options.repeats // 10 + 1):
            start = watch.now()
            results = runner.run(plan).rows
            step = watch.now() - start
            assert all(result.error is None for result in results), results
            parts = watch.take()
            steps.append({"step": step, **parts, "rest": step - sum(parts.values())})
    counted = steps[-options.repeats :]
    return {name: 1e3 * statistics.median(s[name] for s in counted) for name in counted[0]}


def random_cache(options: Options, model: Any) -> KVCache:
    text = model.config.text
    cache = KVCache(
        num_layers=text.num_layers,
        sparse_layer_ids=text.sparse_layer_ids,
        num_pages=options.batch * -(-max(options.contexts) // text.block_size) + 1,
        block_size=text.block_size,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        index_dim=text.index_dim,
        dtype=model.dtype,
        device=model.device,
    )
    for layer in range(text.num_layers):
        cache.k(layer).normal_()
        cache.v(layer).normal_()
    for layer in text.sparse_layer_ids:
        cache.index_k(layer).normal_()
    return cache


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main(options: Options) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    dtype = resolve_dtype("auto", device)
    model = load_model(options.checkpoint, device, dtype, show_progress=False)
    cache = random_cache(options, model)
    runner = Runner(model, cache)
    pages = array("i", (1 + torch.randperm(cache.num_pages - 1)).tolist())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {options.threads} thread(s)"
    print(f"{options.checkpoint.name}, {str(dtype).removeprefix('torch.')}, {name}, PyTorch {torch.__version__}, ")
    print(f"Python {platform.python_version()}, {date.today()}; medians of {options.repeats} steps, in ms\n")
    if options.graphs:
        limits = {"max_num_seqs": options.batch, "max_model_len": max(options.contexts)}
        with_graphs = Runner(model, cache, graphs=DecodeGraphs(model, cache, **limits))
        print(f"{options.batch} requests\n\n| context | kernel by kernel | as a graph |\n|--:|--:|--:|")
        for context in options.contexts:
            costs = (measure(one, context, pages, options, with_parts=False) for one in (runner, with_graphs))
            print(f"| {context:,} | {' | '.join(format(cost['step'], '.3f') for cost in costs)} |", flush=True)
        return
    print(f"| context | step | {' | '.join(PARTS.values())} | everything else |")
    print("|--:|" + "--:|" * (len(PARTS) + 2))
    for context in options.contexts:
        cost = measure(runner, context, pages, options, with_parts=True)
        columns = [cost["step"], *(cost[part] for part in PARTS), cost["rest"]]
        print(f"| {context:,} | {' | '.join(f'{value:.2f}' for value in columns)} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
