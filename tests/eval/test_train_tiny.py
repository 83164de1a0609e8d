"""The training example: its forward pass is the served model's, its batches are labelled rightly, and it trains."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.train_tiny import data, evaluate, kernels, model, plot, recipe, train
from examples.train_tiny.grid import arrange
from msaserve import pixels
from msaserve.config import ModelConfig, VisionConfig
from msaserve.eval import picture, tool, video, words
from msaserve.eval.example import Example
from msaserve.eval.run import make_examples
from msaserve.llm import LLM
from msaserve.models.loader import load_model
from msaserve.tokenizer import Tokenizer
from msaserve.types import SamplingParams

TOPK = 2
"""Of the checkpoint `narrow`."""


@pytest.fixture(scope="module")
def oracle(narrow: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForImageTextToText.from_pretrained(
        narrow, dtype=torch.float32, attn_implementation="eager"
    )


def trained_forward(directory: Path, token_ids: torch.Tensor, **media: Any) -> torch.Tensor:
    """Logits [T, vocabulary] of one prompt, by the pass that training differentiates."""
    served = load_model(directory)
    num_tokens = token_ids.shape[1]
    padded = torch.nn.functional.pad(token_ids, (0, -num_tokens % 128))
    positions = torch.arange(padded.shape[1])[None]
    with torch.no_grad():
        rows = torch.zeros((1, 1), dtype=torch.int64)
        out = model.forward(served, padded, positions, topk=TOPK, index_rows=rows, **media)
        return served.logits(out.hidden[0, :num_tokens])


def vision_config(directory: Path) -> VisionConfig:
    vision = ModelConfig.from_checkpoint(directory).vision
    assert vision is not None
    return vision


def text_prompt(num_tokens: int) -> torch.Tensor:
    return torch.randint(0, 4000, (1, num_tokens), generator=torch.Generator().manual_seed(3))


def relative_error(found: torch.Tensor, known: torch.Tensor) -> float:
    return float((found - known).norm() / known.norm())


def test_forward_is_transformers_and_its_selection_matters(narrow: Path, oracle: Any) -> None:
    token_ids = text_prompt(900)
    logits = trained_forward(narrow, token_ids)
    with torch.no_grad():
        known = oracle(input_ids=token_ids).logits[0]
    assert relative_error(logits, known) < 1e-5
    served = load_model(narrow)
    positions = torch.arange(896)[None]
    with torch.no_grad():
        rows = torch.zeros((1, 1), dtype=torch.int64)
        dense = model.forward(served, token_ids[:, :896], positions, topk=None, index_rows=rows)
    assert relative_error(served.logits(dense.hidden[0]), known[:896]) > 0.05


def test_forward_is_the_served_model_and_transformers_says_the_same(narrow: Path, oracle: Any) -> None:
    token_ids = text_prompt(700)
    logprobs = trained_forward(narrow, token_ids)[-1].log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=8, ignore_eos=True)
    with LLM(narrow, device="cpu", kv_cache_gib=0.1, max_num_batched_tokens=256, max_model_len=1024) as llm:
        (result,) = llm.generate([token_ids[0].tolist()], params)
    output = result.outputs[0]
    assert output.logprobs is not None
    assert output.token_ids[0] == int(logprobs.argmax())
    for token, logprob in output.logprobs[0].top:
        assert logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
    with torch.no_grad():
        said = oracle.generate(token_ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert said[0, 700:].tolist() == output.token_ids


@pytest.mark.parametrize("skill", ["picture", "video"])
def test_forward_sees_what_transformers_sees(narrow: Path, oracle: Any, skill: str) -> None:
    rng = random.Random(2)
    example = picture.generate(rng) if skill == "picture" else video.generate(rng)
    sequence = data.Writer(narrow).write(example)
    (item,) = sequence.media
    grid = data.Writer(narrow).spec.grid_rows(item.grid_thw)
    token_ids = torch.from_numpy(sequence.token_ids)[None]
    patches = torch.from_numpy(pixels.normalize(item.patches))
    is_media = data.Writer(narrow).is_media(sequence.token_ids)
    logits = trained_forward(
        narrow,
        token_ids,
        media_rows=torch.from_numpy(np.flatnonzero(is_media)),
        patches=patches,
        grid=arrange(grid, vision_config(narrow)),
    )
    names = ("pixel_values", "image_grid_thw") if skill == "picture" else ("pixel_values_videos", "video_grid_thw")
    with torch.no_grad():
        known = oracle(input_ids=token_ids, **{names[0]: patches, names[1]: torch.tensor(grid)}).logits[0]
    assert relative_error(logits, known) < 1e-5


def test_pictures_and_clips_at_once_are_seen_as_the_served_tower_sees_them(untrained: Path) -> None:
    made, grid = load_model(untrained), [(1, 4, 6), (2, 8, 10), (1, 2, 2), (1, 6, 4), (4, 4, 4)]
    num_patches = sum(t * h * w for t, h, w in grid)
    patches = torch.randn(num_patches, 1176, generator=torch.Generator().manual_seed(0))
    assert made.vision is not None
    with torch.no_grad():
        seen = model.see(made.vision, patches, arrange(grid, made.vision.config))
        known = made.embed_media(patches, grid)
    assert seen.shape == known.shape
    assert relative_error(seen, known) < 1e-5


def test_index_loss_reaches_the_index_branch_alone(untrained: Path) -> None:
    made = load_model(untrained)
    token_ids = text_prompt(512)
    rows = torch.randint(0, 512, (1, 16), generator=torch.Generator().manual_seed(0))
    parameters = [p.requires_grad_(not name.endswith("score_bias")) for name, p in made.named_parameters()]
    assert parameters
    positions = torch.arange(512)[None]
    model.forward(made, token_ids, positions, topk=TOPK, index_rows=rows).index_loss.backward()
    for name, parameter in made.named_parameters():
        if parameter.grad is None:
            continue
        if name.endswith("in_proj.weight"):
            num_main = 64 * (16 + 2 + 2)
            assert not parameter.grad[:num_main].any(), name
            assert parameter.grad[num_main:].any(), name
        else:
            assert "index_" in name or not parameter.grad.any(), name
    model_loss = model.forward(made, token_ids, positions, topk=TOPK, index_rows=rows).hidden.sum()
    for parameter in made.parameters():
        parameter.grad = None
    model_loss.backward()
    for name, parameter in made.named_parameters():
        assert "index_" not in name or parameter.grad is None
        if name.endswith("in_proj.weight") and parameter.shape[0] > 64 * 20:
            assert parameter.grad is not None
            assert not parameter.grad[64 * 20 :].any()


def test_block_mass_and_scores_token_by_token() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 3, 8, generator=generator), torch.randn(1, 2, 8, 8, generator=generator)
    index_q, index_k = torch.randn(1, 2, 3, 8, generator=generator), torch.randn(1, 8, 8, generator=generator)
    rows = torch.tensor([[7, 2, 5]])
    is_visible = (rows[..., None] >= torch.arange(8))[:, None]
    mass = model.block_mass(q, k, is_visible, 4)
    scores = model.block_scores(index_q, index_k, is_visible, 4)
    for r, row in enumerate(rows[0].tolist()):
        for head in range(2):
            known = torch.zeros(2)
            for member in (2 * head, 2 * head + 1):
                shares = ((q[0, member, r] @ k[0, head, : row + 1].T) * 8**-0.5).softmax(0)
                for token, share in enumerate(shares):
                    known[token // 4] += share / 2
            assert torch.allclose(mass[0, head, r], known, atol=1e-6)
            dots = (index_q[0, head, r] @ index_k[0, : row + 1].T).tolist()
            best = [max(dots[n * 4 : n * 4 + 4], default=-np.inf) for n in range(2)]
            assert scores[0, head, r].tolist() == pytest.approx(best, abs=1e-5)


def test_chunks_of_selected_attention_join(narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = text_prompt(900)
    whole = trained_forward(narrow, token_ids)
    monkeypatch.setattr(model, "MAX_MASK_ELEMENTS", 16 * 1024 * 256)
    monkeypatch.setattr(model, "MAX_KL_ELEMENTS", 1)
    assert relative_error(trained_forward(narrow, token_ids), whole) < 1e-6


def test_documents_of_a_sequence_do_not_see_each_other(untrained: Path) -> None:
    made, token_ids = load_model(untrained), text_prompt(384)
    documents = torch.tensor([0] * 100 + [1] * 150 + [2] * 100 + [-1] * 34)[None]
    positions = torch.cat([torch.arange(n) for n in (100, 150, 100, 34)])[None]
    with torch.no_grad():
        packed = model.forward(made, token_ids, positions, topk=None, index_rows=None, documents=documents)
        assert float(packed.index_loss) == 0.0
        for start, end in ((0, 100), (100, 250), (250, 350)):
            alone = torch.nn.functional.pad(token_ids[:, start:end], (0, -(end - start) % 128))
            known = model.forward(made, alone, torch.arange(alone.shape[1])[None], topk=None, index_rows=None)
            assert relative_error(packed.hidden[0, start:end], known.hidden[0, : end - start]) < 1e-5


def test_short_examples_are_packed(untrained: Path) -> None:
    batches = data.Batches(recipe.FULL, untrained, seed=1)
    batch = batches._short(random.Random(0), recipe.Stage(1.0, 256, 300, False, num_short=12, max_picture_side=200))
    assert batch.documents is not None
    assert batch.token_ids.shape[1] <= data.PACKED_LENGTH
    pad = recipe.token_id("]!p~[")
    assert ((batch.documents == -1) == (batch.token_ids == pad)).all()
    # Each document begins with the template's first token, at position 0.
    begins = batch.token_ids == recipe.token_id("]~!b[")
    assert int(begins.sum()) == 12 == sum(int(row.max()) + 1 for row in batch.documents)
    assert not batch.positions[begins].any()
    assert set(batch.reply_skills) == {"picture", "video", "tool"}


def test_compiled_kernels_agree() -> None:
    """What decides on a GPU whether compiled kernels run can tell right from wrong."""
    device = torch.device("cpu")
    plain, wrong = kernels.Kernels(), kernels.Kernels()
    assert kernels.agree(plain, plain, device, torch.float32)
    wrong.norm = lambda x, weight, eps: kernels.norm(x, weight * 1.1, eps)
    assert not kernels.agree(wrong, plain, device, torch.float32)


def test_experts_are_balanced(untrained: Path) -> None:
    made = load_model(untrained)
    router = made.layers[1].mlp.router  # type: ignore[union-attr]
    before = router.score_bias.clone()
    loads = [torch.tensor([9, 1, 1, 1, 1, 1, 1, 1])] * 3
    model.balance_experts(made, loads, 0.5)
    assert (router.score_bias - before).tolist() == pytest.approx([-0.5] + [0.5] * 7)


def test_replies_are_labelled_whole(untrained: Path, tokenizer: Tokenizer) -> None:
    writer, rng = data.Writer(untrained), random.Random(1)
    examples: list[Example] = [tool.generate(rng) for _ in range(6)]
    examples += [picture.generate(rng, num_questions=2), video.generate(rng, num_questions=2)]
    for example in examples:
        sequence = writer.write(example)
        assert len(sequence.replies) == len(example.turns)
        for (start, end), turn in zip(sequence.replies, example.turns, strict=True):
            said = tokenizer.decode(sequence.token_ids[start:end].tolist(), skip_special_tokens=False)
            assert said.endswith("[e~[")
            if example.skill == "tool":
                assert said.startswith("<mm:think>") == (example.thinking == "adaptive")
                assert turn.reply.reasoning in said
            else:
                assert said == turn.reply.content + "[e~["


def test_batches_are_seeded_and_positions_stretch(untrained: Path) -> None:
    small = recipe.SMOKE
    batches = data.Batches(small, untrained, seed=3)
    again = data.Batches(small, untrained, seed=3)[5, 1]
    for one, two in zip(batches[5, 1], again, strict=True):
        assert torch.equal(one.token_ids, two.token_ids)
        assert torch.equal(one.positions, two.positions)
        assert torch.equal(one.text_rows, two.text_rows)
        assert one.topk == two.topk
        assert not set(one.reply_rows.tolist()) & set(one.text_rows.tolist())
        for rows, labels in ((one.reply_rows, one.reply_labels), (one.text_rows, one.text_labels)):
            assert torch.equal(one.token_ids.flatten()[rows + 1], labels)
        assert one.reply_numbers.unique().tolist() == list(range(len(one.reply_skills)))
        if one.patches is not None:
            assert one.media_rows is not None
            assert one.grid is not None
            assert len(one.media_rows) * 4 == len(one.patches) == len(one.grid.order)
            normalized = one.normalized_patches()
            assert normalized is not None
            assert np.allclose(normalized.numpy(), pixels.normalize(one.patches.numpy()), atol=1e-6)
    furthest, breaks = 0, []
    for step in range(20):
        long = batches[step, 0][0]
        leaps = long.positions.diff(dim=1)
        assert (leaps >= 1).all()
        furthest = max(furthest, int(long.positions.max()))
        before = long.token_ids[:, :-1][leaps > 1]
        breaks += before.tolist()
    assert furthest > 50_000
    assert furthest <= small.max_position
    assert set(breaks) == {batches.writer.line_break}


def test_every_listed_word_is_one_token(tokenizer: Tokenizer) -> None:
    listed = [*words.NAMES, *words.CITIES, *words.NOUNS, *words.COLOURS, *words.SHAPES]
    assert all(len(tokenizer.encode(f" {word}")) == 1 for word in listed)
    assert len(tokenizer.encode("48213")) == 5
    for token in (*recipe.SPECIAL_TOKENS, *recipe.MARKER_TOKENS):
        assert tokenizer.encode(token) == [recipe.token_id(token)]
        assert tokenizer.decode([recipe.token_id(token)]) == ("" if token in recipe.SPECIAL_TOKENS else token)


def test_stages_and_rates() -> None:
    full = recipe.FULL
    assert sum(stage.share for stage in full.stages) == pytest.approx(1.0)
    assert [train.stage_at(full, p) for p in (0.0, 0.3, 0.6, 0.9, 1.0)] == [0, 1, 2, 3, 3]
    assert [stage.is_sparse for stage in full.stages] == [False, False, True, True]
    assert train.learning_rate(full, 0, 0.0) < 0.02
    assert train.learning_rate(full, 10_000, full.decay_from) == 1.0
    assert train.learning_rate(full, 10_000, 0.5 + full.decay_from / 2) == pytest.approx(0.5)
    assert train.learning_rate(full, 10_000, 1.0) == pytest.approx(0.02)
    assert not any(stage.is_sparse for stage in full.stages[:2])
    assert full.stages[-1].max_context <= 16_384


@pytest.mark.slow
def test_smoke_training_learns_resumes_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*options: str) -> float:
        arguments = ["--smoke", "--device", "cpu", "--out", str(tmp_path), "--workers", "0", "--log-every", "2"]
        return train.train(train.parse_arguments([*arguments, *options]))

    first = run("--steps", "4")
    state = torch.load(tmp_path / train.STATE, weights_only=True)
    assert state["step"] == 4
    # Twice as many steps: the run goes on where the first ended, in the second stage.
    last = run("--steps", "8")
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [2, 4, 6, 8]
    assert [line["stage"] for line in log] == [0, 1, 1, 1]
    assert last < first < log[0]["reply"]
    checkpoint = tmp_path / train.CHECKPOINT
    progress = json.loads((checkpoint / "progress.json").read_text())
    assert progress["step"] == 8
    assert progress["seed"] == 0
    assert progress["torch"] == torch.__version__
    files = list(checkpoint.iterdir())
    assert sum(file.stat().st_size for file in files) < 40 * 10**6
    assert max(file.stat().st_size for file in files) < 16 * 2**20
    trained = torch.load(tmp_path / train.STATE, weights_only=True)
    assert trained["step"] == 8
    assert trained["spent_s"] > state["spent_s"]
    # No time left: it stops at once and loses nothing.
    run("--steps", "1000", "--max-minutes", "0")
    assert torch.load(tmp_path / train.STATE, weights_only=True)["step"] == 8
    # Nor when it is told to end.
    with monkeypatch.context() as patch:
        patch.setattr(train, "choose_kernels", lambda device: os.kill(os.getpid(), signal.SIGTERM) or kernels.Kernels())
        run("--steps", "1000")
    assert torch.load(tmp_path / train.STATE, weights_only=True)["step"] == 8
    exported = load_model(checkpoint).state_dict()
    for name, tensor in trained["model"].items():
        assert torch.equal(exported[name], tensor.bfloat16().float()), name
    with LLM(checkpoint, device="cpu", kv_cache_gib=0.1, max_model_len=1024) as llm:
        (result,) = llm.chat([{"role": "user", "content": "What is the code of Alice?"}])
    assert result.outputs[0].finish_reason in ("stop", "length")
    assert ModelConfig.from_checkpoint(checkpoint).eos_token_ids == (recipe.token_id("[e~["),)
    # Without its state, a run goes on from the exported weights, on another machine.
    elsewhere = tmp_path / "elsewhere"
    run("--steps", str(trained["step"] + 1), "--resume-from", str(checkpoint), "--out", str(elsewhere))
    resumed = torch.load(elsewhere / train.STATE, weights_only=True)
    assert resumed["step"] == trained["step"] + 1
    assert resumed["spent_s"] > trained["spent_s"]
    moved = resumed["model"]["layers.1.self_attn.o_proj.weight"] - trained["model"]["layers.1.self_attn.o_proj.weight"]
    assert 0 < float(moved.square().mean().sqrt()) < 0.01


def test_evaluation_fails_below_a_bar(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def passes(*bars: evaluate.Bar, processes: int = 1) -> bool:
        monkeypatch.setattr(evaluate, "SMALL", bars)
        options = ["--checkpoint", str(untrained), "--out", str(tmp_path), "--device", "cpu"]
        options += ["--processes", str(processes)]
        return evaluate.evaluate(evaluate.parse_arguments(options))

    bars = evaluate.Bar("tool", 1), evaluate.Bar("needle", 1, 300, at_most=0.2, selection="random")
    assert passes(*bars, processes=2)
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["seed"] == 1
    assert report["checkpoint"] == str(untrained)
    assert report["torch"] == torch.__version__
    assert report["device"]
    assert [(row["selection"], row["asked"], row["is_passed"]) for row in report["rows"]] == [
        ("index", 1, True),
        ("random", 1, True),
    ]
    assert not passes(evaluate.Bar("tool", 1, at_least=0.98))
    assert "MISSED" in capsys.readouterr().out


def test_evaluation_is_cut_into_tasks_that_make_a_whole() -> None:
    for num_processes in (1, 2, 10):
        made = evaluate.tasks(evaluate.FULL, num_processes)
        assert [task.cost for task in made] == sorted((task.cost for task in made), reverse=True)
        for bar in evaluate.FULL:
            parts = sorted((task.first, task.n) for task in made if task.bar == bar)
            assert [first for first, _ in parts] == [sum(n for _, n in parts[:i]) for i in range(len(parts))]
            assert sum(n for _, n in parts) == bar.n


def test_prompts_fit_the_room_that_evaluation_gives(untrained: Path, tokenizer: Tokenizer) -> None:
    writer = data.Writer(untrained)
    made = make_examples(
        "mixed", n=4, contexts=(4096,), seed=1, count=lambda text: len(tokenizer.encode_plain(text))
    )  # The first one's picture is large.
    lengths = [len(writer.write(example).token_ids) - 4096 for example in made]
    assert 256 < max(lengths) <= evaluate.ROOM - 96


def test_examples_of_a_part_are_those_of_the_whole(tokenizer: Tokenizer) -> None:
    def made(skill: Any, n: int, first: int) -> list[Any]:
        count = lambda text: len(tokenizer.encode_plain(text))  # noqa: E731
        return [
            [part for part in example.turns[0].parts if isinstance(part, str)]
            for example in make_examples(skill, n=n, contexts=(400,), seed=1, count=count, first=first)
        ]

    for skill in ("needle", "tool"):
        assert made(skill, 4, 0)[2:] == made(skill, 2, 2)


def test_log_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [
        {"minutes": i, "stage": i // 2, "reply": 1.0, "text": 2.0, "index": 0.1, "right_tool": 0.5} for i in range(4)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plot.draw(tmp_path / "log.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
