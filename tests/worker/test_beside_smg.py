"""This project's gateway and the real smg before one worker that records: their messages field by field.

What differs, and nothing else may, stands in docs/wire.md with the reason.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from recording_worker import TINY, RecordingTokenSpeed, RecordingVllm, recording_worker
from smg_driver import TEMPLATE, clip, needs_ffmpeg, needs_smg, picture, running_smg, text

from msaserve.gateway.app import GatewaySettings, create_app
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.grpc_client import GrpcClient
from msaserve.gateway.media.options import MediaOptions
from msaserve.rpc.tensors import decode
from msaserve.tokenizer import Tokenizer

pytestmark = [needs_smg, pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("beside_smg")]

# Text is made here, spaces between special tokens too. no_stop_trim: the token that ends an output is wanted as well.
ALWAYS = {"request_id", "sampling_params.spaces_between_special_tokens", "sampling_params.no_stop_trim"}
STOP = {"sampling_params.stop", "stream"}  # the gateway looks for it, in a stream
HASH = {"vllm": {"mm_hashes"}, "tokenspeed": {"content_hash"}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@dataclass
class Pair:
    dialect: str
    worker: Any
    smg: httpx.AsyncClient
    ours: httpx.AsyncClient

    async def differences(self, content: Any, **fields: Any) -> tuple[set[str], dict[str, Any], dict[str, Any]]:
        """The paths at which the two messages differ beyond ALWAYS, smg's message and ours by path."""
        messages = []
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 9, **fields}
        answers = []
        for http in (self.smg, self.ours):
            self.worker.requests.clear()
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            (message,) = self.worker.requests
            messages.append(flat(message))
            answers.append(answer)
        if "tools" not in fields and not fields.get("stream"):
            one, other = ([choice["message"]["content"] for choice in a.json()["choices"]] for a in answers)
            assert one == other
            assert all(one)
        theirs, own = messages
        paths = {path for path in theirs.keys() | own.keys() if not same(theirs.get(path), own.get(path))}
        assert paths >= {"request_id"}
        if "temperature" not in fields and self.dialect == "vllm":  # unset, it is 1
            assert "sampling_params.temperature" not in theirs
            assert own["sampling_params.temperature"] == 1
            paths.discard("sampling_params.temperature")
        return paths - ALWAYS, theirs, own


