"""The scheduler under random scripts. Its runner's cache is a dict, its model a hash of everything before.

The value stored for a position depends on every token, media item and salt up to it, as real K and V do. So a wrong
page, a stale prefix, a page reused too early or a token computed twice shows as a wrong value, and in the end every
request must have put out exactly the tokens that it would have put out alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msaserve.engine.plan import PlanRow, RowResult, StepPlan, StepResult
from msaserve.engine.request import Request, RequestStatus
from msaserve.engine.scheduler import RequestOutput, Scheduler, SchedulerConfig
from msaserve.errors import InvalidRequestError, OverloadedError
from msaserve.kv_events import KvEventLog
from msaserve.types import MediaItem, SamplingParams

BLOCK = 3
VOCAB = 24
EOS = 0
PATCHES = np.zeros((4, 1176), np.float32)
GARBAGE = -1


def next_value(previous: int, token: int, position: int, media: Iterable[MediaItem]) -> int:
    for item in media:
        if item.offset <= position < item.offset + item.length:
            return hash((previous, token, position - item.offset, int.from_bytes(item.content_hash, "little")))
    return hash((previous, token))


def root_value(salt: str) -> int:
    return len(salt)


def sample(value: int, seed: int, num_output_tokens: int, sampling: SamplingParams) -> int:
    token = hash((value, seed, num_output_tokens)) % VOCAB
    if num_output_tokens < sampling.min_tokens:
        masked = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        while token in masked:
            token = (token + 1) % VOCAB
    return token


@dataclass
class Alone:
    """What a request puts out when nothing else runs."""

    values: list[int]
    token_ids: list[int]
    finish_reason: str

    @classmethod
    def of(cls, request: Request, max_len: int) -> Alone:
        sampling = request.sampling
        tokens, values, output = list(request.prompt_token_ids), [], []
        value = root_value(request.cache_salt)
        while True:
            for position in range(len(values), len(tokens)):
                value = next_value(value, tokens[position], position, request.media)
                values.append(value)
            token = sample(value, request.seed, len(output), sampling)
            is_stop = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
            if is_stop and len(output) >= sampling.min_tokens:
                return cls(values, [*output, token], "stop")
            output.append(token)
            tokens.append(token)
            if len(output) == sampling.max_tokens or len(tokens) == max_len:
                return cls(values, output, "length")


@dataclass
class Play:
    """A scheduler, the fake runner behind it, and all that must stay true between them."""

    config: SchedulerConfig
    shuffle_seed: int
    memory: dict[int, dict[int, int]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    alone: dict[str, Alone] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, rng=random.Random(self.shuffle_seed))
        if self.config.enable_prefix_cache:
            self.scheduler.kv_events = KvEventLog(block_size=BLOCK)
        self.max_len = min(self.config.max_model_len, self.scheduler.pool.num_usable_pages * BLOCK)

    def run(self, ops: Iterable[tuple[int, int]]) -> None:
        for kind, number in ops:
            rng = random.Random(number)
            if kind < 3:
                self.add(rng)
            elif kind == 3 and number % 2 == 0:
                self.abort(rng)
            elif kind == 4 and number % 8 == 0:
                self.scheduler.flush_prefix_cache()
            else:
                self.step(rng)
        num_steps = 0
        while self.scheduler.has_work():
            self.step(None)
            num_steps += 1
            assert num_steps < 5000, "no progress"
        self.scheduler.check_integrity()
        self.check_end()

    def add(self, rng: random.Random) -> None:
        # Few templates and few tails: prefixes are shared all the time, up to every length.
        length = rng.choice([rng.randrange(1, 8), rng.randrange(1, 20)])
        template = random.Random(rng.randrange(2))
        prompt = [template.randrange(VOCAB) for _ in range(length)]
        if rng.random() < 0.3:
            prompt[rng.randrange(length)] = rng.randrange(VOCAB)
        media = self.draw_media(rng, length) if rng.random() < 0.4 else ()
        max_tokens = rng.choice([None, None, 1, rng.randrange(1, 20)])
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 3]),
            stop_token_ids=rng.choice([(), (), (5,)]),
            ignore_eos=rng.random() < 0.8,
        )
        salt, seed = rng.choice(["", "", "", "salt"]), rng.randrange(2)
        first: Request | None = None
        for i in range(rng.choice([1, 1, 1, 2, 3])):
            request = Request(
                request_id=str(self.seen["add"]),
                prompt_token_ids=prompt,
                sampling=sampling,
                media=media,
                cache_salt=salt,
                seed=seed + i,
            )
            if not self.queue(request, like=first):
                break
            first = first or request

    def draw_media(self, rng: random.Random, length: int) -> tuple[MediaItem, ...]:
        """A few items, in any order; two requests often agree in some of them."""
        items, end = [], rng.randrange(min(length, 6))
        while end < length and len(items) < 4:
            span = rng.randrange(1, min(length - end, 9) + 1)
            content = rng.choice([b"a", b"b"])
            items.append(
                MediaItem(
                    modality="image",
                    patches=PATCHES,
                    grid_thw=((1, 2, 2),),
                    offset=end,
                    length=span,
                    content_hash=content,
                )
            )
            end += span + rng.randrange(5)
        rng.shuffle(items)
        return tuple(items)

    def queue(self, request: Request, *, like: Request | None) -> bool:
        max_tokens = request.sampling.max_tokens
        is_too_long = request.num_prompt_tokens + (max_tokens or 1) > self.max_len
        is_full = self.config.max_queue is not None and self.scheduler.load().num_waiting >= self.config.max_queue
        try:
            self.scheduler.add(request, like=like)
        except InvalidRequestError:
            assert is_too_long
            self.seen["refused"] += 1
            return False
        except OverloadedError:
            assert is_full
            self.seen["overloaded"] += 1
            return False
        assert not is_too_long
        assert not is_full
        self.seen["add"] += 1
        self.seen["another output"] += like is not None
        self.requests[request.request_id] = request
        self.alone[request.request_id] = Alone.of(request, self.max_len)
        return True

    def abort(self, rng: random.Random) -> None:
        alive = [r for r in self.requests.values() if not r.is_finished]
        if alive:
            request = rng.choice(alive)
            self.seen[f"abort {request.status.value}"] += 1
            assert self.scheduler.abort(request.request_id) is request
            assert request.finish_reason == "abort"
            assert self.scheduler.abort(request.request_id) is None

    def step(self, rng: random.Random | None) -> None:
        """One step; with rng, things happen while it is in flight and rows may fail."""
        scheduler = self.scheduler
        running = [r for r in self.requests.values() if r.status is RequestStatus.RUNNING]
        had_work = scheduler.has_work()
        plan = scheduler.schedule()
        if rng is not None and rng.random() < 0.5:
            scheduler.check_integrity()  # with the step in flight
        assert bool(plan.rows) == had_work
        if any(r.status is RequestStatus.PREEMPTED for r in running):
            assert {row.request_id for row in plan.rows} <= {r.request_id for r in running}, "admitted while preempting"
        if running:
            assert running[0].status is RequestStatus.RUNNING, "the oldest request was preempted"
            assert running[0].request_id in {row.request_id for row in plan.rows}, "the oldest request stands still"
        self.check_plan(plan)
        pool = scheduler.pool
        for page in self.memory.keys() - pool.ref_counts().keys() - pool.kept_pages():
            del self.memory[page]
        failing: set[str] = set()
        if rng is not None:
            failing = {row.request_id for row in plan.rows if rng.random() < 0.01}
            if rng.random() < 0.01:
                failing = {row.request_id for row in plan.rows}
        if rng is not None and rng.random() < 0.1:
            self.in_flight(rng)
        self.seen["passed"] += self.is_passed(plan)
        result = StepResult([self.compute(row, row.request_id in failing) for row in plan.rows])
        for row in plan.rows:
            self.check_memory(row, row.request_id in failing)
        if rng is not None and rng.random() < 0.1:
            self.in_flight(rng)
        self.check_outputs(plan, result, scheduler.commit(plan, result))
        if rng is not None:
            scheduler.check_integrity()

    def in_flight(self, rng: random.Random) -> None:
        choice = rng.randrange(6)
        if choice == 0:
            self.scheduler.flush_prefix_cache()
        elif choice < 3:
            self.add(rng)
        else:
            self.abort(rng)
            self.seen["in flight"] += 1

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.rows) <= self.config.max_num_seqs
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        lens = [row.query_len for row in plan.rows]
        assert min(lens, default=1) >= 1
        assert [n for n in lens if n == 1] == lens[: lens.count(1)], "rows of one token come first"
        for row in plan.rows:
            request = self.requests[row.request_id]
            tokens = [*request.prompt_token_ids, *request.output_token_ids]
            assert list(row.token_ids) == tokens[row.prefix_len : row.seq_len]
            assert row.is_sampled == (row.seq_len == len(tokens))
            assert row.output_token_ids == request.output_token_ids
            assert len(row.pages) * BLOCK >= row.seq_len
            for position in range(row.prefix_len, row.seq_len):
                page = row.pages[position // BLOCK]
                assert self.scheduler.pool.ref_count(page) == 1, "a step writes to a shared page"
                assert page not in self.scheduler.index, "a step writes to an indexed page"

    def is_passed(self, plan: StepPlan) -> bool:
        """Whether a prompt is begun while an older one's goes on behind this step."""
        unfinished = [self.requests[row.request_id].order for row in plan.rows if not row.is_sampled]
        begun = [self.requests[row.request_id].order for row in plan.rows if row.is_sampled and row.query_len > 1]
        return bool(unfinished and begun) and min(unfinished) < max(begun)

    def compute(self, row: PlanRow, is_failing: bool) -> RowResult:
        value = root_value(self.requests[row.request_id].cache_salt)
        if row.prefix_len:
            last = row.prefix_len - 1
            value = self.memory[row.pages[last // BLOCK]][last % BLOCK]
        for position, token in enumerate(row.token_ids, start=row.prefix_len):
            value = next_value(value, token, position, row.media)
            stored = GARBAGE if is_failing else value
            self.memory.setdefault(row.pages[position // BLOCK], {})[position % BLOCK] = stored
        if is_failing:
            return RowResult(error="failed on purpose")
        if not row.is_sampled:
            return RowResult()
        return RowResult(token_id=sample(value, row.seed, len(row.output_token_ids), row.sampling))

    def check_memory(self, row: PlanRow, is_failing: bool) -> None:
        """What attention would read, after every row of the step has stored its own."""
        expected = self.alone[row.request_id].values
        for position in range(row.prefix_len if is_failing else row.seq_len):
            value = self.memory[row.pages[position // BLOCK]][position % BLOCK]
            assert value == expected[position], f"request {row.request_id} reads a wrong value at {position}"

    def check_outputs(self, plan: StepPlan, result: StepResult, outputs: list[RequestOutput]) -> None:
        by_id = {output.request.request_id: output for output in outputs}
        assert len(by_id) == len(outputs)
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            request = self.requests[row.request_id]
            output = by_id.pop(row.request_id, None)
            if request.finish_reason == "abort":
                assert output is None
            elif row_result.error is not None:
                assert output is not None
                assert (output.finish_reason, output.error, output.token_ids) == ("error", "failed on purpose", ())
            elif row.is_sampled:
                assert output is not None
                assert output.token_ids == (row_result.token_id,)
                assert output.finish_reason == request.finish_reason
            else:
                assert output is None
        assert not by_id

    def check_end(self) -> None:
        load = self.scheduler.load()
        assert (load.num_running, load.num_waiting, load.num_used_pages) == (0, 0, 0)
        for request in self.requests.values():
            alone = self.alone[request.request_id]
            if request.finish_reason in ("stop", "length"):
                assert request.output_token_ids == alone.token_ids
                assert request.finish_reason == alone.finish_reason
                assert request.stop_token_id == (alone.token_ids[-1] if alone.finish_reason == "stop" else None)
            else:
                assert request.finish_reason in ("abort", "error")
                assert request.output_token_ids == alone.token_ids[: len(request.output_token_ids)]
            assert not request.pages
            self.seen[f"finish {request.finish_reason}"] += 1
        self.seen["preempted"] += load.num_preemptions
        self.seen["hit tokens"] += load.num_prefix_hit_tokens
        assert load.num_prefix_hit_tokens == sum(request.num_cached_tokens for request in self.requests.values())
        self.scheduler.flush_prefix_cache()
        self.scheduler.check_integrity()
        assert self.scheduler.load().num_cached_pages == 0


def config(num_pages: int, budget: int, num_seqs: int, has_cache: bool, max_queue: int | None) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=BLOCK,
        num_pages=num_pages,
        max_num_batched_tokens=budget,
        max_num_seqs=num_seqs,
        max_model_len=40,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        enable_prefix_cache=has_cache,
        max_queue=max_queue,
    )


CONFIGS = st.builds(
    config,
    num_pages=st.integers(2, 24),
    budget=st.integers(1, 40),
    num_seqs=st.integers(1, 6),
    has_cache=st.booleans(),
    max_queue=st.sampled_from([None, 2]),
)
OPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**16)), max_size=40)


# Two alike: the second is preempted for a page, comes back at once, shares the first one's and leaves room for a third.
@example(config(num_pages=19, budget=3, num_seqs=3, has_cache=True, max_queue=None), 0, [(0, 270), (0, 270), (0, 0)])
@given(CONFIGS, st.integers(0, 3), OPS)
@settings(max_examples=200, deadline=None)
def test_scripts_that_shrink(config: SchedulerConfig, shuffle_seed: int, ops: list[tuple[int, int]]) -> None:
    Play(config, shuffle_seed).run(ops)


@pytest.mark.parametrize("part", range(4))
def test_thousands_of_scripts(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(500 * part, 500 * (part + 1)):
        rng = random.Random(seed)
        play = Play(
            config(
                num_pages=rng.randrange(4, 20),
                budget=rng.randrange(1, 33),
                num_seqs=rng.randrange(1, 7),
                has_cache=rng.random() < 0.8,
                max_queue=rng.choice([None, None, 2]),
            ),
            shuffle_seed=seed,
        )
        try:
            play.run([(rng.randrange(10), rng.randrange(2**30)) for _ in range(rng.randrange(5, 40))])
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"script {seed}") from error
        seen += play.seen
    # The scripts are worth something only if all of this happens in them, often.
    for what in (
        "refused",
        "overloaded",
        "another output",
        "preempted",
        "hit tokens",
        "passed",
        "in flight",
        "abort waiting",
        "abort running",
        "abort preempted",
        "finish stop",
        "finish length",
        "finish error",
    ):
        assert seen[what] >= 3, (what, seen)
