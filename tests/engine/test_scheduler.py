"""The scheduler's rules one by one. Whole runs under random scripts: test_scheduler_random.py."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from typing import Any

import pytest
from scheduling import EOS, TOKEN, commit, media, request, run_to_end, scheduler, shape, step

from msaserve.cache import prefix
from msaserve.engine.plan import RowResult, StepPlan, StepResult
from msaserve.engine.request import Request, RequestStatus
from msaserve.errors import InvalidRequestError, OverloadedError
from msaserve.types import Logprobs

# What is accepted


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"num_pages": 1},
        {"max_num_batched_tokens": 0},
        {"max_num_seqs": 0},
        {"max_model_len": 1},
        {"vocab_size": 0},
        {"max_queue": 0},
    ],
)
def test_config_bounds(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be at least"):
        scheduler(**change)


@pytest.mark.parametrize(
    ("made", "message", "param"),
    [
        (request("r", 0), "prompt is empty", "prompt"),
        (request("r", [5, -1]), "token id -1 is out of range: the vocabulary has ids 0 to 999", "prompt"),
        (request("r", [5, 1000]), "token id 1000 is out of range", "prompt"),
        (request("r", [2**40]), f"token id {2**40} is out of range", "prompt"),
        (request("r", 64), "64 tokens and needs room for at least 1 more, but .* 64 tokens", "prompt"),
        (request("r", 60, max_tokens=5), "60 prompt tokens and max_tokens 5 make 65, but .* 64 tokens", "max_tokens"),
        (request("r", 70, max_tokens=5), "70 prompt tokens and max_tokens 5 make 75, but .* 64 tokens", "prompt"),
        (request("r", 3, max_tokens=0), "max_tokens must be at least 1, got 0", "max_tokens"),
        (request("r", 8, media=(media(6, 3),)), "tokens 6 to 9, outside the prompt of 8 tokens", "media"),
        (request("r", 8, media=(media(-1, 3),)), "tokens -1 to 2, outside", "media"),
        (request("r", 8, media=(media(2, 0),)), "tokens 2 to 2, outside", "media"),
        (request("r", 8, media=(media(4, 2), media(2, 3))), "overlap: one ends at token 5.* token 4", "media"),
        (request("taken", 8), "'taken' is already in use", "request_id"),
    ],
)
def test_what_can_never_be_served_is_refused(made: Request, message: str, param: str) -> None:
    engine = scheduler()
    engine.add(request("taken", 4))
    with pytest.raises(InvalidRequestError, match=message) as caught:
        engine.add(made)
    assert caught.value.param == param
    engine.check_integrity()
    assert engine.load().num_waiting == 1


def test_more_than_the_cache_holds_is_refused() -> None:
    engine = scheduler(num_pages=6)
    message = r"18 prompt tokens and max_tokens 3 make 21, but the cache holds 20 tokens \(5 pages of 4\)"
    with pytest.raises(InvalidRequestError, match=message) as caught:
        engine.add(request("r", 18, max_tokens=3))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequestError, match="has 20 tokens and needs room for at least 1 more"):
        engine.add(request("r", 20))
    engine.add(request("r", 18, max_tokens=2))


@pytest.mark.parametrize(("num_pages", "num_output"), [(33, 54), (6, 10)])
def test_without_max_tokens_it_ends_where_context_or_cache_ends(num_pages: int, num_output: int) -> None:
    engine = scheduler(num_pages=num_pages)
    made = request("r", 10)
    engine.add(made)
    run_to_end(engine)
    assert made.finish_reason == "length"
    assert len(made.output_token_ids) == num_output


def test_full_queue() -> None:
    engine = scheduler(max_queue=2)
    for name in "ab":
        engine.add(request(name, 4))
    with pytest.raises(OverloadedError, match="queue is full: 2 requests wait"):
        engine.add(request("c", 4))
    step(engine)
    engine.add(request("c", 4))


# What a step holds


def test_a_prompt_is_cut_by_the_budget_and_sampled_at_its_end() -> None:
    engine = scheduler(max_num_batched_tokens=4)
    engine.add(request("r", 10, max_tokens=2))
    plans = []
    while engine.has_work():
        plans += step(engine).rows
    assert [(row.prefix_len, row.query_len, row.is_sampled) for row in plans] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
        (10, 1, True),
    ]
    assert [list(row.token_ids) for row in plans][1:] == [[104, 105, 106, 107], [108, 109], [TOKEN]]


def test_decode_rows_first_then_chunks_then_the_next_waiting() -> None:
    engine = scheduler(max_num_batched_tokens=10)
    engine.add(request("a", 4))
    engine.add(request("b", 12, first=200))
    engine.add(request("c", 9, first=300))
    assert shape(step(engine)) == [("a", 0, 4), ("b", 0, 6)]
    assert shape(step(engine)) == [("a", 4, 1), ("b", 6, 6), ("c", 0, 3)]
    assert shape(step(engine)) == [("a", 5, 1), ("b", 12, 1), ("c", 3, 6)]
    assert shape(step(engine)) == [("a", 6, 1), ("b", 13, 1), ("c", 9, 1)]


def test_a_chunk_of_one_token_stands_among_the_first_rows() -> None:
    engine = scheduler(max_num_batched_tokens=7)
    engine.add(request("a", 6))
    engine.add(request("b", 5, first=200))
    assert shape(step(engine)) == [("b", 0, 1), ("a", 0, 6)]


def test_a_question_does_not_wait_for_a_book() -> None:
    engine = scheduler(max_num_batched_tokens=8, max_model_len=200, num_pages=99)
    engine.add(request("book", 100, max_tokens=2))
    assert shape(step(engine)) == [("book", 0, 8)]
    engine.add(request("question", 3, first=200))
    engine.add(request("another", 2, first=300, max_tokens=3))
    assert shape(step(engine)) == [("book", 8, 4), ("question", 0, 2), ("another", 0, 2)]
    assert shape(step(engine)) == [("question", 2, 1), ("another", 2, 1), ("book", 12, 6)]
    assert shape(step(engine)) == [("question", 3, 1), ("another", 3, 1), ("book", 18, 6)]


def test_prompts_that_are_not_much_shorter_go_in_order_of_arrival() -> None:
    engine = scheduler(max_num_batched_tokens=8, max_model_len=200, num_pages=99)
    engine.add(request("first", 30, max_tokens=1))
    engine.add(request("second", 20, first=200, max_tokens=1))
    engine.add(request("short", 3, first=300, max_tokens=1))
    plans = []
    while engine.has_work():
        plans.append(shape(step(engine)))
    assert plans == [
        [("first", 0, 5), ("short", 0, 3)],
        [("first", 5, 8)],
        [("first", 13, 8)],
        [("first", 21, 8)],
        [("first", 29, 1), ("second", 0, 7)],
        [("second", 7, 8)],
        [("second", 15, 5)],
    ]


def test_the_shortest_goes_first_and_a_stream_of_them_takes_half() -> None:
    engine = scheduler(max_num_batched_tokens=8, max_model_len=400, num_pages=200, max_num_seqs=64)
    book = request("book", 300, max_tokens=1)
    engine.add(book)
    engine.add(request("six", 6, first=400, max_tokens=1))
    engine.add(request("one", 1, first=500, max_tokens=1))
    for i in range(40):
        engine.add(request(f"five {i}", 5, first=600 + 5 * i, max_tokens=1))
    order, num_steps = [], 0
    while not book.is_finished:
        num_steps += 1
        for row in step(engine).rows:
            order += [row.request_id] if row.is_sampled else []
    assert num_steps <= 300 // 4
    assert order[0] == "one"
    assert order[-1] == "book"


def test_decoding_leaves_an_older_prompt_half_of_the_budget() -> None:
    engine = scheduler(max_num_batched_tokens=4, max_model_len=200, num_pages=99)
    book = request("book", 60, max_tokens=1)
    engine.add(book)
    for i in range(6):
        engine.add(request(str(i), 1, first=100 + i, max_tokens=30))
    num_steps = 0
    while not book.is_finished:
        plan = step(engine)
        num_steps += 1
        assert plan.num_tokens == 4
        assert next(row.query_len for row in plan.rows if row.request_id == "book") >= 2
    assert num_steps <= 30


def test_no_more_rows_than_max_num_seqs() -> None:
    engine = scheduler(max_num_seqs=2)
    for name in "abc":
        engine.add(request(name, 4, max_tokens=2))
    assert len(step(engine).rows) == 2
    assert len(step(engine).rows) == 2
    assert shape(step(engine)) == [("c", 0, 4)]


def test_a_budget_smaller_than_the_batch_serves_the_oldest() -> None:
    engine = scheduler(max_num_batched_tokens=2)
    for name in "abc":
        engine.add(request(name, 1, max_tokens=3))
    assert shape(step(engine)) == [("a", 0, 1), ("b", 0, 1)]
    assert shape(step(engine)) == [("a", 1, 1), ("b", 1, 1)]


def test_what_waits_for_pages_lets_nobody_pass() -> None:
    engine = scheduler(num_pages=9)
    engine.add(request("a", 8, max_tokens=4))
    engine.add(request("b", 24, first=200, max_tokens=2))
    engine.add(request("c", 2, first=300, max_tokens=2))
    for _ in range(4):
        assert {row.request_id for row in step(engine).rows} == {"a"}
    # a's page of 4 tokens stays cached; b's admission may evict it.
    assert [row.request_id for row in step(engine).rows] == ["b", "c"]


def test_a_page_is_left_for_each_running_request_to_grow_into() -> None:
    engine = scheduler(num_pages=5)
    engine.add(request("a", 4, max_tokens=4))
    engine.add(request("b", 12, first=200, max_tokens=2))
    assert shape(step(engine)) == [("a", 0, 4)]  # b's 3 pages are free, but a would need one of them next
    while engine.has_work():
        step(engine)
    assert engine.load().num_preemptions == 0


def test_rows_carry_what_the_runner_needs() -> None:
    engine = scheduler(max_num_batched_tokens=6)
    items = (media(1, 3), media(5, 3))
    made = request("r", 10, media=items, seed=7, temperature=0.5)
    engine.add(made)
    rows = [step(engine).rows[0] for _ in range(3)]
    assert [row.media for row in rows] == [items, items[1:], ()]
    assert {row.seed for row in rows} == {7}
    assert all(row.sampling is made.sampling for row in rows)
    assert rows[2].output_token_ids is made.output_token_ids
    assert rows[2].prompt_token_ids is made.tokens.prompt
    assert list(rows[2].pages) == list(made.pages)


def test_steps_come_one_at_a_time() -> None:
    engine = scheduler()
    assert engine.schedule().rows == []
    assert engine.commit(StepPlan(rows=[]), StepResult()) == []
    engine.add(request("r", 4))
    plan = engine.schedule()
    with pytest.raises(AssertionError, match="not committed"):
        engine.schedule()
    with pytest.raises(AssertionError, match="not in flight"):
        engine.commit(StepPlan(rows=plan.rows), StepResult([RowResult(token_id=5)]))
    with pytest.raises(AssertionError, match="0 results for 1 rows"):
        engine.commit(plan, StepResult())
    commit(engine, plan, {}, {})


# How a request ends


@pytest.mark.parametrize(
    ("options", "sampled", "reason", "stop_token_id"),
    [
        ({}, [5, EOS], "stop", EOS),
        ({"ignore_eos": True, "max_tokens": 3}, [5, EOS, 5], "length", None),
        ({"stop_token_ids": (7,)}, [5, 7], "stop", 7),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, [EOS, 7], "stop", 7),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, [EOS], "stop", EOS),
        ({"min_tokens": 2}, [EOS, EOS, EOS], "stop", EOS),
        ({"min_tokens": 2, "stop_token_ids": (7,)}, [7, EOS, 5, 7], "stop", 7),
        ({"max_tokens": 1}, [5], "length", None),
        ({"max_tokens": 2}, [5, EOS], "stop", EOS),
    ],
)
def test_ends(options: dict[str, Any], sampled: list[int], reason: str, stop_token_id: int | None) -> None:
    engine = scheduler()
    made = request("r", 4, **options)
    engine.add(made)
    for i, token in enumerate(sampled, start=1):
        plan = engine.schedule()
        (output,) = commit(engine, plan, {"r": token}, {})
        assert output.request is made
        assert output.token_ids == (token,)
        assert output.finish_reason == (reason if i == len(sampled) else None)
    assert (made.finish_reason, made.stop_token_id, made.output_token_ids) == (reason, stop_token_id, sampled)
    assert not engine.has_work()
    assert engine.load().num_used_pages == 0


def test_logprobs_pass_through() -> None:
    engine = scheduler()
    engine.add(request("r", 4, logprobs=1))
    logprobs = Logprobs(5, -0.5, ((5, -0.5),))
    (output,) = engine.commit(engine.schedule(), StepResult([RowResult(token_id=5, logprobs=logprobs)]))
    assert output.logprobs == (logprobs,)


def test_load_counts() -> None:
    engine = scheduler(max_num_seqs=1)
    engine.add(request("a", 9, max_tokens=3))
    engine.add(request("b", 9, max_tokens=1))
    step(engine)
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_pages, load.num_used_pages) == (1, 1, 32, 3)
    assert (load.num_prompt_tokens, load.num_output_tokens) == (9, 1)
    run_to_end(engine)
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_used_pages, load.num_cached_pages) == (0, 0, 0, 2)
    assert (load.num_prompt_tokens, load.num_output_tokens, load.num_preemptions) == (18, 4, 0)
    assert (load.num_prefix_queried_tokens, load.num_prefix_hit_tokens) == (18, 8)


def test_scheduling_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, msaserve.engine.scheduler; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_cost_of_a_decode_step_does_not_grow_with_the_context() -> None:
    """64 rows at 64K tokens. About 0.2 ms here; the bound leaves room for a slow machine, not for O(context) work."""
    engine = scheduler(
        block_size=128, num_pages=40_000, max_num_batched_tokens=2**23, max_num_seqs=64, max_model_len=2**17
    )
    for i in range(64):
        engine.add(request(str(i), [i] * 65_536))
    seconds = []
    for _ in range(40):
        start = time.thread_time()
        plan = engine.schedule()
        between = time.thread_time()
        result = StepResult([RowResult(token_id=5) for _ in plan.rows])
        resumed = time.thread_time()
        engine.commit(plan, result)
        seconds.append(time.thread_time() - resumed + between - start)
    assert min(seconds) < 3e-3
    assert all(made.status is RequestStatus.RUNNING for made in engine._running)


def test_outputs_of_one_prompt_share_what_comes_of_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked, copied and hashed for the first of them only, however many there are."""
    engine = scheduler(block_size=128, num_pages=20_000, max_num_batched_tokens=2**20, max_model_len=2**20)
    prompt = list(range(200)) * 500
    first = request("0", prompt, media=(media(50_000, 100), media(10, 100)), repetition_penalty=1.1)
    engine.add(first)
    step(engine)
    others = [request(str(i), prompt, media=first.media, repetition_penalty=1.1) for i in range(1, 4)]
    for other in others:
        other.sampling = first.sampling
    monkeypatch.setattr(prefix, "blake2b", None)
    tracemalloc.start()
    for other in others:
        engine.add(other, like=first)
    _, num_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 10_000
    plan = engine.schedule()
    assert shape(plan)[1:] == [(other.request_id, 99_968, 32) for other in others]
    for row, whole in zip(plan.rows[1:], [request("x", prompt, media=first.media)] * 3, strict=True):
        assert list(row.token_ids) == prompt[99_968:]
        assert row.seen is not None
        assert set(row.seen.prompt_ids) == set(whole.prompt_token_ids)
    assert [other.media for other in others] == [first.media] * 3
    assert [item.offset for item in first.media] == [10, 50_000]


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_outputs_of_one_prompt_go_ways_of_their_own(enable_prefix_cache: bool) -> None:
    engine = scheduler(enable_prefix_cache=enable_prefix_cache)
    made = [request(str(i), 6, max_tokens=9) for i in range(3)]
    for one in made:
        engine.add(one, like=made[0] if one is not made[0] else None)
    tokens = {one.request_id: 60 + i for i, one in enumerate(made)}
    while engine.has_work():
        step(engine, tokens)
        if len(made[1].output_token_ids) == 4:
            engine.abort("1")
    assert [one.output_token_ids for one in made] == [[60] * 9, [61] * 4, [62] * 9]
    for one in (made[0], made[2]):
        again = request(f"again {one.request_id}", [*one.prompt_token_ids, *one.output_token_ids, 7], max_tokens=1)
        engine.add(again)
        step(engine)
        assert again.num_cached_tokens == (12 if enable_prefix_cache else 0)
