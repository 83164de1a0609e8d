"""How far slice.py's results are from float32: this package's model with its reference operators computes the same.

    python benchmarks/vllm/judge.py CHECKPOINT stock.json ours.json --out judge.jsonl [--seconds 500]

Where greedy tokens of two results part: whose token float32 prefers. Of each result: how often a greedy token is
float32's best one after the same tokens, and how far the log probabilities are off.

Prompts whose tokens part come first, the shortest of them first; then the other prompts, then those of which every
token is scored. Each is written to --out as soon as it is judged, and found there by the next run, which judges the
rest. The report is of what is judged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import slice as m3_slice
import torch
from checkpoint import PREFIX
from safetensors import safe_open

from msaserve.cache.kv import AttentionBatch, KVCache
from msaserve.config import ModelConfig
from msaserve.models.loader import destinations
from msaserve.models.minimax_m3 import MiniMaxM3

CHUNK = 2048
"""Tokens computed in one step."""
OPERATORS = ("norm_rope_store", "dense_attend", "select_attend", "select_blocks", "sparse_attend", "topk_blocks")
TILES = (
    ("index_score", "TILE_SCORES", 1 << 27),
    ("dense_attend", "TILE_TOKENS", 4096),
    ("dense_attend", "TILE_SCORES", 1 << 28),
    ("sparse_attend", "TILE_KEYS", 1 << 27),
)
"""What the references hold at a time; a card has the memory."""
Row = dict[str, Any]
Result = dict[str, list[Row]]


class OutOfTimeError(Exception):
    """A prompt is not judged in the time that is left."""


def only_references() -> None:
    """Take no kernels, which on a card multiply float32 with fewer bits."""
    for name in OPERATORS:
        operator = import_module(f"msaserve.ops.{name}")
        operator.IMPLS = tuple(impl for impl in operator.IMPLS if impl.name in ("reference", "two_steps"))  # type: ignore[attr-defined]
    for name, constant, size in TILES:
        reference = import_module(f"msaserve.ops.{name}.reference")
        assert hasattr(reference, constant)
        setattr(reference, constant, size)
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
    """One request at a time over a cache of its own, until time.monotonic() reaches `end`."""

    def __init__(self, model: MiniMaxM3, max_tokens: int, end: float = float("inf")) -> None:
        text = model.config.text
        self._model = model
        self._end = end
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
    def fill(self, tokens: list[int]) -> None:
        """Leave these tokens in the cache: the last layer stores their keys and values and computes nothing else."""
        for start in range(0, len(tokens), CHUNK):
            self._hidden(tokens[start : start + CHUNK], start, is_stored_only=True)

    @torch.inference_mode()
    def logprobs(self, tokens: list[int], first: int) -> torch.Tensor:
        """[R, vocab] after each of `tokens` from position `first` on; those before are cached."""
        steps = range(first, len(tokens), CHUNK)
        rows = [self._model.logits(self._hidden(tokens[i : i + CHUNK], i)).log_softmax(-1) for i in steps]
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

    def _hidden(self, tokens: list[int], start: int, *, is_stored_only: bool = False) -> torch.Tensor:
        """[R, hidden] of tokens that begin at position `start`; nothing that could be used if they are only stored."""
        if time.monotonic() > self._end:
            raise OutOfTimeError
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
        with stored_only(self._model.layers[-1]) if is_stored_only else nullcontext():
            hidden: torch.Tensor = self._model(torch.tensor(tokens, device=device), batch, self._cache)
        return hidden


@contextmanager
def stored_only(layer: Any) -> Iterator[None]:
    """The layer attends to nothing and has no MLP: of its work the projection and the stores remain."""

    def nothing(q: torch.Tensor, *_: Any) -> torch.Tensor:
        return q.new_zeros(q.shape)

    attention = layer.self_attn
    with (
        patch.multiple(attention, _attend_sparse=nothing, _attend_dense=nothing),
        patch.object(layer.mlp, "forward", torch.zeros_like),
    ):
        yield


def parting(one: Row, other: Row) -> int | None:
    """The first step at which two results have different tokens."""
    pairs = zip(one["tokens"], other["tokens"], strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def tasks(results: dict[str, Result]) -> list[dict[str, Any]]:
    """What is to be judged: prompts whose tokens part, other prompts, scored ones; of each kind the shortest first.
    `rows` are the results', by their names; `key` names all of it."""
    found = []
    for kind in ("greedy", "scored"):
        for number in range(max(len(result[kind]) for result in results.values())):
            rows = {name: result[kind][number] for name, result in results.items() if number < len(result[kind])}
            parts = kind == "greedy" and any(parting(*pair) is not None for pair in combinations(rows.values(), 2))
            key = hashlib.sha256(json.dumps([kind, number, rows]).encode()).hexdigest()[:16]
            context = next(iter(rows.values()))["context"]
            found.append({"kind": kind, "number": number, "context": context, "parts": parts, "rows": rows, "key": key})
    return sorted(found, key=lambda task: (task["kind"] != "greedy", not task["parts"], task["context"]))


