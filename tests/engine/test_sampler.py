"""The sampler against a slow oracle that treats one row at a time in plain Python, and against the distribution it must
draw from."""

from __future__ import annotations

import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch

from msaserve.engine.plan import PlanRow
from msaserve.engine.sampler import sample, uniform
from msaserve.engine.seen import SeenTokens
from msaserve.types import SamplingParams

EOS = (2, 5)


def plan_row(
    params: SamplingParams, *, seed: int = 0, output: Sequence[int] = (), prompt: Sequence[int] = (1,)
) -> PlanRow:
    return PlanRow(
        request_id="r",
        token_ids=[1],
        prefix_len=0,
        pages=array("i", [1]),
        sampling=params,
        seed=seed,
        is_sampled=True,
        prompt_token_ids=array("i", prompt),
        seen=seen(params, prompt, output),
        output_token_ids=output,
    )


def seen(params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> SeenTokens | None:
    made = SeenTokens.of(params, prompt)
    for token in output if made is not None else ():
        made.append(token)
    return made


def oracle_distribution(logits: Sequence[float], row: PlanRow) -> list[float]:
    """The probabilities a row's token is drawn with (one-hot for greedy), one token and one rule at a time."""
    params = row.sampling
    x = list(logits)
    seen = set(row.output_token_ids) | set(row.prompt_token_ids)
    counts = Counter(row.output_token_ids)
    for token in range(len(x)):
        if token in seen:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * counts[token]
        if counts[token]:
            x[token] -= params.presence_penalty
        x[token] += params.logit_bias.get(token, 0.0)
    if len(row.output_token_ids) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else EOS)):
            x[token] = -math.inf
    best = max(x)
    if params.temperature == 0:
        return [float(token == x.index(best)) for token in range(len(x))]
    p = [math.exp((value - best) / params.temperature) for value in x]
    order = sorted(range(len(p)), key=lambda token: -p[token])
    kept = [token for token in order if p[token] >= params.min_p]
    if params.top_k:
        kept = kept[: params.top_k]
    total, cumulative, nucleus = sum(p[token] for token in kept), 0.0, []
    for token in kept:
        if cumulative >= params.top_p * total:
            break
        nucleus.append(token)
        cumulative += p[token]
    total = sum(p[token] for token in nucleus)
    return [p[token] / total if token in nucleus else 0.0 for token in range(len(p))]


def oracle_token(logits: Sequence[float], row: PlanRow) -> int:
    p = oracle_distribution(logits, row)
    point, cumulative = uniform(row.seed, len(row.output_token_ids)), 0.0
    for token, probability in enumerate(p):
        cumulative += probability
        if cumulative > point:
            return token
    return max(token for token, probability in enumerate(p) if probability > 0)


def random_row(rng: random.Random, vocab_size: int) -> PlanRow:
    fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.3, 1.0, 1.7])}
    choices: dict[str, list[Any]] = {
        "top_k": [0, 1, 3, 10, vocab_size + 5],
        "top_p": [1.0, 0.05, 0.5, 0.9],
        "min_p": [0.0, 0.05, 0.4],
        "presence_penalty": [0.0, 0.7, -1.0],
        "frequency_penalty": [0.0, 0.4, -0.5],
        "repetition_penalty": [1.0, 1.3, 0.8],
        "logit_bias": [{}, {3: 4.0, 7: -100.0}, {rng.randrange(vocab_size): 2.5}],
        "min_tokens": [0, 4],
        "stop_token_ids": [(), (9, 11)],
        "ignore_eos": [False, True],
    }
    for name, values in choices.items():
        if rng.random() < 0.4:
            fields[name] = rng.choice(values)
    output = [rng.randrange(vocab_size) for _ in range(rng.randrange(8))]
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 8))]
    return plan_row(SamplingParams(**fields), seed=rng.getrandbits(64), output=output, prompt=prompt)


@pytest.mark.parametrize("vocab_size", [13, 200])
def test_every_row_of_a_mixed_batch_equals_the_oracle(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    for num_rows in (1, 2, 17, 60):
        for _ in range(6):
            logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
            rows = [random_row(rng, vocab_size) for _ in range(num_rows)]
            before = logits.clone()
            got = [result.token_id for result in sample(logits, rows, EOS)]
            assert got == [oracle_token(logits[i].tolist(), row) for i, row in enumerate(rows)]
            assert torch.equal(logits, before)


def test_a_row_does_not_feel_its_batch() -> None:
    rng = random.Random(3)
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(3)) * 2
    rows = [random_row(rng, 300) for _ in range(40)]
    together = sample(logits, rows, EOS)
    alone = [sample(logits[i : i + 1], [row], EOS)[0] for i, row in enumerate(rows)]
    assert together == alone
    order = list(range(40))
    rng.shuffle(order)
    assert sample(logits[order], [rows[i] for i in order], EOS) == [alone[i] for i in order]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.0, top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.15),
        SamplingParams(temperature=1.4, top_k=9, top_p=0.9, min_p=0.02),
        SamplingParams(frequency_penalty=0.8, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={4: 1.0}),
    ],
    ids=["plain", "cold", "top_k", "top_p", "min_p", "all filters", "penalties"],
)
def test_the_distribution_is_the_one_asked_for(params: SamplingParams) -> None:
    """Chi-square over many seeds, below the 99.9 % quantile (Wilson-Hilferty)."""
    num_draws, vocab_size = 20_000, 16
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(11)) * 1.5
    rows = [plan_row(params, seed=seed, output=[3, 3, 4], prompt=[7, 3]) for seed in range(num_draws)]
    counts = Counter(r.token_id for r in sample(logits.expand(num_draws, -1), rows, EOS))
    expected = [p * num_draws for p in oracle_distribution(logits.tolist(), rows[0])]
    assert all(expected[token] > 0 for token in counts if token is not None)
    cells = [(counts[token], e) for token, e in enumerate(expected) if e >= 5]
    statistic = sum((observed - e) ** 2 / e for observed, e in cells)
    df = max(1, len(cells) - 1)
    assert statistic < df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3


