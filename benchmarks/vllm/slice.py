"""A full-width slice of MiniMax-M3 (random weights, few layers) in a real vLLM: with the plugin, and without.

    python benchmarks/vllm/slice.py --out ours.json
    MSASERVE_VLLM=0 python benchmarks/vllm/slice.py --out stock.json
    python benchmarks/vllm/compare.py stock.json ours.json

Needs vLLM, one card and no checkpoint. The weights depend on their shapes alone, so both runs hold the same model. Each
figure is taken twice and the second one kept: kernels compile during the first.

Requests are sent all at once. Each brings `NEW` tokens after a prefix that all share and that the cache holds, so that
many long contexts fit one card: output tokens a second and the time to a request's first token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The model in this process, so that its weights can be scaled and its layers looked at.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

VOCAB = 200_064
NEW, OUTPUT = 2_048, 128
"""Tokens of each request's own, and generated."""
PROMPTS = [*[200 + 37 * i for i in range(12)], *[2048 + 509 * i for i in range(14)], 16_384, 24_000, 32_768, 49_152]
PROMPTS += [65_536, 100_000]
"""Lengths of the 32 prompts whose greedy tokens are compared."""


def write_config(directory: Path, *, num_layers: int, num_dense: int, num_experts: int = 128) -> None:
    """MiniMax-M3's config.json with fewer layers, of which the first `num_dense` attend to everything."""
    is_sparse = [0] * num_dense + [1] * (num_layers - num_dense)
    ids = {"bos_token_id": 200_034, "eos_token_id": 200_020}
    text = {
        "model_type": "minimax_m3_text",
        "vocab_size": VOCAB,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12_288,
        "shared_intermediate_size": 3072,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "hidden_act": "swigluoai",
        "num_local_experts": num_experts,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.0,
        "num_mtp_modules": 0,
        "moe_layer_freq": is_sparse,
        "torch_dtype": "bfloat16",
        **ids,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_disable_index_value": is_sparse,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": is_sparse,
        },
    }
    config = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl",
        "text_config": text,
        "torch_dtype": "bfloat16",
        **ids,
    }
    (directory / "config.json").write_text(json.dumps(config))


def start(
    *,
    num_layers: int,
    num_dense: int,
    max_model_len: int,
    cache_gib: float,
    memory: float,
    num_experts: int = 128,
    capture: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    **options: Any,
) -> Any:
    """A vLLM `LLM` of the slice. `capture`: the batch sizes that CUDA graphs are captured for."""
    directory = Path(tempfile.mkdtemp(prefix="m3slice-"))
    write_config(directory, num_layers=num_layers, num_dense=num_dense, num_experts=num_experts)
    from vllm import LLM

    llm = LLM(
        model=str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        block_size=128,
        gpu_memory_utilization=memory,
        kv_cache_memory_bytes=int(cache_gib * 2**30),
        max_num_batched_tokens=8192,
        max_num_seqs=max(capture),
        enable_prefix_caching=True,
        compilation_config={"cudagraph_capture_sizes": list(capture)},
        **options,
    )
    llm.apply_model(make_tokens_tell)
    return llm


def make_tokens_tell(model: Any) -> float:
    """Make what attention adds large beside the embeddings, as in a trained model, and the output head another matrix
    than the embeddings: of equal shape, both are filled alike, and every token would repeat itself. Returns the
    attention weights' checksum."""
    total = 0.0
    for name, weight in model.named_parameters():
        if "qkv_proj" in name or "o_proj" in name:
            weight.data.mul_(16)
            total += float(weight.data[0].double().abs().sum())
        elif "lm_head" in name:
            weight.data.copy_(weight.data.roll(1, dims=1))
    return total


class Slice:
    """The measurements, each a method that returns rows for JSON."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._random = random.Random(0)
        self._number = 0

    def tokens(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(1000, 190_000) for _ in range(num_tokens)]

    def generate(self, prompts: list[list[int]], num_tokens: int, **options: Any) -> tuple[float, list[Any]]:
        """(seconds, vLLM's outputs)."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **options)
        begin = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begin, outputs

    def greedy(self, lengths: list[int], num_tokens: int = 32) -> list[dict[str, Any]]:
        """Greedy tokens after random prompts, the same ones in every run, with the two best log probabilities."""
        rows = []
        for number, length in enumerate(lengths):
            generator = random.Random(1000 * number + length)
            prompt = [generator.randrange(1000, 190_000) for _ in range(length)]
            _, outputs = self.generate([prompt], num_tokens, logprobs=2)
            output = outputs[0].outputs[0]
            best = [sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in output.logprobs]
            rows.append({"context": length, "tokens": list(output.token_ids), "best": best})
        return rows

    def cold(self, context: int, num_runs: int = 2) -> dict[str, Any]:
        """Time to the first token of a prompt of which nothing is cached, nothing else running."""
        for _ in range(num_runs):
            seconds, _ = self.generate([self.tokens(context)], 1)
        return {"context": context, "cold_ttft_ms": seconds * 1e3}

    def together(self, context: int, concurrency: int, num_runs: int = 2) -> dict[str, Any]:
        """Requests sent at once, of `context` tokens each of which the last `NEW` are not cached."""
        prefix = random.Random(context).choices(range(1000, 190_000), k=context - NEW)
        self.generate([prefix], 1)
        for _ in range(num_runs):
            prompts = [[*prefix, *self.tokens(NEW)] for _ in range(concurrency)]
            firsts, seconds = self.timed(prompts, OUTPUT)
        firsts = sorted(firsts)
        return {
            "context": context,
            "concurrency": concurrency,
            "output_tokens_per_s": concurrency * OUTPUT / seconds,
            "ttft_ms": firsts[len(firsts) // 2] * 1e3,
            "last_ttft_ms": firsts[-1] * 1e3,
            "step_ms": (seconds - firsts[-1]) / (OUTPUT - 1) * 1e3,
        }

    def timed(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[float], float]:
        """(seconds to each request's first token, seconds to the last token of all), from when all of them wait."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        firsts: dict[str, float] = {}
        for prompt in prompts:
            self._number += 1
            engine.add_request(str(self._number), {"type": "token", "prompt_token_ids": prompt}, sampling)
        begin = time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    firsts.setdefault(output.request_id, time.perf_counter() - begin)
        return list(firsts.values()), time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dense", type=int, default=1, help="layers that attend to everything")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 65_536, 131_072, 524_288])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--cache-gib", type=float, default=8.0)
    parser.add_argument("--memory", type=float, default=0.9, help="share of the card's memory that must be free")
    args = parser.parse_args()
    llm = start(
        num_layers=args.layers,
        num_dense=args.dense,
        max_model_len=max(args.contexts) + 4096,
        cache_gib=args.cache_gib,
        memory=args.memory,
    )
    runs = Slice(llm)
    result = {
        "greedy": runs.greedy(PROMPTS),
        "cold": [runs.cold(context) for context in args.contexts],
        "together": [runs.together(context, n) for context in args.contexts for n in args.concurrency],
    }
    args.out.write_text(json.dumps(result))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
