"""Time against context, ours, vLLM's and the floor: measured on a card, then drawn anywhere.

    python benchmarks/ops/context_plot.py measure RESULTS.json [--peers DIR]
    python benchmarks/ops/context_plot.py draw RESULTS.json docs/img/context.png

A chunk of 8,192 queries whose last one sees the context, and one decode token for 1 and for 8 requests; score, top-k
and attention together. Medians of CUDA-graph replays, the L2 cache filled by reading something else before each.
The floor is the larger of bytes over bandwidth and operations over the rate of a large bf16 product.
Dense attention of the chunk at the longest context is timed too: PyTorch's flash and cuDNN backends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decode import BANDWIDTH, BLOCK, DIM, HEADS, KV_HEADS, TOPK, Step, capture, replay_us
from prefill import QUERIES, Chunk, attend, make_chunk, select

CONTEXTS = tuple(8192 << i for i in range(8))
RATE = 7.85e14
"""Operations a second of a large bf16 product on an H200."""
WORK = ("prefill", "decode_1", "decode_8")


def prefill_floor(context: int) -> float:
    """Milliseconds: every query's index heads against every key before it, then 16 blocks for every query head."""
    cached = context - QUERIES
    score = QUERIES * (cached + QUERIES / 2) * KV_HEADS * DIM * 2
    attended = sum(min(cached + i + 1, TOPK * BLOCK) for i in range(QUERIES)) * HEADS * DIM * 4
    return (score + attended) / RATE * 1e3


def decode_floor(context: int, requests: int) -> float:
    """Milliseconds: the index keys once, and the chosen blocks' K and V."""
    index_bytes = requests * context * DIM * 2
    return (index_bytes + requests * KV_HEADS * TOPK * BLOCK * 2 * DIM * 2) / BANDWIDTH * 1e3


def vllm_prefill(chunk: Chunk) -> torch.Tensor:
    index, attention = import_module("m3ops.vllm_index_topk"), import_module("m3ops.vllm_sparse_attn")
    queries, out = chunk.q.shape[0], torch.empty_like(chunk.q)
    where = (chunk.block_table, chunk.cu_query_lens, chunk.seq_lens, chunk.cached_lens, queries)
    scores = index.minimax_m3_index_score(chunk.index_q, chunk.index_k, *where, chunk.seq_len, KV_HEADS)
    ids = index.minimax_m3_index_topk(scores, chunk.cu_query_lens, chunk.cached_lens, queries, TOPK, 0, 1)
    attention.minimax_m3_sparse_attn(chunk.q, chunk.kv, ids, *where, KV_HEADS, DIM**-0.5, out)
    return out


def time_ms(call: Callable[[], Any], other: torch.Tensor, repeats: int) -> float:
    graph, _result = capture(call)
    return replay_us(graph, other.sum, repeats) / 1e3