def flat(message: Any, path: str = "") -> dict[str, Any]:
    """Every field that is set and is not what unset means, by its path; tensors as (dtype, array)."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        at = f"{path}{field.name}"
        if field.message_type is None:
            if field.is_repeated or value != field.default_value or field.has_presence:
                # The keys come from a hash table.
                is_set = field.name.endswith("_keys")
                found[at] = (sorted(value) if is_set else list(value)) if field.is_repeated else value
        elif field.message_type.GetOptions().map_entry:
            for key in value:
                is_tensor = hasattr(value[key], "dtype")
                found[f"{at}.{key}"] = tensor(value[key]) if is_tensor else value[key]
        elif field.message_type.name == "TensorData":
            found[at] = tensor(value)
        elif field.is_repeated:
            for i, one in enumerate(value):
                found |= flat(one, f"{at}[{i}].")
        else:
            found |= flat(value, f"{at}.")
    return found


def tensor(data: Any) -> tuple[str, np.ndarray]:
    return data.dtype, decode(data, name="tensor")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] == other[0] and np.array_equal(one[1], other[1])
    return bool(one == other)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vllm, pixels": (RecordingVllm, {"encoder_dtype": "bfloat16", "takes_pixels": True}),
    "vllm, bfloat16": (RecordingVllm, {"encoder_dtype": "bfloat16", "takes_pixels": False}),
    "vllm, float32": (RecordingVllm, {"encoder_dtype": "", "takes_pixels": False}),
    "tokenspeed, bfloat16": (RecordingTokenSpeed, {"encoder_dtype": "bfloat16", "takes_pixels": False}),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=KINDS)
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    kind, options = KINDS[request.param]
    files: Path = tmp_path_factory.mktemp("files")
    for path in (*TINY.glob("*.json"), *TINY.glob("*.jinja")):
        shutil.copy(path, files)
    (files / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    worker = kind(files, **options)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(recording_worker(worker))
        smg = await stack.enter_async_context(running_smg(port, tmp_path_factory.mktemp("smg") / "log"))
        app = create_app(
            GrpcClient(f"grpc://127.0.0.1:{port}"),
            Tokenizer.load(files),
            ChatTemplate(TEMPLATE),
            GatewaySettings("tiny"),
            MediaOptions(media_processes=1).pipeline(files),
        )
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app)
        http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://o", timeout=200))
        yield Pair(request.param.split(",")[0], worker, smg.http, http)


async def test_text(pair: Pair) -> None:
    differing, _, _ = await pair.differences([text("Hello"), text(" wörld ]<]x")])
    assert differing == set()


async def test_streams(pair: Pair) -> None:
    differing, theirs, _ = await pair.differences("Hello", stream=True)
    assert differing == set()
    assert theirs["stream"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, set()),
        ({"temperature": 0.7, "top_p": 0.9, "seed": 5}, set()),
        ({"presence_penalty": 0.5, "frequency_penalty": -0.25}, set()),
        ({"min_p": 0.125, "top_k": 7, "repetition_penalty": 1.25}, set()),
        ({"logprobs": True, "top_logprobs": 3}, set()),
        ({"ignore_eos": True, "stop_token_ids": [77, 78]}, set()),
        ({"stop": ["zz"]}, STOP),
        ({"logit_bias": {"5": -3}}, {"sampling_params.logit_bias.5"}),
        ({"min_tokens": 3}, {"sampling_params.min_tokens", "sampling_params.min_new_tokens"}),
    ],
)
async def test_sampling(pair: Pair, fields: dict[str, Any], expected: set[str]) -> None:
    differing, theirs, own = await pair.differences("Hello", **fields)
    assert differing == (expected & (theirs.keys() | own.keys()))
    if expected and expected != STOP:
        assert not expected & theirs.keys()  # smg leaves it out
        assert expected & own.keys()


async def test_several_outputs(pair: Pair) -> None:
    """smg leaves n outputs to the worker, as this project does."""
    differing, theirs, _ = await pair.differences("Hello", n=2, seed=3)
    assert differing == set()
    assert theirs["sampling_params.n"] == 2


async def test_forms_of_the_answer(pair: Pair) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    differing, theirs, own = await pair.differences("Hello", response_format=form)
    assert differing == {"sampling_params.json_schema"}
    assert "x-guidance" not in theirs["sampling_params.json_schema"]
    assert "x-guidance" in own["sampling_params.json_schema"]


async def test_tools(pair: Pair) -> None:
    differing, _, _ = await pair.differences("Hello", tools=TOOLS)
    assert differing == set()
    if pair.dialect == "vllm":
        # smg asks for JSON, this project for M3's own calls, which it begins in the prompt.
        differing, theirs, own = await pair.differences("Hello", tools=TOOLS, tool_choice="required")
        assert differing == {
            "tokenized.input_ids", "sampling_params.json_schema", "sampling_params.grammar",
            "sampling_params.grammar_from_first_token",
        }  # fmt: skip
        prompt = theirs["tokenized.input_ids"]
        assert own["tokenized.input_ids"][: len(prompt)] == prompt


def media_paths(pair: Pair, order: list[str]) -> set[str]:
    """What differs in the messages of these items. order: their modalities, in the order of the prompt."""
    if pair.dialect == "tokenspeed":
        items = enumerate(order)
        return {f"mm_inputs.items[{i}].content_hash" for i, _ in items} | {
            f"mm_inputs.items[{i}].model_specific_tensors.video_second_per_grid"
            for i, kind in enumerate(order)
            if kind == "video"
        } | {"tokenized.original_text"}  # fmt: skip
    batches = ["image", "video"] if len(set(order)) == 2 else [order[0]]
    paths = {"tokenized.original_text"}
    for at, kind in zip(("mm_inputs.", "extra_mm_inputs[0]."), batches, strict=False):
        paths.add(f"{at}mm_hashes")
        if kind == "video":
            paths |= {f"{at}model_specific_tensors.video_second_per_grid", f"{at}batched_keys"}
    return paths


def tensors(message: dict[str, Any]) -> list[tuple[str, tuple[str, np.ndarray]]]:
    return [(path, value) for path, value in message.items() if isinstance(value, tuple)]


def check_media(theirs: dict[str, Any], own: dict[str, Any], pair: Pair, *, count: int) -> None:
    """That there was something to compare: spans or runs, grids, patches."""
    assert max(len(value) for _, (_, value) in tensors(own)) >= 64
    assert sum(path.endswith("grid_thw") for path in own) >= 1
    assert sum(".offset" in path for path in own) >= count
    hashes = [v for v in own.values() if isinstance(v, bytes)] or own.get("mm_inputs.mm_hashes")
    assert hashes


async def test_a_picture(pair: Pair) -> None:
    differing, theirs, own = await pair.differences([picture(333, 517), text("what")])
    assert differing == media_paths(pair, ["image"])
    check_media(theirs, own, pair, count=1)


async def test_several_pictures(pair: Pair) -> None:
    parts = [picture(112, 140), picture(448, 448, 1), picture(300, 200, 2), text("what")]
    differing, theirs, own = await pair.differences(parts)
    assert differing == media_paths(pair, ["image"] * 3)
    check_media(theirs, own, pair, count=3)


async def test_the_order_within_a_message(pair: Pair) -> None:
    """smg puts a message's media before its text, this project leaves them where the sender has them."""
    parts = [text("a"), picture(112, 140), text("b"), picture(140, 112, 1), text("c")]
    differing, theirs, own = await pair.differences(parts)
    moved = {path for path in own if path.endswith(".offset")}
    assert len(moved) == 2
    assert differing == media_paths(pair, ["image"] * 2) | {"tokenized.input_ids"} | moved
    assert sorted(own["tokenized.input_ids"]) == sorted(theirs["tokenized.input_ids"])


