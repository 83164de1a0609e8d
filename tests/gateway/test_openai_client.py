"""The unmodified `openai` client against the HTTP side with a fake engine: what its users would write."""

from __future__ import annotations

import openai
import pytest
from fake_engine import FakeClient

from msaserve.tokenizer import Tokenizer
from msaserve.types import SamplingParams


@pytest.fixture(autouse=True)
def _script(engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.script = tokenizer.encode("Grüße, world")


def test_models(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    assert openai_client.models.retrieve("tiny").owned_by == "msaserve"


def test_chat(openai_client: openai.OpenAI, engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.num_cached_tokens = 16
    answer = openai_client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "Grüße, world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    prompt = engine.requests[0].prompt_token_ids
    assert tokenizer.decode(prompt, skip_special_tokens=False) == "]~!b[]~b]user\nhi[e~[\n]~b]ai\n"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(engine.script) + 1
    assert answer.usage.total_tokens == len(prompt) + len(engine.script) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


def test_chat_stream(openai_client: openai.OpenAI, engine: FakeClient) -> None:
    stream = openai_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        n=2,
    )
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert "�" not in (choice.delta.content or "")
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]  # type: ignore[call-overload]
    assert texts == ["Grüße, world"] * 2
    assert reasons == ["stop", "stop"]
    assert usage is not None
    assert usage.completion_tokens == 2 * (len(engine.script) + 1)


def test_stream_helper(openai_client: openai.OpenAI) -> None:
    with openai_client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "hi"}]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Grüße, world"


def test_completions_of_several_prompts(openai_client: openai.OpenAI, engine: FakeClient, tokenizer: Tokenizer) -> None:
    answer = openai_client.completions.create(model="tiny", prompt=["a", "bc"], n=2, max_tokens=5)
    got = [(c.index, c.text, c.finish_reason) for c in answer.choices]
    assert got == [(i, tokenizer.decode(engine.script[:5]), "length") for i in range(4)]
    assert sorted(r.prompt_token_ids for r in engine.requests) == sorted(
        [tokenizer.encode("a"), tokenizer.encode("bc")]
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 20)


def test_completions_of_token_ids(openai_client: openai.OpenAI, engine: FakeClient) -> None:
    openai_client.completions.create(model="tiny", prompt=[5, 6, 260])
    openai_client.completions.create(model="tiny", prompt=[[5], [6]])
    assert [r.prompt_token_ids for r in engine.requests] == [[5, 6, 260], [5], [6]]
    assert engine.requests[0].sampling.max_tokens == 16
    openai_client.completions.create(model="tiny", prompt=[5] * 4090)
    assert engine.requests[-1].sampling.max_tokens == 6


def test_completions_stream(openai_client: openai.OpenAI) -> None:
    stream = openai_client.completions.create(model="tiny", prompt=["a", "b"], stream=True, max_tokens=100)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["Grüße, world"] * 2


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_stop(openai_client: openai.OpenAI, engine: FakeClient, burst: int) -> None:
    engine.burst = burst
    fields = {"model": "tiny", "prompt": "a", "max_tokens": 100}
    assert openai_client.completions.create(**fields, stop=", w").choices[0].text == "Grüße"  # type: ignore[call-overload]
    answer = openai_client.completions.create(**fields, stop=["zzz", "or", "ße"])  # type: ignore[call-overload]
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Grü", "stop")
    stream = openai_client.completions.create(**fields, stop=["world!", "rld"], stream=True)  # type: ignore[call-overload]
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(c.text for c in chunks) == "Grüße, wo"
    assert chunks[-1].finish_reason == "stop"


def test_stop_token_ids(openai_client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    comma = tokenizer.encode(",")[0]
    answer = openai_client.completions.create(
        model="tiny", prompt="a", max_tokens=99, extra_body={"stop_token_ids": [comma]}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Grüße", "stop")


def test_chat_logprobs(openai_client: openai.OpenAI, engine: FakeClient, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = openai_client.chat.completions.create(
        model="tiny",
        messages=messages,
        logprobs=True,
        top_logprobs=3,
        stop="w",  # type: ignore[arg-type]
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert b"".join(bytes(t.bytes or []) for t in content).decode() == "Grüße, " == answer.choices[0].message.content
    assert content[0].token == "G"
    assert content[0].logprob == -0.5
    assert [t.logprob for t in content[0].top_logprobs] == [-0.5, -1.5, -9999.0]
    pieces = []
    for chunk in openai_client.chat.completions.create(
        model="tiny",
        messages=messages,
        logprobs=True,
        stream=True,  # type: ignore[arg-type]
    ):
        if chunk.choices[0].logprobs is not None:
            text = b"".join(bytes(t.bytes or []) for t in chunk.choices[0].logprobs.content or []).decode()
            assert text == chunk.choices[0].delta.content
            pieces.append(text)
    assert "".join(pieces) == "Grüße, world"


def test_completions_logprobs(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(model="tiny", prompt="a", logprobs=2, max_tokens=4)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 1, 2, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0]["G"] == -0.5
    assert len(logprobs.top_logprobs[0]) == 2


def test_every_sampling_field_arrives(openai_client: openai.OpenAI, engine: FakeClient) -> None:
    openai_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        temperature=0.5,
        top_p=0.25,
        n=2,
        seed=7,
        stop=["x", "y"],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"65": -100},
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=4,
        extra_body={
            "top_k": 3,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [1, 2],
            "cache_salt": "s",
            "chat_template_kwargs": {"thinking_mode": "enabled"},
        },
    )
    # With stop strings each of the n outputs is a request of its own.
    assert [r.sampling.seed for r in engine.requests] == [7, 8]
    assert engine.requests[0].sampling == SamplingParams(
        n=1,
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={65: -100.0},
        seed=7,
        stop=("x", "y"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logprobs=4,
    )
    assert engine.requests[0].cache_salt == "s"
    assert engine.requests[0].prompt_token_ids[-1] == 264


def test_skip_special_tokens(openai_client: openai.OpenAI, engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.script = tokenizer.encode("<mm:think>a]~b]b")
    fields = {"model": "tiny", "prompt": "a"}
    assert openai_client.completions.create(**fields).choices[0].text == "<mm:think>ab"  # type: ignore[call-overload]
    answer = openai_client.completions.create(**fields, extra_body={"skip_special_tokens": False})  # type: ignore[call-overload]
    assert answer.choices[0].text == "<mm:think>a]~b]b"


def test_errors_are_the_clients_own(openai_client: openai.OpenAI, engine: FakeClient) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        openai_client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    assert "between 0 and 2" in str(bad.value)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        openai_client.completions.create(model="other", prompt="a")
    engine.fail_after = 2
    with pytest.raises(openai.InternalServerError, match="the fake engine fails"):
        openai_client.completions.create(model="tiny", prompt="a")
    stream = openai_client.completions.create(model="tiny", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="the fake engine fails"):
        list(stream)