def test_successive_positions_of_one_seed_are_independent() -> None:
    draws = [uniform(42, position) for position in range(20_000)]
    assert abs(sum(draws) / len(draws) - 0.5) < 0.01
    cells = Counter((int(a * 4), int(b * 4)) for a, b in pairwise(draws))
    assert sum((cells[i, j] - 1250) ** 2 / 1250 for i in range(4) for j in range(4)) < 38  # 99.9 % at 15 df: 37.7


def test_uniform_is_fixed_for_ever_and_takes_any_seed() -> None:
    assert uniform(0, 0) != uniform(0, 1) != uniform(1, 0)
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
    assert uniform(2**64 + 5, 3) == uniform(5, 3)
    assert uniform(1234, 56) == 0.3195737360940297
    assert all(0 <= uniform(seed, 0) < 1 for seed in range(1000))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_bad_logits_fails_alone(bad: float, temperature: float) -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(5))
    rows = [plan_row(SamplingParams(temperature=temperature, top_p=0.9, logprobs=2), seed=i) for i in range(5)]
    healthy = sample(logits, rows, EOS)
    logits[1, 17] = bad
    logits[3] = bad
    results = sample(logits, rows, EOS)
    for i, result in enumerate(results):
        if i in (1, 3):
            assert result.token_id is None
            assert result.logprobs is None
            assert result.error is not None
            assert "not finite" in result.error
        else:
            assert result == healthy[i]


def test_a_row_with_every_token_banned_fails_alone() -> None:
    params = SamplingParams(temperature=1.0, min_tokens=3, stop_token_ids=tuple(range(10)))
    results = sample(torch.zeros(2, 10), [plan_row(params), plan_row(SamplingParams(temperature=0))], EOS)
    assert results[0].error == "no token is left to choose from"
    assert results[1].token_id == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_back_what_ends_a_request(temperature: float) -> None:
    logits = torch.full((1, 12), -20.0)
    logits[0, 2], logits[0, 9], logits[0, 4] = 30.0, 25.0, 20.0

    def token(**fields: Any) -> int | None:
        output = fields.pop("output", ())
        params = SamplingParams(temperature=temperature, stop_token_ids=(9, 10_000), **fields)
        return sample(logits, [plan_row(params, output=output)], EOS)[0].token_id

    assert token(min_tokens=2) == 4
    assert token(min_tokens=2, output=[4]) == 4
    assert token(min_tokens=2, output=[4, 4]) == 2
    assert token(min_tokens=2, ignore_eos=True) == 2


@pytest.mark.parametrize("num_top", [0, 1, 5, 100])
def test_logprobs_are_of_the_untouched_distribution(num_top: int) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(8)) * 2
    params = SamplingParams(temperature=0.5, top_k=4, presence_penalty=1.0, logit_bias={6: 50.0}, logprobs=num_top)
    rows = [
        plan_row(params, output=[1, 2], seed=1),
        plan_row(SamplingParams()),
        plan_row(msgspec.structs.replace(params, temperature=0.0), seed=4),
    ]
    first, without, greedy = sample(logits, rows, EOS)
    assert without.logprobs is None
    for i, result in ((0, first), (2, greedy)):
        expected = logits[i].double().log_softmax(-1)
        found = result.logprobs
        assert found is not None
        assert found.token_id == result.token_id == 6
        assert found.logprob == pytest.approx(expected[6].item(), abs=1e-5)
        order = expected.argsort(descending=True)[:num_top].tolist()
        assert [token for token, _ in found.top] == order
        assert [value for _, value in found.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def test_equal_logits_share_the_last_place() -> None:
    """A filter keeps every token as likely as the last one it keeps: no order among equals is invented."""
    logits = torch.tensor([[1.0, 0.0, 0.0, -1.0]]).expand(400, -1)
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        rows = [plan_row(params, seed=seed) for seed in range(400)]
        assert {result.token_id for result in sample(logits, rows, EOS)} == {0, 1, 2}


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.999]])
    for temperature in (1e-12, 1e-300):
        assert sample(logits, [plan_row(SamplingParams(temperature=temperature))], EOS)[0].token_id == 1
    hot = [plan_row(SamplingParams(temperature=1e6), seed=seed) for seed in range(600)]
    counts = Counter(r.token_id for r in sample(logits.expand(600, -1), hot, EOS))
    assert all(150 < counts[token] < 250 for token in range(3))


def test_half_precision_and_no_rows() -> None:
    assert sample(torch.zeros(0, 8), [], EOS) == []
    logits = torch.zeros(1, 8, dtype=torch.bfloat16)
    logits[0, 6] = 4
    assert sample(logits, [plan_row(SamplingParams(temperature=0))], EOS)[0].token_id == 6


def test_penalties_cost_what_tokens_there_are_and_not_how_often_they_stand() -> None:
    """A long answer's step is as fast as a short one's: no step counts anew, a hundred times as many here."""
    params = SamplingParams(temperature=0.0, frequency_penalty=0.1, repetition_penalty=1.1)
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(1))
    seconds = []
    for num_tokens in (5_000, 500_000):
        rows = [plan_row(params, output=[i % 500 for i in range(num_tokens)]) for _ in range(8)]
        times = []
        for _ in range(20):
            start = time.thread_time()
            sample(logits, rows, EOS)
            times.append(time.thread_time() - start)
        seconds.append(min(times))
    assert seconds[1] < 5 * seconds[0]
