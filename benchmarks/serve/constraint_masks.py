"""What a constraint costs a step on the CPU, with a vocabulary of M3's size.

The tokenizer is made up (200,064 byte strings: syllables, CJK, digits, punctuation), the outputs are random walks
through what is allowed. Times are of one thread.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from msaserve.engine.grammar import Grammars, Matcher
from msaserve.engine.plan import PlanRow
from msaserve.engine.sampler import sample
from msaserve.tokenizer import _byte_level_alphabet
from msaserve.types import Constraint, SamplingParams

VOCAB_SIZE = 200_064
EOS = VOCAB_SIZE - 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}
_FIELDS = {f"g{j}": {"type": ["string", "integer", "null"]} for j in range(10)}
_GROUP = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS)}
LARGE = {
    "type": "object",
    "properties": {f"f{i}": _GROUP for i in range(50)},
    "required": [f"f{i}" for i in range(50)],
}
CONSTRAINTS = {
    "json_object": Constraint(kind="json_object"),
    "json_schema, 6 fields": Constraint(kind="json_schema", text=json.dumps(PERSON)),
    "json_schema, 500 fields": Constraint(kind="json_schema", text=json.dumps(LARGE)),
    "regex": Constraint(kind="regex", text=r"[A-Z][a-z]+ [A-Z][a-z]+, \d{4}-\d\d-\d\d"),
    "choice of 100": Constraint(kind="choice", choices=tuple(f"label {i}" for i in range(100))),
}
_PAIRS = "thheinerandonatenesofornteatitoitstioleisouarasdertve"
SYLLABLES = [_PAIRS[i : i + 2] for i in range(0, len(_PAIRS) - 1, 2)]


def write_tokenizer(directory: Path) -> None:
    rng = random.Random(0)
    tokens = {bytes([i]): i for i in range(256)}
    while len(tokens) < VOCAB_SIZE - 1:
        kind = rng.random()
        if kind < 0.1:
            word = "".join(chr(rng.randint(0x4E00, 0x9FFF)) for _ in range(rng.randint(1, 3)))
        elif kind < 0.13:
            word = "".join(rng.choice('{}[]":,;()<>=+-*/ \n') for _ in range(rng.randint(2, 6)))
        elif kind < 0.16:
            word = str(rng.randrange(10 ** rng.randint(1, 4)))
        else:
            word = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 5)))
            word = word.capitalize() if rng.random() < 0.15 else word
        tokens.setdefault(((" " if rng.random() < 0.5 else "") + word).encode(), len(tokens))
    char_of = {byte: char for char, byte in _byte_level_alphabet().items()}
    vocab = {"".join(char_of[byte] for byte in token): i for token, i in tokens.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["[e~["])
    tokenizer.save(str(directory / "tokenizer.json"))


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def row(matcher: Matcher | None) -> PlanRow:
    sampling = SamplingParams(temperature=0.0)
    return PlanRow("r", [1], 0, array("i", [1]), sampling, 0, True, [9], [], (), matcher)


def walk(matcher: Matcher, rng: random.Random, num_tokens: int) -> list[float]:
    """Seconds of each mask on a random way, the advance by the last token included."""
    times: list[float] = []
    output: list[int] = []
    while len(output) < num_tokens:
        mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
        times.append(seconds(lambda mask=mask: matcher.fill(output, mask)))  # type: ignore[misc]
        token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
        if token == EOS:
            break
        output.append(token)
    return times


def main() -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        grammars = Grammars(Path(directory), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
        first = Constraint(kind="regex", text="a")
        print(f"first constraint, the tokenizer with it: {seconds(lambda: grammars.compile(first)):.1f} s")
    for name, constraint in CONSTRAINTS.items():
        compiling = seconds(lambda: grammars.compile(constraint))  # noqa: B023
        times = [t * 1e6 for _ in range(5) for t in walk(grammars.matcher(constraint, [1]), rng, 60)]
        median, p99 = np.percentile(times, (50, 99))
        print(
            f"{name}: compiled in {compiling * 1e3:.1f} ms; a mask takes {median:.0f} µs at the median, "
            f"{np.mean(times):.0f} on average, {p99:.0f} at p99 ({len(times)} masks)"
        )
    for num_rows in (1, 8, 64):
        logits = torch.randn(num_rows, VOCAB_SIZE)
        free = [row(None) for _ in range(num_rows)]
        held = [row(grammars.matcher(CONSTRAINTS["json_object"], [1])) for _ in range(num_rows)]
        results = []
        for rows in (free, held):
            sample(logits, rows, (EOS,))
            results.append(min(seconds(lambda: sample(logits, rows, (EOS,))) for _ in range(5)))  # noqa: B023
        print(f"sample() of {num_rows} rows: {results[0] * 1e3:.2f} ms free, {results[1] * 1e3:.2f} ms constrained")


if __name__ == "__main__":
    main()
