from __future__ import annotations

import pytest
from masks import EOS, TINY

from msaserve.engine.grammar import Grammars


@pytest.fixture(autouse=True)
def _check_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSASERVE_CHECK", "1")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """Logits of 600 tokens, of which the tokenizer has 512."""
    return Grammars(TINY, vocab_size=600, eos_token_ids=(EOS,))
