"""Time decode of requests that share pages.

    python benchmarks/ops/shared_prefix.py [--peers DIR]

DIR holds vLLM's kernels, as decode.py takes them; steps "in a row" and "single" as there. Below the shared prefixes are
requests of pages of their own, of one length and of very different ones: no gain of the first may make these slower.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decode import BANDWIDTH, BLOCK, DIM, Step, in_a_row_us, single_us

SHARED = [(8, 65536), (32, 65536), (8, 131072), (32, 131072), (8, 524288), (32, 524288)]
OWN = [(2, 65536), (8, 65536), (32, 65536), (8, 131072), (8, 524288)]
RAGGED = [(8, 8192), (32, 8192)]
"""All but the last one, which has LONGEST tokens."""
LONGEST = 524288
OWN_TOKENS = 2048
"""Of each of the requests that share the rest."""


def inputs(requests: int, context: int, kind: str) -> tuple[list[Step], float]:
    """Several sets, and the bytes of a set's index keys."""
    if kind == "ragged":
        # No more pages than one request has; the short ones read some of them.
        steps = [Step.random(requests, LONGEST, seed, max_pages=LONGEST // BLOCK) for seed in range(3)]
        lens = torch.tensor([context] * (requests - 1) + [LONGEST], dtype=torch.int32, device="cuda")
        return [step._replace(seq_lens=lens) for step in steps], float(lens.sum()) * DIM * 2
    shared = (context - OWN_TOKENS) // BLOCK if kind == "shared" else 0
    index_bytes = (shared * BLOCK + requests * (context - shared * BLOCK)) * DIM * 2
    sets = max(2, min(8, round(400e6 / index_bytes)))
    return [Step.random(requests, context, seed, shared=shared) for seed in range(sets)], index_bytes


def measure(requests: int, context: int, kind: str, peers: bool, other: torch.Tensor) -> str:
    """One row: vLLM with `peers`, and ours."""
    steps, index_bytes = inputs(requests, context, kind)
    cells = [f"{requests}, {context // 1024}K, {kind}", f"{index_bytes / BANDWIDTH * 1e6:.1f}"]
    for way in [Step.vllm, Step.ours] if peers else [Step.ours]:
        calls = [partial(way, step) for step in steps]
        cells.append(f"{in_a_row_us(calls):.1f} / {single_us(calls[0], other):.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with vLLM's kernels")
    options = parser.parse_args()
    if options.peers:
        sys.path.insert(0, str(options.peers.resolve()))
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}; µs a step")
    names = ["vLLM", "ours"] if options.peers else ["ours"]
    columns = ["requests, context, pages", "index keys once", *(f"{name}, in a row / single" for name in names)]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    other = torch.randn(1 << 27, device="cuda")
    for kind, shapes in (("shared", SHARED), ("own", OWN), ("ragged", RAGGED)):
        for requests, context in shapes:
            print(measure(requests, context, kind, options.peers is not None, other), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