async def test_a_smaller_picture_that_was_asked_for(pair: Pair) -> None:
    """smg resizes it twice, this project once: the same grid, on noise 6.5 levels apart on average."""
    part = picture(600, 1000)
    part["image_url"]["max_long_side_pixel"] = 504
    differing, theirs, own = await pair.differences([part, text("what")])
    key = "mm_inputs.pixel_values" if pair.dialect == "vllm" else "mm_inputs.items[0].encoder_input"
    assert differing == media_paths(pair, ["image"]) | {key}
    grid = next(value for path, (_, value) in tensors(own) if path.endswith("grid_thw"))
    assert max(grid[0].tolist()) * 14 <= 504
    assert np.mean(np.abs(own[key][1].astype(np.float32) - theirs[key][1])) < (8 if own[key][0] == "uint8" else 0.12)


@needs_ffmpeg
async def test_a_clip(pair: Pair) -> None:
    part = clip(9.0)
    for hints in ({}, {"fps": 2}):
        part["video_url"] |= hints
        differing, theirs, own = await pair.differences([part, text("what")])
        assert differing == media_paths(pair, ["video"])
        check_media(theirs, own, pair, count=1)


@needs_ffmpeg
async def test_a_clip_with_pictures(pair: Pair) -> None:
    parts = [picture(112, 140), clip(4.0), picture(140, 112, 1), text("what")]
    differing, theirs, own = await pair.differences(parts)
    assert differing == media_paths(pair, ["image", "video", "image"])
    check_media(theirs, own, pair, count=3)
