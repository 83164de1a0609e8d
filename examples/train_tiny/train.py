"""Trains the small MiniMax-M3 and exports its checkpoint. README.md says why it is so."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from examples.train_tiny.checkpoint import export, write_small_files
from examples.train_tiny.data import Batch, Batches
from examples.train_tiny.kernels import Kernels, agree
from examples.train_tiny.model import balance_experts, build, forward
from examples.train_tiny.muon import Muon
from examples.train_tiny.recipe import FULL, SMOKE, Recipe
from examples.train_tiny.setting import describe
from msaserve.config import ModelConfig
from msaserve.models.loader import load_model
from msaserve.models.minimax_m3 import MiniMaxM3

STATE = "state.pt"
CHECKPOINT = "checkpoint"


class Clock:
    """How far the training is, 0 to 1: by steps if their number is given, else by time spent, over all runs."""

    def __init__(self, *, minutes: float, steps: int | None, spent_s: float) -> None:
        self._seconds, self._steps = minutes * 60, steps
        self._start = time.monotonic() - spent_s

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._start

    def progress(self, step: int) -> float:
        return min(1.0, step / self._steps if self._steps else self.spent_s / self._seconds)


class Plan:
    """(step, stage) of the batches to make. The stage is the one at the time a batch is ordered, a few steps ahead."""

    def __init__(self, recipe: Recipe, clock: Clock, first_step: int) -> None:
        self._recipe, self._clock, self._first_step = recipe, clock, first_step

    def __iter__(self) -> Iterator[tuple[int, int]]:
        step = self._first_step
        while True:
            yield step, stage_at(self._recipe, self._clock.progress(step))
            step += 1


def stage_at(recipe: Recipe, progress: float) -> int:
    end = 0.0
    for number, stage in enumerate(recipe.stages):
        end += stage.share
        if progress < end:
            return number
    return len(recipe.stages) - 1


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """As a share of the recipe's rates: linear warm-up, then constant, then linearly down to a fiftieth."""
    left = (1.0 - progress) / (1.0 - recipe.decay_from)
    return min(1.0, (step + 1) / recipe.warm_up_steps) * max(0.02, min(1.0, left))


def make_optimizers(model: MiniMaxM3, recipe: Recipe) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices inside the layers; AdamW for vectors, the router, what reads tokens and patches, and what
    predicts tokens. The index branch has its own loss, but neither's steps depend on a loss's scale.

    "full" of their groups is the highest rate.
    """
    at_ends = ("embed_tokens", "lm_head", "patch_embedding", "router")
    head_dim = model.config.text.head_dim
    muon_groups: list[dict[str, Any]] = []
    adam_groups: list[dict[str, Any]] = []
    for is_vision in (False, True):
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad and n.startswith("vision") == is_vision}
        inner = {n: p for n, p in trained.items() if p.dim() > 1 and not any(part in n for part in at_ends)}
        share = recipe.vision_rate_share if is_vision else 1.0
        # Queries, keys and values: each head is a matrix of its own. Experts are [experts, rows, columns].
        rows = [head_dim if "in_proj" in n or "qkv" in n else p.shape[-2] for n, p in inner.items()]
        muon_groups.append({"params": list(inner.values()), "rows": rows, "full": share * recipe.muon_rate})
        outer = [p for n, p in trained.items() if p.dim() > 1 and n not in inner]
        vectors = [p for p in trained.values() if p.dim() == 1]
        adam_groups += [
            {"params": outer, "weight_decay": recipe.weight_decay, "full": share * recipe.adam_rate},
            {"params": vectors, "weight_decay": 0.0, "full": share * recipe.adam_rate},
        ]
    return (
        Muon(muon_groups, lr=recipe.muon_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(adam_groups, lr=recipe.adam_rate, betas=(0.9, 0.95), fused=True),
    )


def losses(
    model: MiniMaxM3, batch: Batch, recipe: Recipe, kernels: Kernels | None = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of one batch, and what to log of it. Nothing here waits for the device."""
    output = forward(
        model,
        batch.token_ids,
        batch.positions,
        topk=batch.topk,
        index_rows=batch.index_rows,
        documents=batch.documents,
        media_rows=batch.media_rows,
        patches=batch.normalized_patches(),
        grid=batch.grid,
        kernels=kernels,
    )
    hidden = output.hidden.flatten(0, 1)
    logits = model.logits(hidden.index_select(0, batch.reply_rows))
    reply_loss = F.cross_entropy(logits, batch.reply_labels)
    text_loss = F.cross_entropy(model.logits(hidden.index_select(0, batch.text_rows)), batch.text_labels)
    loss = reply_loss + recipe.text_weight * text_loss + output.index_loss
    # A reply whose every token is the likeliest is what greedy decoding says.
    is_right = logits.detach().argmax(-1) == batch.reply_labels
    right = torch.ones(len(batch.reply_skills), device=hidden.device)
    right.scatter_reduce_(0, batch.reply_numbers, is_right.float(), "amin")
    log = {
        "reply": reply_loss.detach(),
        "text": text_loss.detach(),
        "index": None if batch.index_rows is None else output.index_loss.detach(),
        "right": right,
        "skills": batch.reply_skills,
        "loads": output.expert_loads,
    }
    return loss, log


