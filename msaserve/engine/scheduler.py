"""What is computed next. Pure Python: it knows requests, token counts and page numbers, never a tensor."""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from msaserve.cache.blocks import BlockPool
from msaserve.cache.prefix import BlockHashes, PrefixIndex, Tokens, media_between
from msaserve.engine import arrival
from msaserve.engine.plan import PlanRow, StepPlan, StepResult
from msaserve.engine.request import Request, RequestStatus
from msaserve.engine.seen import SeenTokens
from msaserve.errors import BusyError, InvalidRequestError
from msaserve.kv_events import KvEventLog
from msaserve.types import EngineLoad, FinishReason, Logprobs

_SHORT = 4
"""A prompt is short beside one that has so many times as much left: half of that one's speed is well spent on it."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Bounds of a step and of a request.

    Raises:
        ValueError: a bound that lets nothing run.
    """

    block_size: int
    num_pages: int
    """All pages, the dummy page included."""
    max_num_batched_tokens: int
    """Most tokens of one step, over all its rows."""
    max_num_seqs: int
    """Most requests that run at once, and so most rows of a step."""
    max_model_len: int
    """Most tokens of prompt and output that one request may have."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_cache: bool = True
    max_queue: int | None = None
    """Most requests that wait; None: any number."""

    def __post_init__(self) -> None:
        least = {
            "block_size": 1,
            "num_pages": 2,
            "max_num_batched_tokens": 1,
            "max_num_seqs": 1,
            "max_model_len": 2,
            "vocab_size": 1,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        if self.max_queue is not None and self.max_queue < 1:
            raise ValueError(f"max_queue must be at least 1 or None, got {self.max_queue}")


@dataclass(slots=True)
class RequestOutput:
    """What a step brought to one request: a token, its end, or both."""

    request: Request
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


class Scheduler:
    """Continuous batching over a paged cache: schedule, run, commit; one step at a time.

    - Order of service is order of arrival. Running requests come before waiting ones; among the running, those with one
      token to compute before those with a chunk of prompt, but younger ones leave the oldest prompt half of the budget.
    - A question need not wait for a book: where the oldest prompt takes more than this step, prompts of no more than a
      quarter of what it has left may take half of the step from it, the shortest first.
    - A request whose next block another's prompt is just coming to waits for it, and finds it in the prefix index.
    - A request is admitted when pages for all its known tokens are there, so a prompt once begun is never stopped
      half-way by its own growth; only decoding takes pages one by one.
    - When decoding finds no page, the latest arrival that runs gives up all of its pages. It keeps its tokens and is
      admitted again like a prompt, before anything that arrived later. The oldest request is therefore never stopped
      and, `add` having checked that it fits alone, always ends.

    Not thread-safe, but `add` and `abort` may be called between `schedule` and `commit`.

    Args:
        rng: hand pages out in random order (tests).
    """

    def __init__(self, config: SchedulerConfig, *, rng: random.Random | None = None) -> None:
        self.config = config
        self.index = PrefixIndex()
        self.pool = BlockPool(config.num_pages, on_evict=self._evict, rng=rng)
        self.kv_events: KvEventLog | None = None
        """Told what the prefix index gains and loses; whoever wants to know sets it before the first request."""
        self._requests: dict[str, Request] = {}
        # Both are ordered by arrival, and everything that runs arrived before everything that waits.
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._plan: StepPlan | None = None
        self._planned: list[Request] = []
        self._blocked: tuple[Request, int] | None = None
        self._num_added = 0
        self._num_preemptions = 0
        self._num_prefix_queried_tokens = 0
        self._num_prefix_hit_tokens = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def add(self, request: Request, *, like: Request | None = None) -> None:
        """Queue a request.

        Args:
            like: one of the same prompt, media and salt that was added: what comes of these is shared, not made anew.

        Raises:
            InvalidRequestError: it can never be served as it is.
            BusyError: the queue is full.
        """
        config = self.config
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        sampling = request.sampling
        if like is None:
            tokens = Tokens(arrival.checked_ids(request.prompt_token_ids, vocab_size=config.vocab_size))
            media = arrival.checked_media(request.media, len(tokens.prompt))
        else:
            tokens, media = like.tokens.fork(), like.media
        max_output_tokens = arrival.max_output_tokens(
            len(tokens.prompt),
            sampling.max_tokens,
            max_model_len=config.max_model_len,
            num_pages=self.pool.num_usable_pages,
            block_size=config.block_size,
        )
        if config.max_queue is not None and len(self._waiting) >= config.max_queue:
            raise BusyError(f"the queue is full: {len(self._waiting)} requests wait")
        request.tokens = tokens
        request.media = media
        if like is None or like.sampling is not sampling:
            request.seen = SeenTokens.of(sampling, request.prompt_token_ids)
        else:
            request.seen = None if like.seen is None else like.seen.fork()
        request.max_output_tokens = max_output_tokens
        request.stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            request.stop_ids |= frozenset(config.eos_token_ids)
        if like is not None and like.hashes is not None:
            request.hashes = like.hashes.fork(tokens)
        elif config.enable_prefix_cache:
            request.hashes = self._hashes(request)
        request.order = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request with finish_reason "abort"; None if it has ended already or never was.

        A step in flight may still write to its pages: then they are freed by `commit`, which reports nothing of it.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        is_running = request.status is RequestStatus.RUNNING
        request.finish("abort")
        if not is_running:
            self._waiting.remove(request)
            self._blocked = None
        elif self._plan is None:
            self._release_finished()
        return request

    def schedule(self) -> StepPlan:
        """The next step. Without rows if there is no work; otherwise `commit` must follow."""
        assert self._plan is None, "the last step was not committed"
        budget = self.config.max_num_batched_tokens
        half = budget - budget // 2
        planned: list[tuple[Request, PlanRow]] = []

        kept = 0
        for request in tuple(self._running):
            if request.num_left > 1:
                kept = half  # what came later leaves it this much
            elif budget <= kept or request.status is not RequestStatus.RUNNING or not self._grow(request):
                break  # it was preempted, and with it all that follow
            else:
                planned.append((request, self._row(request, 1)))
                budget -= 1
        prompts = [request for request in self._running if request.num_left > 1]
        # Whatever was just preempted waits first in line, for more pages than it gave up. Only if its blocks are those
        # of other requests too does it come back at once, sharing theirs; then there may be room for others behind it.
        while self._waiting and len(self._running) < self.config.max_num_seqs and _num_open(prompts, budget, half) > 0:
            request = self._waiting[0]
            # A short one need not wait for what stands still itself.
            is_short = bool(prompts) and _SHORT * request.num_tokens <= prompts[0].num_left
            others = [prompt for prompt, _ in _shares(prompts, budget, half)] if is_short else prompts
            if self._is_being_computed(request, others) or not self._admit(request):
                break
            prompts.append(request)
        planned += [(request, self._row(request, query_len)) for request, query_len in _shares(prompts, budget, half)]

        planned.sort(key=lambda pair: len(pair[1].token_ids) > 1)
        plan = StepPlan(rows=[row for _, row in planned])
        if planned:
            self._plan = plan
            self._planned = [request for request, _ in planned]
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take the results of the step in flight: append tokens, end what ends, free its pages, index full blocks.

        A step that failed as a whole is committed with an error in every row.

        Returns:
            One output for each request that got a token or ended; chunks of a prompt yield none.
        """
        if not plan.rows:
            return []
        assert plan is self._plan, "commit of a step that is not in flight"
        assert len(result.rows) == len(plan.rows), f"{len(result.rows)} results for {len(plan.rows)} rows"
        outputs: list[RequestOutput] = []
        for request, row, row_result in zip(self._planned, plan.rows, result.rows, strict=True):
            if request.is_finished:
                continue  # aborted while the step ran
            if row_result.error is not None:
                self._forget(request)
                request.finish("error")
                outputs.append(RequestOutput(request, finish_reason="error", error=row_result.error))
                continue
            request.num_computed_tokens += len(row.token_ids)
            if request.num_computed_tokens // self.config.block_size > request.num_indexed_blocks:
                self._index_blocks(request)
            if row.is_sampled:
                assert row_result.token_id is not None, f"request {request.request_id}: a sampled row without a token"
                request.append(row_result.token_id)
                self._num_output_tokens += 1
                logprobs = () if row_result.logprobs is None else (row_result.logprobs,)
                outputs.append(RequestOutput(request, (row_result.token_id,), logprobs, request.finish_reason))
        self._plan = None
        self._planned = []
        for output in outputs:
            if output.finish_reason is not None:
                del self._requests[output.request.request_id]
        self._release_finished()
        if self.kv_events is not None:
            self.kv_events.publish()
        return outputs

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def load(self) -> EngineLoad:
        """Counters; prompt and prefix tokens are counted when a request is first admitted."""
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=self.pool.num_usable_pages,
            num_used_pages=self.pool.num_used_pages,
            num_cached_pages=self.pool.num_cached_pages,
            num_prefix_queried_tokens=self._num_prefix_queried_tokens,
            num_prefix_hit_tokens=self._num_prefix_hit_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=self._num_preemptions,
        )

    def flush_prefix_cache(self) -> int:
        """Forget every cached prefix, and index nothing more of what runs now. Returns how many blocks it forgot."""
        pages = self.index.pages()
        for page in pages:
            self.index.evict(page)
            self.pool.drop(page)
        for request in self._running:
            request.is_indexed = False
        if self.kv_events is not None:
            self.kv_events.clear()
            self.kv_events.publish()
        return len(pages)

    def check_integrity(self) -> None:
        """AssertionError if pages, requests and the prefix index contradict one another. O(pages + tokens)."""
        self.pool.check_integrity()
        self.index.check_integrity()
        size = self.config.block_size
        held = Counter(page for request in self._running for page in request.pages)
        counts = self.pool.ref_counts()
        assert counts == held, f"page: references {counts}, page: requests that hold it {dict(held)}"
        assert self.pool.kept_pages() == set(self.index.pages()), "pool and index disagree on what is reusable"
        if self.kv_events is not None and self._plan is None:
            self.kv_events.check(self.index.digests())
        alive = [r for r in (*self._running, *self._waiting) if not r.is_finished]
        assert self._requests == {r.request_id: r for r in alive}, "a request is lost"
        orders = [r.order for r in (*self._running, *self._waiting)]
        assert orders == sorted(set(orders)), "requests are out of order"
        for request in self._waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert not request.pages, "a waiting request holds pages"
            assert request.num_computed_tokens == 0, "a waiting request has computed tokens"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING or request.finish_reason == "abort"
            assert request.finish_reason is None or self._plan is not None, "an aborted request outlives its step"
            assert len(set(request.pages)) == len(request.pages), "a request holds a page twice"
            assert request.num_computed_tokens <= len(request.pages) * size <= request.num_tokens + size - 1
            hashes = self._hashes(request)
            for block, page in enumerate(request.pages):
                digest = self.index.digest_of(page)
                if digest is not None:
                    assert block < request.num_computed_tokens // size, f"page {page} is indexed before it is full"
                    assert digest == hashes.digest(block), f"page {page} is indexed as another block"

    def _hashes(self, request: Request) -> BlockHashes:
        return BlockHashes(
            request.tokens,
            block_size=self.config.block_size,
            media=request.media,
            cache_salt=request.cache_salt,
        )

    def _row(self, request: Request, query_len: int) -> PlanRow:
        start = request.num_computed_tokens
        end = start + query_len
        return PlanRow(
            request_id=request.request_id,
            token_ids=request.tokens.between(start, end),
            prefix_len=start,
            pages=request.pages,
            sampling=request.sampling,
            seed=request.seed,
            is_sampled=end == request.num_tokens,
            prompt_token_ids=request.tokens.prompt,
            output_token_ids=request.output_token_ids,
            media=media_between(request.media, start, end),
            matcher=request.matcher,
            seen=request.seen,
        )

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _grow(self, request: Request) -> bool:
        """Get the pages for a running request's known tokens; False if it had to be preempted itself."""
        num_missing = self._num_pages(request.num_tokens) - len(request.pages)
        if num_missing <= 0:
            return True
        while self.pool.num_available_pages < num_missing:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                assert self._running, "a request alone does not fit, though it was accepted"
                return False
        request.pages.extend(self.pool.allocate(num_missing))
        return True

    def _preempt(self, request: Request) -> None:
        assert self._running[-1] is request
        self._running.pop()
        self._free_pages(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self._waiting.appendleft(request)
        self._num_preemptions += 1

    def _admit(self, request: Request) -> bool:
        """Move the first waiting request to the running ones if its pages are there, cached prefix included."""
        # One page for each running request to grow into, or what is admitted now would be preempted in a moment.
        num_spare = self.pool.num_available_pages - len(self._running)
        if self._blocked is not None:
            blocked, num_spare_then = self._blocked
            if blocked is request and num_spare <= num_spare_then:
                return False
        num_blocks = self._num_pages(request.num_tokens)
        hits: list[int] = []
        if request.hashes is not None:
            # Never all of it: the last token's logits are needed, so its block is computed.
            hits = self.index.match(request.hashes, (request.num_tokens - 1) // self.config.block_size)
        num_revived = sum(self.pool.ref_count(page) == 0 for page in hits)
        if num_blocks - len(hits) + num_revived > num_spare:
            self._blocked = (request, num_spare)
            return False
        self._blocked = None
        for page in hits:
            self.pool.share(page)
        request.pages = array("i", hits)
        request.pages.extend(self.pool.allocate(num_blocks - len(hits)))
        request.num_computed_tokens = len(hits) * self.config.block_size
        request.num_indexed_blocks = len(hits)
        request.is_indexed = request.hashes is not None
        request.status = RequestStatus.RUNNING
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = request.num_computed_tokens
            self._num_prompt_tokens += request.num_prompt_tokens
            if request.hashes is not None:
                self._num_prefix_queried_tokens += request.num_prompt_tokens
                self._num_prefix_hit_tokens += request.num_cached_tokens
        self._waiting.popleft()
        self._running.append(request)
        return True

    def _is_being_computed(self, request: Request, prompts: Sequence[Request]) -> bool:
        """Whether the block that a waiting request would compute first is the next of one of these prompts, too."""
        hashes, size = request.hashes, self.config.block_size
        if hashes is None:
            return False
        for other in prompts:
            block = other.num_computed_tokens // size
            if block < min((request.num_tokens - 1) // size, other.num_tokens // size) and other.is_indexed:
                assert other.hashes is not None
                # The first block's tells most of them apart, and is at hand.
                if all(hashes.digest(i) == other.hashes.digest(i) for i in (0, block)):
                    return True
        return False

    def _index_blocks(self, request: Request) -> None:
        """Offer the blocks that the last step completed to the prefix index."""
        size = self.config.block_size
        num_full_blocks = request.num_computed_tokens // size
        if request.is_indexed and request.hashes is not None:
            for block in range(request.num_indexed_blocks, num_full_blocks):
                page = request.pages[block]
                if self.index.insert(request.hashes.digest(block), page):
                    self.pool.keep(page)
                    if self.kv_events is not None:
                        self.kv_events.store(
                            digest=request.hashes.digest(block),
                            parent=request.hashes.digest(block - 1) if block else None,
                            token_ids=request.tokens.between(block * size, (block + 1) * size),
                            start=block * size,
                            media=media_between(request.media, block * size, (block + 1) * size),
                            salt=request.cache_salt,
                        )
        request.num_indexed_blocks = num_full_blocks

    def _forget(self, request: Request) -> None:
        """Take a failed request's pages out of the index: whatever broke it may stand in any of them."""
        for page in request.pages:
            if page in self.index:
                self._evict(page)
                self.pool.drop(page)

    def _evict(self, page: int) -> None:
        digest = self.index.evict(page)
        if self.kv_events is not None:
            self.kv_events.remove(digest)

    def _free_pages(self, request: Request) -> None:
        self.pool.free(request.pages)
        request.pages = array("i")

    def _release_finished(self) -> None:
        if any(request.is_finished for request in self._running):
            for request in self._running:
                if request.is_finished:
                    self._free_pages(request)
            self._running = [request for request in self._running if not request.is_finished]


def _short(prompts: Sequence[Request], budget: int) -> list[Request]:
    """Those that go before half of the first, the shortest first: none if a step can compute all of the first."""
    first = prompts[0].num_left
    if first <= budget:
        return []
    return sorted((one for one in prompts if _SHORT * one.num_left <= first), key=lambda one: one.num_left)


def _num_open(prompts: Sequence[Request], budget: int, half: int) -> int:
    """Tokens of what is left of a step's budget that `_shares` would leave to one more prompt, if that is short."""
    if not prompts:
        return budget
    if prompts[0].num_left <= budget:
        return budget - sum(request.num_left for request in prompts)
    return budget - half - sum(request.num_left for request in _short(prompts, budget))


def _shares(prompts: Sequence[Request], budget: int, half: int) -> list[tuple[Request, int]]:
    """Tokens of each prompt, in order of arrival, that this step computes; those without any are left out."""
    if not prompts:
        return []
    first = prompts[0].num_left
    lens = dict.fromkeys(prompts, 0)
    lens[prompts[0]] = first if first <= budget else min(budget, half)
    left = budget - lens[prompts[0]]
    for request in (*_short(prompts, budget), *prompts):
        more = min(request.num_left - lens[request], left)
        lens[request] += more
        left -= more
    return [(request, num_tokens) for request, num_tokens in lens.items() if num_tokens]
