"""Messages to types and back: nothing lost, nothing guessed, and what is not served refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb

from msaserve.errors import InvalidRequestError
from msaserve.rpc import convert
from msaserve.types import Constraint, EngineLoad, GenerateRequest, SamplingParams


def f32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


CONSTRAINTS = st.builds(
    Constraint,
    kind=st.sampled_from(["json_schema", "regex", "grammar", "structural_tag"]),
    text=st.text(max_size=8),
    after_reasoning=st.booleans(),
    param=st.sampled_from(["", "response_format"]),
) | st.sampled_from(
    [
        Constraint(kind="json_object"),
        Constraint(kind="json_object", after_reasoning=True, param="response_format"),
        Constraint(kind="choice", choices=("a", "b")),
        Constraint(kind="choice"),
    ]
)
SAMPLING = st.builds(
    SamplingParams,
    constraint=st.none() | CONSTRAINTS,
    n=st.integers(1, 128),
    max_tokens=st.none() | st.integers(1, 2**32 - 1),
    min_tokens=st.integers(0, 2**32 - 1),
    temperature=f32(0, 2),
    top_p=f32(2**-20, 1),
    top_k=st.integers(0, 2**32 - 1),
    min_p=f32(0, 1),
    presence_penalty=f32(-2, 2),
    frequency_penalty=f32(-2, 2),
    repetition_penalty=f32(0.0625, 10),
    logit_bias=st.dictionaries(st.integers(0, 200_063), f32(-100, 100), max_size=4),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 200_063), max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)


def back(message: Any, **options: Any) -> GenerateRequest:
    return convert.request_from_proto(
        pb.GenerateRequest.FromString(message.SerializeToString()),
        **{"normalize": lambda patches: patches, "tokenize": None, **options},
    )


@settings(max_examples=200, deadline=None)
@given(SAMPLING, st.lists(st.integers(0, 200_063), min_size=1, max_size=20), st.text(max_size=8), st.booleans())
def test_a_request_comes_back_as_it_was(
    sampling: SamplingParams, prompt: list[int], salt: str, has_surrogate: bool
) -> None:
    request = GenerateRequest(
        request_id="r", prompt_token_ids=prompt, sampling=sampling, cache_salt=salt + "\udc80" * has_surrogate
    )
    assert back(convert.request_to_proto(request), metadata=convert.request_metadata(request)) == request


def test_a_wide_seed_without_metadata_stays_deterministic() -> None:
    for seed in (2**31, -(2**31) - 1, 2**64 - 1, -(2**63)):
        message = convert.sampling_to_proto(SamplingParams(seed=seed))
        assert 0 <= message.seed < 2**31
        assert message.seed == convert.sampling_to_proto(SamplingParams(seed=seed)).seed
    assert convert.sampling_to_proto(SamplingParams(seed=-5)).seed == -5


def test_what_proto3_leaves_at_zero_means_the_default() -> None:
    sampling = convert.sampling_from_proto(pb.SamplingParams())
    assert sampling == SamplingParams()
    assert (sampling.top_p, sampling.repetition_penalty, sampling.n, sampling.temperature) == (1.0, 1.0, 1, 1.0)
    assert sampling.max_tokens is sampling.seed is sampling.logprobs is None
    # These can be unset, so that 0 is 0.
    explicit = convert.sampling_from_proto(pb.SamplingParams(temperature=0, max_tokens=0, seed=0, logprobs=0))
    assert (explicit.temperature, explicit.max_tokens, explicit.seed, explicit.logprobs) == (0.0, 0, 0, 0)


def test_values_beyond_a_field_keep_their_meaning() -> None:
    sampling = SamplingParams(top_p=1e-300, top_k=2**40, max_tokens=2**40, min_tokens=2**33)
    message = convert.sampling_to_proto(sampling)
    assert 0 < message.top_p < 1e-30
    assert message.top_k == message.max_tokens == message.min_tokens == 2**32 - 1


@pytest.mark.parametrize("prompt", [[-1], [2**32]])
def test_what_no_field_can_hold_is_the_senders_fault(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        convert.request_to_proto(GenerateRequest(request_id="r", prompt_token_ids=prompt))


def test_a_salt_must_fit_into_metadata() -> None:
    request = GenerateRequest(request_id="r", prompt_token_ids=[1], cache_salt="x" * 5000)
    with pytest.raises(InvalidRequestError, match="5000 characters"):
        convert.request_metadata(request)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling_params": {"prompt_logprobs": 0}}, "prompt_logprobs"),
        ({"sampling_params": {"truncate_prompt_tokens": 5}}, "truncate_prompt_tokens"),
        ({"sampling_params": {"logprobs": -1}}, "logprobs"),
        ({"kv_transfer_params": {"remote_host": "h"}}, "kv_transfer_params"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"media_refs": {"items": [{"url": "http://a"}]}}, "media_refs"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"text": "without a tokenizer"}, "text"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    given_fields = fields if "text" in fields else {"tokenized": {"input_ids": [1]}, **fields}
    with pytest.raises(InvalidRequestError) as caught:
        back(pb.GenerateRequest(request_id="r", **given_fields))
    assert caught.value.param == param
    assert param in str(caught.value) or param == "text"


def test_what_means_nothing_is_taken() -> None:
    sampling = pb.SamplingParams(json_object=False, skip_special_tokens=True, spaces_between_special_tokens=True)
    request = back(pb.GenerateRequest(tokenized={"input_ids": [1]}, sampling_params=sampling, data_parallel_rank=0))
    assert request.sampling == SamplingParams()
    assert request.request_id  # one was made
    assert request.media == ()
    with pytest.raises(InvalidRequestError, match="no input"):
        back(pb.GenerateRequest(request_id="r"))


def test_text_is_tokenised_where_there_is_a_tokenizer() -> None:
    request = back(pb.GenerateRequest(request_id="r", text="abc"), tokenize=lambda text: [ord(c) for c in text])
    assert request.prompt_token_ids == [97, 98, 99]


LOAD = EngineLoad(
    num_running=3,
    num_waiting=2,
    num_pages=50,
    num_used_pages=20,
    num_cached_pages=7,
    num_prefix_queried_tokens=100,
    num_prefix_hit_tokens=25,
    num_prompt_tokens=400,
    num_output_tokens=77,
    num_preemptions=1,
)


def test_a_load() -> None:
    message = convert.load_to_proto(LOAD, block_size=16, max_num_seqs=6, tokens_per_second=12.5)
    assert (message.num_running_reqs, message.num_waiting_reqs, message.num_total_reqs) == (3, 2, 5)
    assert (message.num_used_tokens, message.max_total_num_tokens) == (320, 800)
    assert (message.token_usage, message.cache_hit_rate, message.utilization) == (0.4, 0.25, 0.5)
    assert (message.gen_throughput, message.max_running_requests) == (12.5, 6)
    response = pb.GetLoadsResponse(loads=[message])
    assert convert.load_from_proto(response, convert.load_metadata(LOAD), block_size=16) == LOAD
    for metadata in (None, (("msaserve-load-bin", b"{"),)):
        other = convert.load_from_proto(response, metadata, block_size=16)
        assert (other.num_running, other.num_waiting, other.num_pages, other.num_used_pages) == (3, 2, 50, 20)


def test_floats_are_rounded_to_float32_and_no_further() -> None:
    sampling = convert.sampling_from_proto(convert.sampling_to_proto(SamplingParams(temperature=0.7, top_p=0.95)))
    assert sampling.temperature == float(np.float32(0.7))
    assert sampling.top_p == float(np.float32(0.95))
    assert math.isnan(convert.sampling_from_proto(pb.SamplingParams(min_p=math.nan)).min_p)  # the engine refuses it
