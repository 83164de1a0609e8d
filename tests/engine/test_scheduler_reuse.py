"""How the scheduler shares, takes and returns pages: prefix hits, preemption, aborts, failed rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from scheduling import TOKEN, commit, media, request, run_to_end, scheduler, shape, step

from msaserve.engine.request import RequestStatus
from msaserve.engine.scheduler import Scheduler
from msaserve.types import MediaItem

# Prefix hits


def hit_tokens(engine: Scheduler, prompt: int | list[int], **options: Any) -> int:
    """Tokens of a new request that the index gives it; the request runs to its end."""
    name = f"probe {engine._num_added}"
    probe = request(name, prompt, max_tokens=1, **options)
    engine.add(probe)
    plan = step(engine)
    assert shape(plan) == [(name, probe.num_cached_tokens, probe.num_prompt_tokens - probe.num_cached_tokens)]
    return probe.num_cached_tokens


@pytest.mark.parametrize("num_cached", [1, 3, 4, 5, 8, 11, 12, 13])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 8, 9, 12, 13, 17])
def test_hits_are_full_blocks_and_never_the_whole_prompt(num_cached: int, num_prompt: int) -> None:
    engine = scheduler()
    hit_tokens(engine, num_cached)
    num_hit = hit_tokens(engine, num_prompt)
    assert num_hit == min(num_cached // 4, (num_prompt - 1) // 4) * 4
    assert num_hit < num_prompt


@pytest.mark.parametrize("num_shared", range(12))
def test_a_shared_prefix_that_ends_inside_a_block_hits_the_blocks_before(num_shared: int) -> None:
    engine = scheduler()
    hit_tokens(engine, 12)
    prompt = list(range(100, 100 + num_shared)) + [7] * (13 - num_shared)
    assert hit_tokens(engine, prompt) == num_shared // 4 * 4


def test_output_tokens_are_reused_too() -> None:
    engine = scheduler()
    first = request("first", 6, max_tokens=7)
    engine.add(first)
    run_to_end(engine)
    # 13 tokens, of which the last was never computed.
    assert hit_tokens(engine, [*first.tokens.between(0, 13), 5, 5, 5, 5]) == 12


def test_what_is_reused_is_held_by_both() -> None:
    engine = scheduler()
    first, second = request("first", 9), request("second", 10)
    engine.add(first)
    step(engine)
    engine.add(second)
    step(engine)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert engine.load().num_used_pages == 4
    engine.abort("first")
    engine.check_integrity()
    assert engine.load().num_used_pages == 3


def test_whoever_needs_a_block_that_is_being_computed_waits_for_it() -> None:
    engine = scheduler()
    for name in ("a", "b"):
        engine.add(request(name, 9, max_tokens=1))
    engine.add(request("c", 6, first=200, max_tokens=1))
    assert shape(step(engine)) == [("a", 0, 9)]
    assert shape(step(engine)) == [("b", 8, 1), ("c", 0, 6)]


def test_without_prefix_cache_nobody_waits_for_blocks() -> None:
    engine = scheduler(enable_prefix_cache=False)
    for name in ("a", "b"):
        engine.add(request(name, 9, max_tokens=1))
    assert shape(step(engine)) == [("a", 0, 9), ("b", 0, 9)]


def test_nobody_waits_for_blocks_that_will_not_be_found() -> None:
    engine = scheduler(max_num_batched_tokens=9)
    engine.add(request("a", 16, max_tokens=1))
    assert shape(step(engine)) == [("a", 0, 9)]
    engine.flush_prefix_cache()  # what runs is not indexed any more
    engine.add(request("b", 16, max_tokens=1))
    assert shape(step(engine)) == [("a", 9, 7), ("b", 0, 2)]


@pytest.mark.parametrize("num_shared", [16, 23, 24, 40])
def test_blocks_are_waited_for_only_as_far_as_they_are_shared(num_shared: int) -> None:
    """And of a prompt that is computed in chunks nothing is computed twice."""
    engine = scheduler(max_num_batched_tokens=8)
    long = request("long", 40, max_tokens=1)
    other = request("other", [*long.prompt_token_ids[:num_shared], *range(900, 940 - num_shared)], max_tokens=1)
    engine.add(long)
    engine.add(other)
    computed = Counter()
    while engine.has_work():
        computed.update({row.request_id: row.query_len for row in step(engine).rows})
    assert computed["long"] == 40
    assert other.num_cached_tokens == min(num_shared // 4 * 4, 36)
    assert computed["other"] == 40 - other.num_cached_tokens


def test_a_preempted_request_that_waits_for_blocks_comes_back() -> None:
    engine = scheduler(num_pages=12, max_num_batched_tokens=4)
    made = [request(name, 12, max_tokens=20) for name in "abc"]
    for one in made:
        engine.add(one)
    run_to_end(engine)
    assert [len(one.output_token_ids) for one in made] == [20] * 3


@pytest.mark.parametrize(
    ("one", "other", "num_hit"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "a"}, 12),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, {}, 0),
        ({"media": (media(5, 6),)}, {"media": (media(5, 6),)}, 12),
        ({"media": (media(5, 6),)}, {"media": (media(5, 6, b"dog"),)}, 4),
        ({"media": (media(5, 6),)}, {}, 4),
        ({"media": (media(9, 2),)}, {"media": (media(9, 2, b"dog"),)}, 8),
        ({"seed": 1}, {"seed": 2}, 12),
    ],
)
def test_salts_and_media_separate_prefixes(one: dict[str, Any], other: dict[str, Any], num_hit: int) -> None:
    engine = scheduler()
    hit_tokens(engine, 13, **one)
    assert hit_tokens(engine, 13, **other) == num_hit


def test_media_at_another_place_is_another_prefix() -> None:
    def prompt(item: MediaItem) -> list[int]:
        return [9 if item.offset <= p < item.offset + item.length else 5 for p in range(13)]

    engine = scheduler()
    here, there = media(5, 2), media(6, 2)
    hit_tokens(engine, prompt(here), media=(here,))
    assert hit_tokens(engine, prompt(there), media=(there,)) == 4


def test_without_prefix_cache_nothing_is_found_or_kept() -> None:
    engine = scheduler(enable_prefix_cache=False)
    hit_tokens(engine, 13)
    assert hit_tokens(engine, 13) == 0
    load = engine.load()
    assert (load.num_cached_pages, load.num_prefix_queried_tokens) == (0, 0)


def test_the_least_recently_used_prefix_goes_first_from_its_end() -> None:
    engine = scheduler(num_pages=8)
    hit_tokens(engine, 12, first=100)
    hit_tokens(engine, 12, first=200)  # 6 cached pages, 1 free
    assert hit_tokens(engine, 5, first=100) == 4  # used again: block 0 of the first is now the most recent
    hit_tokens(engine, 12, first=300)  # needs 3: the free one and blocks 2 and 1 of the first prompt
    assert [hit_tokens(engine, 12, first=first) for first in (200, 100)] == [8, 4]


def test_cached_pages_do_not_stand_in_the_way_of_a_request_that_needs_all() -> None:
    engine = scheduler(num_pages=5)
    hit_tokens(engine, 12, first=100)
    assert engine.load().num_cached_pages == 3
    assert hit_tokens(engine, 15, first=200) == 0
    # Its own cached blocks count as pages it needs.
    hit_tokens(engine, 12, first=100)
    assert hit_tokens(engine, 15, first=100) == 12


def test_flush() -> None:
    engine = scheduler()
    hit_tokens(engine, 13)
    engine.add(request("a", 9, first=200, max_tokens=12))
    step(engine)
    assert engine.flush_prefix_cache() == 5
    engine.check_integrity()
    assert engine.load().num_cached_pages == 0
    run_to_end(engine)
    assert engine.load().num_cached_pages == 0  # what ran across the flush is not indexed either
    assert hit_tokens(engine, 13) == 0
    assert hit_tokens(engine, 13) == 12


def test_flush_while_a_step_is_in_flight() -> None:
    engine = scheduler()
    engine.add(request("a", 9, max_tokens=1))
    plan = engine.schedule()
    engine.flush_prefix_cache()
    commit(engine, plan, {}, {})
    assert engine.load().num_cached_pages == 0


# Preemption


def test_the_latest_arrival_gives_way_and_resumes_with_its_tokens() -> None:
    engine = scheduler(num_pages=7, enable_prefix_cache=False)
    old, new = (request(name, 8, first=first, max_tokens=12) for name, first in (("old", 100), ("new", 200)))
    engine.add(old)
    step(engine)
    engine.add(new)
    # 2 + 2 pages, then 3 + 3; at 13 tokens old needs a seventh.
    for _ in range(4):
        step(engine, {"new": 60})
    assert new.status is RequestStatus.RUNNING
    assert shape(step(engine)) == [("old", 12, 1)]
    assert new.status is RequestStatus.PREEMPTED
    assert new.output_token_ids == [60] * 4
    assert (engine.load().num_preemptions, engine.load().num_waiting) == (1, 1)
    while new.status is RequestStatus.PREEMPTED:
        plan = step(engine)
    assert old.is_finished
    assert shape(plan) == [("new", 0, 12)]
    assert list(plan.rows[0].token_ids) == [*new.prompt_token_ids, 60, 60, 60, 60]
    assert plan.rows[0].is_sampled
    run_to_end(engine)
    assert new.output_token_ids == [60] * 4 + [TOKEN] * 8
    assert engine.load().num_prompt_tokens == 16


def test_recomputation_is_shortened_by_the_prefix_index() -> None:
    engine = scheduler(num_pages=7)
    engine.add(request("old", 8, max_tokens=6))
    step(engine)
    new = request("new", 8, first=200, max_tokens=12)
    engine.add(new)
    while new.status is not RequestStatus.PREEMPTED:
        step(engine)
    while new.status is RequestStatus.PREEMPTED:
        plan = step(engine)
    # Three blocks were full; the last was evicted for old, which took it at once.
    assert shape(plan) == [("new", 8, new.num_tokens - 9)]
    assert new.num_cached_tokens == 0  # its own pages are not a hit of its prompt
    assert engine.load().num_prefix_hit_tokens == 0


def test_a_request_that_runs_out_while_it_is_the_latest_preempts_itself() -> None:
    engine = scheduler(num_pages=6)
    old, new = request("old", 5, max_tokens=7), request("new", 4, first=200, max_tokens=9)
    engine.add(old)
    engine.add(new)
    step(engine)
    while new.status is RequestStatus.RUNNING:
        plan = step(engine)
    assert shape(plan) == [("old", plan.rows[0].prefix_len, 1)]
    assert old.status is RequestStatus.RUNNING
    run_to_end(engine)
    assert (len(old.output_token_ids), len(new.output_token_ids)) == (7, 9)


def test_preempted_requests_come_back_in_order_of_arrival() -> None:
    engine = scheduler(num_pages=9, enable_prefix_cache=False)
    made = [request(name, 3, first=100 * i, max_tokens=25) for i, name in enumerate("abcd", start=1)]
    for one in made:
        engine.add(one)
    engine.add(request("late", 3, first=600, max_tokens=2))
    order: list[str] = []
    was_preempted: set[str] = set()
    while engine.has_work():
        before = {one.request_id for one in made if one.status is RequestStatus.RUNNING}
        step(engine)
        after = {one.request_id for one in made if one.status is RequestStatus.RUNNING}
        gone = {one.request_id for one in made if one.status is RequestStatus.PREEMPTED} & before
        assert all(name > other for name in gone for other in after & before)
        was_preempted |= gone
        order += sorted(after - before)
    assert was_preempted == {"b", "c", "d"}
    assert all(len(one.output_token_ids) == 25 for one in made)
    finished_order = [name for i, name in enumerate(order) if name not in order[i + 1 :]]
    assert finished_order == sorted(finished_order)


def test_nothing_is_admitted_in_the_step_that_preempts() -> None:
    engine = scheduler(num_pages=7, enable_prefix_cache=False)
    engine.add(request("old", 8, max_tokens=12))
    engine.add(request("new", 8, first=200, max_tokens=12))
    while engine.load().num_preemptions == 0:
        plan = step(engine)
    engine.add(request("small", 1, first=300))
    assert [row.request_id for row in plan.rows] == ["old"]
    assert [row.request_id for row in step(engine).rows] == ["old"]  # and nothing passes what was preempted


# Aborts


def test_abort_of_what_is_not_there() -> None:
    engine = scheduler()
    assert engine.abort("nobody") is None
    made = request("r", 4, max_tokens=1)
    engine.add(made)
    run_to_end(engine)
    assert engine.abort("r") is None
    assert made.finish_reason == "length"


def test_abort_while_waiting() -> None:
    engine = scheduler(max_num_seqs=1)
    made = [request(name, 4, max_tokens=2) for name in "abc"]
    for one in made:
        engine.add(one)
    step(engine)
    assert engine.abort("b") is made[1]
    engine.check_integrity()
    assert made[1].finish_reason == "abort"
    run_to_end(engine)
    assert made[1].output_token_ids == []
    assert made[2].finish_reason == "length"


def test_abort_between_steps_frees_at_once() -> None:
    engine = scheduler(max_num_batched_tokens=6)
    made = request("r", 10)
    engine.add(made)
    step(engine)  # half a prompt
    assert engine.abort("r") is made
    engine.check_integrity()
    assert not engine.has_work()
    load = engine.load()
    assert (load.num_used_pages, load.num_cached_pages) == (0, 1)


def test_abort_in_flight_keeps_the_pages_until_the_step_ends() -> None:
    engine = scheduler(num_pages=7)
    made, other = request("r", 12), request("other", 4, first=200)
    engine.add(made)
    engine.add(other)
    plan = engine.schedule()
    pages = list(plan.rows[0].pages)
    assert engine.abort("r") is made
    engine.check_integrity()
    assert made.finish_reason == "abort"
    assert engine.has_work()
    assert list(plan.rows[0].pages) == pages
    assert all(engine.pool.ref_count(page) == 1 for page in pages)
    assert engine.abort("r") is None
    engine.add(request("r", 4, first=300, max_tokens=1))  # the name is free again, the pages are not
    engine.check_integrity()
    outputs = commit(engine, plan, {}, {})
    assert [output.request for output in outputs] == [other]
    assert made.output_token_ids == []
    assert all(engine.pool.ref_count(page) == 0 for page in pages)
    assert [row.request_id for row in step(engine).rows] == ["other", "r"]


def test_abort_of_all_in_flight() -> None:
    engine = scheduler()
    for name in "ab":
        engine.add(request(name, 4))
    plan = engine.schedule()
    for name in "ab":
        engine.abort(name)
    assert commit(engine, plan, {}, {"a": "failed as well"}) == []
    assert not engine.has_work()
    assert engine.load().num_used_pages == 0


def test_abort_while_preempted() -> None:
    engine = scheduler(num_pages=7)
    engine.add(request("old", 8, max_tokens=12))
    new = request("new", 8, first=200, max_tokens=12)
    engine.add(new)
    while new.status is not RequestStatus.PREEMPTED:
        step(engine)
    assert engine.abort("new") is new
    engine.check_integrity()
    run_to_end(engine)
    assert engine.load().num_used_pages == 0


# Failed rows


def test_a_failed_row_ends_its_request_alone() -> None:
    engine = scheduler()
    bad, good = request("bad", 9), request("good", 9, first=200, max_tokens=3)
    engine.add(bad)
    engine.add(good)
    plan = engine.schedule()
    outputs = commit(engine, plan, {}, {"bad": "non-finite logits"})
    assert [(o.request.request_id, o.finish_reason, o.error, o.token_ids) for o in outputs] == [
        ("bad", "error", "non-finite logits", ()),
        ("good", None, None, (TOKEN,)),
    ]
    assert (bad.finish_reason, bad.output_token_ids) == ("error", [])
    run_to_end(engine)
    assert good.finish_reason == "length"
    assert hit_tokens(engine, 9) == 0
    assert hit_tokens(engine, 9, first=200) == 8


def test_a_failed_request_takes_its_earlier_blocks_and_its_hits_out_of_the_index() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    assert hit_tokens(engine, 5) == 0
    engine.add(request("bad", 20))
    assert shape(step(engine)) == [("bad", 4, 8)]
    assert shape(step(engine, errors={"bad": "non-finite logits"})) == [("bad", 12, 8)]
    assert engine.load().num_cached_pages == 0
    assert engine.load().num_used_pages == 0
    assert hit_tokens(engine, 8) == 0


def test_a_step_that_failed_as_a_whole() -> None:
    engine = scheduler()
    made = [request(name, 9, first=i * 100) for i, name in enumerate("abc", start=1)]
    for one in made:
        engine.add(one)
    step(engine)
    step(engine, errors=dict.fromkeys("abc", "out of memory"))
    assert [one.finish_reason for one in made] == ["error"] * 3
    assert not engine.has_work()
    load = engine.load()
    assert (load.num_used_pages, load.num_cached_pages) == (0, 0)


# The check itself


@pytest.mark.parametrize("fault", ["leak", "early free", "index", "stale hash", "order", "lost", "zombie"])
def test_check_integrity_finds_faults(fault: str) -> None:
    engine = scheduler(max_num_seqs=2)
    made = [request(name, 9, first=i * 100) for i, name in enumerate("abc", start=1)]
    for one in made:
        engine.add(one)
    step(engine)
    engine.check_integrity()
    if fault == "leak":
        engine.pool.allocate(1)
    elif fault == "early free":
        engine.pool.free(made[0].pages[-1:])
    elif fault == "index":
        engine.index.evict(made[0].pages[0])
    elif fault == "stale hash":
        made[0].tokens.prompt[0] += 1
    elif fault == "order":
        engine._running.reverse()
    elif fault == "lost":
        engine._waiting.clear()
    else:
        made[0].finish("abort")
    with pytest.raises(AssertionError):
        engine.check_integrity()