def choose_kernels(device: torch.device) -> Kernels:
    """Compiled ones on a GPU if they give what the plain ones give there."""
    if device.type != "cuda":
        return Kernels()
    start = time.monotonic()
    try:
        compiled = Kernels(compiled=True)
        with torch.autocast(device.type, torch.bfloat16):
            is_right = agree(compiled, Kernels(), device, torch.bfloat16, lengths=(65_536, 36_864))
    except Exception as error:
        print(f"kernels are not compiled: {error!r:.500}", flush=True)
        return Kernels()
    print(f"kernels are {'compiled' if is_right else 'plain'}: {time.monotonic() - start:.1f} s", flush=True)
    return compiled if is_right else Kernels()


def train(arguments: argparse.Namespace) -> float:
    """Returns the last mean loss of replies."""
    started = time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    # cuDNN's attention makes a plan for each new shape, and here every step has new ones.
    torch.backends.cuda.enable_cudnn_sdp(False)
    recipe: Recipe = SMOKE if arguments.smoke else FULL
    device = torch.device(arguments.device)
    out: Path = arguments.out
    if not (out / CHECKPOINT / "config.json").exists():
        write_small_files(out / CHECKPOINT)
    config = ModelConfig.from_checkpoint(out / CHECKPOINT)
    state_path: Path = (arguments.state or out) / STATE
    model, step, spent_s = build(config, seed=arguments.seed), 0, 0.0
    saved = torch.load(state_path, map_location="cpu", weights_only=True) if state_path.exists() else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        step, spent_s = saved["step"], saved["spent_s"]
    elif arguments.resume_from is not None:
        # The weights alone, in bfloat16: the optimizer starts anew.
        model.load_state_dict(load_model(arguments.resume_from).state_dict())
        progress = json.loads((arguments.resume_from / "progress.json").read_text())
        step, spent_s = progress["step"], progress["spent_s"]
    first_step = step if saved is None else 0
    clock = Clock(minutes=arguments.minutes, steps=arguments.steps, spent_s=spent_s)
    loader = DataLoader(
        Batches(recipe, out / CHECKPOINT, seed=arguments.seed),
        batch_size=None,
        sampler=Plan(recipe, clock, step),  # type: ignore[arg-type]
        num_workers=arguments.workers,
        prefetch_factor=2 if arguments.workers else None,
        timeout=120 if arguments.workers else 0,
        pin_memory=device.type == "cuda",
    )
    # The processes begin while the device is made ready; what ends this one must not be caught by them.
    coming = iter(loader)
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    model.to(device)
    optimizers = make_optimizers(model, recipe)
    if saved is not None:
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    parameters = [p for p in model.parameters() if p.requires_grad]
    kernels = Kernels() if arguments.plain else choose_kernels(device)
    setting = describe(device) | {"seed": arguments.seed}
    print(setting, flush=True)
    save_at = time.monotonic() + 60 * arguments.save_minutes
    reply_loss, log = math.inf, Log(out / "log.jsonl")
    waited_s = 0.0
    while True:
        progress_now = clock.progress(step)
        if progress_now >= 1.0 or time.monotonic() - started > 60 * arguments.max_minutes or stopped.is_set():
            break
        asked_at = time.monotonic()
        batches = next(coming)
        waited_s += time.monotonic() - asked_at
        rate = learning_rate(recipe, step - first_step, progress_now)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["full"]
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss, values = losses(model, batch.to(device), recipe, kernels)
            (loss / len(batches)).backward()
            balance_experts(model, values["loads"], recipe.expert_bias_step)
            log.add(values)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        # A batch that overflowed teaches nothing; the weights must outlive it. The device decides by itself.
        finite = torch.isfinite(norm)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = torch.where(finite, parameter.grad, 0.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % arguments.log_every == 0:
            reply_loss = log.write(step, clock, stage_at(recipe, progress_now), rate, float(norm), waited_s)
            waited_s = 0.0
        if time.monotonic() > save_at:
            save(model, optimizers, out, state_path, step=step, spent_s=clock.spent_s, setting=setting)
            save_at = time.monotonic() + 60 * arguments.save_minutes
    save(model, optimizers, out, state_path, step=step, spent_s=clock.spent_s, setting=setting)
    signal.signal(signal.SIGTERM, before)
    is_done = clock.progress(step) >= 1.0
    print(f"{'done' if is_done else 'to be resumed'}: step {step}, {clock.spent_s / 60:.1f} minutes", flush=True)
    return reply_loss


def save(
    model: MiniMaxM3,
    optimizers: Sequence[torch.optim.Optimizer],
    out: Path,
    state_path: Path,
    *,
    step: int,
    spent_s: float,
    setting: dict[str, str | int],
) -> None:
    """The state to resume from, and the checkpoint; each is whole at any moment. setting: of this run, kept with it."""
    state_path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "spent_s": spent_s,
    }
    torch.save(state, state_path.with_suffix(".new"))
    state_path.with_suffix(".new").replace(state_path)
    new, old = out / f"{CHECKPOINT}.new", out / f"{CHECKPOINT}.old"
    for directory in (new, old):
        shutil.rmtree(directory, ignore_errors=True)
    export(model, new)
    progress = {"step": step, "spent_s": round(spent_s, 1), **setting}
    (new / "progress.json").write_text(json.dumps(progress, indent=1) + "\n")
    (out / CHECKPOINT).rename(old)
    new.rename(out / CHECKPOINT)
    shutil.rmtree(old)


