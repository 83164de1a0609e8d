"""One sequence as the scheduler sees it. A request for n outputs is n of these; who made them keeps the index."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msaserve.cache.prefix import BlockHashes, Tokens
from msaserve.engine.seen import SeenTokens
from msaserve.types import FinishReason, MediaItem, SamplingParams

if TYPE_CHECKING:
    from msaserve.engine.grammar import Matcher


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waits again: its pages were taken, its output tokens are kept and computed anew like a prompt."""
    FINISHED = "finished"


def _ids() -> array[int]:
    return array("i")


@dataclass(slots=True, eq=False)
class Request:
    """State of one sequence. The upper fields are the caller's, the lower ones the scheduler's."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    media: tuple[MediaItem, ...] = ()
    """In order of offset once `Scheduler.add` has taken it."""
    cache_salt: str = ""
    seed: int = 0
    matcher: Matcher | None = None
    """Of this sequence alone, if its sampling has a constraint."""

    output_token_ids: list[int] = field(default_factory=list)
    tokens: Tokens = field(default_factory=lambda: Tokens(_ids()))
    """Prompt and output; `Scheduler.add` brings the prompt, once its ids are known to fit."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, when one did; it is the last of output_token_ids."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix index when it was first admitted."""

    seen: SeenTokens | None = None
    """Of prompt and output, if there is a penalty."""

    pages: array[int] = field(default_factory=_ids)
    """block → page, while running."""
    num_computed_tokens: int = 0
    """Tokens whose K, V and index-K are in its pages."""
    num_indexed_blocks: int = 0
    """Full blocks already offered to the prefix index since the last admission."""
    is_indexed: bool = False
    """Whether blocks it completes may enter the prefix index."""
    hashes: BlockHashes | None = None
    max_output_tokens: int = 0
    """max_tokens, or what context length and pages leave."""
    stop_ids: frozenset[int] = frozenset()
    """End-of-sequence (unless ignored) and stop token ids."""
    order: int = -1
    """Counts calls of `Scheduler.add`: lower is served first and preempted last."""
    was_admitted: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.tokens)

    @property
    def num_left(self) -> int:
        """Known tokens whose K, V and index-K are not there: 1 while it decodes, more while its prompt is computed."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append(self, token_id: int) -> None:
        """Take a sampled token and decide whether it ends the request.

        A stop token ends it only after min_tokens other tokens: the sampler masks stop tokens while
        len(output_token_ids) < min_tokens, and this rule is the same.
        """
        has_min_tokens = len(self.output_token_ids) >= self.sampling.min_tokens
        self.output_token_ids.append(token_id)
        self.tokens.append(token_id)
        if self.seen is not None:
            self.seen.append(token_id)
        if has_min_tokens and token_id in self.stop_ids:
            self.stop_token_id = token_id
            self.finish("stop")
        elif len(self.output_token_ids) >= self.max_output_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        assert not self.is_finished, f"request {self.request_id} finishes twice"
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
