"""The trained checkpoint: it says the same however it is asked, and what transformers says."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from waits import until

from examples.train_tiny import recipe
from msaserve.config import EngineConfig, ModelConfig
from msaserve.eval import tool
from msaserve.eval.answer import Http, InProcess
from msaserve.eval.conversation import messages, parse, prompt
from msaserve.eval.example import Example, Reply
from msaserve.eval.run import make_examples, run
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.media.spec import find_spec, normalize
from msaserve.llm import LLM
from msaserve.tokenizer import Tokenizer
from msaserve.types import SamplingParams

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny"
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_gib": 0.1, "max_model_len": 4096, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def tokens() -> Tokenizer:
    return Tokenizer.load(CHECKPOINT)


def examples_of(tokens: Tokenizer, skill: Any, n: int, context: int = 1024, seed: int = 11) -> list[Example]:
    return make_examples(skill, n=n, contexts=(context,), seed=seed, count=lambda text: len(tokens.encode_plain(text)))


@pytest.fixture(scope="module")
def asked(tokens: Tokenizer) -> list[Example]:
    """One or two examples of each skill. The long ones have more blocks than are selected."""
    examples = examples_of(tokens, "needle", 1, 2600) + examples_of(tokens, "mixed", 1, 2400)
    examples += [example for skill in ("picture", "video") for example in examples_of(tokens, skill, 2)]
    return examples + [tool.generate(random.Random(5), thinking=mode) for mode in ("enabled", "disabled")]


def answers(examples: list[Example], **options: Any) -> list[Reply]:
    answerer = InProcess(CHECKPOINT, EngineConfig(**{**OPTIONS, **options}))
    return [result.reply for result in run(examples, answerer, on_result=lambda result: None)]


@pytest.fixture(scope="module")
def answerer() -> InProcess:
    return InProcess(CHECKPOINT, EngineConfig(**OPTIONS))


@pytest.fixture(scope="module")
def known(asked: list[Example], answerer: InProcess) -> list[Reply]:
    return [result.reply for result in run(asked, answerer, on_result=lambda result: None)]


def test_it_is_small_and_of_the_recipe() -> None:
    files = list(CHECKPOINT.iterdir())
    assert sum(file.stat().st_size for file in files) < 40 * 10**6
    config, text = ModelConfig.from_checkpoint(CHECKPOINT), recipe.model_config()["text_config"]
    assert config.text.num_layers == text["num_hidden_layers"]
    assert config.text.topk_blocks == 16
    assert config.text.block_size == 128


@pytest.mark.parametrize(
    ("skill", "n", "context", "at_least"),
    [
        ("needle", 8, 600, 8),
        ("needle", 2, 4096, 2),
        ("picture", 20, 1024, 20),
        ("tool", 16, 1024, 16),
        ("video", 10, 1024, 10),
        ("mixed", 2, 2048, 2),
    ],
)
def test_it_answers_as_well_as_when_it_was_made(
    tokens: Tokenizer, skill: str, n: int, context: int, at_least: int
) -> None:
    """The first questions of docs/eval.md's seed, at sizes for a CPU: all were right then."""
    answerer = InProcess(CHECKPOINT, EngineConfig(**{**OPTIONS, "max_model_len": 5120, "max_num_batched_tokens": 2048}))
    results = run(examples_of(tokens, skill, n, context, seed=1), answerer, on_result=lambda result: None)
    assert sum(result.is_right for result in results) >= at_least


def test_chunks_batches_and_prefix_hits_answer_alike(
    asked: list[Example], known: list[Reply], answerer: InProcess
) -> None:
    assert answers(asked, max_num_batched_tokens=100) == known
    assert answers(asked, max_num_seqs=1, enable_prefix_cache=False) == known
    # Once more where they were answered: from the prefix cache.
    assert [r.reply for r in run(asked, answerer, on_result=lambda result: None)] == known


def test_llm_chat_answers_alike(asked: list[Example], known: list[Reply]) -> None:
    texts = [i for i, example in enumerate(asked) if not example.media(1)]
    greedy = SamplingParams(temperature=0.0, max_tokens=96)
    with LLM(CHECKPOINT, **OPTIONS) as llm:
        for i in texts:
            example = asked[i]
            kwargs = {"thinking_mode": example.thinking, "tools": list(example.tools) or None}
            for is_again in (False, True):
                (result,) = llm.chat(messages(example), greedy, chat_template_kwargs=kwargs)
                assert result.num_cached_tokens >= 128 * is_again
                said = llm.tokenizer.decode(result.outputs[0].token_ids)
                assert parse(said, tools=example.tool_schemas, thinking=example.thinking) == known[i]


@pytest.fixture
def server() -> Iterator[str]:
    command = [sys.executable, "-m", "msaserve", "serve", str(CHECKPOINT), "--port", "0"]
    for name, value in OPTIONS.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    thread = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")), daemon=True)  # type: ignore[union-attr]
    thread.start()

    def url() -> str | None:
        assert process.poll() is None, lines
        found = re.search("curl (http://[^/]+)", "".join(lines))
        return found and found.group(1)

    until(url)
    yield url() or ""
    process.kill()
    process.wait()
    thread.join(5)
    process.stdout.close()


def test_http_answers_alike(asked: list[Example], known: list[Reply], server: str) -> None:
    said = dict(Http(server, model=CHECKPOINT.resolve().name).answer(asked))
    for number, (example, reply) in enumerate(zip(asked, known, strict=True)):
        if example.skill == "video":
            # Clips pass through a codec: the answer is as right, the bits are not the same.
            assert example.turns[0].scorer(said[number]) == example.turns[0].scorer(reply)
        else:
            assert said[number] == reply


def test_transformers_says_the_same(tokens: Tokenizer, asked: list[Example]) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForImageTextToText.from_pretrained(
        CHECKPOINT, dtype=torch.float32, attn_implementation="eager"
    )
    template, source = ChatTemplate.load(CHECKPOINT), find_spec(CHECKPOINT)
    assert template is not None
    assert source is not None
    spec = source.load()
    for example in [
        *(e for e in asked if e.skill in ("picture", "video", "tool")),
        *examples_of(tokens, "needle", 1, 2300),
    ]:
        (token_ids, _), items = prompt(example, tokens, template, spec)
        media: dict[str, Any] = {}
        for item in items:
            names = {"image": ("pixel_values", "image_grid_thw")}.get(
                item.modality, ("pixel_values_videos", "video_grid_thw")
            )
            grid = torch.tensor([list(row) for row in spec.grid_rows(item.grid_thw)])
            media |= {names[0]: torch.from_numpy(normalize(item.patches, spec)), names[1]: grid}
        with torch.no_grad():
            said = oracle.generate(
                torch.tensor([token_ids]), max_new_tokens=96, do_sample=False, pad_token_id=0, **media
            )[0, len(token_ids) :].tolist()
        text = tokens.decode(said)
        (reply,) = answers([example])
        assert parse(text, tools=example.tool_schemas, thinking=example.thinking) == reply
        assert re.search(r"\w", text)
