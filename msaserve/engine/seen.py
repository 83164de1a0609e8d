"""Which tokens a sequence has: what penalties ask for at every step, kept so that no step counts them anew."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from msaserve.types import SamplingParams


class SeenTokens:
    """The distinct tokens of one sequence. A step reads the arrays and keeps no view of them: they grow behind it.

    prompt_ids: array('i') of a prompt's, which forks share; empty where no penalty asks for them.
    output_ids, output_counts: array('i'), parallel: the output's and how often each stands there.
    """

    __slots__ = ("_place", "output_counts", "output_ids", "prompt_ids")

    def __init__(self, prompt_ids: array[int]) -> None:
        self.prompt_ids = prompt_ids
        self.output_ids = array("i")
        self.output_counts = array("i")
        self._place: dict[int, int] = {}

    @classmethod
    def of(cls, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> SeenTokens | None:
        """Of a sequence without output; None if no penalty asks for it."""
        if sampling.repetition_penalty != 1:
            return cls(array("i", set(prompt_token_ids)))
        if sampling.frequency_penalty != 0 or sampling.presence_penalty != 0:
            return cls(array("i"))
        return None

    def fork(self) -> SeenTokens:
        """For another sequence of the same prompt and parameters, without output."""
        return SeenTokens(self.prompt_ids)

    def append(self, token_id: int) -> None:
        """An output token."""
        place = self._place.setdefault(token_id, len(self.output_ids))
        if place == len(self.output_ids):
            self.output_ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[place] += 1
