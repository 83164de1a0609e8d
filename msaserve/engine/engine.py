"""The scheduler and the runner together: requests in, tokens out, one step at a time. Not thread-safe."""

from __future__ import annotations

import ctypes
import logging
import random
import sys
from pathlib import Path
from typing import Literal

import torch
from llguidance import LLMatcher

from msaserve import env
from msaserve.cache.kv import KVCache
from msaserve.config import EngineConfig, ModelConfig
from msaserve.engine.grammar import Grammars
from msaserve.engine.graphs import DecodeGraphs
from msaserve.engine.media import check_media
from msaserve.engine.plan import RowResult, StepResult
from msaserve.engine.request import Request
from msaserve.engine.runner import Runner
from msaserve.engine.scheduler import RequestOutput, Scheduler, SchedulerConfig
from msaserve.errors import InvalidRequestError
from msaserve.kv_events import KvEventLog
from msaserve.models.loader import load_model, resolve_device, resolve_dtype
from msaserve.models.memory_plan import cache_page_bytes
from msaserve.models.minimax_m3 import MiniMaxM3
from msaserve.ops.sparse_attend import IMPLS
from msaserve.types import EngineLoad, GenerateRequest, ModelInfo

_log = logging.getLogger(__name__)

_KEPT_BYTES = 2**30
"""Of freed memory, on a CPU."""