def judge_greedy(reference: Reference, number: int, length: int, rows: dict[str, Row], vocab_size: int) -> Row:
    """One prompt's tokens. The prompt is computed once for all results."""
    prompt = m3_slice.greedy_prompt(number, length, vocab_size)
    reference.fill(prompt[:-1])
    record: Row = {"hits": {}, "off": {}, "partings": []}
    logprobs: dict[str, torch.Tensor] = {}
    for name, row in rows.items():
        tokens = row["tokens"]
        logprobs[name] = reference.logprobs([*prompt, *tokens[:-1]], length - 1)
        chosen = logprobs[name].gather(1, torch.tensor(tokens, device=logprobs[name].device)[:, None])[:, 0]
        record["hits"][name] = [int((chosen == logprobs[name].amax(-1)).sum()), len(tokens)]
        said = [best[0] for best in row["best"]]
        record["off"][name] = [abs(a - b) for a, b in zip(said, chosen.tolist(), strict=True)]
    for one, other in combinations(rows, 2):
        step = parting(rows[one], rows[other])
        if step is not None:
            values = [float(logprobs[one][step, rows[name]["tokens"][step]]) for name in (one, other)]
            record["partings"].append({"pair": [one, other], "context": length, "step": step, "logprobs": values})
    return record


def judge_scored(reference: Reference, length: int, rows: dict[str, Row], vocab_size: int) -> Row:
    """Every token of one prompt."""
    following = reference.following(m3_slice.make_prompt(length, length, vocab_size))
    return {name: [abs(a - b) for a, b in zip(row["logprobs"], following, strict=True)] for name, row in rows.items()}


def judge(reference: Reference, todo: list[dict[str, Any]], vocab_size: int, records: dict[str, Row]) -> Iterator[str]:
    """Adds to `records`, which are by the tasks' keys, and yields each key that it added; ends when the time is up."""
    for task in todo:
        if task["key"] in records:
            continue
        try:
            if task["kind"] == "greedy":
                args = (task["number"], task["context"], task["rows"], vocab_size)
                records[task["key"]] = judge_greedy(reference, *args)
            else:
                records[task["key"]] = judge_scored(reference, task["context"], task["rows"], vocab_size)
        except OutOfTimeError:
            return
        yield task["key"]


def report(names: list[str], todo: list[dict[str, Any]], records: dict[str, Row]) -> list[str]:
    """Two tables of what is judged."""
    judged = [(task, records[task["key"]]) for task in todo if task["key"] in records]
    greedy = [record for task, record in judged if task["kind"] == "greedy"]
    scored = [record for task, record in judged if task["kind"] == "scored"]
    lines = ["| result | greedy tokens that are float32's best | log probability of these, off by | of prompt tokens |"]
    lines.append("|---|---|---|---|")
    for name in names:
        hits = [record["hits"][name] for record in greedy if name in record["hits"]]
        off = [value for record in greedy for value in record["off"].get(name, [])]
        of_prompts = [value for record in scored for value in record.get(name, [])]
        counts = f"{sum(right for right, _ in hits)} of {sum(asked for _, asked in hits)}"
        lines.append(f"| {name} | {counts} | {described(off)} | {described(of_prompts)} |")
    lines += ["", "| pair | prompts that part | float32 prefers the first's token | the second's | apart by at most |"]
    lines.append("|---|---|---|---|---|")
    partings = [parting for record in greedy for parting in record["partings"]]
    for one, other in combinations(names, 2):
        gaps = [p["logprobs"][0] - p["logprobs"][1] for p in partings if p["pair"] == [one, other]]
        first, second = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
        most = max(map(abs, gaps), default=0.0)
        lines.append(f"| {one}, {other} | {len(gaps)} | {first} | {second} | {most:.4f} |")
    left = [task for task in todo if task["key"] not in records]
    if left:
        lines += [
            "",
            f"not judged, out of time: {len(left)} of {len(todo)}, {sum(t['parts'] for t in left)} of which part",
        ]
    return lines


def described(values: list[float]) -> str:
    """A value that is no number counts as the largest of all."""
    if not values:
        return "–"
    ordered = sorted(v if v == v else float("inf") for v in values)
    mean = statistics.fmean(ordered)
    return f"{mean:.4f} in the mean, 99 %: {ordered[int(len(ordered) * 0.99)]:.3f}, most {ordered[-1]:.3f}"


def read(path: Path) -> dict[str, Row]:
    """What a former run judged, by key."""
    records: dict[str, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):  # a run that was killed leaves part of a line
            record = json.loads(line)
            records[record["key"]] = record["found"]
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="a line for each prompt, added to what is there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many, with what is judged")
    args = parser.parse_args()
    begin = time.monotonic()
    results = {path.stem: json.loads(path.read_text()) for path in args.results}
    todo, records = tasks(results), read(args.out)
    if any(task["key"] not in records for task in todo):
        only_references()
        model = load(args.checkpoint, args.device)
        print(f"{time.monotonic() - begin:6.1f} s  loaded", flush=True)
        longest = max(task["context"] for task in todo)
        reference = Reference(model, longest + 128, begin + args.seconds)
        by_key = {task["key"]: task for task in todo}
        for key in judge(reference, todo, model.config.text.vocab_size, records):
            task, found = by_key[key], records[key]
            with args.out.open("a") as file:
                file.write("\n" + json.dumps({"key": key, "found": found}) + "\n")
            gaps = [p["logprobs"][0] - p["logprobs"][1] for p in found.get("partings", [])]
            said = f"{task['kind']}, {task['context']:,} tokens" + "".join(f", {gap:+.4f}" for gap in gaps)
            print(
                f"{time.monotonic() - begin:6.1f} s  {sum(k in records for k in by_key)} of {len(todo)}: {said}",
                flush=True,
            )
    print("\n".join(report(list(results), todo, records)))


if __name__ == "__main__":
    main()
