"""What the scheduler and the runner share: a StepPlan goes in, a StepResult comes out. Nothing else passes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msaserve.types import Logprobs, MediaItem, SamplingParams

if TYPE_CHECKING:
    from msaserve.engine.grammar import Matcher
    from msaserve.engine.seen import SeenTokens


@dataclass(slots=True)
class PlanRow:
    """One request's part of a step: query_len tokens at positions prefix_len … prefix_len + query_len − 1.

    Sequences are the scheduler's own, shared by reference: the runner reads them during the step and keeps none.
    """

    request_id: str
    token_ids: Sequence[int]
    """The tokens to compute, query_len of them."""
    prefix_len: int
    """Tokens whose K, V and index-K are already cached."""
    pages: array[int]
    """block → page, at least ceil((prefix_len + query_len) / block_size) of them. array('i')."""
    sampling: SamplingParams
    seed: int
    is_sampled: bool
    """Whether the row's last token yields an output token; False for all chunks of a prompt but the last."""
    prompt_token_ids: array[int] = field(default_factory=lambda: array("i"))
    """array('i')."""
    output_token_ids: Sequence[int] = ()
    """All output tokens so far: their number is the position that keys the random number."""
    media: Sequence[MediaItem] = ()
    """The request's media that overlap this step's positions."""
    matcher: Matcher | None = None
    """What the constraint allows after output_token_ids; None without one. The request's own, as it is followed."""
    seen: SeenTokens | None = None
    """The distinct tokens of prompt and output; None without penalties."""

    @property
    def query_len(self) -> int:
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        return self.prefix_len + len(self.token_ids)


@dataclass(slots=True)
class StepPlan:
    rows: list[PlanRow]
    """Rows of one query token first."""

    @property
    def num_tokens(self) -> int:
        return sum(row.query_len for row in self.rows)


@dataclass(slots=True)
class RowResult:
    """Parallel to StepPlan.rows."""

    token_id: int | None = None
    """None for a row that is not sampled, or that failed."""
    logprobs: Logprobs | None = None
    error: str | None = None
    """This row alone failed (non-finite logits, broken media): the scheduler ends its request with this message."""


@dataclass(slots=True)
class StepResult:
    rows: list[RowResult] = field(default_factory=list)
