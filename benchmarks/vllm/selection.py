"""vLLM's own indexer and attention for MiniMax-M3, out of unpacked wheels, and ours in their place, on one step.

    python scripts/vllm_facts.py 0.24.0 0.26.0 --keep DIR
    python benchmarks/vllm/selection.py DIR/0.24.0 DIR/0.26.0

For each release and batch, the error of the attention's output against float32 over the exact selection: vLLM's code as
it is (its classes are read from the files, nothing of vLLM is installed), then the plugin's. 0.25 and 0.26 read their
shared top-k buffer on the wrong axis (vllm#48603), which ends in wrong selections or in an illegal memory access: every
case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

COMMON = "vllm/models/minimax_m3/common"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
DIM, TOPK, MAX_TOKENS = 128, 16, 8192
CASES = {
    # name: (query lengths, sequence lengths, how many of them decode, KV heads, query heads of each)
    "16 decodes, 4 KV heads": ([1] * 16, [3000 + 200 * i for i in range(16)], 16, 4, 16),
    "4 decodes and a prefill, 4 KV heads": ([1] * 4 + [64], [3000, 4000, 5000, 6000, 4500], 4, 4, 16),
    "4 decodes and a prefill, 1 KV head": ([1] * 4 + [64], [3000, 4000, 5000, 6000, 4500], 4, 1, 16),
    "a prefill, 4 KV heads": ([200], [4500], 0, 4, 16),
}


class Anything:
    """In place of what the classes name and these cases never use."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __class_getitem__(cls, _: Any) -> type:
        return cls


