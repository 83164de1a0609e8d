"""Small requests and steps for tests of the scheduler; the runner is a dict of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from msaserve.engine.plan import RowResult, StepPlan, StepResult
from msaserve.engine.request import Request
from msaserve.engine.scheduler import RequestOutput, Scheduler, SchedulerConfig
from msaserve.types import MediaItem, SamplingParams

EOS = 1
TOKEN = 50
"""What the runner of these tests samples unless told otherwise."""


def scheduler(**changes: Any) -> Scheduler:
    config = {
        "block_size": 4,
        "num_pages": 33,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "vocab_size": 1000,
        "eos_token_ids": (EOS,),
    }
    return Scheduler(SchedulerConfig(**{**config, **changes}))


def request(name: str, prompt: int | list[int], *, first: int = 100, **options: Any) -> Request:
    """A request of `prompt` tokens counting up from `first`, or of the tokens given."""
    own = {key: options.pop(key) for key in ("media", "cache_salt", "seed") if key in options}
    tokens = list(range(first, first + prompt)) if isinstance(prompt, int) else prompt
    return Request(name, tokens, SamplingParams(**options), **own)


def media(offset: int, length: int, content: bytes = b"cat") -> MediaItem:
    return MediaItem(
        modality="image",
        patches=np.zeros((4, 1176), np.float32),
        grid_thw=((1, 2, 2),),
        offset=offset,
        length=length,
        content_hash=content,
    )


def commit(engine: Scheduler, plan: StepPlan, tokens: dict[str, int], errors: dict[str, str]) -> list[RequestOutput]:
    rows = []
    for row in plan.rows:
        if row.request_id in errors:
            rows.append(RowResult(error=errors[row.request_id]))
        else:
            rows.append(RowResult(token_id=tokens.get(row.request_id, TOKEN) if row.is_sampled else None))
    outputs = engine.commit(plan, StepResult(rows))
    engine.check_integrity()
    return outputs


def step(engine: Scheduler, tokens: dict[str, int] | None = None, errors: dict[str, str] | None = None) -> StepPlan:
    plan = engine.schedule()
    engine.check_integrity()
    commit(engine, plan, tokens or {}, errors or {})
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(row.request_id, row.prefix_len, row.query_len) for row in plan.rows]


def run_to_end(engine: Scheduler) -> None:
    while engine.has_work():
        step(engine)
