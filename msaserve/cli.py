"""The command line. Importing this loads no torch; commands load what they need."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
import tyro

import msaserve
from msaserve.config import EngineConfig, KVCacheDtype, ModelConfig
from msaserve.errors import CheckpointError, InvalidRequestError, MsaserveError
from msaserve.eval.command import Eval
from msaserve.gateway.command import Gateway
from msaserve.interrupt import INTERRUPTED
from msaserve.serve import Serve
from msaserve.worker.command import Worker

GIB = 2**30

Checkpoint = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
EngineOptions = Annotated[EngineConfig, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Generate:
    """Complete prompts without a server and print the texts."""

    needs: ClassVar[str] = "engine"

    checkpoint: Checkpoint
    engine: EngineOptions = field(default_factory=EngineConfig)
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT [TEXT ...]")] = ()
    """Prompts."""
    file: Path | None = None
    """A file with one prompt a line."""
    chat: bool = False
    """Send each prompt as a user's message, through the chat template."""
    json: bool = False
    """Print one JSON object per output: prompt, index, text, token_ids, finish_reason."""
    max_tokens: int = 256
    """Most tokens of one output."""
    n: int = 1
    """Outputs per prompt."""
    temperature: float | None = None
    """Default of this and the next two: the checkpoint's generation_config.json."""
    top_p: float | None = None
    top_k: int | None = None
    random_seed: int | None = None
    """Of the first output; output i has random_seed + i. Default: drawn."""

    def run(self) -> int:
        from msaserve.llm import LLM

        prompts = self._prompts()
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": self.random_seed}
        with LLM(self.checkpoint, **dataclasses.asdict(self.engine)) as llm:
            sampling = msgspec.structs.replace(
                llm.default_sampling(),
                max_tokens=self.max_tokens,
                n=self.n,
                **{name: value for name, value in given.items() if value is not None},
            )
            if self.chat:
                results = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], sampling)
            else:
                results = llm.generate(prompts, sampling)
        failed = 0
        for prompt, result in zip(prompts, results, strict=True):
            for output in result.outputs:
                if output.finish_reason == "error":
                    failed += 1
                    _fail(f"prompt {prompt[:40]!r}: {output.error}", 1)
                elif self.json:
                    line = {
                        "prompt": prompt,
                        "index": output.index,
                        "text": output.text,
                        "token_ids": output.token_ids,
                        "finish_reason": output.finish_reason,
                    }
                    print(json.dumps(line, ensure_ascii=False))
                else:
                    print(output.text)
        return 1 if failed else 0

    def _prompts(self) -> list[str]:
        prompts = list(self.prompt)
        if self.file is not None:
            try:
                prompts += [line for line in self.file.read_text(encoding="utf-8").split("\n") if line]
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidRequestError(f"{self.file} cannot be read: {error}") from error
        if not prompts:
            raise InvalidRequestError("no prompt: give --prompt TEXT or --file FILE")
        return prompts


@dataclass(frozen=True)
class Check:
    """Say what a checkpoint is, whether it can be served, and what fits into memory. Loads no weights."""

    needs: ClassVar[str] = "engine"

    checkpoint: Checkpoint
    memory: float = 80.0
    """GiB for weights and cache together."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights and cache."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Of the cache, if another than `dtype`."""

    def run(self) -> int:
        from msaserve.gateway.chat import ChatTemplate
        from msaserve.models.memory_plan import plan_memory, weight_bytes
        from msaserve.tokenizer import Tokenizer

        if not 0 < self.memory < math.inf:
            raise InvalidRequestError(f"memory must be a positive number of GiB, not {self.memory}", param="memory")
        config = ModelConfig.from_checkpoint(self.checkpoint)
        tokenizer = Tokenizer.load(self.checkpoint)
        template = ChatTemplate.load(self.checkpoint)
        budget = int(self.memory * GIB) - weight_bytes(config, self.dtype)
        plan = plan_memory(config, self.dtype, max(budget, 0), self.kv_cache_dtype)
        text, vision = config.text, config.vision
        num_sparse, num_moe = len(text.sparse_layer_ids), sum(text.has_moe)
        num_dense = text.num_layers - num_sparse
        index = f"{text.num_index_heads} index heads of {text.index_dim}"
        cached = f"{plan.num_pages:,} pages, {plan.max_cached_tokens:,} tokens"
        rows = (
            ("model", config.model_type),
            (
                "layers",
                f"{text.num_layers}: {num_sparse} sparse and {num_dense} dense attention, {num_moe} with experts",
            ),
            ("attention", f"{text.num_heads} query heads on {text.num_kv_heads} KV heads of {text.head_dim}"),
            ("selection", f"{text.topk_blocks} blocks of {text.block_size} tokens, {index}"),
            ("experts", f"{text.num_experts}, {text.num_experts_per_tok} per token"),
            ("vocabulary", f"{text.vocab_size:,} tokens; the tokenizer knows {tokenizer.vocab_size:,}"),
            ("context", f"{config.max_model_len:,} tokens"),
            ("vision", "none: text only" if vision is None else f"{vision.num_layers} layers"),
            ("chat template", "none: only /v1/completions" if template is None else "yes"),
            ("weights", f"{_size(plan.weight_bytes)} in {plan.dtype}"),
            ("KV per token", f"{plan.kv_bytes_per_token:,} B"),
            ("index-K per token", f"{plan.index_bytes_per_token:,} B"),
            ("cache", f"{_size(plan.budget_bytes)} of {self.memory:g} GiB: {cached}"),
            ("longest request", f"{plan.max_request_len:,} tokens"),
            ("not supported", "quantised weights, several GPUs, prediction (MTP) heads"),
        )
        for name, value in rows:
            print(f"{name:<18} {value}")
        if not plan.num_pages:
            return _fail(f"weights of {_size(plan.weight_bytes)} leave no cache in {self.memory:g} GiB", 1)
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for what failed, 2 for what was wrong in the command or the checkpoint."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["--version"], ["-V"]):
        print(f"msaserve {msaserve.__version__}")
        return 0
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # what cannot be written is noticed here, and not when Python has ended
    except BrokenPipeError:
        # Whoever read the output has read enough, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (CheckpointError, InvalidRequestError) as error:
        return _fail(str(error), 2)
    except MsaserveError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    command: Serve | Worker | Gateway | Generate | Eval | Check = tyro.cli(
        Annotated[Serve, tyro.conf.subcommand("serve")]
        | Annotated[Worker, tyro.conf.subcommand("worker")]
        | Annotated[Gateway, tyro.conf.subcommand("gateway")]
        | Annotated[Generate, tyro.conf.subcommand("generate")]
        | Annotated[Eval, tyro.conf.subcommand("eval")]
        | Annotated[Check, tyro.conf.subcommand("check")],
        prog="msaserve",
        description="Serve MiniMax-M3 and models of its kind. `msaserve --version` prints the version.",
        args=arguments,
    )
    try:
        return command.run()
    except ModuleNotFoundError as error:
        if str(error.name).startswith("msaserve"):
            raise
        extra = "otel" if str(error.name).startswith("opentelemetry") else command.needs
        return _fail(f"this needs {error.name}, which is not installed: pip install 'msaserve[{extra}]'", 1)


def _fail(message: str, code: int) -> int:
    print(f"msaserve: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:,.2f} MiB"
