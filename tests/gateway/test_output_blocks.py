"""Blocks against the messages of chat completions: any output, cut anywhere, says the same."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from msaserve.gateway.apis.blocks import Block, Blocks
from msaserve.gateway.chat_output import ChatOutput
from msaserve.gateway.tools import tool_use

NS = "]<]minimax[>["
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
FRAGMENTS = (
    "<mm:think>", "</mm:think>", "text", " \n", "{", f"{NS}<tool_call>", f"{NS}</tool_call>", f'{NS}<invoke name="f">',
    f"{NS}</invoke>", f"{NS}<a>", f"{NS}</a>", f'{NS}<invoke name="f">{NS}<a>b{NS}</a>{NS}</invoke>',
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    reason=st.sampled_from(["stop", "length"]),
    is_parallel=st.booleans(),
)
def test_blocks_say_what_the_message_says(
    fragments: list[str], cuts: list[int], reason: str, is_parallel: bool
) -> None:
    text = "".join(fragments)
    use = tool_use(TOOLS, None, is_parallel)
    message, finish_reason = ChatOutput(use, "adaptive").push(text, reason)
    output, blocks, steps = ChatOutput(use, "adaptive"), Blocks(), []
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(bounds):
        steps += blocks.push(output.read(text[start:end], None)[0])
    events, last_reason = output.read("", reason)
    steps += blocks.push(events) + blocks.finish(last_reason or "")

    assert last_reason == finish_reason

    def joined(kind: str) -> str:
        return "".join(block.text for block in blocks.all if block.kind == kind)

    assert joined("text") == (message.content or "")
    assert joined("thinking") == (message.reasoning_content or "")
    calls = [block for block in blocks.all if block.kind == "call"]
    assert [(c.name, c.text) for c in calls] == [
        (call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    assert (last_reason == "tool_calls") == (reason == "stop" and any(call.is_complete for call in calls))
    for call in calls:
        if call.is_complete:
            json.loads(call.text)
        else:
            assert call.source
    # One block at a time, in order: opened, grown, closed.
    numbers = [step.block.number for step in steps if step.kind == "opened"]
    assert numbers == list(range(len(blocks.all)))
    is_open: Block | None = None
    for step in steps:
        if step.kind == "opened":
            assert is_open is None
            is_open = step.block
        else:
            assert step.block is is_open
            is_open = None if step.kind == "closed" else is_open
    assert is_open is None
