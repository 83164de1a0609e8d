"""What the tests of constraints share: `tiny`'s tokenizer, and which tokens a mask allows."""

from __future__ import annotations

import numpy as np
from golden_data import golden

from msaserve.engine.grammar import Matcher
from msaserve.tokenizer import Tokenizer

TINY = golden("tiny")[0]
TOKENIZER = Tokenizer.load(TINY)
EOS = 2


def allowed(matcher: Matcher, output: list[int], vocab_size: int = 600) -> set[int] | None:
    """None: everything."""
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    if not matcher.fill(output, mask):
        return None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
