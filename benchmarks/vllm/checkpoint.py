"""A checkpoint of slice.py's model with random weights, which vLLM loads, and judge.py too.

    python benchmarks/vllm/checkpoint.py DIR --layers 3 --experts 8

Every matrix keeps the size of what passes it, and queries are three times as large as keys, so that a head attends to
few tokens: a block chosen wrongly changes what comes out.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import slice as m3_slice
import torch
from safetensors.torch import save_file

from msaserve.config import ModelConfig
from msaserve.models.loader import destinations
from msaserve.models.minimax_m3 import MiniMaxM3

PREFIX = "language_model."
"""What the released names, which our loader takes, have before vLLM's names for a model without a vision tower."""
QUERY_NORM = 2.0
"""Of q_norm, whose effect is 1 more."""
LOGIT_SIZE = 2.0


def write(directory: Path, *, device: str, **sizes: int) -> None:
    """`sizes`: as slice.write_config takes them."""
    directory.mkdir(parents=True, exist_ok=True)
    m3_slice.write_config(directory, **sizes)
    save_file(dict(tensors(directory, device)), directory / "model.safetensors")


def tensors(directory: Path, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor by vLLM's name; its values depend on the name, the shape and the kind of device alone."""
    with torch.device("meta"):
        model = MiniMaxM3(ModelConfig.from_checkpoint(directory))
    for released, like in destinations(model):
        name = released.removeprefix(PREFIX)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(like.shape, generator=generator, device=device)
        yield name, (noise * size_of(name, like)).add_(mean_of(name)).to("cpu", torch.bfloat16)


def size_of(name: str, like: torch.Tensor) -> float:
    if "embed_tokens" in name:
        return 1.0
    if like.ndim == 1:
        return 0.01
    return (LOGIT_SIZE if "lm_head" in name else 1.0) / math.sqrt(like.shape[1])


def mean_of(name: str) -> float:
    return QUERY_NORM if name.endswith(".q_norm.weight") else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dense", type=int, default=1, help="layers that attend to everything")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    sizes = {"num_layers": args.layers, "num_dense": args.dense, "num_experts": args.experts, "vocab_size": args.vocab}
    write(args.directory, device=args.device, **sizes)


if __name__ == "__main__":
    main()
