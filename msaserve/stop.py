"""Stop strings: where in a text the first of them ends, looked for as the text comes."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of some stop strings to be complete, one character after the other (Knuth, Morris, Pratt)."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._borders = [_borders(text) for text in stop]
        self._matched = [0] * len(stop)

    @property
    def num_held(self) -> int:
        """Characters at the end of what was pushed that may begin a stop string."""
        return max(self._matched)

    def push(self, text: str) -> tuple[int, int] | None:
        """(characters of text up to the end of the stop string, its length), or None. The longest, if two end there."""
        for position, char in enumerate(text, start=1):
            longest = 0
            for i, stop in enumerate(self._stop):
                matched = self._matched[i]
                while matched and stop[matched] != char:
                    matched = self._borders[i][matched - 1]
                if stop[matched] == char:
                    matched += 1
                if matched == len(stop):
                    longest = max(longest, matched)
                    matched = self._borders[i][matched - 1]
                self._matched[i] = matched
            if longest:
                return position, longest
        return None


def _borders(text: str) -> list[int]:
    """For each prefix: the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders
