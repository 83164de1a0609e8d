"""A full-width slice of MiniMax-M3 (few layers) in a real vLLM: with the plugin, and with MSASERVE_VLLM=0 without.

What it computes, of which judge.py says how far it is from float32:

    python benchmarks/vllm/checkpoint.py DIR
    python benchmarks/vllm/slice.py --checkpoint DIR --out ours.json

How fast it is, which turns.py measures on two of these by turns:

    python benchmarks/vllm/slice.py --serve ours

Needs vLLM and one card. Without a checkpoint vLLM makes up the weights, which depend on their shapes alone, so that two
of these hold the same model.

Requests are sent all at once. Each brings `NEW` tokens after a prefix that all share and that the cache holds, so that
many long contexts fit one card: output tokens a second, the time to a request's first token and that of a decode step.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The model in this process, so that its weights can be scaled and its layers looked at.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

VOCAB = 200_064
NEW, OUTPUT = 2_048, 128
"""Tokens of each request's own, and generated."""
CONTEXTS = (8192, 65_536, 131_072, 524_288)
PROMPTS = [*[200 + 37 * i for i in range(12)], *[2048 + 509 * i for i in range(14)], 16_384, 24_000, 32_768, 49_152]
PROMPTS += [65_536, 100_000]
"""Lengths of the 32 prompts whose greedy tokens are compared."""
SCORED = (3000, 20_000, 65_536)
"""Lengths of the prompts of which every token's log probability is compared."""


def make_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """The same tokens in every process, none of them special."""
    return random.Random(seed).choices(range(1000, vocab_size - 100), k=length)


def greedy_prompt(number: int, length: int, vocab_size: int) -> list[int]:
    return make_prompt(1000 * number + length, length, vocab_size)


def write_config(
    directory: Path, *, num_layers: int, num_dense: int, num_experts: int = 128, vocab_size: int = VOCAB
) -> None:
    """MiniMax-M3's config.json with fewer layers, of which the first `num_dense` attend to everything."""
    is_sparse = [0] * num_dense + [1] * (num_layers - num_dense)
    ids = {"bos_token_id": vocab_size - 30, "eos_token_id": vocab_size - 44}
    text = {
        "model_type": "minimax_m3_text",
        "vocab_size": vocab_size,
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
    max_model_len: int,
    cache_gib: float,
    memory: float,
    checkpoint: Path | None = None,
    num_layers: int = 4,
    num_dense: int = 1,
    num_experts: int = 128,
    capture: tuple[int, ...] = (1, 8, 32),
    **options: Any,
) -> Any:
    """A vLLM `LLM` of the checkpoint, or of a slice that has none.

    Args:
        memory: share of the card's memory that must be free.
        capture: the batch sizes that CUDA graphs are captured for.
    """
    directory = checkpoint or Path(tempfile.mkdtemp(prefix="m3slice-"))
    if checkpoint is None:
        write_config(directory, num_layers=num_layers, num_dense=num_dense, num_experts=num_experts)
    from vllm import LLM

    llm = LLM(
        model=str(directory),
        load_format="dummy" if checkpoint is None else "safetensors",
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
    if checkpoint is None:
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
        self._vocab_size = llm.llm_engine.model_config.get_vocab_size()
        self._random = random.Random(0)
        self._number = 0

    @functools.cached_property
    def text(self) -> list[int]:
        """What all contexts begin with: the cache holds the longest, and the others in it."""
        return make_prompt(0, max(CONTEXTS), self._vocab_size)

    def tokens(self, num_tokens: int) -> list[int]:
        return make_prompt(self._random.getrandbits(32), num_tokens, self._vocab_size)

    def generate(self, prompts: list[list[int]], num_tokens: int, **options: Any) -> tuple[float, list[Any]]:
        """(seconds, vLLM's outputs)."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **options)
        begin = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begin, outputs

    def greedy(self, lengths: list[int], num_tokens: int = 32) -> Iterator[dict[str, Any]]:
        """Greedy tokens after random prompts, the same ones in every run, and the two best log probabilities."""
        for number, length in enumerate(lengths):
            prompt = greedy_prompt(number, length, self._vocab_size)
            _, outputs = self.generate([prompt], num_tokens, logprobs=2)
            output = outputs[0].outputs[0]
            best = [sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in output.logprobs]
            yield {"context": length, "tokens": list(output.token_ids), "best": best}

    def scored(self, lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        """The log probability of each token of a random prompt but the first."""
        for length in lengths:
            prompt = make_prompt(length, length, self._vocab_size)
            _, outputs = self.generate([prompt], 1, prompt_logprobs=1)
            steps = zip(prompt[1:], outputs[0].prompt_logprobs[1:], strict=True)
            yield {"context": length, "logprobs": [round(step[token].logprob, 5) for token, step in steps]}

    def touch(self, context: int) -> None:
        """Use the cached prefix of that context, so that it is the last one to leave the cache."""
        self.generate([self.text[: context - NEW]], 1)

    def cold(self, context: int) -> dict[str, Any]:
        """Time to the first token of a prompt of which nothing is cached, nothing else running."""
        firsts, _, _ = self.timed([self.tokens(context)], 1)
        return {"context": context, "cold_ttft_ms": firsts[0] * 1e3}

    def together(self, context: int, concurrency: int) -> dict[str, Any]:
        """Requests sent at once, of `context` tokens each of which the last `NEW` are not cached."""
        self.touch(context)
        prefix = self.text[: context - NEW]
        prompts = [[*prefix, *self.tokens(NEW)] for _ in range(concurrency)]
        firsts, steps, seconds = self.timed(prompts, OUTPUT)
        return {
            "context": context,
            "concurrency": concurrency,
            "output_tokens_per_s": concurrency * OUTPUT / seconds,
            "ttft_ms": statistics.median(firsts) * 1e3,
            "last_ttft_ms": max(firsts) * 1e3,
            "step_ms": statistics.median(steps) * 1e3,
        }

    def timed(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[float], list[float], float]:
        """From when all of them wait: (seconds to each request's first token, seconds of each step after the last
        request's first token, seconds to the last token of all)."""
        self.add(prompts, num_tokens)
        engine = self._llm.llm_engine
        firsts: dict[str, float] = {}
        steps = []
        gc.collect()
        gc.disable()
        try:
            now = begin = time.perf_counter()
            while engine.has_unfinished_requests():
                is_decode = len(firsts) == len(prompts)
                outputs = engine.step()
                before, now = now, time.perf_counter()
                if is_decode:
                    steps.append(now - before)
                for output in outputs:
                    if output.outputs and output.outputs[0].token_ids:
                        firsts.setdefault(output.request_id, now - begin)
        finally:
            gc.enable()
        return list(firsts.values()), steps, now - begin

    def add(self, prompts: list[list[int]], num_tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self._number += 1
            request = {"type": "token", "prompt_token_ids": prompt}
            self._llm.llm_engine.add_request(str(self._number), request, sampling)

    def kernels(self, context: int, concurrency: int) -> dict[str, Any]:
        """The card's time by kernel, in microseconds: of what comes before the first tokens, and of one decode step."""
        from torch.profiler import ProfilerActivity, profile

        engine = self._llm.llm_engine
        self.touch(context)
        prefix = self.text[: context - NEW]
        self.add([[*prefix, *self.tokens(NEW)] for _ in range(concurrency)], OUTPUT)
        started: set[str] = set()
        row: dict[str, Any] = {"context": context, "concurrency": concurrency}
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            while len(started) < concurrency:
                started |= {o.request_id for o in engine.step() if o.outputs and o.outputs[0].token_ids}
        row["prefill"] = by_kernel(trace, 1)
        num_steps = OUTPUT // 4
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(num_steps):
                engine.step()
        row["step"] = by_kernel(trace, num_steps)
        while engine.has_unfinished_requests():
            engine.step()
        return row


def by_kernel(trace: Any, num_steps: int) -> dict[str, tuple[float, float]]:
    """(microseconds, launches) of each kernel and copy, per step."""
    events = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    return {e.key: (e.self_device_time_total / num_steps, e.count / num_steps) for e in events}


def serve(runs: Any, directory: Path) -> None:
    """Answer what turns.py asks: N.ask is {"call", "args"}, N.answer what that method of `runs` returned."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    (directory / "ready").touch()
    for number in itertools.count():
        ask = directory / f"{number}.ask"
        while not ask.exists():
            time.sleep(0.002)
        request = json.loads(ask.read_text())
        if request["call"] == "end":
            return
        try:
            answer = {"row": getattr(runs, request["call"])(*request["args"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        made = directory / f"{number}.made"
        made.write_text(json.dumps(answer))
        made.rename(directory / f"{number}.answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="write greedy tokens and log probabilities, for judge.py")
    what.add_argument("--serve", type=Path, metavar="DIR", help="measure what turns.py asks for in DIR")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dense", type=int, default=1, help="layers that attend to everything")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--cache-gib", type=float, default=8.0)
    parser.add_argument("--memory", type=float, default=0.9, help="share of the card's memory that must be free")
    parser.add_argument("--options", type=json.loads, default={}, help="further options of vLLM's LLM, as JSON")
    args = parser.parse_args()
    llm = start(
        checkpoint=args.checkpoint,
        num_layers=args.layers,
        num_dense=args.dense,
        num_experts=args.experts,
        max_model_len=max(CONTEXTS) + 4096,
        cache_gib=args.cache_gib,
        memory=args.memory,
        **args.options,
    )
    runs = Slice(llm)
    if args.serve is not None:
        serve(runs, args.serve)
        return
    result = {"greedy": list(runs.greedy(PROMPTS)), "scored": list(runs.scored(SCORED))}
    args.out.write_text(json.dumps(result))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