class Log:
    """Means over a few steps, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: list[dict[str, Any]] = []
        self._time = time.monotonic()

    def add(self, values: dict[str, Any]) -> None:
        self._values.append(values)

    def write(self, step: int, clock: Clock, stage: int, rate: float, norm: float, waited_s: float) -> float:
        right: dict[str, list[float]] = defaultdict(list)
        for values in self._values:
            for skill, share in zip(values["skills"], values["right"].tolist(), strict=True):
                right[skill].append(share)
        means = {
            name: float(torch.stack([v[name] for v in self._values if v[name] is not None]).mean())
            for name in ("reply", "text", "index")
        }
        line = {
            "step": step,
            "minutes": round(clock.spent_s / 60, 3),
            "stage": stage,
            "rate": rate,
            "norm": norm,
            "seconds": round(time.monotonic() - self._time, 2),
            "waited": round(waited_s, 2),
            **{name: round(value, 4) for name, value in means.items()},
            **{f"right_{skill}": round(sum(shares) / len(shares), 4) for skill, shares in sorted(right.items())},
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
        self._values.clear()
        self._time = time.monotonic()
        return means["reply"]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.train_tiny.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint/, log.jsonl and state.pt go here")
    parser.add_argument("--state", type=Path, help="keep state.pt (weights, optimizers: 115 MB) here instead")
    parser.add_argument("--resume-from", type=Path, help="an exported checkpoint, if there is no state.pt")
    parser.add_argument("--minutes", type=float, default=22.0, help="of the whole training, over all runs")
    parser.add_argument("--max-minutes", type=float, default=1e9, help="of this run: then save and stop")
    parser.add_argument("--save-minutes", type=float, default=3.0, help="between checkpoints")
    parser.add_argument("--plain", action="store_true", help="compile no kernels")
    parser.add_argument("--steps", type=int, help="measure progress by steps in place of time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=20, help="processes that make batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="tiny batches, to see that everything works")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse_arguments())