def stub_vllm(version: str, context: SimpleNamespace) -> None:
    """Modules for what the kernel files and the plugin import."""
    import triton
    import triton.language as tl

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(names)
        made.__path__ = []
        sys.modules[name] = made

    capability = torch.cuda.get_device_capability() if DEVICE == "cuda" else (9, 0)
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        is_fp8_fnuz=lambda: False,
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_arch_support_pdl=lambda: DEVICE == "cuda" and capability[0] >= 9,
        is_device_capability=lambda c: tuple(c) == capability,
        is_device_capability_family=lambda c: c // 10 == capability[0],
    )
    module("vllm", __version__=version)
    module("vllm.config", get_current_vllm_config=lambda: None)
    module("vllm.forward_context", get_forward_context=lambda: context)
    module("vllm.platforms", current_platform=platform)
    module("vllm.triton_utils", triton=triton, tl=tl)
    module("vllm.utils")
    module("vllm.utils.math_utils", round_up=lambda x, y: -(-x // y) * y, cdiv=lambda x, y: -(-x // y))
    for name in ("vllm.models", "vllm.models.minimax_m3", "vllm.models.minimax_m3.common"):
        module(name)
    module("vllm.models.minimax_m3.common.ops")


def load_kernels(root: Path, name: str) -> ModuleType:
    full = f"{COMMON.replace('/', '.')}.ops.{name}"
    spec = importlib.util.spec_from_file_location(full, root / COMMON / "ops" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    sys.modules[full] = kernels
    spec.loader.exec_module(kernels)
    return kernels


def load_classes(root: Path, name: str, names: dict[str, Any]) -> ModuleType:
    """vLLM's implementation classes of one file, with these names for what they use."""
    wanted = ("IndexerImpl", "IndexerTritonImpl", "SparseImpl", "SparseTritonImpl")
    tree = ast.parse((root / COMMON / f"{name}.py").read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.removeprefix("MiniMaxM3") in wanted]
    future = ast.parse("from __future__ import annotations").body
    tree.body = [*future, *tree.body]
    made = ModuleType(f"{COMMON.replace('/', '.')}.{name}")
    made.__dict__.update(names)
    exec(compile(tree, name, "exec"), made.__dict__)
    sys.modules[made.__name__] = made
    setattr(sys.modules[COMMON.replace("/", ".")], name, made)
    return made


def metadata(query_lens: list[int], seq_lens: torch.Tensor, table: torch.Tensor, num_decodes: int) -> SimpleNamespace:
    """As vLLM's builders describe a step, of which the first requests decode."""
    num_decode_tokens, num_tokens = sum(query_lens[:num_decodes]), sum(query_lens)
    starts = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = {"max_query_len": max(query_lens), "max_seq_len": int(seq_lens.max())}
    decode = SimpleNamespace(
        seq_lens=seq_lens[:num_decodes],
        block_table=table[:num_decodes],
        decode_query_len=query_lens[0],
        max_decode_query_len=query_lens[0],
        max_seq_len=lens["max_seq_len"],
    )
    prefill = SimpleNamespace(
        cu_seqlens_q=starts[num_decodes:] - num_decode_tokens,
        seq_lens=seq_lens[num_decodes:],
        context_lens=seq_lens[num_decodes:] - torch.tensor(query_lens, device=DEVICE).int()[num_decodes:],
        block_table=table[num_decodes:],
        **lens,
    )
    return SimpleNamespace(
        num_actual_tokens=num_tokens,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
        num_prefills=len(query_lens) - num_decodes,
        decode=decode if num_decodes else None,
        prefill=prefill if num_decodes < len(query_lens) else None,
        max_seq_len=lens["max_seq_len"],
    )


def run(root: Path, case: str, who: str) -> float:
    """The relative error of the step's output, of vLLM's classes ("stock") or of the plugin's ("ours")."""
    version = root.name
    query_lens, lens, num_decodes, kv_heads, group = CASES[case]
    context = SimpleNamespace()
    stub_vllm(version, context)
    kernels = {**load_kernels(root, "index_topk").__dict__, **load_kernels(root, "sparse_attn").__dict__}
    names: dict[str, Any] = {
        **dict.fromkeys(("AttentionImplBase", "AttentionLayer", "MiniMaxM3IndexerBackend"), Anything),
        **dict.fromkeys(("MiniMaxM3IndexerMetadata", "MiniMaxM3SparseMetadata"), SimpleNamespace),
        **{name: value for name, value in kernels.items() if name.startswith("minimax_m3")},
        "torch": torch,
        "nn": torch.nn,
        "current_platform": sys.modules["vllm.platforms"].current_platform,
        "get_forward_context": lambda: context,
        "is_quantized_kv_cache": lambda name: name.startswith("fp8"),
        "MiniMaxM3IndexerCache": lambda **given: SimpleNamespace(prefix=given["prefix"], dtype=DTYPE),
    }
    indexer = load_classes(root, "indexer", names)
    attention = load_classes(root, "sparse_attention", names)
    from msaserve import ops
    from msaserve.integrations.vllm import attention as ours

    is_ours = who == "ours"
    index_class = ours.MsaIndexer if is_ours else indexer.MiniMaxM3IndexerTritonImpl
    attend_class = ours.MsaAttend if is_ours else attention.MiniMaxM3SparseTritonImpl
    torch.manual_seed(0)
    num_blocks = -(-max(lens) // 128)
    num_pages = len(lens) * num_blocks + 1
    table = (torch.randperm(num_pages - 1)[: len(lens) * num_blocks] + 1).int().view(len(lens), num_blocks).to(DEVICE)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(DEVICE, DTYPE)

    k, v = randn(num_pages, 128, kv_heads, DIM), randn(num_pages, 128, kv_heads, DIM)
    packed = torch.cat([k, v], dim=-1).transpose(1, 2)
    minor = int(version.split(".")[1])
    kv_cache = torch.stack([k, v], dim=1) if minor <= 25 else packed
    # As vLLM's model allocates it.
    shape = (kv_heads, MAX_TOKENS) if minor <= 24 else (MAX_TOKENS, kv_heads)
    buffer = torch.full((*shape, TOPK), -1, dtype=torch.int32, device=DEVICE)
    index = index_class(
        num_kv_heads=kv_heads,
        scale=DIM**-0.5,
        topk_blocks=TOPK,
        sparse_block_size=128,
        num_index_heads=kv_heads,
        index_head_dim=DIM,
        prefix="layer",
        local_blocks=1,
        topk_indices_buffer=buffer,
    )
    index.index_cache.kv_cache = randn(num_pages, 128, DIM)
    attend = attend_class(kv_heads * group, DIM, DIM**-0.5, kv_heads, topk_blocks=TOPK, sparse_block_size=128)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    step = metadata(query_lens, seq_lens, table, num_decodes)
    context.attn_metadata = {"layer": step, "layer.index_cache": step}
    num_tokens = sum(query_lens)
    query, index_query = randn(num_tokens, kv_heads * group * DIM), randn(num_tokens, kv_heads * DIM)
    output = torch.empty_like(query)
    layer = SimpleNamespace(layer_name="layer", topk_indices_buffer=buffer, indexer=SimpleNamespace(impl=index))
    index(index_query)
    attend.forward(layer, query, kv_cache, output)

    starts = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    batch = (table, seq_lens, starts)
    block_ids = ops.select_blocks(
        index_query.view(num_tokens, kv_heads, DIM).float(),
        index.index_cache.kv_cache.float(),
        *batch,
        topk=TOPK,
        max_query_len=max(query_lens),
        max_seq_len=max(lens),
        impl="reference",
    )
    q = query.view(num_tokens, kv_heads * group, DIM).float()
    options: dict[str, Any] = {"max_query_len": max(query_lens), "impl": "reference"}
    expected = ops.sparse_attend(q, k.float(), v.float(), block_ids, *batch, **options)
    return float((output.view_as(expected).float() - expected).norm() / expected.norm())


def measure(root: Path, case: str, who: str) -> str:
    """`run` in a process of its own: its error, or how it failed."""
    command = [sys.executable, __file__, str(root), "--one", case, who]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return "took over 180 s"
    if done.returncode == 0:
        return done.stdout.split()[-1]
    print(done.stderr[-2000:], file=sys.stderr)
    errors = [line for line in done.stderr.splitlines() if "Error: " in line]
    return errors[-1][:120] if errors else f"exit code {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("roots", type=Path, nargs="+", metavar="DIR", help="an unpacked release, named as its version")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "WHO"), help="print one error: stock's or ours")
    args = parser.parse_args()
    if args.one is not None:
        print(f"{run(args.roots[0], *args.one):.5f}")
        return
    for root in args.roots:
        if not (root / COMMON).is_dir():
            parser.error(f"{root} has no {COMMON}: scripts/vllm_facts.py VERSION --keep DIR makes it")
    print("| vLLM | step | vLLM's own | ours |\n|---|---|---|---|")
    for root in args.roots:
        for case in CASES:
            cells = [measure(root, case, who) for who in ("stock", "ours")]
            print(f"| {root.name} | {case} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
