"""How far slice.py's results are from float32: this package's model with its reference operators computes the same.

    python benchmarks/vllm/judge.py CHECKPOINT stock.json ours.json

Of each result: how often a greedy token is float32's best one after the same tokens, and how far the log probabilities
are off. Of each pair: where their tokens part, whose token float32 prefers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import slice as m3_slice
import torch
from checkpoint import PREFIX
from safetensors import safe_open

from msaserve.cache.kv import AttentionBatch, KVCache
from msaserve.config import ModelConfig
from msaserve.models.loader import destinations
from msaserve.models.minimax_m3 import MiniMaxM3

CHUNK = 1024
"""Tokens computed in one step."""
OPERATORS = ("norm_rope_store", "dense_attend", "select_attend", "select_blocks", "sparse_attend", "topk_blocks")
TILES = (("index_score", "TILE_SCORES"), ("dense_attend", "TILE_SCORES"), ("sparse_attend", "TILE_KEYS"))
Result = dict[str, list[dict[str, Any]]]


def only_references() -> None:
    """Take no kernels, which on a card multiply float32 with fewer bits, and large tiles: a card has the memory."""
    for name in OPERATORS:
        operator = import_module(f"msaserve.ops.{name}")
        operator.IMPLS = tuple(impl for impl in operator.IMPLS if impl.name in ("reference", "two_steps"))  # type: ignore[attr-defined]
    for name, tile in TILES:
        setattr(import_module(f"msaserve.ops.{name}.reference"), tile, 1 << 27)
    torch.backends.cuda.matmul.allow_tf32 = False


def load(directory: Path, device: str) -> MiniMaxM3:
    with torch.device("meta"):
        model = MiniMaxM3(ModelConfig.from_checkpoint(directory), dtype=torch.float32)
    model.to_empty(device=device)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        for name, target in destinations(model):
            target.copy_(file.get_tensor(name.removeprefix(PREFIX)))
    return model.eval()


class Reference:
    """One request at a time over a cache of its own."""

    def __init__(self, model: MiniMaxM3, max_tokens: int) -> None:
        text = model.config.text
        self._model = model
        self._block_size = text.block_size
        num_blocks = -(-max_tokens // text.block_size)
        self._cache = KVCache(
            num_layers=text.num_layers,
            sparse_layer_ids=text.sparse_layer_ids,
            num_pages=num_blocks + 1,
            block_size=text.block_size,
            num_kv_heads=text.num_kv_heads,
            head_dim=text.head_dim,
            index_dim=text.index_dim,
            dtype=torch.float32,
            device=model.device,
        )
        self._table = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=model.device)[None]

    @torch.inference_mode()
    def logprobs(self, tokens: list[int], first: int, *, first_scored: int) -> torch.Tensor:
        """[R, vocab] after each of `tokens` from position first_scored on; those before `first` are cached."""
        rows = []
        for start in range(first, len(tokens), CHUNK):
            end = min(start + CHUNK, len(tokens))
            hidden = self._hidden(tokens[start:end], start)[max(0, first_scored - start) :]
            if hidden.shape[0]:
                rows.append(self._model.logits(hidden).log_softmax(-1))
        return torch.cat(rows)

    @torch.inference_mode()
    def following(self, tokens: list[int]) -> list[float]:
        """The log probability of each token but the first."""
        found: list[float] = []
        for start in range(0, len(tokens) - 1, CHUNK):
            end = min(start + CHUNK, len(tokens) - 1)
            logprobs = self._model.logits(self._hidden(tokens[start:end], start)).log_softmax(-1)
            targets = torch.tensor(tokens[start + 1 : end + 1], device=self._model.device)
            found += logprobs.gather(1, targets[:, None])[:, 0].tolist()
        return found

    def _hidden(self, tokens: list[int], start: int) -> torch.Tensor:
        device, end = self._model.device, start + len(tokens)
        positions = torch.arange(start, end, device=device)
        batch = AttentionBatch(
            positions=positions,
            slots=positions + self._block_size,  # pages follow each other from 1 on
            block_table=self._table,
            seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
            cu_query_lens=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            max_query_len=end - start,
            max_seq_len=end,
        )
        hidden: torch.Tensor = self._model(torch.tensor(tokens, device=device), batch, self._cache)
        return hidden


def judge(reference: Reference, results: dict[str, Result], vocab_size: int) -> tuple[list[str], dict[str, Any]]:
    """(report, the figures behind it)."""
    partings: list[dict[str, Any]] = []
    hits = {name: [0, 0] for name in results}
    errors: dict[str, dict[str, list[float]]] = {name: {"greedy": [], "scored": []} for name in results}
    num_prompts = max(len(result["greedy"]) for result in results.values())
    for number in range(num_prompts):
        rows = {name: result["greedy"][number] for name, result in results.items() if number < len(result["greedy"])}
        length = next(iter(rows.values()))["context"]
        prompt = m3_slice.greedy_prompt(number, length, vocab_size)
        reference.logprobs(prompt[:-1], 0, first_scored=length - 2)
        logprobs: dict[str, torch.Tensor] = {}
        for name, row in rows.items():
            tokens = row["tokens"]
            logprobs[name] = reference.logprobs([*prompt, *tokens[:-1]], length - 1, first_scored=length - 1)
            chosen = logprobs[name].gather(1, torch.tensor(tokens, device=logprobs[name].device)[:, None])[:, 0]
            hits[name][0] += int((chosen == logprobs[name].amax(-1)).sum())
            hits[name][1] += len(tokens)
            said = [best[0] for best in row["best"]]
            errors[name]["greedy"] += [abs(a - b) for a, b in zip(said, chosen.tolist(), strict=True)]
        for one, other in combinations(rows, 2):
            pair = list(zip(rows[one]["tokens"], rows[other]["tokens"], strict=True))
            step = next((i for i, (a, b) in enumerate(pair) if a != b), None)
            if step is not None:
                a, b = (float(logprobs[one][step, token]) for token in pair[step])
                partings.append({"pair": [one, other], "context": length, "step": step, "logprobs": [a, b]})
    for number, length in enumerate(m3_slice.SCORED):
        if not any(number < len(result["scored"]) for result in results.values()):
            continue
        following = reference.following(m3_slice.make_prompt(length, length, vocab_size))
        for name, result in results.items():
            if number < len(result["scored"]):
                said = result["scored"][number]["logprobs"]
                errors[name]["scored"] += [abs(a - b) for a, b in zip(said, following, strict=True)]
    lines = ["| result | greedy tokens that are float32's best | log probability of these, off by | of prompt tokens |"]
    lines.append("|---|---|---|---|")
    for name in results:
        off = [described(errors[name][kind]) for kind in ("greedy", "scored")]
        lines.append(f"| {name} | {hits[name][0]} of {hits[name][1]} | {off[0]} | {off[1]} |")
    lines += ["", "| pair | prompts that part | float32 prefers the first's token | the second's | apart by at most |"]
    lines.append("|---|---|---|---|---|")
    for one, other in combinations(results, 2):
        gaps = [p["logprobs"][0] - p["logprobs"][1] for p in partings if p["pair"] == [one, other]]
        first, second = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
        most = max(map(abs, gaps), default=0.0)
        lines.append(f"| {one}, {other} | {len(gaps)} | {first} | {second} | {most:.4f} |")
    return lines, {"hits": hits, "partings": partings}


def described(values: list[float]) -> str:
    """A value that is no number counts as the largest of all."""
    if not values:
        return "–"
    ordered = sorted(v if v == v else float("inf") for v in values)
    mean = statistics.fmean(ordered)
    return f"{mean:.4f} in the mean, 99 %: {ordered[int(len(ordered) * 0.99)]:.3f}, most {ordered[-1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="write each parting there, as JSON")
    args = parser.parse_args()
    only_references()
    model = load(args.checkpoint, args.device)
    results = {path.stem: json.loads(path.read_text()) for path in args.results}
    contexts = [row["context"] for result in results.values() for rows in result.values() for row in rows]
    report, figures = judge(Reference(model, max(contexts) + 128), results, model.config.text.vocab_size)
    print("\n".join(report))
    if args.out is not None:
        args.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