class Engine:
    """Continuous batching of one model on one device.

    Args:
        scheduler: decides what a step computes.
        runner: computes it.
        config: the model's.
        seed: of the seeds drawn for requests that name none.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, config: ModelConfig, *, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.config = config
        self._rng = random.Random(seed)
        self.grammars = Grammars(
            config.directory, vocab_size=config.text.vocab_size, eos_token_ids=config.eos_token_ids
        )
        cacheable = scheduler.pool.num_usable_pages * scheduler.config.block_size
        self.info = ModelInfo(
            model_type=config.model_type,
            vocab_size=config.text.vocab_size,
            max_model_len=min(scheduler.config.max_model_len, cacheable),
            eos_token_ids=config.eos_token_ids,
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            supports_vision=config.vision is not None,
        )

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | Path,
        config: EngineConfig | None = None,
        *,
        show_progress: bool = True,
        page_order: random.Random | None = None,
    ) -> Engine:
        """Load a model and give it as much cache as the budget holds and its requests can use.

        Args:
            directory: a checkpoint in the released format.
            show_progress: a bar on stderr while weights load, if that is a terminal.
            page_order: hand pages out in random order (tests).

        Raises:
            CheckpointError: the checkpoint cannot be served.
            InvalidRequestError: the budget for the cache does not hold a single block, or there is not that much
                memory; no such attend_impl.
        """
        config = config or EngineConfig()
        model_config = ModelConfig.from_checkpoint(directory)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        if device.type == "cpu":
            _keep_freed_memory()
        known = [impl.name for impl in IMPLS]
        if config.attend_impl not in (None, *known):
            raise InvalidRequestError(
                f"attend_impl must be one of {', '.join(known)}, not {config.attend_impl!r}", param="attend_impl"
            )
        try:
            model = load_model(directory, device, dtype, config=model_config, show_progress=show_progress)
            cache = _make_cache(model, config)
        except (MemoryError, torch.OutOfMemoryError) as error:
            reason = str(error).split("\n", 1)[0]
            raise InvalidRequestError(
                f"weights and cache do not fit into the memory of {device}: {reason}", param="kv_cache_gib"
            ) from error
        scheduler_config = SchedulerConfig(
            block_size=cache.block_size,
            num_pages=cache.num_pages,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len or model_config.max_model_len,
            vocab_size=model_config.text.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            enable_prefix_cache=config.enable_prefix_cache,
            max_queue=config.max_queue,
        )
        graphs = None
        if config.enable_decode_graphs and device.type == "cuda":
            limits = {"max_num_seqs": config.max_num_seqs, "max_model_len": scheduler_config.max_model_len}
            graphs = DecodeGraphs(model, cache, **limits, attend_impl=config.attend_impl)
        return cls(
            Scheduler(scheduler_config, rng=page_order),
            Runner(model, cache, attend_impl=config.attend_impl, graphs=graphs),
            model_config,
            seed=config.seed,
        )

    def add(self, request: GenerateRequest, compiled: LLMatcher | None = None) -> list[Request]:
        """Queue a request: one sequence for each of its n outputs, in order; output i has seed + i.

        compiled: what `grammars.compile` made of its constraint; None: it is compiled first.

        Raises:
            InvalidRequestError: it can never be served. Nothing of it is queued.
            OverloadedError: the queue is full. Nothing of it is queued.
        """
        sampling = request.sampling
        sampling.validate(vocab_size=self.config.text.vocab_size)
        limit = self.scheduler.config.max_queue
        if limit is not None and sampling.n > limit:  # "busy" would be a promise that is never kept
            raise InvalidRequestError(f"n is {sampling.n}, and at most {limit} outputs may wait here", param="n")
        for item in request.media:
            check_media(item, request.prompt_token_ids, self.config)
        constraint = sampling.constraint
        if constraint is not None and compiled is None:
            compiled = self.grammars.compile(constraint)
        seed = self._rng.getrandbits(63) if sampling.seed is None else sampling.seed
        sequences: list[Request] = []
        try:
            for i in range(sampling.n):
                sequence = Request(
                    request_id=request.request_id if sampling.n == 1 else f"{request.request_id}#{i}",
                    prompt_token_ids=request.prompt_token_ids,
                    sampling=sampling,
                    media=request.media,
                    cache_salt=request.cache_salt,
                    seed=seed + i,
                    matcher=None
                    if constraint is None
                    else self.grammars.matcher(constraint, request.prompt_token_ids, compiled),
                )
                self.scheduler.add(sequence, like=sequences[0] if sequences else None)
                sequences.append(sequence)
        except BaseException:
            for sequence in sequences:
                self.scheduler.abort(sequence.request_id)
            raise
        return sequences

    def abort(self, sequence: Request) -> None:
        """End a sequence that `add` returned with finish_reason "abort", unless it has.

        `step` reports nothing of it.
        """
        if not sequence.is_finished:
            self.scheduler.abort(sequence.request_id)

    def step(self) -> list[RequestOutput]:
        """Schedule, run, commit. If the run fails, every request of the step ends with an error and the others go on.

        Returns:
            One output for each sequence that got a token or ended.
        """
        plan = self.scheduler.schedule()
        if not plan.rows:
            return []
        try:
            result = self.runner.run(plan)
        except BaseException as error:
            message = f"the engine's step failed: {type(error).__name__}: {error}"
            outputs = self.scheduler.commit(plan, StepResult([RowResult(error=message) for _ in plan.rows]))
            if not isinstance(error, Exception) or isinstance(error, torch.AcceleratorError):
                raise  # an interrupt is the caller's, and of a device's error no later step recovers
            _log.exception("a step of %d rows and %d tokens failed", len(plan.rows), plan.num_tokens)
        else:
            outputs = self.scheduler.commit(plan, result)
        if env.is_check_on():
            self.check_integrity()
        return outputs

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def load(self) -> EngineLoad:
        return self.scheduler.load()

    def flush_prefix_cache(self) -> int:
        """Forget every cached prefix. Returns how many blocks it forgot."""
        return self.scheduler.flush_prefix_cache()

    def reset(self) -> None:
        """Forget every request and every cached prefix, whatever state an interrupt has left them in."""
        log = self.scheduler.kv_events
        self.scheduler = Scheduler(self.scheduler.config)
        self.scheduler.kv_events = log
        self.scheduler.flush_prefix_cache()

    def record_kv_events(self) -> KvEventLog | None:
        """A log of what the prefix cache gains and loses from now on; None if there is no prefix cache.

        Called before the first request.
        """
        config = self.scheduler.config
        self.scheduler.kv_events = KvEventLog(block_size=config.block_size) if config.enable_prefix_cache else None
        return self.scheduler.kv_events

    def check_integrity(self) -> None:
        """AssertionError if a page or a request is lost. For when the engine idles: O(pages + tokens)."""
        self.scheduler.check_integrity()


def _make_cache(model: MiniMaxM3, config: EngineConfig) -> KVCache:
    """Pages for the budget, but no more than max_num_seqs requests of the greatest length fill."""
    text = model.config.text
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
    page_bytes = cache_page_bytes(text, dtype, config.kv_cache_dtype)
    budget = _free_bytes(model.device) if config.kv_cache_bytes is None else config.kv_cache_bytes
    max_model_len = config.max_model_len or model.config.max_model_len
    num_useful = config.max_num_seqs * -(-max_model_len // text.block_size) + 1
    num_pages = min(budget // page_bytes, num_useful)
    if num_pages < 2:
        raise InvalidRequestError(
            f"a cache of {budget} bytes holds {budget // page_bytes} pages of {page_bytes} bytes; it must hold 2",
            param="kv_cache_gib",
        )
    return KVCache(
        num_layers=text.num_layers,
        sparse_layer_ids=text.sparse_layer_ids,
        num_pages=num_pages,
        block_size=text.block_size,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        index_dim=text.index_dim,
        dtype=model.dtype if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn,
        device=model.device,
    )


def _free_bytes(device: torch.device) -> int:
    """The cache's budget if none is given: what EngineConfig.kv_cache_gib says of None."""
    if device.type == "cuda":
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    return min(4 * 2**30, _free_host_bytes() // 4)


def _keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one, up to 1 GiB: taking it anew costs a fault for every 4 KiB,
    a fifth of a prefill. Process-wide; nothing where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX: the arenas of threads cannot hold what is large.
        for parameter, value in ((-3, _KEPT_BYTES), (-1, _KEPT_BYTES), (-8, 1)):
            mallopt(parameter, value)


def _free_host_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 16 * 2**30  # not Linux: a quarter of it is the upper bound
