from __future__ import annotations

import pytest
from fake_engine import EOS, TINY, FakeClient
from hypothesis import given, settings
from hypothesis import strategies as st

from msaserve.errors import EngineError, InvalidRequestError
from msaserve.gateway.stream import Generation, OutputText
from msaserve.observe.metrics import ServerMetrics
from msaserve.stop import StopMatcher
from msaserve.tokenizer import Tokenizer
from msaserve.types import GenerateRequest, Logprobs, SamplingParams, TokenEvent

TOKENIZER = Tokenizer.load(TINY)


def first_stop(text: str, stop: list[str]) -> int | None:
    """Where the text is cut: the stop string that is complete first counts, the longest of those that end together."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    return min(ends)[0] + min(ends)[1] if ends else None


def run(text: str, stop: list[str], sizes: list[int], **fields: int) -> tuple[list[str], OutputText]:
    output = OutputText(TOKENIZER, SamplingParams(stop=tuple(stop), **fields))  # type: ignore[arg-type]
    ids = TOKENIZER.encode_plain(text)
    pieces = []
    position = 0
    while position < len(ids) and output.finish_reason is None:
        size = sizes.pop(0) if sizes else 1
        group, position = ids[position : position + size], position + size
        delta = output.push(
            TokenEvent(token_ids=tuple(group), finish_reason="length" if position >= len(ids) else None)
        )
        if delta is not None:
            pieces.append(delta.text)
    return pieces, output


@given(
    st.text("abé", max_size=30),
    st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(1, 5)),
)
@settings(max_examples=500)
def test_stop_strings_cut_exactly_and_whatever_the_pieces(text: str, stop: list[str], sizes: list[int]) -> None:
    pieces, output = run(text, stop, sizes)
    cut = first_stop(text, stop)
    assert "".join(pieces) == text[:cut]
    if text:
        assert output.finish_reason == ("length" if cut is None else "stop")


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    output = OutputText(TOKENIZER, SamplingParams(stop=("END",)))
    shown = [output.push(TokenEvent(token_ids=(i,))) for i in TOKENIZER.encode_plain("aEEN.E")]
    assert [delta and delta.text for delta in shown] == ["a", None, "E", None, "EN.", None]
    last = output.push(TokenEvent(token_ids=(EOS,), finish_reason="stop", stop_token_id=EOS))
    assert last is not None
    assert (last.text, last.finish_reason) == ("E", "stop")
    assert output.num_tokens == 7


def test_matcher_finds_self_overlapping_strings() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa") is None
    assert matcher.num_held == 2
    assert matcher.push("ab!") == (2, 3)


def test_events_after_a_stop_are_ignored() -> None:
    pieces, output = run("one STOP two", ["STOP"], [100])
    assert pieces == ["one "]
    assert output.push(TokenEvent(token_ids=(70,), finish_reason="length")) is None
    assert output.finish_reason == "stop"


def test_stop_strings_wait_for_min_tokens() -> None:
    pieces, _ = run("xx_xx_", ["x"], [], min_tokens=3)
    assert "".join(pieces) == "xx_"


def test_logprobs_follow_the_text() -> None:
    output = OutputText(TOKENIZER, SamplingParams(stop=("cd",), logprobs=0))
    ids = TOKENIZER.encode_plain("é" + "abcd")
    deltas = [output.push(TokenEvent(token_ids=(i,), logprobs=(Logprobs(i, -1.0),))) for i in ids]
    shown = [(d.text, [(t.logprobs.token_id, t.offset) for t in d.tokens]) if d else None for d in deltas]
    assert shown == [
        None,
        ("é", [(ids[0], 0), (ids[1], 0)]),
        ("a", [(ids[2], 1)]),
        ("b", [(ids[3], 2)]),
        None,
        ("", []),
    ]


def test_a_stop_token_is_counted_and_not_shown() -> None:
    output = OutputText(TOKENIZER, SamplingParams(stop_token_ids=(70,), logprobs=0))
    delta = output.push(
        TokenEvent(
            token_ids=(69, 70), logprobs=(Logprobs(69, -1), Logprobs(70, -1)), finish_reason="stop", stop_token_id=70
        )
    )
    assert delta is not None
    assert delta.text == TOKENIZER.decode([69])
    assert [t.logprobs.token_id for t in delta.tokens] == [69]
    assert output.num_tokens == 2


def request(name: str = "r", **fields: object) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=[70, 71], sampling=SamplingParams(**fields))  # type: ignore[arg-type]


def generation(client: FakeClient, *requests: GenerateRequest) -> Generation:
    return Generation(client, TOKENIZER, requests, ServerMetrics("m"), arrival=0.0)


async def test_choices_of_several_prompts_and_outputs() -> None:
    client = FakeClient()
    client.scripts = [TOKENIZER.encode("ab"), TOKENIZER.encode("cde")]
    client.num_cached_tokens = 1
    run = generation(client, request("p", n=2), request("q", n=2))
    texts = [""] * 4
    async for choice, delta in run.deltas():
        texts[choice] += delta.text
    assert texts == ["ab", "cde", "ab", "cde"]
    assert (run.num_prompt_tokens, run.num_cached_tokens, run.num_output_tokens) == (4, 2, 2 * (3 + 4))
    assert not client.closed_early


async def test_a_stop_string_ends_the_request_early() -> None:
    client = FakeClient()
    client.script = TOKENIZER.encode("a.b")
    async for _ in generation(client, request(stop=(".",))).deltas():
        pass
    assert client.closed_early == ["r"]
    client.closed_early.clear()


async def test_a_stop_string_ends_one_output_alone() -> None:
    client = FakeClient()
    client.delay = 0.001
    client.by_seed = {5: TOKENIZER.encode("a." + "b" * 1000), 6: TOKENIZER.encode("cdefgh" * 3)}
    texts = ["", ""]
    run = generation(client, request(stop=(".",), n=2, seed=5))
    async for choice, delta in run.deltas():
        texts[choice] += delta.text
        if texts[1] == "cdefgh":
            assert client.running == {"r-1"}
    assert texts == ["a", "cdefgh" * 3]
    assert client.closed_early == ["r-0"]
    assert (run.num_prompt_tokens, run.num_output_tokens) == (2, 2 + 19)


@pytest.mark.parametrize("count", [1, 2])
async def test_closing_aborts(count: int) -> None:
    client = FakeClient()
    client.delay = 0.01
    client.script = TOKENIZER.encode("abc")
    deltas = generation(client, *(request(f"r{i}") for i in range(count))).deltas()
    await anext(deltas)
    await deltas.aclose()
    assert not client.running
    assert client.closed_early[:1] == ["r0"]


@pytest.mark.parametrize("count", [1, 2])
async def test_failures_pass(count: int) -> None:
    client = FakeClient()
    client.script = TOKENIZER.encode("abc")
    client.fail_after = 1
    with pytest.raises(EngineError, match="the fake engine fails"):
        async for _ in generation(client, *(request(f"r{i}") for i in range(count))).deltas():
            pass
    assert not client.running
    client.refusal = InvalidRequestError("too long")
    with pytest.raises(InvalidRequestError, match="too long"):
        await anext(generation(client, *(request(f"r{i}") for i in range(count))).deltas())
