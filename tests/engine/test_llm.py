"""Offline batches through the public name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from driver import greedy_prompt, greedy_tokens
from golden_data import golden

from msaserve import LLM, SamplingParams
from msaserve.cache import blocks
from msaserve.engine import engine, scheduler
from msaserve.errors import CheckpointError, InvalidRequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(golden("tiny")[0], device="cpu", max_model_len=1024, max_num_seqs=2, max_queue=1) as llm:
        yield llm


def test_token_ids_give_the_reference(llm: LLM) -> None:
    (output,) = llm.generate(greedy_prompt("tiny"), GREEDY)
    assert output.prompt_token_ids == greedy_prompt("tiny")
    (completion,) = output.outputs
    assert completion.token_ids == greedy_tokens("tiny")
    assert completion.finish_reason == "length"
    assert completion.logprobs is None
    assert completion.text == llm.tokenizer.decode(greedy_tokens("tiny"))
    (again,) = llm.generate([np.array(greedy_prompt("tiny"))], GREEDY)
    assert again.num_cached_tokens == 288


def test_texts_in_a_batch(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=6, n=2, logprobs=3)
    texts = ["one", "two", "three"]
    together = llm.generate(texts, sampling)
    alone = [llm.generate(text, sampling)[0] for text in texts]
    for a, b, text in zip(together, alone, texts, strict=True):
        assert a.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=True)
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert [o.index for o in a.outputs] == [0, 1]
        for completion in a.outputs:
            assert completion.logprobs is not None
            assert [lp.token_id for lp in completion.logprobs] == completion.token_ids
            assert all(len(lp.top) == 3 for lp in completion.logprobs)


def test_a_stop_string_ends_an_output_and_is_not_shown(llm: LLM) -> None:
    (whole,) = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop, "never said"))
    (cut,) = llm.generate("hello", params)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    assert len(cut.outputs[0].token_ids) < 40
    assert llm.engine.load().num_used_pages == 0


def test_eos_is_a_token_but_no_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, logit_bias={2: 100.0}, min_tokens=3)
    (output,) = llm.generate("hello", params)
    assert output.outputs[0].token_ids[-1] == 2
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids[:-1])


def test_a_refused_prompt_does_not_lose_the_others(llm: LLM) -> None:
    prompts = ["fine", "", [5] * 2000, [5, 10**6], greedy_prompt("tiny")]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "error", "error", "length"]
    assert "context length is 1024" in str(outputs[2].outputs[0].error)
    assert "1000000 is out of range" in str(outputs[3].outputs[0].error)
    assert outputs[4].outputs[0].token_ids == greedy_tokens("tiny")


def test_one_sampling_per_prompt(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5, ignore_eos=True)])
    assert len(outputs[1].outputs[0].token_ids) == 5
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    assert llm.generate([]) == []


def test_chat_uses_the_checkpoints_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, GREEDY)
    assert llm.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False).startswith("]~!b[")
    two = llm.chat([messages, [{"role": "user", "content": "other"}]], GREEDY)
    assert two[0].outputs[0].token_ids == one.outputs[0].token_ids
    with pytest.raises(InvalidRequestError):
        llm.chat([])


def test_without_a_tokenizer_token_ids_still_work() -> None:
    llm = LLM(golden("geometry")[0], device="cpu", max_model_len=512)
    assert len(llm.generate([5, 6], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
    with pytest.raises(CheckpointError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(CheckpointError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    (refused,) = llm.generate([5, 6], SamplingParams(stop=("x",)))
    assert "need a tokenizer" in str(refused.outputs[0].error)
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate([5])


def test_an_interrupt_anywhere_leaves_no_request_behind(llm: LLM) -> None:
    """Wherever it comes: at one line in 97 that the scheduler or the engine executes."""
    places = [module.__file__ for module in (scheduler, engine, blocks)]
    num_left = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_left
        if frame.f_code.co_filename not in places:
            return None
        num_left -= event == "line"
        if num_left == 0:
            raise KeyboardInterrupt
        return trace

    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, n=2)
    prompts = [[5] * 40, [5] * 40, [6] * 20]
    num_interrupts, is_whole = 0, False
    while not is_whole:
        num_left = 1 + 97 * num_interrupts
        sys.settrace(trace)
        try:
            llm.generate(prompts, params)
            is_whole = True
        except KeyboardInterrupt:
            num_interrupts += 1
        finally:
            sys.settrace(None)
        llm.engine.check_integrity()
        assert llm.engine.load().num_used_pages == 0
        assert not llm.engine.has_work()
    assert num_interrupts > 15
    assert llm.generate(greedy_prompt("tiny"), GREEDY)[0].outputs[0].token_ids == greedy_tokens("tiny")


def test_an_interrupt_leaves_no_request_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], GREEDY)
    assert llm.engine.load().num_used_pages == 0
    assert llm.generate(greedy_prompt("tiny"), GREEDY)[0].outputs[0].token_ids == greedy_tokens("tiny")
