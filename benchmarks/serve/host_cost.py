"""What a step costs the host besides the model: scheduling, building the batch, taking the results, sampling.

No model runs, so contexts may be as long as they like. Prints Markdown tables of medians in microseconds.

    OMP_NUM_THREADS=1 python benchmarks/serve/host_cost.py
"""

from __future__ import annotations

import platform
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial

import numpy as np
import torch
import tyro

from msaserve.engine.plan import PlanRow, RowResult, StepResult
from msaserve.engine.request import Request
from msaserve.engine.runner import build_batch
from msaserve.engine.sampler import sample
from msaserve.engine.scheduler import Scheduler, SchedulerConfig
from msaserve.engine.seen import SeenTokens
from msaserve.kv_events import KvEventLog
from msaserve.types import MediaItem, SamplingParams

BLOCK = 128
VOCAB = 1000
"""Small: what grows with it is the device's work."""


@dataclass(frozen=True)
class Options:
    repeats: int = 200
    max_context: int = 1_000_000


class Host:
    """A scheduler whose device takes no time."""

    def __init__(self, *, num_seqs: int, num_tokens: int, budget: int = 8192) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=BLOCK,
                num_pages=num_seqs * (num_tokens // BLOCK + 40) + 1,
                max_num_batched_tokens=budget,
                max_num_seqs=num_seqs,
                max_model_len=2**21,
                vocab_size=VOCAB,
            )
        )
        self.scheduler.kv_events = KvEventLog(block_size=BLOCK)

    def add(
        self, name: str, prompt: list[int], *, media: tuple[MediaItem, ...] = (), like: Request | None = None
    ) -> Request:
        request = Request(name, prompt, SamplingParams(), media=media)
        self.scheduler.add(request, like=like)
        return request

    def step(self) -> tuple[float, float, float]:
        """Seconds of scheduling, building and committing."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        build_batch(plan.rows, block_size=BLOCK, device="cpu")
        built = time.perf_counter()
        result = StepResult([RowResult(token_id=5 if row.is_sampled else None) for row in plan.rows])
        begun = time.perf_counter()
        self.scheduler.commit(plan, result)
        return scheduled - start, built - scheduled, time.perf_counter() - begun


def make_prompt(number: int, num_tokens: int) -> list[int]:
    return [(number * 7919 + place * 31) % VOCAB for place in range(num_tokens)]


def microseconds(seconds: list[float]) -> str:
    return f"{1e6 * statistics.median(seconds):,.0f}"


def print_steps(options: Options) -> None:
    print("| step | schedule | build the batch | commit |\n|---|--:|--:|--:|")

    def show(what: str, host: Host, count: int) -> None:
        parts = zip(*(host.step() for _ in range(count)), strict=True)
        print(f"| {what} | {' | '.join(microseconds(list(part)) for part in parts)} |", flush=True)

    for num_seqs, context, num_waiting in (
        (1, 200, 0),
        (32, 200, 0),
        (32, 200, 1000),
        (32, 20_000, 0),
        (4, options.max_context, 0),
    ):
        host = Host(num_seqs=num_seqs, num_tokens=context)
        running = [host.add(str(i), make_prompt(i, context)) for i in range(num_seqs)]
        while not all(request.output_token_ids for request in running):
            host.step()
        for i in range(num_waiting):
            host.add(f"waiting {i}", make_prompt(i, 100))
        waiting = f", {num_waiting:,} wait" if num_waiting else ""
        show(f"{num_seqs} decode behind {context:,} tokens{waiting}", host, options.repeats)
    for num_items in (0, 200):
        host = Host(num_seqs=1, num_tokens=options.max_context)
        gap = options.max_context // max(num_items, 1)
        patches = np.zeros((4, 1176), np.float32)
        media = tuple(
            MediaItem(
                modality="image",
                patches=patches,
                grid_thw=((1, 2, 2),),
                offset=i * gap,
                length=gap // 2,
                content_hash=bytes([i]) * 32,
            )
            for i in range(num_items)
        )
        host.add("long", make_prompt(0, options.max_context), media=media)
        what = f"a chunk of 8,192 of {options.max_context:,} tokens, {num_items} pictures"
        show(what, host, options.max_context // 8192)


def print_adding(options: Options) -> None:
    host = Host(num_seqs=4, num_tokens=options.max_context)
    prompt = make_prompt(0, options.max_context)
    made: list[Request] = []
    seconds = [
        timed(lambda: made.append(host.add(str(len(made)), prompt, like=made[0] if made else None))) for _ in range(9)
    ]
    print(
        f"\nAdding a prompt of {options.max_context:,} tokens: {microseconds(seconds[:1])} for its first output, ",
        end="",
    )
    print(f"{microseconds(seconds[1:])} for each further one.")


def print_sampling(options: Options) -> None:
    kinds: dict[str, SamplingParams] = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(),
        "top_p, top_k": SamplingParams(top_p=0.95, top_k=40),
        "5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
        "100 biases": SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(100), 1.0)),
        "frequency penalty": SamplingParams(temperature=0.0, frequency_penalty=0.5),
        "repetition penalty": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    }
    lengths = (100, 10_000)
    print("\n| 32 rows, outputs so far | " + " | ".join(f"{length:,} tokens" for length in lengths) + " |")
    print("|---|" + "--:|" * len(lengths))
    logits = torch.randn(32, VOCAB)
    for kind, params in kinds.items():
        columns = []
        for length in lengths:
            output = [place * 31 % VOCAB for place in range(length)]
            rows = [make_row(params, output) for _ in range(32)]
            seconds = [timed(partial(sample, logits, rows, (2,))) for _ in range(options.repeats)]
            columns.append(microseconds(seconds))
        print(f"| {kind} | {' | '.join(columns)} |", flush=True)


def make_row(params: SamplingParams, output: list[int]) -> PlanRow:
    seen = SeenTokens.of(params, range(VOCAB))
    if seen is not None:
        for token in output:
            seen.append(token)
    return PlanRow(
        request_id="r",
        token_ids=[1],
        prefix_len=9,
        pages=array("i", [1]),
        sampling=params,
        seed=0,
        is_sampled=True,
        output_token_ids=output,
        seen=seen,
    )


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@torch.inference_mode()
def main(options: Options) -> None:
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, PyTorch {torch.__version__}, {date.today()}; medians in microseconds\n")
    print_steps(options)
    print_adding(options)
    print_sampling(options)


if __name__ == "__main__":
    main(tyro.cli(Options))