def dense_ms(context: int) -> dict[str, float]:
    """The chunk's queries over the whole context, half of the chunk's own tokens: the causal average."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(1, HEADS, QUERIES, DIM, **options)
    k, v = (torch.randn(1, KV_HEADS, context - QUERIES // 2, DIM, **options) for _ in range(2))
    times = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                found = []
                for _ in range(3):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
                    end.record()
                    torch.cuda.synchronize()
                    found.append(start.elapsed_time(end))
                times[backend.name] = min(found)
        except RuntimeError as error:
            print(f"dense {backend.name}: {str(error).splitlines()[0]}", flush=True)
    return times


def measure(path: Path, peers: Path | None) -> None:
    import triton

    if peers is not None:
        sys.path.insert(0, str(peers.resolve()))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    results: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "date": str(date.today()),
        "versions": f"torch {torch.__version__}, Triton {triton.__version__}",
        "commit": commit,
        **{work: {"floor": {}, "ours": {}, "vLLM": {}} for work in WORK},
    }
    other = torch.randn(1 << 27, device="cuda")

    def add(work: str, name: str, context: int, call: Callable[[], Any]) -> None:
        try:
            results[work][name][context] = time_ms(call, other, 9 if work == "prefill" else 31)
            print(f"{work} {context} {name} {results[work][name][context]:.4f} ms", flush=True)
        except Exception as error:
            print(f"{work} {context} {name} failed: {type(error).__name__} {str(error)[:200]}", flush=True)
        path.write_text(json.dumps(results, indent=1))

    for context in CONTEXTS:
        for requests in (1, 8):
            step = Step.random(requests, context, 0)
            results[f"decode_{requests}"]["floor"][context] = decode_floor(context, requests)
            add(f"decode_{requests}", "ours", context, step.ours)
            if peers is not None:
                add(f"decode_{requests}", "vLLM", context, step.vllm)
            del step
            torch.cuda.empty_cache()
        chunk = make_chunk(context - QUERIES)
        results["prefill"]["floor"][context] = prefill_floor(context)
        add("prefill", "ours", context, lambda chunk=chunk: attend(chunk, select(chunk)))
        if peers is not None:
            add("prefill", "vLLM", context, lambda chunk=chunk: vllm_prefill(chunk))
        del chunk
        torch.cuda.empty_cache()
    results["dense_prefill"] = {CONTEXTS[-1]: dense_ms(CONTEXTS[-1])}
    path.write_text(json.dumps(results, indent=1))
    print(f"\n{results['card']}, {results['versions']}, {results['date']}\n\n{table(results)}", flush=True)


def table(results: dict[str, Any]) -> str:
    """Markdown: ours / vLLM's / floor of each context, prefill in ms and decode in µs; the dense ratio."""
    results = json.loads(json.dumps(results))
    lines = ["| context | prefill of 8,192, ms | decode 1, µs | decode 8, µs |", "|--:|---|---|---|"]
    for context in CONTEXTS:
        cells = [f"{context // 1024}K"]
        for work in WORK:
            unit = 1.0 if work == "prefill" else 1e3
            values = [results[work][name].get(str(context)) for name in ("ours", "vLLM", "floor")]
            ratio = "" if None in values[:2] else f" ({values[0] / values[1]:.2f})"
            cells.append(" / ".join("–" if value is None else f"{value * unit:.3g}" for value in values) + ratio)
        lines.append(f"| {' | '.join(cells)} |")
    for context, times in results.get("dense_prefill", {}).items():
        ours = results["prefill"]["ours"].get(context)
        for name, value in times.items():
            lines.append(f"\nDense attention of the chunk at {context}, {name}: {value:.0f} ms")
            if ours:
                lines[-1] += f", {value / ours:.1f} times ours"
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    titles = ("prefill, a chunk of 8,192", "decode, 1 request", "decode, 8 requests")
    looks = {"vLLM": ("#888888", "s-"), "ours": ("#c0392b", "o-"), "floor": ("#2c3e50", ":")}
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.6), dpi=110)
    for axis, work, title in zip(axes, WORK, titles, strict=True):
        is_prefill = work == "prefill"
        for name, (colour, look) in looks.items():
            points = sorted((int(context), value) for context, value in results[work][name].items())
            values = [value if is_prefill else value * 1e3 for _, value in points]
            # Between few points a line would claim more than was measured.
            style = look if len(points) == len(CONTEXTS) else look[0]
            axis.plot([context for context, _ in points], values, style, color=colour, label=name, markersize=5)
        axis.set(xscale="log", yscale="log", title=title, xlabel="context", ylabel="ms" if is_prefill else "µs")
        axis.set_xticks(CONTEXTS, [f"{context // 1024}K" if context < 1 << 20 else "1M" for context in CONTEXTS])
        axis.minorticks_off()
        axis.tick_params(axis="x", labelsize=7)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.suptitle(f"One sparse layer of MiniMax-M3, bf16, {results['card']}, {results['date']}", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("results", type=Path)
    measuring.add_argument("--peers", type=Path)
    drawing = commands.add_parser("draw")
    drawing.add_argument("results", type=Path)
    drawing.add_argument("picture", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.results, options.peers)
    else:
        results = json.loads(options.results.read_text())
        print(table(results))
        draw(results, options.picture)


if __name__ == "__main__":
    main()
